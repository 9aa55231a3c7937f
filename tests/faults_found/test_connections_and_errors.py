"""Connections that broke between two requests, statements that took too long, transactions begun by hand."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final, NamedTuple

import pytest
from asgiref.sync import async_to_sync
from django.core.signals import request_finished, request_started
from django.db import connections, transaction
from django.test import override_settings

from helix_store.checkpointers import SnapshotCheckpointer
from helix_store.core.types import SessionState, StepInfo
from helix_store.exceptions import StoreTimeout, StoreUnavailable
from helix_store.models import Lock, Session, Stream
from helix_store.stores import (
    DatabaseLockManager,
    DatabaseStateStore,
    DatabaseStreamManager,
    DatabaseUsageStore,
)
from helix_store.testing.usage.base import custom
from tests.cells import for_each
from tests.database.separate import execute, fetch
from tests.databases import CommittedDatabase
from tests.faults_found.races import held
from tests.processes import run_in_threads


class Faces:
    """A session with everything that the calls below write to."""

    def __init__(self, database: CommittedDatabase) -> None:
        where: dict[str, Any] = {"using": database.alias, "tenant": database.tenant}
        self.store = DatabaseStateStore(**where)
        self.locks = DatabaseLockManager(**where)
        self.usage = DatabaseUsageStore(**where)
        self.streams = DatabaseStreamManager(**where)
        self.snapshots = SnapshotCheckpointer(**where, max_checkpoints_per_thread=2)
        self.store.create_session("s", agent_type="t")
        self.snapshots.put("s", {"version": 1})
        async_to_sync(self.streams.create_writer)("stream", "run", "agent")
        lock = self.locks.acquire("held")
        assert lock is not None
        self.lock = lock

    def step(self) -> int:
        state = SessionState(session_id="s", agent_type="t", custom_state={"n": 1})
        return self.store.save_state_and_promote_staging("s", state, [], StepInfo("step", 1)).new_version

    def contents(self) -> list[Any]:
        """Everything that a call below could have written."""
        return [
            self.store.load_state("s"),
            self.store.get_messages("s"),
            self.store.get_staged_changes("s", "step"),
            self.store.list_checkpoints("s"),
            self.snapshots.list("s"),
            self.usage.get_entries("s"),
            self.streams.read_after("stream", 0),
            self.locks.get_active_locks(),
        ]


Call = Callable[[Faces], Any]

READS: Final[dict[str, Call]] = {
    "load_state": lambda faces: faces.store.load_state("s"),
    "get_messages": lambda faces: faces.store.get_messages("s"),
    "get_latest_checkpoint": lambda faces: faces.store.get_latest_checkpoint("s"),
    "snapshot get": lambda faces: faces.snapshots.get("s"),
    "is_locked": lambda faces: faces.locks.is_locked("held"),
    "get_active_locks": lambda faces: faces.locks.get_active_locks(),
    "read_after": lambda faces: faces.streams.read_after("stream", 0),
    "get_rollup": lambda faces: faces.usage.get_rollup("s"),
}


class Write(NamedTuple):
    call: Call
    waits_for: type[Session] | type[Stream] | type[Lock] = Session


WRITES: Final[dict[str, Write]] = {
    "step": Write(Faces.step),
    "save_state": Write(
        lambda faces: faces.store.save_state("s", SessionState(session_id="s", agent_type="t"))
    ),
    "append_messages": Write(lambda faces: faces.store.append_messages("s", [{"role": "user"}])),
    "stage_changes": Write(
        lambda faces: faces.store.stage_changes("s", "step", {"tool_call_id": "c", "merge_changes": {}})
    ),
    "compare_and_set_status": Write(
        lambda faces: faces.store.compare_and_set_status("s", ["active"], "running")
    ),
    "snapshot put": Write(lambda faces: faces.snapshots.put("s", {"version": 1})),
    "record_entry": Write(lambda faces: faces.usage.record_entry(custom("s"))),
    "write_sync": Write(lambda faces: faces.streams.write_sync("stream", [{"type": "t"}]), Stream),
    "refresh": Write(lambda faces: faces.lock.refresh(), Lock),
    "force_release": Write(lambda faces: faces.locks.force_release("held"), Lock),
}
ACQUIRE: Final = "acquire"
CALLS: Final[dict[str, Call]] = {
    **READS,
    **{name: write.call for name, write in WRITES.items()},
    ACQUIRE: lambda faces: faces.locks.acquire("another"),
}


@pytest.fixture
def faces(postgres_forms: CommittedDatabase) -> Faces:
    return Faces(postgres_forms)


# Requests on a connection that the server has ended


@contextmanager
def request() -> Iterator[None]:
    request_started.send(sender=None)
    try:
        yield
    finally:
        request_finished.send(sender=None)


def end_backend(database: CommittedDatabase) -> int:
    """Have the server end this thread's connection, which stays open here; returns the old backend."""
    pid: int = database.connection.connection.info.backend_pid
    with database.second_connection() as other:
        assert fetch(other, "SELECT pg_terminate_backend(%s, 10000)", pid) == [(True,)]
    return pid


