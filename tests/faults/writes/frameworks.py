"""The writes of the stores of OpenAI Agents, Pydantic AI, Strands and Claude Agent SDK."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import cache
from types import SimpleNamespace
from typing import Any, Final

from agents import Runner, set_tracing_disabled
from agents.result import RunResultBase
from asgiref.sync import async_to_sync
from pydantic_ai.conversation import Conversation
from strands.types.exceptions import SessionException
from strands.types.session import Session, SessionAgent, SessionMessage, SessionType

from helix_store.contrib.claude_agent import DjangoSessionStore
from helix_store.contrib.openai_agents import DjangoSession
from helix_store.contrib.pydantic_ai import DjangoConversationStore
from helix_store.contrib.strands import DjangoSessionRepository
from tests.faults.writes.faces import AsyncWrite, Faces, Write, synchronous
from tests.frameworks.openai_agents.models import talking_agent
from tests.frameworks.pydantic_ai.conversations import turn

__all__ = ["FRAMEWORKS", "FRAMEWORK_CLASSES", "begin_frameworks"]

set_tracing_disabled(True)

FRAMEWORK_CLASSES: Final = (
    DjangoSession,
    DjangoConversationStore,
    DjangoSessionRepository,
    DjangoSessionStore,
)

# OpenAI Agents SDK


def _chat(faces: Faces, key: str) -> DjangoSession:
    return DjangoSession(f"{key}-chat", using=faces.alias, tenant=faces.tenant)


async def _add_items(faces: Faces, key: str) -> None:
    chat = _chat(faces, key)
    count = len(await chat.get_items())
    await chat.add_items([{"role": "user", "content": f"{count}"}, {"role": "assistant", "content": "yes"}])


async def _branch(faces: Faces, key: str) -> None:
    chat = _chat(faces, key)
    if len(await chat.get_conversation_turns()) > 1 and not await _has_branch(chat):
        await chat.create_branch_from_turn(2, "other")


async def _delete_branch(faces: Faces, key: str) -> None:
    chat = _chat(faces, key)
    if await _has_branch(chat):
        await chat.delete_branch("other")


async def _has_branch(chat: DjangoSession) -> bool:
    return any(branch["branch_id"] == "other" for branch in await chat.list_branches())


@cache
def _result() -> RunResultBase:
    """Made before the first fork, as the durations of all writes are measured there."""
    return async_to_sync(Runner.run)(talking_agent("hello"), "hi")


def _store_run_usage(faces: Faces, key: str) -> object:
    return async_to_sync(_chat(faces, key).store_run_usage)(_result())


# Pydantic AI


def _conversations(faces: Faces) -> DjangoConversationStore:
    return DjangoConversationStore(faces.alias, tenant=faces.tenant)


async def _save(faces: Faces, key: str) -> object:
    store = _conversations(faces)
    talk = await store.load(f"{key}-talk") or Conversation(conversation_id=f"{key}-talk")
    turn(talk, f"{len(talk.messages)}")
    return await store.save(talk, scope="ada")


async def _fork(faces: Faces, key: str) -> None:
    store = _conversations(faces)
    if await store.load(f"{key}-talk") and not await store.load(f"{key}-fork"):
        await store.fork(f"{key}-talk", new_conversation_id=f"{key}-fork", source_scope="ada")


async def _branch_of_talk(faces: Faces, key: str) -> None:
    store = _conversations(faces)
    talk = await store.load(f"{key}-talk")
    if talk is not None:
        await store.branch(f"{key}-talk", at=2, expected_revision=talk.revision)


# Strands

_THEN: Final = "2026-03-15T12:00:00+00:00"
_MEMBERS: Final[Any] = SimpleNamespace(id="swarm", serialize_state=lambda: {"id": "swarm", "n": 1})


def _repository(faces: Faces) -> DjangoSessionRepository:
    return DjangoSessionRepository(faces.alias, tenant=faces.tenant)


def _agent(n: int = 0) -> SessionAgent:
    return SessionAgent("guide", {"n": n}, {}, created_at=_THEN, updated_at=_THEN)


def _message(number: int, text: str) -> SessionMessage:
    content: Any = {"role": "user", "content": [{"text": text}]}
    return SessionMessage(content, number, created_at=_THEN, updated_at=_THEN)


def _session(trip: str) -> Session:
    return Session(trip, SessionType.AGENT, created_at=_THEN, updated_at=_THEN)


def _of_trip(write: Callable[[DjangoSessionRepository, str], object]) -> Write:
    """A write to a session of Strands. The refusal of what there is, or is not, is a result."""

    def run(faces: Faces, key: str) -> None:
        with suppress(SessionException):
            write(_repository(faces), f"{key}-trip")

    return run


def _update_agent(repository: DjangoSessionRepository, trip: str) -> None:
    agent = repository.read_agent(trip, "guide")
    repository.update_agent(trip, _agent(agent.state["n"] + 1 if agent else 0))


def _create_message(repository: DjangoSessionRepository, trip: str) -> None:
    count = len(repository.list_messages(trip, "guide"))
    repository.create_message(trip, "guide", _message(count, "hello"))


# Claude Agent SDK


def _key_of(key: str, subpath: str = "") -> Any:
    return {"project_key": "-srv-app", "session_id": key} | ({"subpath": subpath} if subpath else {})


def _append(subpath: str) -> AsyncWrite:
    async def append(faces: Faces, key: str) -> None:
        store = DjangoSessionStore(faces.alias, tenant=faces.tenant)
        count = len(await store.load(_key_of(key, subpath)) or [])
        said = {"type": "user", "message": {"role": "user", "content": f"{count}"}}
        entries: Any = [{**said, "uuid": f"{subpath}{count}"}, said]
        await store.append(_key_of(key, subpath), entries)

    return append


def _delete_transcripts(subpath: str) -> AsyncWrite:
    return lambda faces, key: DjangoSessionStore(faces.alias, tenant=faces.tenant).delete(
        _key_of(key, subpath)
    )


FRAMEWORKS: Final[dict[str, Write]] = {
    "openai session: add_items": synchronous(_add_items),
    "openai session: pop_item": synchronous(lambda faces, key: _chat(faces, key).pop_item()),
    "openai session: clear_session": synchronous(lambda faces, key: _chat(faces, key).clear_session()),
    "openai session: create_branch_from_turn": synchronous(_branch),
    "openai session: delete_branch": synchronous(_delete_branch),
    "openai session: store_run_usage": _store_run_usage,
    "pydantic: save": synchronous(_save),
    "pydantic: fork": synchronous(_fork),
    "pydantic: branch": synchronous(_branch_of_talk),
    "pydantic: delete": synchronous(lambda faces, key: _conversations(faces).delete(f"{key}-talk")),
    "pydantic: delete of the fork": synchronous(
        lambda faces, key: _conversations(faces).delete(f"{key}-fork")
    ),
    "strands: create_session": _of_trip(lambda repository, trip: repository.create_session(_session(trip))),
    "strands: delete_session": _of_trip(lambda repository, trip: repository.delete_session(trip)),
    "strands: create_agent": _of_trip(lambda repository, trip: repository.create_agent(trip, _agent())),
    "strands: update_agent": _of_trip(_update_agent),
    "strands: create_multi_agent": _of_trip(
        lambda repository, trip: repository.create_multi_agent(trip, _MEMBERS)
    ),
    "strands: update_multi_agent": _of_trip(
        lambda repository, trip: repository.update_multi_agent(trip, _MEMBERS)
    ),
    "strands: create_message": _of_trip(_create_message),
    "strands: update_message": _of_trip(
        lambda repository, trip: repository.update_message(trip, "guide", _message(0, "changed"))
    ),
    "claude: append": synchronous(_append("")),
    "claude: append to a part": synchronous(_append("subagents/agent-1")),
    "claude: delete": synchronous(_delete_transcripts("")),
    "claude: delete of a part": synchronous(_delete_transcripts("subagents/agent-1")),
}


def begin_frameworks(faces: Faces, key: str) -> None:
    first = (
        *("openai session: add_items", "pydantic: save", "strands: create_session"),
        *("strands: create_agent", "strands: create_message", "claude: append"),
    )
    for kind in first:
        FRAMEWORKS[kind](faces, key)
