"""A write of each adapter to the session ``s``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, cast

from asgiref.sync import async_to_sync
from pydantic_ai.conversation import Conversation as PydanticConversation
from strands.types.session import Session as StrandsSession
from strands.types.session import SessionAgent, SessionMessage, SessionType

from helix_store.contrib.claude_agent import DjangoSessionStore
from helix_store.contrib.langgraph import DjangoSaver
from helix_store.contrib.openai_agents import DjangoSession, RunStateStore
from helix_store.contrib.pydantic_ai import DjangoConversationStore
from helix_store.contrib.strands import DjangoSessionRepository
from helix_store.items import ItemLog
from helix_store.stores import DatabaseLockManager
from tests.databases import CommittedDatabase
from tests.frameworks.langgraph.graphs import config_of, put
from tests.frameworks.pydantic_ai.conversations import turn

__all__ = ["WRITES", "Write", "langgraph", "openai"]

Write = Callable[[CommittedDatabase, str | None], Any]
"""Adds something to the session ``s`` in the name of a user."""


def claude(db: CommittedDatabase, user_id: str | None) -> None:
    store = DjangoSessionStore(db.alias, tenant=db.tenant, user_id=user_id)
    entry: Any = {"type": "user", "message": {"role": "user", "content": "hi"}}
    async_to_sync(store.append)({"project_key": "p", "session_id": "s"}, [entry])


def items(db: CommittedDatabase, user_id: str | None) -> None:
    ItemLog("s", using=db.alias, tenant=db.tenant, user_id=user_id).append([1])


def langgraph(db: CommittedDatabase, user_id: str | None) -> None:
    saver = DjangoSaver(db.alias, tenant=db.tenant)
    known: Any = {} if user_id is None else {"metadata": {"user_id": user_id}}
    config = put(saver, {**config_of("s"), **known}, {"log": [1]})
    saver.put_writes(config | known, [("log", 2)], "task")


def langgraph_writes(db: CommittedDatabase, user_id: str | None) -> None:
    known = {} if user_id is None else {"user_id": user_id}
    config: Any = {"configurable": {**config_of("s", "1")["configurable"], **known}}
    DjangoSaver(db.alias, tenant=db.tenant).put_writes(config, [("log", 2)], "task")


def langgraph_owner(db: CommittedDatabase, user_id: str | None) -> None:
    known = {} if user_id is None else {"metadata": {"user_id": user_id}}
    owner = DjangoSaver(db.alias, tenant=db.tenant).claim_write_ownership("s")
    put(owner, {**config_of("s"), **known}, {"log": [1]})
    # An erasure leaves sessions that are locked.
    DatabaseLockManager(db.alias, tenant=db.tenant).force_release("s")


def openai(db: CommittedDatabase, user_id: str | None) -> None:
    session = DjangoSession("s", using=db.alias, tenant=db.tenant, user_id=user_id)
    async_to_sync(session.add_items)(cast("Any", [{"role": "user", "content": "hi"}]))


def openai_run_state(db: CommittedDatabase, user_id: str | None) -> None:
    RunStateStore(db.alias, tenant=db.tenant, user_id=user_id).save("s", "{}")


def pydantic_ai(db: CommittedDatabase, user_id: str | None) -> None:
    store = DjangoConversationStore(db.alias, tenant=db.tenant, user_id=user_id)
    conversation = async_to_sync(store.load)("s") or PydanticConversation(conversation_id="s")
    turn(conversation, "hi")
    async_to_sync(store.save)(conversation)


def strands(db: CommittedDatabase, user_id: str | None) -> None:
    repository = DjangoSessionRepository(db.alias, tenant=db.tenant, user_id=user_id)
    if repository.read_session("s") is None:
        repository.create_session(StrandsSession(session_id="s", session_type=SessionType.AGENT))
        repository.create_agent("s", SessionAgent("guide", state={}, conversation_manager_state={}))
    number = len(repository.list_messages("s", "guide"))
    message = SessionMessage({"role": "user", "content": [{"text": "hi"}]}, number)
    repository.create_message("s", "guide", message)


WRITES: Final = [
    claude,
    items,
    langgraph,
    langgraph_owner,
    langgraph_writes,
    openai,
    openai_run_state,
    pydantic_ai,
    strands,
]
