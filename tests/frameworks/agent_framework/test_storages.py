"""History, sessions and checkpoints of Microsoft Agent Framework, on SQLite and PostgreSQL."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any, TypeVar

import pytest

pytest.importorskip(
    "agent_framework", reason="Microsoft Agent Framework is not installed: pip install agent-framework-core"
)

from agent_framework import (
    Agent,
    AgentSession,
    Message,
    WorkflowCheckpoint,
    WorkflowCheckpointException,
)

from helix_store import DatabaseUsageStore
from helix_store.cleanup import erase
from helix_store.contrib.agent_framework import (
    DjangoCheckpointStorage,
    DjangoHistoryProvider,
    DjangoSessionStore,
)
from helix_store.exceptions import ConflictError, FencedOutError, IntegrityFault, InvalidPayload
from helix_store.models import Item, UsageEntry
from helix_store.models import Session as StoredSession
from helix_store.stores import DatabaseLockManager
from tests.databases import CommittedDatabase
from tests.frameworks.agent_framework.agents import Offer, ScriptedClient, booking, guide
from tests.frameworks.agent_framework.differential import Differential, Stored, message
from tests.frameworks.retention import assert_deleted_thirty_days_after_the_last_write
from tests.processes import run_in_threads
from tests.transfer.files import exported, imported

R = TypeVar("R")
USER = "ada-lovelace"
OFFER = f"{Offer.__module__}:{Offer.__qualname__}"


def history_of(db: CommittedDatabase, **options: Any) -> DjangoHistoryProvider:
    return DjangoHistoryProvider(db.alias, tenant=db.tenant, user_id=USER, **options)


def sessions_of(db: CommittedDatabase, **options: Any) -> DjangoSessionStore:
    return DjangoSessionStore(db.alias, tenant=db.tenant, user_id=USER, **options)


def checkpoints_of(
    db: CommittedDatabase, session_id: str = "trip", **options: Any
) -> DjangoCheckpointStorage:
    options = {"tenant": db.tenant, "user_id": USER, "allowed_checkpoint_types": [OFFER], **options}
    return DjangoCheckpointStorage(session_id, db.alias, **options)


def run(call: Coroutine[Any, Any, R]) -> R:
    return asyncio.run(call)


def texts(db: CommittedDatabase, session_id: str = "trip", **options: Any) -> list[str]:
    return [each.text for each in run(history_of(db, **options).get_messages(session_id))]


def counted(db: CommittedDatabase) -> dict[str, int]:
    sessions = StoredSession.objects.using(db.alias).filter(tenant=db.tenant)
    return {
        "session": sessions.count(),
        "item": Item.objects.using(db.alias).filter(session__in=sessions).count(),
        "usage": UsageEntry.objects.using(db.alias).filter(tenant=db.tenant).count(),
    }


def _talk(db: CommittedDatabase, *questions: str, session_id: str = "trip", **options: Any) -> None:
    async def talk() -> None:
        agent = guide(history_of(db, **options), *(f"answer to {question}" for question in questions))
        for question in questions:
            await agent.run(question, session=AgentSession(session_id=session_id))

    run(talk())


def _wait(db: CommittedDatabase) -> str:
    """Run a workflow until it asks a person, and return the id of the question."""
    (asked,) = run(booking().run("Lisbon", checkpoint_storage=checkpoints_of(db))).get_request_info_events()
    return str(asked.request_id)


def _fill(db: CommittedDatabase) -> None:
    _talk(db, "How is Lisbon?", "And Porto?")
    session = AgentSession(session_id="trip")
    session.state = {"kept": [1, 1.5], "message": Message("user", ["hi"])}
    run(sessions_of(db).set("trip", session))
    _wait(db)


# --- The same as in memory -------------------------------------------------------------------------


@pytest.mark.thorough
def test_two_thousand_calls_give_what_they_give_in_memory(committed_db: CommittedDatabase) -> None:
    stored = f"{Stored.__module__}:{Stored.__qualname__}"
    differential = Differential(
        history_of(committed_db, skip_excluded=True),
        sessions_of(committed_db),
        checkpoints_of(committed_db, "checkpoints", allowed_checkpoint_types=[stored]),
        seed=len(committed_db.vendor),
    )
    run(differential.run(2_000))
    assert differential.calls >= 2_000


# --- History ---------------------------------------------------------------------------------------


def test_an_agent_continues_in_another_process_and_its_usage_is_recorded(
    committed_db: CommittedDatabase,
) -> None:
    _talk(committed_db, "one", "two")
    assert texts(committed_db) == ["one", "answer to one", "two", "answer to two"]
    usage = DatabaseUsageStore(committed_db.alias, tenant=committed_db.tenant)
    entries = usage.get_entries(DjangoHistoryProvider.session_id_of("trip"))
    assert [(entry.model, entry.source.name) for entry in entries] == [("gpt-5", "guide")] * 2
    counts = [(each.tokens.completion, each.tokens.cache_write) for each in entries if each.tokens]
    assert counts == [(5, 3)] * 2
    _talk(committed_db, "three", session_id="free", model=None)
    assert usage.get_entries("free") == []


def test_providers_of_one_session_keep_histories_of_their_own(committed_db: CommittedDatabase) -> None:
    _talk(committed_db, "one")
    _talk(committed_db, "two", source_id="audit", store_outputs=False)
    assert texts(committed_db, source_id="audit") == ["two"]
    assert texts(committed_db) == ["one", "answer to one"]


def test_two_providers_record_a_response_without_an_id_once(committed_db: CommittedDatabase) -> None:
    agent = Agent(
        client=ScriptedClient("one", "two", has_ids=False),
        name="guide",
        context_providers=[
            history_of(committed_db),
            history_of(committed_db, source_id="audit", load_messages=False),
        ],
    )
    session = AgentSession(session_id="trip")

    async def ask() -> None:
        for question in ("hello", "again"):
            await agent.run(question, session=session)

    run(ask())
    assert texts(committed_db) == texts(committed_db, source_id="audit") == ["hello", "one", "again", "two"]
    usage = DatabaseUsageStore(committed_db.alias, tenant=committed_db.tenant)
    entries = usage.get_entries(DjangoHistoryProvider.session_id_of("trip"))
    assert [each.tokens.completion for each in entries if each.tokens] == [5, 5]


def _save(db: CommittedDatabase, writer: int) -> None:
    async def save() -> None:
        for number in range(5):
            name = f"{writer}/{number}"
            await history_of(db).save_messages("trip", [Message("user", [name], message_id=name)])

    run(save())


def test_threads_that_save_to_one_session_lose_and_double_nothing(committed_db: CommittedDatabase) -> None:
    for outcome in run_in_threads(_save, [(committed_db, writer) for writer in range(6)]):
        outcome.unwrap()
    expected = [f"{writer}/{number}" for writer in range(6) for number in range(5)]
    assert sorted(texts(committed_db)) == sorted(expected)


def test_what_is_stored_already_is_not_stored_again(committed_db: CommittedDatabase) -> None:
    choose = random.Random(1)  # noqa: S311  messages to repeat
    stored = [message(choose) for _ in range(20)]
    history = history_of(committed_db)
    run(history.save_messages("trip", stored))
    run(history.save_messages("trip", [*stored[-3:], Message("user", ["new"])]))
    run(history.save_messages("trip", [*stored, Message("user", ["new"]), Message("user", ["newer"])]))
    assert texts(committed_db)[-2:] == ["new", "newer"]
    assert counted(committed_db)["item"] == 22


def test_a_history_without_a_session_is_refused(committed_db: CommittedDatabase) -> None:
    with pytest.raises(InvalidPayload):
        run(history_of(committed_db).get_messages(None))
    with pytest.raises(InvalidPayload):
        run(history_of(committed_db).save_messages(None, [Message("user", ["hi"])]))


def test_a_message_that_cannot_be_read_is_an_integrity_fault(committed_db: CommittedDatabase) -> None:
    _talk(committed_db, "one")
    items = Item.objects.using(committed_db.alias).filter(session__tenant=committed_db.tenant)
    for payload in ("[1]", '{"role":"user","contents":5}'):
        items.update(payload=payload)
        with pytest.raises(IntegrityFault):
            texts(committed_db)


# --- Sessions --------------------------------------------------------------------------------------


def test_a_stale_session_is_refused_and_a_new_one_replaces(committed_db: CommittedDatabase) -> None:
    store = sessions_of(committed_db)
    run(store.set("trip", AgentSession(session_id="trip")))
    stale, fresh = run(store.get("trip")), run(store.get("trip"))
    assert stale is not None
    assert fresh is not None
    fresh.state["by"] = "the first writer"
    run(store.set("trip", fresh))
    run(store.set("trip", fresh))
    with pytest.raises(ConflictError):
        run(store.set("trip", stale))
    run(store.delete("trip"))
    with pytest.raises(ConflictError):
        run(store.set("trip", fresh))
    assert run(store.get("trip")) is None
    run(store.set("trip", AgentSession(session_id="trip")))


def _count(db: CommittedDatabase, _writer: int) -> None:
    async def count() -> None:
        store, done = sessions_of(db), 0
        while done < 5:
            session = await store.get("trip")
            assert session is not None
            session.state["count"] += 1
            try:
                await store.set("trip", session)
                done += 1
            except ConflictError:
                continue

    run(count())


def test_threads_that_count_in_one_session_lose_nothing(committed_db: CommittedDatabase) -> None:
    session = AgentSession(session_id="trip")
    session.state["count"] = 0
    run(sessions_of(committed_db).set("trip", session))
    for outcome in run_in_threads(_count, [(committed_db, writer) for writer in range(5)]):
        outcome.unwrap()
    stored = run(sessions_of(committed_db).get("trip"))
    assert stored is not None
    assert stored.state == {"count": 25}


def test_an_empty_id_and_a_class_of_its_own_are_refused(committed_db: CommittedDatabase) -> None:
    class OwnSession(AgentSession):
        pass

    with pytest.raises(ValueError):
        run(sessions_of(committed_db).get(""))
    with pytest.raises(InvalidPayload):
        run(sessions_of(committed_db).set("trip", OwnSession()))


def test_a_session_that_cannot_be_read_is_an_integrity_fault(committed_db: CommittedDatabase) -> None:
    run(sessions_of(committed_db).set("trip", AgentSession(session_id="trip")))
    items = Item.objects.using(committed_db.alias).filter(session__tenant=committed_db.tenant)
    items.update(payload='{"session":{}}')
    with pytest.raises(IntegrityFault):
        run(sessions_of(committed_db).get("trip"))


# --- Checkpoints -----------------------------------------------------------------------------------


def test_a_workflow_waits_for_a_person_and_continues_in_another_process(
    committed_db: CommittedDatabase,
) -> None:
    asked = _wait(committed_db)
    storage = checkpoints_of(committed_db)
    latest = run(storage.get_latest(workflow_name="trip"))
    assert latest is not None
    resumed = booking().run(
        checkpoint_id=latest.checkpoint_id, checkpoint_storage=storage, responses={asked: True}
    )
    assert run(resumed).get_outputs() == ["booked for Lisbon: 120 euros"]
    ids = run(storage.list_checkpoint_ids(workflow_name="trip"))
    assert ids == [each.checkpoint_id for each in run(storage.list_checkpoints(workflow_name="trip"))]
    assert len(ids) > 2


def test_the_latest_checkpoint_is_the_last_one_that_was_stored(committed_db: CommittedDatabase) -> None:
    """The clock of the second worker is an hour behind that of the first."""
    storage = checkpoints_of(committed_db)
    now = datetime.now(UTC)
    for name, at in (("first", now), ("second", now - timedelta(hours=1))):
        checkpoint = WorkflowCheckpoint("trip", "hash", checkpoint_id=name, timestamp=at.isoformat())
        run(storage.save(checkpoint))
    latest = run(storage.get_latest(workflow_name="trip"))
    assert latest is not None
    assert latest.checkpoint_id == "second"


def test_a_type_that_is_not_allowed_is_refused_before_it_is_stored(committed_db: CommittedDatabase) -> None:
    storage = checkpoints_of(committed_db, allowed_checkpoint_types=())
    checkpoint = WorkflowCheckpoint("trip", "hash", state={"offer": Offer("120 euros")})
    with pytest.raises(WorkflowCheckpointException):
        run(storage.save(checkpoint))
    assert counted(committed_db)["item"] == 0
    # A storage that allows it wrote it; this one does not read it.
    run(checkpoints_of(committed_db).save(checkpoint))
    with pytest.raises(WorkflowCheckpointException):
        run(storage.load(checkpoint.checkpoint_id))


def test_checkpoints_of_other_sessions_are_not_seen(committed_db: CommittedDatabase) -> None:
    run(checkpoints_of(committed_db, "one").save(WorkflowCheckpoint("trip", "hash", checkpoint_id="id")))
    other = checkpoints_of(committed_db, "two")
    assert run(other.get_latest(workflow_name="trip")) is None
    assert run(other.delete("id")) is False
    with pytest.raises(WorkflowCheckpointException):
        run(other.load("id"))


# --- Sessions of this store ------------------------------------------------------------------------


def test_a_superseded_owner_writes_nothing(committed_db: CommittedDatabase) -> None:
    _fill(committed_db)
    locks = DatabaseLockManager(committed_db.alias, tenant=committed_db.tenant)
    first, second = locks.acquire("trip"), locks.take_over("trip")
    assert first is not None
    before = counted(committed_db)

    def writes(token: int) -> list[Coroutine[Any, Any, object]]:
        storage = checkpoints_of(committed_db, fencing_token=token)
        sessions = sessions_of(committed_db, fencing_token=token)
        return [
            history_of(committed_db, fencing_token=token).save_messages("trip", [Message("user", ["new"])]),
            sessions.set("trip", AgentSession(session_id="trip")),
            storage.save(WorkflowCheckpoint("trip", "hash", checkpoint_id="new")),
            storage.delete("new"),
            sessions.delete("trip"),
        ]

    for write in writes(first.fencing_token):
        with pytest.raises(FencedOutError):
            run(write)
    assert counted(committed_db) == before
    for write in writes(second.fencing_token):
        run(write)
    assert counted(committed_db) == {"session": 0, "item": 0, "usage": 0}


def _save_message(**options: Any) -> Coroutine[Any, Any, object]:
    return DjangoHistoryProvider(**options).save_messages("s", [Message("user", ["hi"])])


def _set_session(**options: Any) -> Coroutine[Any, Any, object]:
    return DjangoSessionStore(**options).set("s", AgentSession(session_id="s"))


def _save_checkpoint(**options: Any) -> Coroutine[Any, Any, object]:
    return DjangoCheckpointStorage("s", **options).save(WorkflowCheckpoint("trip", "hash"))


@pytest.mark.parametrize("write", [_save_message, _set_session, _save_checkpoint])
def test_a_user_is_named_by_any_write_and_a_session_keeps_its_user(
    committed_db: CommittedDatabase, write: Callable[..., Coroutine[Any, Any, object]]
) -> None:
    options = {"using": committed_db.alias, "tenant": committed_db.tenant}
    for user in (None, USER, USER, None):
        run(write(**options, user_id=user))
    with pytest.raises(ConflictError):
        run(write(**options, user_id="grace"))
    stored = StoredSession.objects.using(committed_db.alias).get(tenant=committed_db.tenant)
    assert stored.user_id == USER


def test_an_erasure_of_the_user_leaves_no_trace(committed_db: CommittedDatabase) -> None:
    _fill(committed_db)
    assert counted(committed_db)["usage"] == 2
    erase(using=committed_db.alias, tenant=committed_db.tenant, user_id=USER)
    assert counted(committed_db) == {"session": 0, "item": 0, "usage": 0}


_WRITES: dict[str, Callable[[CommittedDatabase], object]] = {
    "history": lambda db: _talk(db, "How is Lisbon?"),
    "session": lambda db: run(sessions_of(db).set("trip", AgentSession(session_id="trip"))),
    "checkpoint": _wait,
}


@pytest.mark.parametrize("write", _WRITES.values(), ids=_WRITES)
def test_an_idle_session_is_deleted_by_the_retention_policy(
    empty_db: CommittedDatabase, write: Callable[[CommittedDatabase], object]
) -> None:
    assert_deleted_thirty_days_after_the_last_write(empty_db, lambda: write(empty_db))


def test_an_import_of_an_export_is_the_same_file_again(
    sqlite_db: CommittedDatabase, postgres_db: CommittedDatabase
) -> None:
    other = replace(postgres_db, tenant=sqlite_db.tenant)
    _fill(sqlite_db)
    data = exported(sqlite_db)
    summary, file = imported(other, data)
    assert (summary.problems, file.problems) == ([], [])
    assert exported(other) == data
    assert texts(other) == texts(sqlite_db)
    ours, theirs = (run(sessions_of(db).get("trip")) for db in (sqlite_db, other))
    assert ours is not None
    assert theirs is not None
    assert ours.to_dict() == theirs.to_dict()
    for db in (sqlite_db, other):
        assert run(checkpoints_of(db).get_latest(workflow_name="trip")) is not None
