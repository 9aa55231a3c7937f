"""The naive store, in the database that a test runs on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.databases import CommittedDatabase
from tests.museum.naive import Detonation, NaiveRows


@contextmanager
def _rows(database: CommittedDatabase) -> Iterator[NaiveRows]:
    rows = NaiveRows(database)
    rows.create()
    try:
        yield rows
    finally:
        rows.drop()


@pytest.fixture
def naive(committed_db: CommittedDatabase) -> Iterator[NaiveRows]:
    with _rows(committed_db) as rows:
        yield rows


@pytest.fixture
def postgres_naive(postgres_db: CommittedDatabase) -> Iterator[NaiveRows]:
    with _rows(postgres_db) as rows:
        yield rows


@pytest.fixture
def detonations(monkeypatch: pytest.MonkeyPatch) -> type[Detonation]:
    """Counts from zero how often a payload was called."""
    monkeypatch.setattr(Detonation, "count", 0)
    return Detonation
