"""The graph store on each database, and the snapshot checkpointer on each database and in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
from django.db import connections
from django.test.utils import CaptureQueriesContext, override_settings

from helix_store.checkpointers import (
    GraphCheckpointStore,
    InMemorySnapshotCheckpointer,
    SnapshotCheckpointer,
)
from helix_store.stores import (
    DatabaseLockManager,
    DatabaseStateStore,
    InMemoryLockManager,
    InMemoryStateStore,
    MemoryWorld,
)
from tests.databases import ALIASES, CommittedDatabase

Snapshots = SnapshotCheckpointer | InMemorySnapshotCheckpointer


@pytest.fixture
def graph(committed_db: CommittedDatabase) -> GraphCheckpointStore:
    return GraphCheckpointStore(committed_db.alias, tenant=committed_db.tenant)


@pytest.fixture
def snapshots(committed_db: CommittedDatabase) -> SnapshotCheckpointer:
    return SnapshotCheckpointer(committed_db.alias, tenant=committed_db.tenant)


@dataclass(frozen=True)
class Stores:
    """Factories of stores that share their data: on one database and tenant, or in one world."""

    snapshots: Callable[..., Snapshots]
    states: Callable[[], Any]
    locks: Callable[[], Any]


@pytest.fixture(params=[*ALIASES, "postgres without fast paths", "memory"])
def stores(request: pytest.FixtureRequest) -> Iterator[Stores]:
    vendor, _, is_portable = request.param.partition(" ")
    with override_settings(HELIX_STORE={"FAST_PATHS": not is_portable}):
        yield _stores(request, vendor)


def _stores(request: pytest.FixtureRequest, vendor: str) -> Stores:
    if vendor == "memory":
        world = MemoryWorld()
        return Stores(
            snapshots=partial(InMemorySnapshotCheckpointer, world=world),
            states=partial(InMemoryStateStore, world=world),
            locks=partial(InMemoryLockManager, world=world),
        )
    database: CommittedDatabase = request.getfixturevalue(f"{vendor}_db")
    where: dict[str, Any] = {"using": database.alias, "tenant": database.tenant}
    return Stores(
        snapshots=partial(SnapshotCheckpointer, **where),
        states=partial(DatabaseStateStore, **where),
        locks=partial(DatabaseLockManager, **where),
    )


@pytest.fixture
def make_snapshots(stores: Stores) -> Callable[..., Snapshots]:
    """A factory of checkpointers, on each database and in memory."""
    return stores.snapshots


@pytest.fixture
def statements(committed_db: CommittedDatabase) -> Callable[[Callable[[], Any]], list[str]]:
    """The statements that a call sends, with BEGIN and COMMIT."""

    def of(call: Callable[[], Any]) -> list[str]:
        with CaptureQueriesContext(connections[committed_db.alias]) as captured:
            call()
        return [query["sql"] for query in captured.captured_queries]

    return of