@pytest.fixture
def kept_between_requests(
    postgres_forms: CommittedDatabase, monkeypatch: pytest.MonkeyPatch
) -> CommittedDatabase:
    """The connection outlives a request, and Django checks it at the first statement of the next one."""
    settings = postgres_forms.connection.settings_dict
    monkeypatch.setitem(settings, "CONN_MAX_AGE", None)
    monkeypatch.setitem(settings, "CONN_HEALTH_CHECKS", True)
    postgres_forms.connection.close()
    return postgres_forms


@pytest.mark.thorough
@for_each("name", CALLS)
def test_the_first_call_of_a_request_connects_again_when_the_server_has_hung_up(
    kept_between_requests: CommittedDatabase, faces: Faces, name: str
) -> None:
    expected = CALLS[name](Faces(other_tenant(kept_between_requests)))
    with request():
        faces.contents()
    pid = end_backend(kept_between_requests)
    with request():
        result = CALLS[name](faces)
        assert kept_between_requests.connection.connection.info.backend_pid != pid
    assert type(result) is type(expected)
    if type(result) in (bool, int):
        assert result == expected


def other_tenant(database: CommittedDatabase) -> CommittedDatabase:
    return CommittedDatabase(alias=database.alias, tenant=f"{database.tenant}-other")


def test_the_first_block_of_a_request_connects_again_when_the_server_has_hung_up(
    kept_between_requests: CommittedDatabase, faces: Faces
) -> None:
    with request():
        faces.step()
    end_backend(kept_between_requests)
    with request(), transaction.atomic(using=kept_between_requests.alias):
        assert faces.step() == 3
    state = faces.store.load_state("s")
    assert state is not None
    assert state.version == 3


def test_without_health_checks_the_first_call_fails_and_the_second_connects_again(
    kept_between_requests: CommittedDatabase, faces: Faces
) -> None:
    connection = kept_between_requests.connection
    connection.settings_dict["CONN_HEALTH_CHECKS"] = False
    connection.close()
    with request():
        faces.store.load_state("s")
    end_backend(kept_between_requests)
    with request():
        with pytest.raises(StoreUnavailable):
            faces.store.load_state("s")
        assert faces.store.load_state("s") is not None


# Statements that the server cancels


@pytest.mark.thorough
@for_each("name", WRITES)
def test_a_write_that_the_server_cancelled_was_not_applied(
    postgres_forms: CommittedDatabase, faces: Faces, name: str
) -> None:
    call, model = WRITES[name]
    key: dict[str, str] = {
        Session: {"session_id": "s"},
        Stream: {"stream_id": "stream"},
        Lock: {"name": "held"},
    }[model]
    before = faces.contents()
    execute(postgres_forms.connection, "SET statement_timeout = '100ms'")
    with held(postgres_forms, model, **key), pytest.raises(StoreTimeout) as raised:
        call(faces)
    assert raised.value.applied == "no"
    assert raised.value.attributes == {"database_code": "57014"}
    execute(postgres_forms.connection, "RESET statement_timeout")
    assert faces.contents() == before
    call(faces)
    assert faces.contents() != before


# Transactions of a thread that Django does not manage


IN_HAND: Final[dict[str, Call]] = {
    "load_state": lambda faces: faces.store.load_state("s"),
    **{
        name: WRITES[name].call
        for name in ("step", "append_messages", "stage_changes", "snapshot put", "write_sync", "record_entry")
    },
    ACQUIRE: CALLS[ACQUIRE],
}


@pytest.mark.thorough
@for_each("ends_with", ["commit", "rollback"])
@for_each("name", IN_HAND)
@for_each("fast", [True, False], ids=["one statement", "portable"])
def test_a_transaction_begun_by_hand_in_a_thread_lasts_until_its_owner_ends_it(
    postgres_db: CommittedDatabase, name: str, ends_with: str, fast: bool
) -> None:
    faces = Faces(postgres_db)
    before = faces.contents()

    def work() -> tuple[bool, list[Any]]:
        assert threading.current_thread() is not threading.main_thread()
        connection = connections[postgres_db.alias]
        transaction.set_autocommit(False, using=postgres_db.alias)
        driver = connection.connection
        faces.store.update_status("s", "paused")
        IN_HAND[name](faces)
        kept = connection.connection is driver and not driver.closed
        inside = faces.contents()
        if ends_with == "commit":
            transaction.commit(using=postgres_db.alias)
        else:
            transaction.rollback(using=postgres_db.alias)
        return kept, inside

    with override_settings(HELIX_STORE={"FAST_PATHS": fast}):
        (outcome,) = run_in_threads(work, [()])
    kept, inside = outcome.unwrap()
    assert kept
    assert inside != before
    assert faces.contents() == (inside if ends_with == "commit" else before)


def test_a_transaction_begun_by_hand_on_sqlite_keeps_its_connection(sqlite_db: CommittedDatabase) -> None:
    faces = Faces(sqlite_db)

    def work() -> bool:
        connection = connections[sqlite_db.alias]
        transaction.set_autocommit(False, using=sqlite_db.alias)
        driver = connection.connection
        faces.step()
        kept = connection.connection is driver
        transaction.commit(using=sqlite_db.alias)
        return kept

    (outcome,) = run_in_threads(work, [()])
    assert outcome.unwrap()
    state = faces.store.load_state("s")
    assert state is not None
    assert state.version == 2
