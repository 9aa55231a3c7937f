"""The two faces on each database, and the snapshot face in memory too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from django.db import connections
from django.test.utils import CaptureQueriesContext

from helix_store.checkpointers import (
    GraphCheckpointStore,
    InMemorySnapshotCheckpointer,
    SnapshotCheckpointer,
)
from tests.databases import CommittedDatabase

Snapshots = SnapshotCheckpointer | InMemorySnapshotCheckpointer


@pytest.fixture
def graph(committed_db: CommittedDatabase) -> GraphCheckpointStore:
    return GraphCheckpointStore(committed_db.alias, tenant=committed_db.tenant)


@pytest.fixture
def snapshots(committed_db: CommittedDatabase) -> SnapshotCheckpointer:
    return SnapshotCheckpointer(committed_db.alias, tenant=committed_db.tenant)


@pytest.fixture(params=["database", "memory"])
def make_snapshots(request: pytest.FixtureRequest) -> Callable[..., Snapshots]:
    """Builds a checkpointer of either kind; the database one runs on each database."""
    if request.param == "memory":
        return InMemorySnapshotCheckpointer
    database: CommittedDatabase = request.getfixturevalue("committed_db")

    def make(**options: Any) -> SnapshotCheckpointer:
        return SnapshotCheckpointer(database.alias, tenant=database.tenant, **options)

    return make


@pytest.fixture
def statements(committed_db: CommittedDatabase) -> Callable[[Callable[[], Any]], list[str]]:
    """Everything that a call sends, BEGIN and COMMIT included."""

    def of(call: Callable[[], Any]) -> list[str]:
        with CaptureQueriesContext(connections[committed_db.alias]) as captured:
            call()
        return [query["sql"] for query in captured.captured_queries]

    return of
