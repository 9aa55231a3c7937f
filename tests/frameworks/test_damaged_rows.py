"""A stored row that cannot be read is a typed error of its own session, and hides no other from a list."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
from asgiref.sync import async_to_sync
from django.test.utils import CaptureQueriesContext
from pydantic_ai.conversation import Conversation
from pydantic_ai.messages import ModelRequest, ModelResponse, ToolCallPart, ToolReturnPart
from strands.types.session import Session, SessionAgent, SessionMessage, SessionType

from helix_store.contrib.claude_agent import DjangoSessionStore
from helix_store.contrib.claude_agent.models import ClaudeSession
from helix_store.contrib.pydantic_ai import DjangoConversationStore
from helix_store.contrib.pydantic_ai.models import Conversation as StoredConversation
from helix_store.contrib.strands import DjangoSessionRepository
from helix_store.exceptions import HelixStoreError, IntegrityFault, InvalidPayload, LimitExceeded
from helix_store.models import Item
from tests.cells import for_each
from tests.databases import CommittedDatabase


def damage(db: CommittedDatabase, payload: str, **row: Any) -> None:
    rows = Item._base_manager.using(db.alias).filter(session__tenant=db.tenant, **row)
    assert rows.update(payload=payload) == 1


# --- Strands ---------------------------------------------------------------------------------------

DEEP: Any = 1
for _ in range(5_000):
    DEEP = [DEEP]


def _agent(state: Any) -> SessionAgent:
    return SessionAgent(agent_id="guide", state={"state": state}, conversation_manager_state={})


def _message(number: int, content: Any = "hi") -> SessionMessage:
    return SessionMessage(message=cast("Any", {"role": "user", "content": content}), message_id=number)


@pytest.fixture
def repository(committed_db: CommittedDatabase) -> DjangoSessionRepository:
    repository = DjangoSessionRepository(committed_db.alias, tenant=committed_db.tenant)
    repository.create_session(Session(session_id="trip", session_type=SessionType.AGENT))
    repository.create_agent("trip", _agent(1))
    for number in range(3):
        repository.create_message("trip", "guide", _message(number))
    return repository


@for_each(
    "call",
    [
        lambda repository: repository.create_agent("trip", _agent(DEEP)),
        lambda repository: repository.update_agent("trip", _agent(DEEP)),
        lambda repository: repository.create_message("trip", "guide", _message(3, DEEP)),
        lambda repository: repository.update_message("trip", "guide", _message(2, DEEP)),
        lambda repository: repository.create_multi_agent(
            "trip", SimpleNamespace(id="graph", serialize_state=lambda: {"state": DEEP})
        ),
        lambda repository: repository.create_session(Session(session_id="two", session_type=DEEP)),
    ],
    ids=["create agent", "update agent", "create message", "update message", "multi-agent", "session"],
)
def test_a_deep_state_of_strands_is_refused_before_sql(
    repository: DjangoSessionRepository, committed_db: CommittedDatabase, call: Callable[[Any], Any]
) -> None:
    with (
        CaptureQueriesContext(committed_db.connection) as captured,
        pytest.raises((InvalidPayload, LimitExceeded)),
    ):
        call(repository)
    assert captured.captured_queries == []


DAMAGED: list[str] = ["5", "{}", '{"message":1', '{"~json":"{"}', '{"~json":5}']


@for_each("payload", DAMAGED)
def test_a_damaged_message_of_strands_is_a_fault(
    repository: DjangoSessionRepository, committed_db: CommittedDatabase, payload: str
) -> None:
    damage(committed_db, payload, lane="messages/guide", key=f"{1:019d}")
    with pytest.raises(IntegrityFault):
        repository.read_message("trip", "guide", 1)
    with pytest.raises(IntegrityFault):
        repository.list_messages("trip", "guide")
    assert len(repository.list_messages("trip", "guide", limit=1)) == 1


@for_each("payload", DAMAGED)
@for_each(
    ("lane", "read"),
    [
        ("session", lambda repository: repository.read_session("trip")),
        ("agents", lambda repository: repository.read_agent("trip", "guide")),
    ],
    ids=["session", "agent"],
)
def test_a_damaged_document_of_strands_is_a_fault(
    repository: DjangoSessionRepository,
    committed_db: CommittedDatabase,
    lane: str,
    read: Callable[[Any], Any],
    payload: str,
) -> None:
    damage(committed_db, payload, lane=lane)
    with pytest.raises(IntegrityFault):
        read(repository)


# --- Claude Agent SDK ------------------------------------------------------------------------------


def _key(session_id: str) -> Any:
    return {"project_key": "project", "session_id": session_id}


def _entry(text: str) -> Any:
    return {
        "type": "user",
        "uuid": text,
        "timestamp": "2026-01-01T00:00:00Z",
        "message": {"role": "user", "content": text},
    }


@pytest.fixture
def transcripts(committed_db: CommittedDatabase) -> DjangoSessionStore:
    store = DjangoSessionStore(committed_db.alias, tenant=committed_db.tenant)
    for session_id in ("whole", "damaged"):
        async_to_sync(store.append)(_key(session_id), [_entry(f"first of {session_id}")])
    return store


@pytest.mark.parametrize("summary", ['{"cut"', "[]"])
def test_a_damaged_summary_is_left_out_of_the_list_and_made_again_by_an_append(
    transcripts: DjangoSessionStore,
    committed_db: CommittedDatabase,
    summary: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    (expected,) = [each["data"] for each in _summaries(transcripts) if each["session_id"] == "damaged"]
    rows = ClaudeSession.objects.using(committed_db.alias).filter(tenant=committed_db.tenant)
    assert rows.filter(claude_session_id="damaged").update(summary=summary) == 1
    assert [each["session_id"] for each in _summaries(transcripts)] == ["whole"]
    assert "damaged" in caplog.text
    assert len(async_to_sync(transcripts.list_sessions)("project")) == 2
    async_to_sync(transcripts.append)(_key("damaged"), [_entry("second")])
    (made,) = [each["data"] for each in _summaries(transcripts) if each["session_id"] == "damaged"]
    assert made["first_prompt"] == expected["first_prompt"] == "first of damaged"


def _summaries(store: DjangoSessionStore) -> list[Any]:
    return list(async_to_sync(store.list_session_summaries)("project"))


def test_a_damaged_entry_of_a_transcript_is_a_fault_of_that_transcript(
    transcripts: DjangoSessionStore, committed_db: CommittedDatabase
) -> None:
    damage(committed_db, '{"~json":"{"}', key="first of damaged")
    with pytest.raises(IntegrityFault):
        async_to_sync(transcripts.load)(_key("damaged"))
    assert async_to_sync(transcripts.load)(_key("whole")) == [_entry("first of whole")]


# --- Pydantic AI -----------------------------------------------------------------------------------


@for_each("document", ['{"cut"', "{}", "[]"])
def test_a_damaged_record_is_left_out_of_the_list_of_conversations(
    committed_db: CommittedDatabase, document: str, caplog: pytest.LogCaptureFixture
) -> None:
    store = DjangoConversationStore(committed_db.alias, tenant=committed_db.tenant)
    for name in ("one", "damaged", "two"):
        async_to_sync(store.save)(Conversation(conversation_id=name))
    rows = StoredConversation.objects.using(committed_db.alias).filter(session__tenant=committed_db.tenant)
    row = rows.get(session__session_id="damaged")
    assert rows.filter(pk=row.pk).update(document=document) == 1
    found = async_to_sync(store.read_records)()
    assert [each.conversation_id for each in found] == ["two", "one"]
    assert f"row {row.session_id}" in caplog.text
    with pytest.raises(HelixStoreError) as fault:
        async_to_sync(store.read_record)("damaged")
    assert type(fault.value) is IntegrityFault


@for_each("content", [DEEP, object()], ids=["deep", "object"])
@for_each(
    "message",
    [
        lambda content: ModelRequest(
            parts=[ToolReturnPart(tool_name="t", content=content, tool_call_id="c")]
        ),
        lambda content: ModelResponse(parts=[ToolCallPart(tool_name="t", args={"a": content})]),
    ],
    ids=["result", "call"],
)
def test_a_message_that_pydantic_cannot_write_is_refused_before_a_write(
    committed_db: CommittedDatabase, message: Callable[[Any], Any], content: Any
) -> None:
    store = DjangoConversationStore(committed_db.alias, tenant=committed_db.tenant)
    conversation = Conversation(conversation_id="trip", messages=[message(content)])
    with CaptureQueriesContext(committed_db.connection) as captured, pytest.raises(InvalidPayload) as refused:
        async_to_sync(store.save)(conversation)
    assert refused.value.path == "/new_entries"
    # Pydantic AI looks for the record before it saves one.
    assert [query["sql"].split()[0] for query in captured.captured_queries] == ["SELECT"]
