"""What an adapter accepts, it reads back: one table of adapters by values."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any, Final, cast

import pytest
from agents import set_tracing_disabled
from asgiref.sync import async_to_sync
from pydantic_ai.conversation_store import ConversationEntry, ConversationRecord
from pydantic_ai.messages import ModelRequest, ToolReturnPart
from strands.types.session import Session, SessionAgent, SessionMessage, SessionType

from helix_store.contrib.claude_agent import DjangoSessionStore
from helix_store.contrib.langgraph import DjangoSaver
from helix_store.contrib.openai_agents import DjangoSession
from helix_store.contrib.pydantic_ai import DjangoConversationStore
from helix_store.contrib.strands import DjangoSessionRepository
from helix_store.exceptions import HelixStoreError, IntegrityFault, InvalidPayload
from tests.databases import CommittedDatabase
from tests.frameworks.langgraph.graphs import config_of, put

set_tracing_disabled(True)

DEEP: Any = 1
for _ in range(150):
    DEEP = [DEEP]

EXACT: Final[dict[str, Any]] = {
    "text": "hi",
    "NaN": {"n": float("nan")},
    "infinity": [float("inf"), float("-inf"), 1.5],
    "null": {"a": None, "b": [None, 1]},
    "NaN and null": {"a": None, "b": [None, {"n": float("nan")}]},
    "surrogate": "\ud800",
    "pair of surrogates": "\ud83d\ude00",
    "NUL": "\x00",
    "long integer": 2**70,
    "deep": DEEP,
    "like a payload of its own": {"~json": "{}"},
}
"""Values of JSON, and numbers that Python's JSON has: they come back as they were, or are refused."""

OTHER: Final[dict[str, Any]] = {
    "tuple": (1, 2),
    "set": {1},
    "bytes": b"\xff",
    "keys that are numbers": {1: 2},
    "not the bytes that Strands marks so": {"__bytes_encoded__": True, "data": 5},
    "object": object(),
}
"""Values that may come back in another form, but must not prevent reading."""

AS_THE_FRAMEWORK_WRITES_IT: Final = {("langgraph", "surrogate"), ("langgraph", "pair of surrogates")}
"""LangGraph's serializer replaces characters that UTF-8 cannot represent with question marks."""

REFUSALS: Final = (HelixStoreError, TypeError, ValueError, RecursionError)


def claude(db: CommittedDatabase, name: str, value: Any) -> Callable[[], Any]:
    store = DjangoSessionStore(db.alias, tenant=db.tenant)
    key: Any = {"project_key": "p", "session_id": name}
    entry: Any = {"type": "user", "uuid": "u", "message": {"role": "user", "content": value}}
    async_to_sync(store.append)(key, [entry])
    return lambda: cast("Any", async_to_sync(store.load)(key))[0]["message"]["content"]


def openai(db: CommittedDatabase, name: str, value: Any) -> Callable[[], Any]:
    session = DjangoSession(name, using=db.alias, tenant=db.tenant)
    async_to_sync(session.add_items)([cast("Any", {"role": "user", "content": value})])
    return lambda: cast("Any", async_to_sync(session.get_items)())[0]["content"]


def _pydantic_parts(db: CommittedDatabase, name: str, part: Any) -> Callable[[], Any]:
    store = DjangoConversationStore(db.alias, tenant=db.tenant)
    entry = ConversationEntry(id=name, parent_id=None, message=ModelRequest(parts=[part]))
    record = ConversationRecord(conversation_id=name, head_id=name)
    async_to_sync(store.write_record)(record, new_entries=[entry], expected_revision=None)
    return lambda: cast("Any", async_to_sync(store.read_history)(name))[0].message.parts[0].content


def pydantic(db: CommittedDatabase, name: str, value: Any) -> Callable[[], Any]:
    return _pydantic_parts(db, name, ToolReturnPart("search", value, tool_call_id="call"))


def strands(db: CommittedDatabase, name: str, value: Any) -> Callable[[], Any]:
    repository = DjangoSessionRepository(db.alias, tenant=db.tenant)
    repository.create_session(Session(session_id=name, session_type=SessionType.AGENT))
    agent = SessionAgent(agent_id="guide", state={"value": value}, conversation_manager_state={})
    repository.create_agent(name, agent)
    message: Any = {"role": "user", "content": value}
    repository.create_message(name, "guide", SessionMessage(message=message, message_id=0))

    def read() -> Any:
        stored = repository.read_agent(name, "guide")
        assert stored is not None
        (read,) = repository.list_messages(name, "guide")
        assert repr(stored.state["value"]) == repr(read.message["content"])
        return read.message["content"]

    return read


def langgraph(db: CommittedDatabase, name: str, value: Any) -> Callable[[], Any]:
    saver = DjangoSaver(db.alias, tenant=db.tenant)
    config = put(saver, config_of(name), {"log": value})
    return lambda: cast("Any", saver.get_tuple(config)).checkpoint["channel_values"]["log"]


