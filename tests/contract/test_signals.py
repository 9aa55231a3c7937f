"""Signals: once for each change that causes them, after its commit, on every back end."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, Final

import pytest
from asgiref.sync import async_to_sync
from django.db import connections, transaction
from django.dispatch import Signal
from django.test.utils import override_settings

from helix_store import announce_due_posts, signals
from helix_store.cleanup import expired_session_cleanup
from helix_store.cleanup.expiry import DatabaseCleanup
from helix_store.cleanup.workspaces import SessionKey
from helix_store.core import moments
from helix_store.core.types import SESSION_EXPIRED, SessionStatus, StepInfo
from helix_store.exceptions import StaleStateError
from helix_store.models import Session
from helix_store.stores import DatabaseLockManager, DatabaseStateStore, InMemoryStateStore
from helix_store.testing.state_store.approvals import approve, ask_approval, forge_answer, use_once
from helix_store.testing.state_store.samples import commit_step, loaded
from helix_store.testing.state_store.tool_calls import APPROVE, ASK, LONG_AGO, create_family
from tests.cells import for_each
from tests.databases import ALIASES, CommittedDatabase

Store = DatabaseStateStore | InMemoryStateStore

MESSAGE: Final = {"role": "user", "content": "hello"}
NAMES: Final = (
    "session_answered",
    "session_failed",
    "session_finished",
    "session_expired",
    "session_posted",
    "session_ready",
)
ELSEWHERE: Final = ("effect_unknown", "session_waiting")
"""Signals whose tests stand with those of effects and of tool calls."""


# What is portable on PostgreSQL, is all that SQLite has.
@pytest.fixture(params=["memory", *ALIASES, *(f"{name} portable" for name in ALIASES if name == "postgres")])
def store(request: pytest.FixtureRequest) -> Iterator[Store]:
    name, _, form = request.param.partition(" ")
    with override_settings(HELIX_STORE={"FAST_PATHS": not form}):
        if name == "memory":
            yield InMemoryStateStore(tenant="tenant")
        else:
            database: CommittedDatabase = request.getfixturevalue(f"{name}_db")
            yield DatabaseStateStore(database.alias, tenant=database.tenant)


@pytest.fixture
def database_store(committed_db: CommittedDatabase) -> DatabaseStateStore:
    return DatabaseStateStore(committed_db.alias, tenant=committed_db.tenant)


@pytest.fixture
def session_id(store: Store) -> str:
    return store.create_session("session", agent_type="agent").session_id


@pytest.fixture
def sent() -> Iterator[list[tuple[str, str]]]:
    """What is sent, as names of signals and ids of sessions."""
    received: list[tuple[str, str]] = []

    def receiver(name: str) -> Callable[..., None]:
        return lambda session_id, **kwargs: received.append((name, session_id))

    receivers = {name: receiver(name) for name in NAMES}
    for name, receive in receivers.items():
        getattr(signals, name).connect(receive)
    yield received
    for name, receive in receivers.items():
        assert getattr(signals, name).disconnect(receive)


# --- Posts -------------------------------------------------------------------------------------------


@pytest.fixture
def announced() -> Iterator[list[tuple[str, str, str | None]]]:
    """What `session_posted` said: session, post, author."""
    said: list[tuple[str, str, str | None]] = []

    def receive(session_id: str, post_id: str, author: str | None, **_: Any) -> None:
        said.append((session_id, post_id, author))

    signals.session_posted.connect(receive)
    yield said
    assert signals.session_posted.disconnect(receive)


def test_a_due_post_is_announced_once(store: Store, session_id: str, announced: list[Any]) -> None:
    post = store.post_message(session_id, MESSAGE, key="key", author="ada")
    store.post_message(session_id, MESSAGE, key="key", author="ada")
    store.post_message(session_id, MESSAGE, not_before=moments.now() + timedelta(hours=1))
    assert announced == [(session_id, post.post_id, "ada")]


def test_a_post_is_announced_after_the_commit(
    database_store: DatabaseStateStore, announced: list[Any]
) -> None:
    session_id = database_store.create_session(agent_type="agent").session_id
    with transaction.atomic(using=database_store.alias):
        database_store.post_message(session_id, MESSAGE)
        assert announced == []
    assert len(announced) == 1
    with transaction.atomic(using=database_store.alias):
        database_store.post_message(session_id, MESSAGE)
        transaction.set_rollback(True, using=database_store.alias)
    assert len(announced) == 1
    assert len(database_store.list_posts(session_id).items) == 1


def test_due_posts_of_every_tenant_are_announced_once_for_each_session(
    database_store: DatabaseStateStore, announced: list[Any]
) -> None:
    other = DatabaseStateStore(database_store.alias, tenant=f"{database_store.tenant}-other")
    expected = []
    for store in (database_store, other):
        session_id = store.create_session(agent_type="agent").session_id
        first = store.post_message(session_id, MESSAGE, not_before=1_600_000_000_000, author="ada")
        store.post_message(session_id, MESSAGE)
        expected.append((session_id, first.post_id, "ada"))
    announced.clear()
    assert announce_due_posts(using=other.alias, tenant=other.tenant) == 1
    assert announced == expected[1:]
    announced.clear()
    assert announce_due_posts(using=other.alias) >= 2
    assert set(expected) <= set(announced)


# --- The end of a session ---------------------------------------------------------------------------


def _save(store: Store, session_id: str, status: SessionStatus) -> None:
    state = loaded(store, session_id)
    state.status = status
    store.save_state(session_id, state, expected_version=state.version)


def _step(store: Store, session_id: str, status: SessionStatus, **arguments: Any) -> None:
    state = loaded(store, session_id)
    state.status = status
    number = state.step_count = state.step_count + 1
    info = StepInfo("step", step_count=number)
    store.save_state_and_promote_staging(
        session_id, state, [{"role": "assistant", "content": "Bye."}], info, **arguments
    )


def _expected_step(store: Store, session_id: str, status: SessionStatus) -> None:
    _step(store, session_id, status, expected_version=loaded(store, session_id).version)


def _recorded_step(store: Store, session_id: str, status: SessionStatus) -> None:
    _step(store, session_id, status, operation_id=f"end-{loaded(store, session_id).version}")


def _step_with_staging(store: Store, session_id: str, status: SessionStatus) -> None:
    store.stage_changes(session_id, "step", {"tool_call_id": "call", "merge_changes": {"done": True}})
    _step(store, session_id, status)
    assert loaded(store, session_id).custom_state["done"]


def _set(store: Store, session_id: str, status: SessionStatus) -> None:
    store.update_status(session_id, status)


def _compare_and_set(store: Store, session_id: str, status: SessionStatus) -> None:
    assert store.compare_and_set_status(session_id, list(SessionStatus), status)


def _compare_with_others_and_set(store: Store, session_id: str, status: SessionStatus) -> None:
    store.compare_and_set_status(session_id, [each for each in SessionStatus if each != status], status)


def _guarded_compare_and_set(store: Store, session_id: str, status: SessionStatus) -> None:
    assert store.compare_and_set_status(session_id, list(SessionStatus), status, fencing_token=1)


def _rewind(store: Store, session_id: str, status: SessionStatus) -> None:
    """To a checkpoint with this status, from another status than this one unless it was set before."""
    checkpoint = store.get_latest_checkpoint(session_id)
    assert checkpoint is not None
    assert checkpoint.status == status
    store.restore_checkpoint(session_id, checkpoint.checkpoint_id)


WRITES: Final = [
    _save,
    _step,
    _expected_step,
    _recorded_step,
    _step_with_staging,
    _set,
    _compare_and_set,
    _compare_with_others_and_set,
    _guarded_compare_and_set,
]


@for_each("write", WRITES)
@for_each("status, signal", [("completed", "session_finished"), ("failed", "session_failed")])
def test_an_end_is_announced_once(
    store: Store,
    sent: list[tuple[str, str]],
    write: Callable[[Store, str, SessionStatus], None],
    status: str,
    signal: str,
) -> None:
    session_id = store.create_session(agent_type="agent").session_id
    sent.clear()
    write(store, session_id, SessionStatus(status))
    assert sent == [(signal, session_id)]
    write(store, session_id, SessionStatus(status))
    assert sent == [(signal, session_id)]


@for_each("write", WRITES)
def test_another_status_is_not_announced(
    store: Store, sent: list[tuple[str, str]], write: Callable[[Store, str, SessionStatus], None]
) -> None:
    session_id = store.create_session(agent_type="agent").session_id
    sent.clear()
    for status in (SessionStatus.RUNNING, SessionStatus.PAUSED, SessionStatus.INTERRUPTED):
        write(store, session_id, status)
    assert sent == []


def test_a_session_that_was_active_again_ends_again(
    store: Store, session_id: str, sent: list[tuple[str, str]]
) -> None:
    for status in ("completed", "active", "failed", "completed"):
        store.update_status(session_id, status)
    assert sent == [("session_finished", "session"), ("session_failed", "session"), sent[0]]


def test_a_rewind_to_an_ended_state_announces_that_end(
    store: Store, session_id: str, sent: list[tuple[str, str]]
) -> None:
    _step(store, session_id, SessionStatus.COMPLETED)
    store.update_status(session_id, "active")
    _rewind(store, session_id, SessionStatus.COMPLETED)
    assert sent == [("session_finished", "session")] * 2
    _rewind(store, session_id, SessionStatus.COMPLETED)
    assert sent == [("session_finished", "session")] * 2


def test_a_write_that_is_refused_announces_nothing(
    store: Store, session_id: str, sent: list[tuple[str, str]]
) -> None:
    state = loaded(store, session_id)
    state.status = SessionStatus.FAILED
    with pytest.raises(StaleStateError):
        store.save_state(session_id, state, expected_version=7)
    with pytest.raises(StaleStateError):
        store.save_state_and_promote_staging(
            session_id, state, [], StepInfo("step", step_count=1), expected_version=7
        )
    assert not store.compare_and_set_status(session_id, ["paused"], "failed")
    assert sent == []


def test_a_repeated_operation_announces_its_end_once(
    store: Store, session_id: str, sent: list[tuple[str, str]]
) -> None:
    state = loaded(store, session_id)
    state.status = SessionStatus.COMPLETED
    for _ in range(2):
        commit = store.save_state_and_promote_staging(
            session_id, state, [], StepInfo("step", step_count=1), operation_id="once"
        )
        assert commit.new_version == 2
    assert sent == [("session_finished", "session")]


@for_each("workspace_refs", [{}, {"code": {"provider": "none"}}])
def test_an_expired_session_has_failed_and_expired(
    store: Store, sent: list[tuple[str, str]], workspace_refs: dict[str, Any]
) -> None:
    """With a workspace, the session is marked alone, else together with others."""

    class NoSnapshots:
        def list_snapshots(self, session_id: str, ref: Any, *, tenant: str) -> list[str]:
            return []

        def delete_snapshot(self, snapshot_id: str) -> None:
            raise AssertionError("there is none")

    state = store.create_session(agent_type="agent", expires_at=LONG_AGO)
    state.workspace_refs = workspace_refs
    store.save_state(state.session_id, state)
    sent.clear()
    for _ in range(2):
        expired_session_cleanup(state_store=store, workspace_providers={"none": NoSnapshots()})
        assert loaded(store, state.session_id).failure_reason == SESSION_EXPIRED
        assert sent == [("session_failed", state.session_id), ("session_expired", state.session_id)]


def test_an_expired_session_is_announced_with_its_tenant(
    database_store: DatabaseStateStore, sent: list[tuple[str, str]]
) -> None:
    """Where one cleanup works on all tenants."""
    tenants: list[str] = []

    def receive(tenant: str, **kwargs: Any) -> None:
        tenants.append(tenant)

    database_store.create_session("session", agent_type="agent", expires_at=LONG_AGO)
    row = Session.objects.using(database_store.alias).get(tenant=database_store.tenant)
    signals.session_expired.connect(receive)
    try:
        cleanup = DatabaseCleanup(database_store.alias, tenant=None)
        key = SessionKey(row.session_id, row.tenant, row.pk)
        assert cleanup.mark_in_bulk([key], moments.now()) == []
    finally:
        signals.session_expired.disconnect(receive)
    assert tenants == [database_store.tenant]


# --- The last answer --------------------------------------------------------------------------------


def test_the_last_answer_is_announced_for_the_owner(store: Store, sent: list[tuple[str, str]]) -> None:
    create_family(store)
    store.add_pending_tool_calls("grandchild", {"call-1": ASK, "call-2": APPROVE})
    store.add_pending_tool_calls("child", {"call-3": ASK})
    store.submit_tool_result("root", "call-1", result=1)
    store.submit_tool_result("root", "call-1", result=2)
    store.submit_tool_result("root", "no call", result=2)
    assert sent == []
    store.submit_tool_result("root", "call-2", approved=True, approval_id="approval")
    assert sent == [("session_answered", "grandchild")]
    store.submit_tool_result("child", "call-2", approved=False, approval_id="approval")
    assert sent == [("session_answered", "grandchild")]
    store.submit_tool_result("child", "call-3", error="gone")
    assert sent[1:] == [("session_answered", "child")]


def test_the_default_of_a_deadline_is_announced_like_an_answer(
    store: Store, session_id: str, sent: list[tuple[str, str]]
) -> None:
    store.add_pending_tool_calls(
        session_id, {"call": {**APPROVE, "deadline": LONG_AGO, "on_expiry": "reject"}}
    )
    assert expired_session_cleanup(state_store=store).errors == 0
    assert sent == [("session_answered", "session")]


def test_a_session_suspended_after_its_last_answer_is_announced(
    store: Store, session_id: str, sent: list[tuple[str, str]]
) -> None:
    """Who was told of the answer may have met a session that was not suspended yet."""
    store.add_pending_tool_calls(session_id, {"call-1": ASK, "call-2": ASK})
    store.submit_tool_result(session_id, "call-1", result=1)
    store.suspend(session_id, kind="suspended_client_tool", context={})
    assert sent == []
    store.submit_tool_result(session_id, "call-2", result=1)
    assert sent == [("session_answered", "session")]
    store.suspend(session_id, kind="suspended_client_tool", context={})
    assert sent == [("session_answered", "session")] * 2


@for_each("last", ["forged", "other"])
def test_an_answer_of_the_agent_is_not_the_last_one(
    store: Store, session_id: str, sent: list[tuple[str, str]], last: str
) -> None:
    store.add_pending_tool_calls(session_id, {"other": ASK})
    ask_approval(store, session_id, tool_call_id="forged")
    forge_answer(store, session_id, "forged")
    calls: dict[str, dict[str, Any]] = {
        "forged": {"approved": False, "approval_id": "approval", "actor": "ann"},
        "other": {"result": 1},
    }
    (first,) = calls.keys() - {last}
    store.submit_tool_result(session_id, first, **calls[first])
    store.suspend(session_id, kind="suspended_client_tool", context={})
    assert sent == []
    store.submit_tool_result(session_id, last, **calls[last])
    assert sent == [("session_answered", "session")]


@for_each("earlier", ["approved", "used", "rejected", "failed"])
def test_an_answer_that_is_not_taken_does_not_hide_the_last_one(
    store: Store, session_id: str, sent: list[tuple[str, str]], earlier: str
) -> None:
    ask_approval(store, session_id)
    store.add_pending_tool_calls(session_id, {"last": ASK})
    if earlier == "failed":
        store.submit_tool_result(session_id, "call", error="no")
    else:
        approve(store, session_id, approved=earlier != "rejected")
    if earlier == "used":
        use_once(store, session_id)
    assert sent == []
    store.submit_tool_result(session_id, "last", result=1)
    assert sent == [("session_answered", "session")]
    store.suspend(session_id, kind="suspended_client_tool", context={})
    assert sent == [("session_answered", "session")] * 2


def test_a_session_that_waits_for_something_else_is_not_announced_when_it_is_suspended(
    store: Store, session_id: str, sent: list[tuple[str, str]]
) -> None:
    store.suspend(session_id, kind="suspended_client_tool", context={})
    store.suspend(session_id, kind="suspended_client_tool", context={}, pending={"call": ASK})
    store.submit_tool_result(session_id, "call", result=1)
    sent.clear()
    store.suspend(session_id, kind="suspended_awaiting_children", context={}, awaiting_children=["child"])
    store.suspend(session_id, kind="suspended_client_tool", context={}, pending={"call-2": ASK})
    assert sent == []


# --- When, and to whom ------------------------------------------------------------------------------


def test_receivers_get_the_session_the_tenant_and_the_database(store: Store, session_id: str) -> None:
    received: list[dict[str, Any]] = []

    def receive(**kwargs: Any) -> None:
        received.append(kwargs)

    signals.session_finished.connect(receive)
    try:
        store.update_status(session_id, "completed")
    finally:
        signals.session_finished.disconnect(receive)
    alias = store.alias if isinstance(store, DatabaseStateStore) else None
    assert received == [
        {
            "signal": signals.session_finished,
            "sender": None,
            "session_id": "session",
            "tenant": store.tenant,
            "using": alias,
            "alias": alias,
        }
    ]


def test_a_receiver_reads_and_writes_what_was_written(store: Store, session_id: str) -> None:
    """From another thread: no lock and no transaction is open any more."""

    def write() -> SessionStatus:
        try:
            store.append_messages(session_id, [{"role": "system", "content": "The end."}])
            return loaded(store, session_id).status
        finally:
            connections.close_all()

    found: list[SessionStatus] = []
    pool = ThreadPoolExecutor(1)

    def receive(**kwargs: Any) -> None:
        found.append(pool.submit(write).result(timeout=5))

    for signal in (signals.session_finished, signals.session_answered):
        signal.connect(receive)
    try:
        store.add_pending_tool_calls(session_id, {"call": ASK})
        store.submit_tool_result(session_id, "call", result=1)
        store.update_status(session_id, "completed")
    finally:
        pool.shutdown(wait=False)
        for signal in (signals.session_finished, signals.session_answered):
            signal.disconnect(receive)
    assert found == [SessionStatus.ACTIVE, SessionStatus.COMPLETED]
    assert store.get_message_count(session_id) == 2


def test_an_error_of_a_receiver_is_logged_and_undoes_nothing(
    store: Store, session_id: str, caplog: pytest.LogCaptureFixture
) -> None:
    received: list[str] = []

    def refuse(**kwargs: Any) -> None:
        raise RuntimeError("the receiver is broken")

    def receive(session_id: str, **kwargs: Any) -> None:
        received.append(session_id)

    for receiver in (refuse, receive):
        signals.session_failed.connect(receiver)
    try:
        with caplog.at_level(logging.ERROR):
            store.update_status(session_id, "failed")
    finally:
        for receiver in (refuse, receive):
            signals.session_failed.disconnect(receiver)
    assert "refuse" in caplog.text
    assert loaded(store, session_id).status is SessionStatus.FAILED
    assert received == ["session"]


async def test_asynchronous_calls_announce_and_asynchronous_receivers_are_called(
    store: Store, session_id: str
) -> None:
    received: list[str] = []

    async def receive(session_id: str, **kwargs: Any) -> None:
        received.append(session_id)

    signals.session_finished.connect(receive)
    try:
        await store.aupdate_status(session_id, "completed")
    finally:
        signals.session_finished.disconnect(receive)
    assert received == ["session"]


async def test_an_asynchronous_receiver_on_the_loops_own_thread_is_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    store = InMemoryStateStore()
    store.create_session("session", agent_type="agent")

    async def receive(**kwargs: Any) -> None:
        raise AssertionError("it cannot be called from here")

    signals.session_finished.connect(receive)
    try:
        store.update_status("session", "completed")
    finally:
        signals.session_finished.disconnect(receive)
    assert "Some receivers of a signal" in caplog.text
    assert loaded(store, "session").status is SessionStatus.COMPLETED


def test_signals_are_sent_after_the_callers_commit(
    database_store: DatabaseStateStore, sent: list[tuple[str, str]]
) -> None:
    with transaction.atomic(using=database_store.alias):
        _cause_all(database_store)
        assert sent == []
    assert sent == [
        ("session_finished", "ends"),
        ("session_failed", "fails"),
        ("session_answered", "waits"),
        ("session_failed", "expires"),
        ("session_expired", "expires"),
    ]


def test_a_rollback_sends_nothing(database_store: DatabaseStateStore, sent: list[tuple[str, str]]) -> None:
    with transaction.atomic(using=database_store.alias):
        _cause_all(database_store)
        transaction.set_rollback(True, using=database_store.alias)
    assert sent == []
    assert not database_store.session_exists("ends")


def test_a_rolled_back_savepoint_sends_nothing(
    database_store: DatabaseStateStore, sent: list[tuple[str, str]]
) -> None:
    database_store.create_session("session", agent_type="agent")
    with transaction.atomic(using=database_store.alias):
        with transaction.atomic(using=database_store.alias):
            database_store.update_status("session", "failed")
            transaction.set_rollback(True, using=database_store.alias)
        database_store.update_status("session", "completed")
    assert sent == [("session_finished", "session")]


def test_a_fenced_step_announces_its_end(
    database_store: DatabaseStateStore, sent: list[tuple[str, str]]
) -> None:
    database_store.create_session("session", agent_type="agent")
    locks = DatabaseLockManager(database_store.alias, tenant=database_store.tenant)
    lock = locks.acquire("session")
    assert lock is not None
    run = database_store.start_run("session", fencing_token=lock.fencing_token)
    _step(
        database_store,
        "session",
        SessionStatus.COMPLETED,
        fencing_token=lock.fencing_token,
        run_id=run.run_id,
    )
    lock.release()
    assert sent == [("session_finished", "session")]


def _cause_all(store: DatabaseStateStore) -> None:
    for name in ("ends", "fails", "waits"):
        store.create_session(name, agent_type="agent")
        commit_step(store, name, 1)
    store.create_session("expires", agent_type="agent", expires_at=LONG_AGO)
    _step(store, "ends", SessionStatus.COMPLETED)
    assert store.compare_and_set_status("fails", ["active"], "failed")
    store.add_pending_tool_calls("waits", {"call": ASK})
    store.submit_tool_result("waits", "call", result=1)
    assert expired_session_cleanup(state_store=store).marked == 1


def test_every_signal_is_documented() -> None:
    named = {name: value for name, value in vars(signals).items() if type(value) is Signal}
    assert sorted(named) == sorted((*NAMES, *ELSEWHERE)) == sorted(signals.__all__)


# --- Transactions of the caller, also in memory --------------------------------------------------------


class Undo(Exception):
    """An error of the caller's own, which rolls a block back."""


