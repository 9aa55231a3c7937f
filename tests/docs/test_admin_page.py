"""The reference of the admin names every section and every operation, with what they need."""

from __future__ import annotations

import re

from helix_store.actions.upkeep import CLEAN_UP, FORCE_RELEASE, PRUNE_STREAMS
from helix_store.admin import BudgetAdmin, SessionAdmin
from helix_store.admin.sections import SECTIONS
from helix_store.models import Session
from tests.docs.test_examples import ROOT

TEXT = (ROOT / "docs" / "admin-reference.md").read_text()


def _rows(heading: str) -> list[list[str]]:
    """The cells of the table below a heading, without its head."""
    table = TEXT.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    rows = [line.strip("|").split("|") for line in table.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in row] for row in rows[2:]]


def test_the_table_of_sections_is_that_of_the_page() -> None:
    of_several = {"items": "items, or rows of another app", "conversation": "messages, or rows of an adapter"}
    shown = {
        section.name: of_several.get(section.name)
        or " and ".join(str(model._meta.verbose_name_plural) for model in section.needs or (Session,))
        for section in SECTIONS
    }
    assert {row[0].strip("`"): row[2] for row in _rows("The page of a session")} == shown


def test_the_table_of_operations_is_that_of_the_admin() -> None:
    of_budgets = (*BudgetAdmin.row_operations, *BudgetAdmin.table_operations)
    operations = (*SessionAdmin.row_operations, *of_budgets, FORCE_RELEASE, CLEAN_UP, PRUNE_STREAMS)
    named = {
        row[0].strip("`"): (row[2].strip("`"), row[3] == "yes", bool(re.search("changed|another", row[4])))
        for row in _rows("Operations")
    }
    assert named == {
        each.name: (
            f"{each.permission}_{each.model._meta.model_name}",
            each.is_destructive,
            each.guard is not None,
        )
        for each in operations
    }
