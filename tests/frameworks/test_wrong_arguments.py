"""An argument of a wrong type: a typed error, and no statement, from every call of a framework's store."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any, Final

import pytest
from asgiref.sync import async_to_sync
from django.test.utils import CaptureQueriesContext
from pydantic_ai.conversation import Conversation
from strands.types.session import Session, SessionAgent, SessionMessage, SessionType

from helix_store.contrib.claude_agent import DjangoSessionStore
from helix_store.contrib.openai_agents import DjangoSession, RunStateStore
from helix_store.contrib.pydantic_ai import DjangoConversationStore
from helix_store.contrib.strands import DjangoSessionRepository
from helix_store.exceptions import InvalidPayload, InvalidQuery
from tests.cells import for_each
from tests.databases import CommittedDatabase

_KEY: Final = {"project_key": "p", "session_id": "s"}
_AGENT: Final = SessionAgent(agent_id="a", state={}, conversation_manager_state={})
_MESSAGE: Final = SessionMessage({"role": "user", "content": []}, 0)
_GRAPH: Final = SimpleNamespace(id="g", serialize_state=dict)

_SESSION: Final[dict[str, dict[str, Any]]] = {
    "get_items": {"limit": 1, "branch_id": "main"},
    "add_items": {"items": [{"role": "user", "content": "hi"}]},
    "create_branch_from_turn": {"turn_number": 1, "branch_name": "b"},
    "create_branch_from_content": {"search_term": "hi", "branch_name": "b"},
    "switch_to_branch": {"branch_id": "main"},
    "delete_branch": {"branch_id": "b"},
    "get_conversation_turns": {"branch_id": "main"},
    "find_turns_by_content": {"search_term": "hi", "branch_id": "main"},
    "store_run_usage": {"result": None},
    "get_session_usage": {"branch_id": "main"},
    "get_turn_usage": {"user_turn_number": 1, "branch_id": "main"},
    "get_conversation_by_turns": {"branch_id": "main"},
    "get_tool_usage": {"branch_id": "main"},
}
_RUN_STATES: Final[dict[str, dict[str, Any]]] = {
    "save": {
        "session_id": "s",
        "state": "{}",
        "state_id": "i",
        "owner": "o",
        "deadline": datetime(2030, 1, 1, tzinfo=UTC),
    },
    "load": {"session_id": "s", "state_id": "i"},
    "waiting": {"session_id": "s", "limit": 3},
    "claim": {"session_id": "s", "state_id": "i", "resumer": "r", "owner": "o", "ttl_ms": 1000},
    "delete": {"session_id": "s", "state_id": "i"},
}
_TRANSCRIPTS: Final[dict[str, dict[str, Any]]] = {
    "append": {"key": _KEY, "entries": [{"type": "user"}]},
    "load": {"key": _KEY},
    "list_sessions": {"project_key": "p"},
    "list_session_summaries": {"project_key": "p"},
    "list_subkeys": {"key": _KEY},
    "delete": {"key": _KEY},
    "session_id_of": {"key": _KEY},
}
_REPOSITORY: Final[dict[str, dict[str, Any]]] = {
    "create_session": {"session": Session(session_id="s", session_type=SessionType.AGENT)},
    "read_session": {"session_id": "s"},
    "delete_session": {"session_id": "s"},
    "create_agent": {"session_id": "s", "session_agent": _AGENT},
    "read_agent": {"session_id": "s", "agent_id": "a"},
    "update_agent": {"session_id": "s", "session_agent": _AGENT},
    "create_message": {"session_id": "s", "agent_id": "a", "session_message": _MESSAGE},
    "read_message": {"session_id": "s", "agent_id": "a", "message_id": 0},
    "update_message": {"session_id": "s", "agent_id": "a", "session_message": _MESSAGE},
    "list_messages": {"session_id": "s", "agent_id": "a", "limit": 3, "offset": 0},
    "create_multi_agent": {"session_id": "s", "multi_agent": _GRAPH},
    "read_multi_agent": {"session_id": "s", "multi_agent_id": "g"},
    "update_multi_agent": {"session_id": "s", "multi_agent": _GRAPH},
    "session_id_of": {"session_id": "s"},
}
_CONVERSATIONS: Final[dict[str, dict[str, Any]]] = {
    "read_record": {"conversation_id": "c"},
    "read_records": {"scope": "u", "limit": 3},
    "write_record": {"record": None, "new_entries": (), "expected_revision": "r"},
    "delete_record": {"conversation_id": "c", "expected_revision": "r"},
    "read_entry": {"entry_id": "e"},
    "read_history": {"head_id": "e", "limit": 3},
}

Make = Callable[..., Any]
_STORES: Final[list[tuple[Make, dict[str, dict[str, Any]]]]] = [
    (lambda **place: DjangoSession("s", **place), _SESSION),
    (RunStateStore, _RUN_STATES),
    (DjangoSessionStore, _TRANSCRIPTS),
    (DjangoSessionRepository, _REPOSITORY),
    (DjangoConversationStore, _CONVERSATIONS),
]
_ARGUMENTS: Final = [
    pytest.param(make, call, argument, arguments, id=f"{call} {argument}")
    for make, calls in _STORES
    for call, arguments in calls.items()
    for argument in arguments
]
_ELSEWHERE: Final = {"kwargs", "wrapper", "force"}
"""What is not looked at, or only asked whether it is true."""


async def _record() -> Any:
    """A record as Pydantic AI writes it."""
    written = []

    class Store(DjangoConversationStore):
        async def write_record(self, record: Any, **_: Any) -> None:
            written.append(record)

    await Store().save(Conversation(conversation_id="c"))
    return written[0]


@for_each("wrong", [object(), 1.5], ids=["object", "float"], shared=True)
@for_each(("make", "call", "argument", "arguments"), _ARGUMENTS, shared=True)
def test_a_wrong_type_is_refused_before_sql(
    committed_db: CommittedDatabase,
    make: Make,
    call: str,
    argument: str,
    arguments: dict[str, Any],
    wrong: object,
) -> None:
    method = getattr(make(using=committed_db.alias, tenant=committed_db.tenant), call)
    given = {**arguments, argument: wrong}
    if "record" in given and argument != "record":
        given["record"] = async_to_sync(_record)()
    call_of = async_to_sync(method) if inspect.iscoroutinefunction(method) else method
    with (
        CaptureQueriesContext(committed_db.connection) as captured,
        pytest.raises((InvalidPayload, InvalidQuery)),
    ):
        call_of(**given)
    assert captured.captured_queries == []


@for_each(("make", "calls"), _STORES, ids=lambda value: getattr(value, "__name__", None))
def test_every_public_call_has_a_row(make: Make, calls: dict[str, dict[str, Any]]) -> None:
    store = make(using="default", tenant="")
    public = {
        name: inspect.signature(method)
        for name, method in inspect.getmembers(store, callable)
        if not name.startswith("_")
        and type(store).__module__.split(".")[0] == "helix_store"
        and method.__module__.startswith("helix_store.")
    }
    missing = {
        f"{name}.{parameter}"
        for name, signature in public.items()
        for parameter in signature.parameters
        if parameter not in _ELSEWHERE
        and parameter not in calls.get(name.removeprefix("a"), calls.get(name, {}))
    }
    assert missing == set()


def test_a_fencing_token_is_checked_when_the_session_is_made() -> None:
    with pytest.raises(InvalidPayload) as refused:
        DjangoSession("s", fencing_token="1")  # type: ignore[arg-type]
    assert refused.value.path == "/fencing_token"