def _write(store: Store, session_id: str) -> None:
    """Send a signal of each kind of write."""
    store.post_message(session_id, MESSAGE)
    store.suspend(session_id, kind="suspended_client_tool", context={}, pending={session_id: ASK})
    store.submit_tool_result(session_id, session_id, result=1)
    store.update_status(session_id, "failed", failure_reason=SESSION_EXPIRED)


_OF_WRITE: Final = (
    "session_posted",
    "session_waiting",
    "session_answered",
    "session_failed",
    "session_expired",
)


def _in_blocks(store: Store, sent: list[tuple[str, str]], *, undo_inner: bool, undo_outer: bool) -> None:
    """Write before, in and after an inner block. The inner block has another one in it, which is kept."""
    with suppress(Undo), store._stores.transaction():
        _write(store, "first")
        with suppress(Undo), store._stores.transaction():
            _write(store, "inner")
            with store._stores.transaction():
                _write(store, "innermost")
            if undo_inner:
                raise Undo
        _write(store, "last")
        assert sent == []
        if undo_outer:
            raise Undo


@for_each(
    ("undo_inner", "undo_outer", "kept"),
    [
        (False, False, ["first", "inner", "innermost", "last"]),
        (True, False, ["first", "last"]),
        (False, True, []),
        (True, True, []),
    ],
)
def test_signals_are_sent_in_order_after_the_outermost_transaction(
    store: Store, undo_inner: bool, undo_outer: bool, kept: list[str]
) -> None:
    for session_id in ("first", "inner", "innermost", "last"):
        store.create_session(session_id, agent_type="agent")
    sent: list[tuple[str, str]] = []
    with _connected(sent):
        _in_blocks(store, sent, undo_inner=undo_inner, undo_outer=undo_outer)
    assert sent == [(name, session_id) for session_id in kept for name in _OF_WRITE]


