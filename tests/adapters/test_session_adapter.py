"""Sessions for an adapter: got or created once, and written together with rows of its own."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from django.db import connections

from helix_store.adapters import LockedSession, SessionAdapter, session_id_for
from helix_store.core import moments, validation
from helix_store.exceptions import ConflictError, FencedOutError, InvalidPayload, SessionNotFound
from helix_store.models import Message, Session
from helix_store.stores import DatabaseLockManager, DatabaseStateStore
from tests.cells import for_each
from tests.databases import CommittedDatabase


@pytest.fixture
def adapter(committed_db: CommittedDatabase) -> SessionAdapter:
    return SessionAdapter("third-party", committed_db.alias, tenant=committed_db.tenant)


@pytest.fixture
def store(committed_db: CommittedDatabase) -> DatabaseStateStore:
    return DatabaseStateStore(committed_db.alias, tenant=committed_db.tenant)


def _add_message(session: LockedSession) -> int:
    rows = Message.objects.using(session.alias).filter(session_id=session.key)
    Message.objects.using(session.alias).create(
        session_id=session.key,
        sequence=rows.count() + 1,
        role="user",
        payload='{"role":"user"}',
        created_at=moments.now(),
    )
    return session.key


def test_a_session_is_created_once_and_found_afterwards(
    adapter: SessionAdapter, store: DatabaseStateStore
) -> None:
    assert adapter.ensure("s", user_id="user", title="Title", metadata={"origin": "here"})
    assert not adapter.ensure("s", user_id="other")
    state = store.load_state("s")
    assert state is not None
    assert (state.agent_type, state.user_id, state.title) == ("third-party", "user", "Title")
    assert state.metadata == {"origin": "here"}


def test_of_many_callers_at_once_one_creates_the_session(adapter: SessionAdapter) -> None:
    barrier = threading.Barrier(8)

    def ensure(name: str) -> bool:
        try:
            barrier.wait()
            return adapter.ensure(name)
        finally:
            connections.close_all()

    with ThreadPoolExecutor(8) as pool:
        for name in ("a", "b", "c"):
            assert sorted(pool.map(ensure, [name] * 8)) == [False] * 7 + [True]


@for_each("bad", ["", "a\0b", "x" * 256, 7])
def test_bad_input_is_refused_before_a_statement(adapter: SessionAdapter, bad: str) -> None:
    with pytest.raises(InvalidPayload):
        adapter.ensure(bad)
    with pytest.raises(InvalidPayload):
        adapter.write(bad, lambda session: None)
    with pytest.raises(InvalidPayload):
        adapter.ensure("s", metadata={"count": 1})  # type: ignore[dict-item]
    assert not Session.objects.using(adapter.db.alias).filter(tenant=adapter.tenant).exists()


def test_rows_are_written_with_the_session_that_they_need(
    adapter: SessionAdapter, store: DatabaseStateStore
) -> None:
    met: list[bool] = []

    def write(session: LockedSession) -> int:
        met.append(session.is_new)
        return _add_message(session)

    assert adapter.write("s", write) == adapter.write("s", write)
    assert met == [True, False]
    rows = Message.objects.filter(session__tenant=adapter.tenant, session__session_id="s")
    assert adapter.read(lambda db: rows.using(db.alias).count()) == 2


def test_an_error_leaves_neither_rows_nor_the_session(
    adapter: SessionAdapter, store: DatabaseStateStore
) -> None:
    def write(session: LockedSession) -> None:
        _add_message(session)
        raise LookupError("of the adapter")

    with pytest.raises(LookupError):
        adapter.write("s", write)
    assert not store.session_exists("s")


def test_a_write_may_require_the_session(adapter: SessionAdapter) -> None:
    with pytest.raises(SessionNotFound):
        adapter.write("s", _add_message, create=False)
    adapter.ensure("s")
    adapter.write("s", _add_message, create=False)


def test_a_write_is_activity_of_the_session(adapter: SessionAdapter) -> None:
    adapter.ensure("s")
    sessions = Session.objects.using(adapter.db.alias).filter(tenant=adapter.tenant)
    before = sessions.get()
    adapter.write("s", _add_message)
    after = sessions.get()
    assert after.updated_at > before.updated_at
    assert after.version == before.version


def test_a_former_holder_writes_nothing(adapter: SessionAdapter) -> None:
    locks = DatabaseLockManager(adapter.db.using, tenant=adapter.tenant)
    adapter.ensure("s")
    former = locks.acquire("s")
    assert former is not None
    successor = locks.take_over("s")
    with pytest.raises(FencedOutError):
        adapter.write("s", _add_message, fencing_token=former.fencing_token)
    adapter.write("s", _add_message, fencing_token=successor.fencing_token)
    messages = Message.objects.using(adapter.db.alias).filter(session__tenant=adapter.tenant)
    assert messages.count() == 1


def test_an_adapter_may_have_a_user_and_a_token_for_all_of_its_calls(adapter: SessionAdapter) -> None:
    locks = DatabaseLockManager(adapter.db.using, tenant=adapter.tenant)
    former, successor = locks.take_over("s"), locks.take_over("s")
    of_former, of_successor = (
        SessionAdapter(
            "third-party",
            adapter.db.using,
            tenant=adapter.tenant,
            user_id="ada",
            fencing_token=lock.fencing_token,
        )
        for lock in (former, successor)
    )
    of_successor.write("s", _add_message)
    of_successor.ensure("another")
    sessions = Session.objects.using(adapter.db.alias).filter(tenant=adapter.tenant)
    assert set(sessions.values_list("user_id", flat=True)) == {"ada"}
    with pytest.raises(ConflictError):
        of_successor.write("s", _add_message, user_id="bob")
    with pytest.raises(FencedOutError):
        of_former.write("s", _add_message)
    with pytest.raises(FencedOutError):
        of_former.delete("s")
    of_former.write("s", _add_message, fencing_token=successor.fencing_token)
    assert of_successor.delete("s") == 1


def test_a_session_of_the_adapter_goes_whole_and_another_one_stays(
    adapter: SessionAdapter, store: DatabaseStateStore
) -> None:
    adapter.write("its own", _add_message)
    store.create_session("the application's", agent_type="support")
    adapter.write("the application's", _add_message)

    assert adapter.delete("its own", Message) == 1
    assert adapter.delete("the application's", Message) == 1
    assert adapter.delete("unknown", Message) == 0
    assert not store.session_exists("its own")
    assert store.session_exists("the application's")
    messages = Message.objects.using(adapter.db.alias).filter(session__tenant=adapter.tenant)
    assert not messages.exists()


def test_tenants_do_not_meet(adapter: SessionAdapter) -> None:
    other = SessionAdapter("third-party", adapter.db.using, tenant=f"{adapter.tenant} other")
    assert adapter.write("s", _add_message) != other.write("s", _add_message)
    assert other.delete("s") == 1
    assert not adapter.ensure("s")


async def test_a_cancelled_write_tells_so_after_its_transaction(committed_db: CommittedDatabase) -> None:
    adapter = SessionAdapter("third-party", committed_db.alias, tenant=committed_db.tenant)
    loop = asyncio.get_running_loop()
    began, may_end = asyncio.Event(), threading.Event()
    outcome: list[str] = []

    def write(session: LockedSession) -> None:
        loop.call_soon_threadsafe(began.set)
        assert may_end.wait(30)
        _add_message(session)
        outcome.append("written")

    task = asyncio.create_task(adapter.awrite("s", write))
    await began.wait()
    task.cancel()
    for _ in range(10):
        await asyncio.sleep(0)
    task.cancel()
    assert not task.done()
    may_end.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert outcome == ["written"]
    found = await adapter.aread(
        lambda db: Message.objects.using(db.alias).filter(session__tenant=db.tenant).count()
    )
    assert found == 1


def test_a_session_id_of_a_framework_is_kept_where_it_fits() -> None:
    assert session_id_for("thread-1") == "thread-1"
    assert session_id_for("ünïcode thread") == "ünïcode thread"


@for_each("parts", [("x" * 300,), ("a\0b",), ("\ud800",), ("project", "session"), ("", "s")])
def test_any_other_id_becomes_a_readable_one_with_a_digest(parts: tuple[str, ...]) -> None:
    made = session_id_for(*parts)
    name, _, digest = made.rpartition("~")
    assert len(name) <= 80
    assert len(digest) == 32
    assert made == session_id_for(*parts)
    assert validation.identifier(made, "session_id") == made


def test_ids_of_a_framework_never_meet() -> None:
    joined = session_id_for("project", "session")
    ids = [
        session_id_for(*parts)
        for parts in [("a", "bc"), ("ab", "c"), ("abc",), ("a.bc",), ("abc", ""), ("", "abc"), (joined,)]
    ]
    assert len({joined, *ids}) == len(ids) + 1


@for_each("parts", [(), ("",), ("", ""), (7,), (None, "a")])
def test_an_id_is_of_texts_that_are_not_all_empty(parts: tuple[str, ...]) -> None:
    with pytest.raises(InvalidPayload):
        session_id_for(*parts)
