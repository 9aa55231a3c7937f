"""Notebooks of the app in `tests.adapters.third_party`."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from django.db.models import Model

from helix_store.catalogue import AppTable
from helix_store.catalogue.table import _tables
from tests.adapters.third_party.notebook import Notebook
from tests.databases import CommittedDatabase

MakeNotebook = Callable[[str], Notebook]


@pytest.fixture
def notebook(committed_db: CommittedDatabase) -> MakeNotebook:
    """Makes the notebook of a conversation in the test's tenant."""
    return lambda name: Notebook("project", name, committed_db.alias, tenant=committed_db.tenant)


def fill(notebook: Notebook) -> None:
    """Pages whose content is exact only as text, one of them with an attachment."""
    notebook.write("zebra", {"b": 1.0, "a": "NUL \x00 and \ud800", "big": 10**400})
    notebook.write("ant", [1, None], b"\x00shared\xff")


def describe(monkeypatch: pytest.MonkeyPatch, table: AppTable) -> None:
    """Let a table be registered like this until the end of the test, also where it would be refused."""
    monkeypatch.setitem(_tables, table.model, table)


def forget(monkeypatch: pytest.MonkeyPatch, model: type[Model]) -> None:
    """Let the table of a model not be registered until the end of the test."""
    monkeypatch.delitem(_tables, model)
