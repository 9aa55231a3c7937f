"""What the tests of adapters know of sessions that wait for a person."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from helix_store import Store, session_waiting
from tests.databases import CommittedDatabase

__all__ = ["asked", "waiting"]


def waiting(database: CommittedDatabase) -> list[tuple[str, str | None]]:
    """Return the sessions that wait, each with what it waits for."""
    store = Store(database.alias, tenant=database.tenant)
    return [(each.session_id, each.detail) for each in store.find_stuck(conditions=["waiting"])]


@contextmanager
def asked(tenant: str) -> Iterator[list[tuple[str, list[str], str]]]:
    """Collect the session, the calls and the root of each `session_waiting` of a tenant."""
    told: list[tuple[str, list[str], str]] = []

    def receive(**signal: Any) -> None:
        if signal["tenant"] == tenant:
            told.append((signal["session_id"], signal["tool_call_ids"], signal["root_session_id"]))

    session_waiting.connect(receive)
    try:
        yield told
    finally:
        session_waiting.disconnect(receive)
