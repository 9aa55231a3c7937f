"""Reads of a hot standby, by its alias: what they show, and that every write is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final

import pytest
from asgiref.sync import async_to_sync
from django.db import connections
from django.test import override_settings

from helix_store.checkpointers import GraphCheckpointStore, SnapshotCheckpointer
from helix_store.exceptions import StoreUnavailable
from helix_store.stores import (
    DatabaseLockManager,
    DatabaseStateStore,
    DatabaseStreamManager,
    DatabaseUsageStore,
)
from helix_store.testing.usage.base import custom
from tests.cells import for_each
from tests.databases import ALIASES, close_connections
from tests.deployments.deployments import another_alias
from tests.deployments.servers import primary_and_standby
from tests.deployments.test_listening import read_each_written_chunk

_PATIENCE_SECONDS: Final = 30.0


class Stores:
    def __init__(self, alias: str) -> None:
        self.states = DatabaseStateStore(alias)
        self.locks = DatabaseLockManager(alias)
        self.usage = DatabaseUsageStore(alias)
        self.streams = DatabaseStreamManager(alias, poll_interval=0.02)
        self.snapshots = SnapshotCheckpointer(alias)
        self.graph = GraphCheckpointStore(alias)

    def fill(self) -> None:
        state = self.states.create_session("s", agent_type="t")
        step = {"step_id": "step", "step_count": 1}
        self.states.save_state_and_promote_staging("s", state, [{"role": "user", "content": "hi"}], step)
        self.states.start_run("s")
        self.usage.record_entry(custom("s"))
        async_to_sync(self.streams.create_writer)("stream", "run", "agent")
        self.streams.write_sync("stream", [{"type": "t"}])
        self.snapshots.put("thread", {"version": 1})
        self.graph.create_session("", session_id="graph")
        self.graph.save_checkpoint("graph", step=0)
        self.locks.acquire("lock", ttl_ms=600_000)


@pytest.fixture(scope="module")
def stores(django_db_setup: None, django_db_blocker: Any) -> Iterator[tuple[Stores, Stores]]:
    """Of the primary, with rows, and of its standby, which has them too when a write returns."""
    if "postgres" not in ALIASES:
        pytest.skip("HELIX_TEST_DATABASES leaves postgres out of this run")
    alias = ALIASES["postgres"]
    with (
        override_settings(HELIX_STORE={"STREAMS": {"notify": False}}),
        django_db_blocker.unblock(),
        primary_and_standby(alias) as servers,
    ):
        address = {"HOST": str(servers.standby.directory), "PORT": servers.standby.port, "OPTIONS": {}}
        with another_alias("replica", **{**connections.settings[alias], **address}) as replica:
            primary = Stores(alias)
            primary.fill()
            yield primary, Stores(replica)
            close_connections()


READS: Final[dict[str, Callable[[Stores], Any]]] = {
    "state": lambda each: each.states.load_state("s"),
    "sessions": lambda each: each.states.list_sessions(),
    "messages": lambda each: each.states.get_messages("s"),
    "runs": lambda each: each.states.list_runs("s"),
    "checkpoints": lambda each: each.states.list_checkpoints("s"),
    "latest checkpoint": lambda each: each.states.get_latest_checkpoint("s"),
    "rollup": lambda each: each.usage.get_rollup("s"),
    "usage entries": lambda each: each.usage.get_entries("s"),
    "lock": lambda each: each.locks.is_locked("lock"),
    "stream": lambda each: each.streams.read_after("stream", 0),
    "snapshots": lambda each: each.snapshots.list("thread"),
    "snapshot": lambda each: each.snapshots.get("thread"),
    "graph checkpoints": lambda each: each.graph.list_checkpoints("graph"),
}

WRITES: Final[dict[str, Callable[[Stores], Any]]] = {
    "create": lambda each: each.states.create_session("other", agent_type="t"),
    "append": lambda each: each.states.append_messages("s", [{"role": "user", "content": "hi"}]),
    "status": lambda each: each.states.compare_and_set_status("s", ["active"], "paused"),
    "acquire": lambda each: each.locks.acquire("other"),
    "usage": lambda each: each.usage.record_entry(custom("s")),
    "chunk": lambda each: each.streams.write_sync("stream", [{"type": "t"}]),
    "snapshot": lambda each: each.snapshots.put("thread", {"version": 1}),
    "graph checkpoint": lambda each: each.graph.save_checkpoint("graph", step=1),
}


@for_each("read", READS.values(), ids=list(READS))
def test_a_read_of_the_standby_is_that_of_the_primary(
    stores: tuple[Stores, Stores], django_db_blocker: Any, read: Callable[[Stores], Any]
) -> None:
    primary, replica = stores
    with django_db_blocker.unblock():
        found = read(replica)
        assert found
        assert found == read(primary)


@for_each("write", WRITES.values(), ids=list(WRITES))
def test_a_write_to_the_standby_is_refused_for_now(
    stores: tuple[Stores, Stores], django_db_blocker: Any, write: Callable[[Stores], Any]
) -> None:
    with django_db_blocker.unblock(), pytest.raises(StoreUnavailable) as raised:
        write(stores[1])
    assert (raised.value.retryable, raised.value.applied) == (True, "no")
    assert raised.value.attributes["database_code"] == "25006"


def test_a_reader_of_the_standby_gets_what_is_written_to_the_primary(
    stores: tuple[Stores, Stores], django_db_blocker: Any
) -> None:
    primary, replica = stores

    with django_db_blocker.unblock():
        sequences = async_to_sync(read_each_written_chunk)(
            primary.streams, replica.streams, "read", chunks=3, patience_seconds=_PATIENCE_SECONDS
        )
        assert sequences == [1, 2, 3]
