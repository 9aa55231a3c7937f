"""Prepared statements behind a pooler in transaction mode, where processes share connections."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final, TypeVar

import pytest
from asgiref.sync import async_to_sync
from django.db import connections, transaction
from django.db.backends.base.base import BaseDatabaseWrapper
from django.test import override_settings

from helix_store.checkpointers import SnapshotCheckpointer
from helix_store.core.types import SessionState, StepInfo
from helix_store.exceptions import StoreBusy
from helix_store.stores import (
    DatabaseLockManager,
    DatabaseStateStore,
    DatabaseStreamManager,
    DatabaseUsageStore,
)
from helix_store.testing.usage.base import custom
from tests.database.separate import execute, fetch, separate_connection
from tests.databases import CommittedDatabase
from tests.faults_found.races import held_session
from tests.pooler import PGBOUNCER, Address, pgbouncer, transaction_pooler
from tests.processes import PROCESSES, WorkerProcess

T = TypeVar("T")

PATIENCE_SECONDS: Final = 40.0

Pooler = Callable[[int], AbstractContextManager[int]]


@pytest.fixture(
    params=[
        transaction_pooler,
        pytest.param(
            pgbouncer, marks=pytest.mark.skipif(PGBOUNCER is None, reason="pgbouncer is not installed")
        ),
    ],
    ids=["pooler of the tests", "pgbouncer"],
)
def pooler(request: pytest.FixtureRequest, postgres_db: CommittedDatabase) -> Pooler:
    """Start a pooler with a number of server connections."""
    server = Address.of(postgres_db.connection)
    if not os.path.isdir(server.host):
        pytest.skip("the server of DATABASE_URL is not reached through a socket that trusts")
    return lambda servers: request.param(server, servers)


def behind(alias: str, port: int) -> dict[str, Any]:
    """Send this process's connections of an alias through a pooler; for a process that has none yet."""
    settings: dict[str, Any] = connections.settings[alias]
    settings.update(HOST="127.0.0.1", PORT=port)
    return settings


# The statement of another process


def occupy(alias: str, tenant: str, port: int, meeting: Any) -> bool:
    """Prepare a statement on one server connection, then leave only that one to the other process."""
    settings = behind(alias, port)
    with separate_connection(**settings) as one, separate_connection(**settings) as two:
        for connection in (connections[alias], one, two):
            execute(connection, "SELECT 1")
        meeting.wait()
        with transaction.atomic(using=alias):
            released = DatabaseLockManager(alias, tenant=tenant).force_release("free")
            own = backend_of(connections[alias])
            meeting.wait()
            # The other process prepares its statement on the other server connection.
            meeting.wait()
        by_backend = {}
        for connection in (one, two):
            connection.set_autocommit(False)
            by_backend[backend_of(connection)] = connection
        by_backend[own].rollback()
        meeting.wait()
        # The other process runs it again, on the one that is free.
        meeting.wait()
    return released


def ask_twice(alias: str, tenant: str, port: int, meeting: Any) -> list[bool]:
    behind(alias, port)
    locks = DatabaseLockManager(alias, tenant=tenant)
    execute(connections[alias], "SELECT 1")
    meeting.wait()
    meeting.wait()
    answers = [locks.is_locked("job")]
    meeting.wait()
    meeting.wait()
    answers.append(locks.is_locked("job"))
    meeting.wait()
    return answers


def backend_of(connection: BaseDatabaseWrapper) -> int:
    ((pid,),) = fetch(connection, "SELECT pg_backend_pid()")
    return int(pid)


def test_a_question_behind_a_pooler_never_runs_the_statement_of_another_process(
    postgres_db: CommittedDatabase, pooler: Pooler
) -> None:
    locks = DatabaseLockManager(postgres_db.alias, tenant=postgres_db.tenant)
    lock = locks.acquire("job", ttl_ms=600_000)
    assert lock is not None
    meeting = PROCESSES.Barrier(2, timeout=PATIENCE_SECONDS)
    with pooler(2) as port:
        where = (postgres_db.alias, postgres_db.tenant, port, meeting)
        operator, worker = WorkerProcess(occupy, *where), WorkerProcess(ask_twice, *where)
        assert worker.outcome().unwrap() == [True, True]
        assert operator.outcome().unwrap() is False
    (held,) = locks.get_active_locks()
    assert (held.name, held.fencing_token) == ("job", lock.fencing_token)
    lock.refresh()


# Every hot call


