"""Stores to clean up: in memory and on every database, and sessions that have expired."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

from helix_store.core.contracts import StateStore
from helix_store.stores import DatabaseStateStore, InMemoryStateStore
from tests.databases import ALIASES, CommittedDatabase

LONG_AGO = 1_600_000_000_000


def later() -> int:
    return int(time.time() * 1000) + 3_600_000


@pytest.fixture(params=["memory", *ALIASES])
def store(request: pytest.FixtureRequest) -> StateStore:
    if request.param == "memory":
        return InMemoryStateStore()
    database: CommittedDatabase = request.getfixturevalue(f"{request.param}_db")
    return DatabaseStateStore(database.alias, tenant=database.tenant)


@pytest.fixture
def expired(store: StateStore) -> Callable[..., str]:
    """Create a session that expired long ago; what is given is saved with it."""

    def create(session_id: str, **changes: Any) -> str:
        state = store.create_session(session_id, agent_type="agent", expires_at=LONG_AGO)
        for name, value in changes.items():
            setattr(state, name, value)
        if changes:
            store.save_state(session_id, state)
        return session_id

    return create
