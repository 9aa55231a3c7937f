"""The repository of Strands, on SQLite and PostgreSQL."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from strands.session.file_session_manager import FileSessionManager
from strands.types.exceptions import SessionException
from strands.types.session import Session, SessionAgent, SessionMessage, SessionType

from example_project.frameworks.strands import agent_of
from helix_store import DatabaseStateStore, DatabaseUsageStore
from helix_store.contrib.strands import DjangoSessionRepository
from helix_store.exceptions import InvalidPayload, LimitExceeded
from helix_store.models import Item, UsageEntry
from helix_store.models import Session as StoredSession
from tests.cells import for_each
from tests.databases import CommittedDatabase
from tests.processes import run_in_threads

SESSION = "trip"


@pytest.fixture
def repository(committed_db: CommittedDatabase) -> DjangoSessionRepository:
    return repository_of(committed_db)


def repository_of(db: CommittedDatabase, **options: Any) -> DjangoSessionRepository:
    return DjangoSessionRepository(db.alias, **{"tenant": db.tenant, **options})


def session_of(session_id: str = SESSION) -> Session:
    return Session(session_id=session_id, session_type=SessionType.AGENT)


def agent(agent_id: str = "guide", **state: Any) -> SessionAgent:
    return SessionAgent(agent_id=agent_id, state=state, conversation_manager_state={})


def message(number: int, text: Any = "hi", **more: Any) -> SessionMessage:
    content = {"role": "user", "content": [{"text": text}], **more}
    return SessionMessage(message=cast("Any", content), message_id=number)


def texts(messages: list[SessionMessage]) -> list[Any]:
    return [each.message["content"][0]["text"] for each in messages]


def started(repository: DjangoSessionRepository, session_id: str = SESSION) -> DjangoSessionRepository:
    repository.create_session(session_of(session_id))
    repository.create_agent(session_id, agent())
    return repository


def rows_of(db: CommittedDatabase) -> dict[str, int]:
    sessions = StoredSession.objects.using(db.alias).filter(tenant=db.tenant)
    return {
        "session": sessions.count(),
        "item": Item.objects.using(db.alias).filter(session__in=sessions).count(),
        "usage": UsageEntry.objects.using(db.alias).filter(tenant=db.tenant).count(),
    }


# --- Documents -------------------------------------------------------------------------------------


def test_what_is_stored_comes_back_as_from_files(repository: DjangoSessionRepository, tmp_path: Path) -> None:
    files = FileSessionManager("other", storage_dir=str(tmp_path))
    image = {"image": {"format": "png", "source": {"bytes": b"\x00\xff"}}}
    one = message(0, "\x00 \ud83d\ude00", content=[image, {"text": float("inf")}])
    both: tuple[Any, ...] = (repository, files)
    for store in both:
        store.create_session(session_of())
        store.create_agent(SESSION, agent(n=[1, {"deep": None}], big=10**30))
        store.create_message(SESSION, "guide", one)
    ours, theirs = ([store.read_session(SESSION), store.read_agent(SESSION, "guide")] for store in both)
    assert [type(each) for each in ours] == [type(each) for each in theirs]
    assert ours[1].state == theirs[1].state == {"n": [1, {"deep": None}], "big": 10**30}
    assert repository.read_message(SESSION, "guide", 0) == files.read_message(SESSION, "guide", 0) == one
    assert repository.list_messages(SESSION, "guide") == files.list_messages(SESSION, "guide")


@for_each("text", ["\x00", "\ud800", "\ud83d" + "\ude00", json.loads("1e400"), 10**400])
def test_any_json_value_comes_back(repository: DjangoSessionRepository, text: Any) -> None:
    started(repository).create_message(SESSION, "guide", message(0, text))
    assert texts(repository.list_messages(SESSION, "guide")) == [text]


def test_an_update_keeps_the_time_of_creation(repository: DjangoSessionRepository) -> None:
    old, new = "2026-01-01T00:00:00+00:00", "2026-02-02T00:00:00+00:00"
    repository.create_session(session_of())
    repository.create_agent(SESSION, replace(agent(), created_at=old))
    repository.create_message(SESSION, "guide", replace(message(0, "secret"), created_at=old))
    repository.update_agent(SESSION, replace(agent(step=2), created_at=new))
    repository.update_message(SESSION, "guide", replace(message(0, "redacted"), created_at=new))
    stored = repository.read_agent(SESSION, "guide")
    (redacted,) = repository.list_messages(SESSION, "guide")
    assert stored is not None
    assert (stored.created_at, stored.state) == (old, {"step": 2})
    assert (redacted.created_at, texts([redacted])) == (old, ["redacted"])


def test_messages_are_listed_by_their_ids_in_pages(repository: DjangoSessionRepository) -> None:
    started(repository).create_agent(SESSION, agent("other"))
    for number in [0, 1, 10, 9, 2]:
        repository.create_message(SESSION, "guide", message(number, str(number)))
    repository.create_message(SESSION, "other", message(0, "other"))
    assert texts(repository.list_messages(SESSION, "guide")) == ["0", "1", "2", "9", "10"]
    assert texts(repository.list_messages(SESSION, "guide", limit=2, offset=1)) == ["1", "2"]
    assert texts(repository.list_messages(SESSION, "guide", offset=4)) == ["10"]
    assert repository.list_messages(SESSION, "guide", limit=0) == []
    assert repository.list_messages(SESSION, "nobody") == []


def test_graphs_and_swarms_keep_their_state(repository: DjangoSessionRepository) -> None:
    repository.create_session(session_of())
    graph = SimpleNamespace(id="graph", serialize_state=lambda: {"nodes": ["a"], "created_at": "now"})
    with pytest.raises(SessionException):
        repository.update_multi_agent(SESSION, cast("Any", graph))
    repository.create_multi_agent(SESSION, cast("Any", graph))
    graph.serialize_state = lambda: {"nodes": ["a", "b"], "created_at": "later"}
    repository.update_multi_agent(SESSION, cast("Any", graph))
    assert repository.read_multi_agent(SESSION, "graph") == {"nodes": ["a", "b"], "created_at": "later"}
    assert repository.read_multi_agent(SESSION, "other") is None


# --- What is refused -------------------------------------------------------------------------------


def test_what_is_there_is_not_created_again(repository: DjangoSessionRepository) -> None:
    started(repository).create_message(SESSION, "guide", message(0, "first"))
    creates: list[Callable[[], object]] = [
        lambda: repository.create_session(session_of()),
        lambda: repository.create_agent(SESSION, agent()),
        lambda: repository.create_message(SESSION, "guide", message(0, "second")),
    ]
    for create in creates:
        with pytest.raises(SessionException, match="already exists"):
            create()
    assert texts(repository.list_messages(SESSION, "guide")) == ["first"]


def test_what_is_not_there_is_an_error_to_write_and_none_to_read(
    repository: DjangoSessionRepository, committed_db: CommittedDatabase
) -> None:
    assert repository.read_session(SESSION) is None
    assert repository.read_agent(SESSION, "guide") is None
    assert repository.read_message(SESSION, "guide", 0) is None
    assert repository.list_messages(SESSION, "guide") == []
    with pytest.raises(SessionException):
        repository.create_agent(SESSION, agent())
    repository.create_session(session_of())
    writes: list[Callable[[], None]] = [
        lambda: repository.update_agent(SESSION, agent()),
        lambda: repository.create_message(SESSION, "guide", message(0)),
        lambda: repository.update_message(SESSION, "guide", message(0)),
    ]
    for write in writes:
        with pytest.raises(SessionException, match="does not exist"):
            write()
    assert rows_of(committed_db) == {"session": 1, "item": 1, "usage": 0}


def test_wrong_arguments_are_typed_errors(
    repository: DjangoSessionRepository, committed_db: CommittedDatabase
) -> None:
    started(repository)
    for call, error in [
        (lambda: repository.read_message(SESSION, "guide", cast("Any", "0")), InvalidPayload),
        (lambda: repository.create_message(SESSION, "guide", message(-1)), InvalidPayload),
        (lambda: repository.create_message(SESSION, "guide", message(0, object())), InvalidPayload),
        (lambda: repository.create_agent(SESSION, agent("a" * 1001)), LimitExceeded),
        (lambda: repository.create_agent(SESSION, agent("\x00")), InvalidPayload),
    ]:
        with pytest.raises(error):
            cast("Any", call)()
    assert rows_of(committed_db) == {"session": 1, "item": 2, "usage": 0}


def test_an_agent_whose_messages_have_no_lane_is_not_created(repository: DjangoSessionRepository) -> None:
    repository.create_session(session_of())
    with pytest.raises(LimitExceeded):
        repository.create_agent(SESSION, agent("x" * 1_000))
    assert repository.read_agent(SESSION, "x" * 1_000) is None


def test_of_two_processes_with_one_agent_the_second_message_fails(
    repository: DjangoSessionRepository, committed_db: CommittedDatabase
) -> None:
    started(repository)

    def create(name: str) -> None:
        repository_of(committed_db).create_message(SESSION, "guide", message(0, name))

    outcomes = run_in_threads(create, [(f"writer {n}",) for n in range(4)])
    assert sum(outcome.error is None for outcome in outcomes) == 1
    assert all(isinstance(outcome.error, SessionException) for outcome in outcomes if outcome.error)
    assert len(repository.list_messages(SESSION, "guide")) == 1


# --- Agents ----------------------------------------------------------------------------------------


def test_an_agent_goes_on_in_another_process(
    repository: DjangoSessionRepository, committed_db: CommittedDatabase
) -> None:
    assert str(agent_of(SESSION, repository)("How is the weather?")).strip() == "Sunny in Lisbon."
    again = agent_of(SESSION, repository_of(committed_db))
    assert [each["role"] for each in again.messages] == ["user", "assistant"] * 2
    again("And tomorrow?")
    assert len(repository.list_messages(SESSION, "guide")) == 8


async def test_an_agent_may_run_on_the_event_loop(repository: DjangoSessionRepository) -> None:
    results = await asyncio.gather(
        *(agent_of(f"{SESSION}-{n}", repository).invoke_async("How is the weather?") for n in range(3))
    )
    assert [str(result).strip() for result in results] == ["Sunny in Lisbon."] * 3
    assert len(repository.list_messages(f"{SESSION}-2", "guide")) == 4
    assert "helix_store_strands_0" in {thread.name for thread in threading.enumerate()}


def test_what_the_model_spent_is_in_the_ledger_once(
    repository: DjangoSessionRepository, committed_db: CommittedDatabase
) -> None:
    agent_of(SESSION, repository_of(committed_db, model="claude-opus-4-6"))("How is the weather?")
    usage = DatabaseUsageStore(committed_db.alias, tenant=committed_db.tenant)
    rollup = usage.get_rollup(repository.session_id_of(SESSION))
    assert rollup is not None
    assert (rollup.entry_count, rollup.tokens.prompt, rollup.tokens.completion) == (2, 204, 20)
    assert set(rollup.tokens_by_model) == {"claude-opus-4-6"}
    started(repository, "copy")
    for number, each in enumerate(repository.list_messages(SESSION, "guide")):
        repository.create_message("copy", "guide", SessionMessage(each.message, number))
    assert rows_of(committed_db)["usage"] == 2


def test_cached_tokens_are_part_of_the_prompt(
    repository: DjangoSessionRepository, committed_db: CommittedDatabase
) -> None:
    started(repository)
    cached = {"cacheReadInputTokens": 50, "cacheWriteInputTokens": 5}
    usages: list[Any] = [
        {"inputTokens": 100, "outputTokens": 10, "totalTokens": 110, **cached},
        {"inputTokens": 45, "outputTokens": 10, "totalTokens": 110, **cached},
        {"inputTokens": "7"},
        {},
    ]
    for number, usage in enumerate(usages):
        repository.create_message(SESSION, "guide", message(number, metadata={"usage": usage}))
    ledger = DatabaseUsageStore(committed_db.alias, tenant=committed_db.tenant)
    entries = ledger.get_entries(SESSION)
    counts = [each.tokens for each in entries if each.tokens]
    assert [(each.prompt, each.cached, each.cache_write) for each in counts] == [(100, 50, 5)] * 2


# --- The session in this store ---------------------------------------------------------------------


def test_a_deleted_session_leaves_no_row(
    repository: DjangoSessionRepository, committed_db: CommittedDatabase
) -> None:
    agent_of(SESSION, repository)("How is the weather?")
    assert rows_of(committed_db) == {"session": 1, "item": 6, "usage": 2}
    repository.delete_session(SESSION)
    assert rows_of(committed_db) == {"session": 0, "item": 0, "usage": 0}
    repository.delete_session(SESSION)


def test_a_session_of_the_application_keeps_its_row(
    repository: DjangoSessionRepository, committed_db: CommittedDatabase
) -> None:
    store = DatabaseStateStore(using=committed_db.alias, tenant=committed_db.tenant)
    store.create_session(SESSION, agent_type="chat", user_id="ada")
    agent_of(SESSION, repository)("How is the weather?")
    repository.delete_session(SESSION)
    assert rows_of(committed_db)["session"] == 1
    assert rows_of(committed_db)["item"] == 0


def test_sessions_belong_to_a_user_and_a_tenant(committed_db: CommittedDatabase) -> None:
    started(repository_of(committed_db, user_id="ada"))
    state = DatabaseStateStore(using=committed_db.alias, tenant=committed_db.tenant).load_state(SESSION)
    assert state is not None
    assert (state.user_id, state.agent_type) == ("ada", "strands")
    assert repository_of(committed_db, tenant="other").read_session(SESSION) is None


def test_a_session_id_may_be_long(repository: DjangoSessionRepository) -> None:
    long = "s" * 2000
    started(repository, long)
    session = repository.read_session(long)
    assert session is not None
    assert session.session_id == long
    assert len(repository.session_id_of(long)) <= 255