class Faces:
    """Everything that a process asks, in parts that can be asked in any order; it yields after each call."""

    def __init__(self, alias: str, tenant: str, name: str, *, inside: bool) -> None:
        where: dict[str, Any] = {"using": alias, "tenant": tenant}
        self.alias = alias
        self.name = name
        self.inside = inside
        self.store = DatabaseStateStore(**where)
        self.locks = DatabaseLockManager(**where)
        self.usage = DatabaseUsageStore(**where)
        self.streams = DatabaseStreamManager(**where)
        self.snapshots = SnapshotCheckpointer(**where, max_checkpoints_per_thread=2)

    def ask(self, call: Callable[[], T]) -> T:
        with transaction.atomic(using=self.alias) if self.inside else nullcontext():
            return call()

    def sessions(self) -> Iterator[None]:
        name, store, ask = self.name, self.store, self.ask
        state = ask(lambda: store.create_session(name, agent_type="t"))
        yield
        for number in range(1, 4):
            state.custom_state = {"by": name, "number": number}
            change = {"tool_call_id": "call", "merge_changes": {"staged": number}}
            ask(lambda change=change: store.stage_changes(name, "step", change))  # type: ignore[misc]
            yield
            message = {"role": "user", "content": f"{name} {number}"}
            commit = ask(
                lambda message=message, number=number: store.save_state_and_promote_staging(  # type: ignore[misc]
                    name, state, [message], StepInfo("step", number), expected_version=2 * number - 1
                )
            )
            assert commit.new_version == 2 * number
            yield
            loaded = ask(lambda: store.load_state(name))
            assert loaded is not None
            assert loaded.custom_state == {"by": name, "number": number, "staged": number}
            yield
            page = ask(lambda: store.get_messages(name))
            assert [each["content"] for each in page.messages] == [
                f"{name} {each}" for each in range(1, number + 1)
            ]
            yield
            checkpoint = ask(lambda: store.get_latest_checkpoint(name))
            assert checkpoint is not None
            assert (checkpoint.session_id, checkpoint.step_count) == (name, number)
            yield
            status = "running" if number % 2 else "active"
            changed = ask(
                lambda status=status: store.compare_and_set_status(name, ["active", "running"], status)  # type: ignore[misc]
            )
            assert (changed.ok, getattr(changed, "new_version", None)) == (True, 2 * number + 1)
            yield

    def names(self) -> Iterator[None]:
        name, locks, ask = self.name, self.locks, self.ask
        for number in range(1, 4):
            lock = ask(lambda: locks.acquire(name, ttl_ms=600_000))
            assert lock is not None
            assert lock.fencing_token == 2 * number - 1
            yield
            assert ask(lambda: locks.is_locked(name)) is True
            yield
            assert ask(lambda: locks.acquire(name)) is None
            yield
            ask(lock.refresh)
            yield
            if number % 2:
                assert ask(lambda: locks.force_release(name)) is True
            else:
                assert ask(lock.release) is True
                again = ask(lambda: locks.acquire(name))
                assert again is not None
                assert again.fencing_token == 2 * number
                assert ask(again.release) is True
            yield
            assert ask(lambda: locks.is_locked(name)) is False
            yield

    def costs(self) -> Iterator[None]:
        name, usage, ask = f"{self.name} spends", self.usage, self.ask
        ask(lambda: self.store.create_session(name, agent_type="t"))
        yield
        for number in range(1, 4):
            ask(lambda: usage.record_entry(custom(name)))
            yield
            ask(lambda: usage.record_entries([custom(name), custom(name)]))
            yield
            rollup = ask(lambda: usage.get_rollup(name))
            assert rollup is not None
            assert rollup.entry_count == 3 * number
            yield
            assert len(ask(lambda: usage.get_entries(name))) == 3 * number
            yield

    def chunks(self) -> Iterator[None]:
        name, streams, ask = self.name, self.streams, self.ask
        ask(lambda: async_to_sync(streams.create_writer)(name, "run", "agent"))
        yield
        for number in range(1, 4):
            chunks = [{"type": "t", "by": name, "number": number}] * 2
            assert ask(lambda chunks=chunks: streams.write_sync(name, chunks)) == 2 * number  # type: ignore[misc]
            yield
            after = 2 * number - 2
            read = ask(lambda after=after: streams.read_after(name, after))  # type: ignore[misc]
            assert [(each.sequence, each.chunk) for each in read] == [
                (after + 1, chunks[0]),
                (after + 2, chunks[0]),
            ]
            yield
            info = ask(lambda: async_to_sync(streams.get_info)(name))
            assert info is not None
            assert info.last_sequence == 2 * number
            yield

    def agents(self) -> Iterator[None]:
        thread, snapshots, ask = f"{self.name} pauses", self.snapshots, self.ask
        for number in range(1, 4):
            snapshot = {"version": 1, "by": self.name, "number": number}
            put = ask(lambda snapshot=snapshot: snapshots.put(thread, snapshot))  # type: ignore[misc]
            yield
            assert ask(lambda: snapshots.get(thread)) == snapshot
            yield
            assert ask(lambda put=put: snapshots.get(thread, put)) == snapshot  # type: ignore[misc]
            yield
            listed = ask(lambda: snapshots.list(thread))
            assert listed[0].id == put
            assert len(listed) == min(number, 2)
            yield

    def parts(self) -> list[Callable[[], Iterator[None]]]:
        return [self.sessions, self.names, self.costs, self.chunks, self.agents]


