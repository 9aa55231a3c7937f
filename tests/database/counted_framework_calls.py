"""The calls of the stores of frameworks whose statements ``docs/statement-counts.md`` counts."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Final, cast

from asgiref.sync import async_to_sync
from pydantic_ai.conversation import Conversation
from strands.types.session import Session, SessionAgent, SessionMessage, SessionType

from helix_store.contrib.claude_agent import DjangoSessionStore
from helix_store.contrib.openai_agents import DjangoSession, RunStateStore
from helix_store.contrib.pydantic_ai import DjangoConversationStore
from helix_store.contrib.strands import DjangoSessionRepository
from tests.databases import CommittedDatabase
from tests.frameworks.pydantic_ai.conversations import turn

__all__ = ["FRAMEWORK_CALLS"]

Call = Callable[[], object]
Calls = dict[str, Callable[[Any], Call]]


def _of(make: Callable[[CommittedDatabase], Any], call: Callable[..., Any]) -> Callable[[Any], Call]:
    """A call of what ``make`` fills, measured after it was filled."""
    return lambda faces: partial(call, make(faces.database))


# --- OpenAI Agents -------------------------------------------------------------------------------------


def _add(session: DjangoSession, *contents: str) -> None:
    items = [{"role": "user", "content": content} for content in contents]
    async_to_sync(session.add_items)(cast("Any", items))


def _new_session(database: CommittedDatabase) -> DjangoSession:
    return DjangoSession("openai", using=database.alias, tenant=database.tenant)


def _session(database: CommittedDatabase) -> DjangoSession:
    session = _new_session(database)
    _add(session, "one", "two", "three")
    return session


_OPENAI: Final[Calls] = {
    "add_items": _of(_session, lambda session: _add(session, "four")),
    "add_items in a new session": _of(_new_session, lambda session: _add(session, "one")),
    "get_items": _of(_session, lambda session: async_to_sync(session.get_items)()),
    "pop_item": _of(_session, lambda session: async_to_sync(session.pop_item)()),
    "clear_session": _of(_session, lambda session: async_to_sync(session.clear_session)()),
    "list_branches": _of(_session, lambda session: async_to_sync(session.list_branches)()),
    "create_branch_from_turn": _of(
        _session, lambda session: async_to_sync(session.create_branch_from_turn)(2)
    ),
}


def _states(database: CommittedDatabase) -> RunStateStore:
    states = RunStateStore(database.alias, tenant=database.tenant)
    states.save("openai", "{}", state_id="waiting")
    return states


def _claimed(database: CommittedDatabase) -> Any:
    claim = _states(database).claim("openai", "waiting", resumer="worker")
    assert claim is not None
    return claim


_RUN_STATES: Final[Calls] = {
    "save": _of(_states, lambda states: states.save("openai", '{"run": 2}')),
    "load": _of(_states, lambda states: states.load("openai", "waiting")),
    "waiting": _of(_states, lambda states: states.waiting("openai")),
    "claim": _of(_states, lambda states: states.claim("openai", "waiting", resumer="worker")),
    "delete": _of(_states, lambda states: states.delete("openai", "waiting")),
    "refresh of a claim": _of(_claimed, lambda claim: claim.refresh()),
    "done of a claim": _of(_claimed, lambda claim: claim.done()),
}

# --- Claude Agent SDK ----------------------------------------------------------------------------------

_KEY: Final[Any] = {"project_key": "project", "session_id": "claude"}


def _append(store: DjangoSessionStore, *contents: str) -> None:
    entries = [
        {"type": "user", "uuid": content, "message": {"role": "user", "content": content}}
        for content in contents
    ]
    async_to_sync(store.append)(_KEY, cast("Any", entries))


def _new_transcripts(database: CommittedDatabase) -> DjangoSessionStore:
    return DjangoSessionStore(database.alias, tenant=database.tenant)


def _transcripts(database: CommittedDatabase) -> DjangoSessionStore:
    store = _new_transcripts(database)
    _append(store, "one", "two")
    return store


_CLAUDE: Final[Calls] = {
    "append": _of(_transcripts, lambda store: _append(store, "three", "four")),
    "append of what is stored": _of(_transcripts, lambda store: _append(store, "one", "two")),
    "append in a new session": _of(_new_transcripts, lambda store: _append(store, "one")),
    "load": _of(_transcripts, lambda store: async_to_sync(store.load)(_KEY)),
    "list_sessions": _of(_transcripts, lambda store: async_to_sync(store.list_sessions)("project")),
    "list_session_summaries": _of(
        _transcripts, lambda store: async_to_sync(store.list_session_summaries)("project")
    ),
    "list_subkeys": _of(_transcripts, lambda store: async_to_sync(store.list_subkeys)(_KEY)),
    "delete": _of(_transcripts, lambda store: async_to_sync(store.delete)(_KEY)),
}

# --- Pydantic AI ---------------------------------------------------------------------------------------


def _new_conversation(database: CommittedDatabase) -> tuple[DjangoConversationStore, Conversation]:
    conversation = Conversation(conversation_id="talk")
    turn(conversation, "one")
    return DjangoConversationStore(database.alias, tenant=database.tenant), conversation


def _conversation(database: CommittedDatabase) -> tuple[DjangoConversationStore, Conversation]:
    """A stored one, and what a second turn adds to it."""
    store, conversation = _new_conversation(database)
    async_to_sync(store.save)(conversation)
    turn(conversation, "two")
    return store, conversation


def _of_conversation(method: str, **options: Any) -> Callable[[Any], Call]:
    return _of(_conversation, lambda made: async_to_sync(getattr(made[0], method))("talk", **options))


def _save(made: tuple[DjangoConversationStore, Conversation]) -> None:
    async_to_sync(made[0].save)(made[1])


_PYDANTIC: Final[Calls] = {
    "save": _of(_conversation, _save),
    "save of a new conversation": _of(_new_conversation, _save),
    "load": _of_conversation("load"),
    "read_record": _of_conversation("read_record"),
    "read_records": _of(_conversation, lambda made: async_to_sync(made[0].read_records)()),
    "load_entries": _of_conversation("load_entries"),
    "fork": _of_conversation("fork"),
    "delete": _of_conversation("delete"),
}

# --- Strands -------------------------------------------------------------------------------------------


def _agent(agent_id: str) -> SessionAgent:
    return SessionAgent(agent_id=agent_id, state={}, conversation_manager_state={})


def _message(number: int) -> SessionMessage:
    return SessionMessage({"role": "user", "content": [{"text": "hello"}]}, number)


def _new_repository(database: CommittedDatabase) -> DjangoSessionRepository:
    return DjangoSessionRepository(database.alias, tenant=database.tenant)


def _repository(database: CommittedDatabase) -> DjangoSessionRepository:
    repository = _new_repository(database)
    _create_session(repository)
    repository.create_agent("strands", _agent("guide"))
    repository.create_message("strands", "guide", _message(0))
    return repository


def _create_session(repository: DjangoSessionRepository) -> None:
    repository.create_session(Session(session_id="strands", session_type=SessionType.AGENT))


_STRANDS: Final[Calls] = {
    "create_session": _of(_new_repository, _create_session),
    "read_session": _of(_repository, lambda store: store.read_session("strands")),
    "delete_session": _of(_repository, lambda store: store.delete_session("strands")),
    "create_agent": _of(_repository, lambda store: store.create_agent("strands", _agent("other"))),
    "read_agent": _of(_repository, lambda store: store.read_agent("strands", "guide")),
    "update_agent": _of(_repository, lambda store: store.update_agent("strands", _agent("guide"))),
    "create_message": _of(_repository, lambda store: store.create_message("strands", "guide", _message(1))),
    "read_message": _of(_repository, lambda store: store.read_message("strands", "guide", 0)),
    "update_message": _of(_repository, lambda store: store.update_message("strands", "guide", _message(0))),
    "list_messages": _of(_repository, lambda store: store.list_messages("strands", "guide")),
}

FRAMEWORK_CALLS: Final[dict[str, Calls]] = {
    "session of OpenAI Agents": _OPENAI,
    "run states of OpenAI Agents": _RUN_STATES,
    "transcripts of Claude Agent SDK": _CLAUDE,
    "conversations of Pydantic AI": _PYDANTIC,
    "repository of Strands": _STRANDS,
}