def test_signals_of_an_async_transaction_are_sent_after_it(store: Store) -> None:
    sent: list[tuple[str, str]] = []
    for session_id in ("kept", "lost"):
        store.create_session(session_id, agent_type="agent")

    async def post() -> None:
        for session_id in ("kept", "lost"):
            with suppress(Undo):
                async with store._stores.transaction():
                    await store.apost_message(session_id, MESSAGE)
                    assert ("session_posted", session_id) not in sent
                    if session_id == "lost":
                        raise Undo

    with _connected(sent):
        async_to_sync(post)()
    assert sent == [("session_posted", "kept")]


def test_an_error_of_a_receiver_after_a_transaction_reaches_nobody(store: Store) -> None:
    """The other receivers are called, and a receiver may write and open transactions itself."""
    sent: list[tuple[str, str]] = []

    def fails(**_: Any) -> None:
        raise Undo

    def posts(session_id: str, **_: Any) -> None:
        if session_id == "first":
            with store._stores.transaction():
                store.post_message("second", MESSAGE)

    for session_id in ("first", "second"):
        store.create_session(session_id, agent_type="agent")
    signals.session_posted.connect(fails)
    signals.session_posted.connect(posts)
    try:
        with _connected(sent), store._stores.transaction():
            store.post_message("first", MESSAGE)
            assert len(store.list_posts("second").items) == 0
    finally:
        assert signals.session_posted.disconnect(fails)
        assert signals.session_posted.disconnect(posts)
    assert sorted(sent) == [("session_posted", "first"), ("session_posted", "second")]
    assert [len(store.list_posts(each).items) for each in ("first", "second")] == [1, 1]


@contextmanager
def _connected(sent: list[tuple[str, str]]) -> Iterator[None]:
    """Collect the names of signals and the ids of sessions that are sent in a block."""

    def receiver(name: str) -> Callable[..., None]:
        return lambda session_id, **_: sent.append((name, session_id))

    receivers = {name: receiver(name) for name in (*NAMES, *ELSEWHERE)}
    for name, receive in receivers.items():
        getattr(signals, name).connect(receive)
    try:
        yield
    finally:
        for name, receive in receivers.items():
            assert getattr(signals, name).disconnect(receive)
