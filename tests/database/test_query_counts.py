"""How many statements every public call sends, as ``docs/performance.md`` says.

A row that no longer holds is printed as it is measured now: put it in the place of the old one.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
from django.test import override_settings
from pytest_django import DjangoDbBlocker

from tests.database.counted_calls import CALLS, CLASSES, Faces
from tests.database.test_statements import sent_by
from tests.databases import ALIASES, CommittedDatabase, close_connections, fresh_tenant

TABLE: Final = Path(__file__).parents[2] / "docs" / "performance.md"
COLUMNS: Final = (("sqlite", True), ("postgres", False), ("postgres", True))
"""Which database, and whether fast paths are on."""

Counts = tuple[str, ...]


def documented() -> dict[tuple[str, str], Counts]:
    """The rows of the table by face and call."""
    rows = {}
    _, _, table = TABLE.read_text().partition("## What each call sends")
    for line in table.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("|") and cells[-1].isdigit():
            face, call, *counts = cells
            rows[face, call.replace("`", "")] = tuple(counts)
    return rows


ROWS: Final = documented()


@pytest.fixture
def unblocked(django_db_setup: None, django_db_blocker: DjangoDbBlocker) -> Iterator[None]:
    with django_db_blocker.unblock():
        yield
        close_connections()


def measured(face: str, call: str, otherwise: Counts) -> Counts:
    """A database that this run leaves out keeps its figure."""
    counts = []
    for (vendor, fast_paths), figure in zip(COLUMNS, otherwise, strict=True):
        if vendor in ALIASES:
            database = CommittedDatabase(alias=ALIASES[vendor], tenant=fresh_tenant())
            with override_settings(HELIX_STORE={"FAST_PATHS": fast_paths}):
                prepared = CALLS[face][call](Faces(database))
                figure = str(len(sent_by(database.alias, prepared)))
        counts.append(figure)
    return tuple(counts)


def as_row(face: str, call: str, counts: Counts) -> str:
    method, _, case = call.partition(" ")
    return f"| {face} | `{method}`{' ' if case else ''}{case} | {' | '.join(counts)} |"


@pytest.mark.parametrize(("face", "call"), [(face, call) for face, calls in CALLS.items() for call in calls])
def test_a_call_sends_as_many_statements_as_its_row_says(unblocked: None, face: str, call: str) -> None:
    expected = ROWS.get((face, call), ("?",) * len(COLUMNS))
    found = measured(face, call, expected)
    assert found == expected, f"{TABLE.name} should say:\n{as_row(face, call, found)}"


def test_every_row_is_of_a_call() -> None:
    assert set(ROWS) == {(face, call) for face, calls in CALLS.items() for call in calls}


@pytest.mark.parametrize(("face", "cls"), CLASSES.items(), ids=lambda value: str(value))
def test_every_public_method_has_a_row(face: str, cls: type[Any]) -> None:
    assert {call.partition(" ")[0] for of, call in ROWS if of == face} == public_methods(cls)


def public_methods(cls: type[Any]) -> set[str]:
    """Without the async twins, which send what their originals send."""
    names = {name for name in dir(cls) if not name.startswith("_") and callable(getattr(cls, name))}
    return {name for name in names if name[:1] != "a" or name[1:] not in names}
