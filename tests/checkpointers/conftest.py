"""The two faces on each database, and the snapshot face in memory too."""

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
class Faces:
    """How to build the faces that see each other: on one database and tenant, or in one world."""

    snapshots: Callable[..., Snapshots]
    states: Callable[[], Any]
    locks: Callable[[], Any]


@pytest.fixture(params=[*ALIASES, "postgres without fast paths", "memory"])
def faces(request: pytest.FixtureRequest) -> Iterator[Faces]:
    vendor, _, is_portable = request.param.partition(" ")
    with override_settings(HELIX_STORE={"FAST_PATHS": not is_portable}):
        yield _faces(request, vendor)


def _faces(request: pytest.FixtureRequest, vendor: str) -> Faces:
    if vendor == "memory":
        world = MemoryWorld()
        return Faces(
            snapshots=partial(InMemorySnapshotCheckpointer, world=world),
            states=partial(InMemoryStateStore, world=world),
            locks=partial(InMemoryLockManager, world=world),
        )
    database: CommittedDatabase = request.getfixturevalue(f"{vendor}_db")
    where: dict[str, Any] = {"using": database.alias, "tenant": database.tenant}
    return Faces(
        snapshots=partial(SnapshotCheckpointer, **where),
        states=partial(DatabaseStateStore, **where),
        locks=partial(DatabaseLockManager, **where),
    )


@pytest.fixture
def make_snapshots(faces: Faces) -> Callable[..., Snapshots]:
    """Builds a checkpointer on each database, and one in memory."""
    return faces.snapshots


@pytest.fixture
def statements(committed_db: CommittedDatabase) -> Callable[[Callable[[], Any]], list[str]]:
    """Everything that a call sends, BEGIN and COMMIT included."""

    def of(call: Callable[[], Any]) -> list[str]:
        with CaptureQueriesContext(connections[committed_db.alias]) as captured:
            call()
        return [query["sql"] for query in captured.captured_queries]

    return of