def ask_everything(
    alias: str, tenant: str, port: int, name: str, inside: bool, own_turn: Any, next_turn: Any
) -> int:
    """Make one call per turn; the second process asks in another order. Returns the number of turns."""
    behind(alias, port)
    turns = 0
    # What tells other processes of streams has connections of its own, which would mix up the turns.
    with override_settings(HELIX_STORE={"STREAMS": {"notify": False}}):
        faces = Faces(alias, tenant, name, inside=inside)
        parts = faces.parts() if name == "first" else faces.parts()[::-1]
        try:
            if name == "second":
                assert own_turn.acquire(timeout=PATIENCE_SECONDS)
            for part in parts:
                # A new session for this process, but not for the server.
                connections[alias].close()
                for _ in part():
                    turns += 1
                    next_turn.release()
                    assert own_turn.acquire(timeout=PATIENCE_SECONDS)
        finally:
            # The other one may go on alone.
            for _ in range(1_000):
                next_turn.release()
    return turns


@pytest.mark.parametrize("inside", [False, True], ids=["alone", "inside atomic"])
@pytest.mark.parametrize("servers", [1, 2, 3])
def test_two_processes_behind_a_pooler_get_right_answers_from_every_hot_call(
    postgres_db: CommittedDatabase, pooler: Pooler, servers: int, inside: bool
) -> None:
    first, second = PROCESSES.Semaphore(0), PROCESSES.Semaphore(0)
    where = (postgres_db.alias, postgres_db.tenant)
    with pooler(servers) as port:
        workers = [
            WorkerProcess(ask_everything, *where, port, "first", inside, first, second),
            WorkerProcess(ask_everything, *where, port, "second", inside, second, first),
        ]
        turns = [worker.outcome().unwrap() for worker in workers]
    assert turns[0] == turns[1] > 60


# What a failed statement leaves on the server


FAILING: Final[list[Callable[[DatabaseStateStore, SnapshotCheckpointer], object]]] = [
    lambda store, snapshots: store.stage_changes("s", "step", {"tool_call_id": "c", "merge_changes": {}}),
    lambda store, snapshots: store.compare_and_set_status("s", ["active"], "running"),
    lambda store, snapshots: store.save_state_and_promote_staging(
        "s", SessionState(session_id="s", agent_type="t"), [], StepInfo("step", 1), expected_version=1
    ),
    lambda store, snapshots: snapshots.put("s", {"version": 1}),
]


def test_statements_that_fail_in_a_block_do_not_add_up_on_the_server(
    postgres_db: CommittedDatabase,
) -> None:
    store = DatabaseStateStore(postgres_db.alias, tenant=postgres_db.tenant)
    store.create_session("s", agent_type="t")
    with (
        held_session(postgres_db, "s"),
        separate_connection(**postgres_db.connection.settings_dict) as connection,
        transaction.atomic(using=connection.alias),
    ):
        execute(connection, "SET LOCAL lock_timeout = '2ms'")
        others = DatabaseStateStore(connection.alias, tenant=postgres_db.tenant)
        snapshots = SnapshotCheckpointer(connection.alias, tenant=postgres_db.tenant)
        counts = []
        for _ in range(100 // len(FAILING)):
            for write in FAILING:
                with pytest.raises(StoreBusy), transaction.atomic(using=connection.alias):
                    write(others, snapshots)
            counts += fetch(connection, "SELECT count(*) FROM pg_prepared_statements")
    assert counts[-1] == counts[0]
    assert counts[0][0] <= len(FAILING)