def google_adk(db: CommittedDatabase, name: str, value: Any) -> Callable[[], Any]:
    from google.adk.events.event import Event
    from google.adk.events.event_actions import EventActions
    from google.genai import types

    from helix_store.contrib.google_adk import DjangoSessionService

    service = DjangoSessionService(db.alias, tenant=db.tenant)
    named: Any = {"app_name": "app", "user_id": "ada", "session_id": name}

    async def write() -> None:
        session = await service.create_session(**named, state={"first": value})
        answer = types.FunctionResponse(name="search", response={"value": value})
        content = types.Content(role="user", parts=[types.Part(function_response=answer)])
        actions = EventActions(state_delta={"value": value})
        event = Event(author="user", content=content, actions=actions, custom_metadata={"value": value})
        copied = event.model_copy(deep=True)
        await service.append_event(session, event)
        # A repeat has no effect.
        await service.append_event(session, copied)

    async def read() -> Any:
        session: Any = await service.get_session(**named)
        (event,) = session.events
        response = event.content.parts[0].function_response.response["value"]
        read = (response, event.custom_metadata["value"], session.state["value"], session.state["first"])
        assert len(set(map(repr, read))) == 1, read
        return response

    asyncio.run(write())
    return lambda: asyncio.run(read())


def agent_framework(db: CommittedDatabase, name: str, value: Any) -> Callable[[], Any]:
    from agent_framework import AgentSession, Message

    from helix_store.contrib import agent_framework as adapter

    history = adapter.DjangoHistoryProvider(db.alias, tenant=db.tenant)
    sessions = adapter.DjangoSessionStore(db.alias, tenant=db.tenant)
    snapshot = AgentSession(session_id=name)
    snapshot.state = {"value": value}

    async def write() -> None:
        message = Message("user", ["hi"], additional_properties={"value": value})
        await history.save_messages(name, [message])
        await sessions.set(name, snapshot)

    async def read() -> Any:
        (message,) = await history.get_messages(name)
        stored = await sessions.get(name)
        assert stored is not None
        # The framework leaves out properties of a message that it cannot write.
        read = message.additional_properties.get("value")
        return read if repr(read) == repr(stored.state["value"]) else (read, stored.state["value"])

    asyncio.run(write())
    return lambda: asyncio.run(read())


ADAPTERS: Final[dict[str, Callable[[CommittedDatabase, str, Any], Callable[[], Any]]]] = {
    adapter.__name__: adapter
    for adapter, package in (
        (langgraph, "langgraph"),
        (openai, "agents"),
        (claude, "claude_agent_sdk"),
        (pydantic, "pydantic_ai"),
        (strands, "strands"),
        (google_adk, "google.adk" if find_spec("google") else "google"),
        (agent_framework, "agent_framework"),
    )
    if find_spec(package)
}


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore:AgentSession state value")
def test_what_an_adapter_accepts_it_reads_back(committed_db: CommittedDatabase) -> None:
    wrong = {}
    for adapter, write in ADAPTERS.items():
        for number, (kind, value) in enumerate((EXACT | OTHER).items()):
            try:
                read = write(committed_db, f"{adapter}-{number}", value)
            except IntegrityFault as exc:
                wrong[adapter, kind] = f"refused as a stored value: {exc}"
                continue
            except REFUSALS:
                continue
            try:
                found = read()
            except Exception as exc:  # noqa: BLE001 - whatever prevents reading is a failure
                wrong[adapter, kind] = f"accepted, and cannot be read: {exc!r}"[:200]
                continue
            is_exact = kind in EXACT and (adapter, kind) not in AS_THE_FRAMEWORK_WRITES_IT
            if is_exact and repr(found) != repr(value):
                wrong[adapter, kind] = f"{value!r} came back as {found!r}"[:200]
    assert not wrong, "\n".join(f"{cell}: {reason}" for cell, reason in wrong.items())


@pytest.mark.filterwarnings("ignore:`RetryPromptPart` is deprecated")
def test_a_retry_with_details_that_pydantic_cannot_read_again_is_refused(
    committed_db: CommittedDatabase,
) -> None:
    """Details of `ValidationError.errors(include_input=False)` have no ``input``, which a read requires."""
    from pydantic_ai import messages

    details: Any = {"type": "missing", "loc": ("city",), "msg": "Field required"}
    kind: Any = getattr(messages, "RetryPromptPart")  # noqa: B009 - deprecated by newer releases
    for name, content in (("whole", [{**details, "input": {}}]), ("text", "again")):
        assert _pydantic_parts(committed_db, name, kind(content=content, tool_name="search"))()
    with pytest.raises(InvalidPayload, match="input: Field required"):
        _pydantic_parts(committed_db, "cut", kind(content=[details], tool_name="search"))
