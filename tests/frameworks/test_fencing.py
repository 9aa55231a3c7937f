"""Stores of frameworks with the token of a lock: a superseded owner writes nothing, the new one does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, cast

import pytest
from asgiref.sync import async_to_sync
from strands.types.session import Session, SessionAgent, SessionMessage, SessionType

from helix_store.adapters import session_id_for
from helix_store.contrib.claude_agent import DjangoSessionStore
from helix_store.contrib.claude_agent.models import ClaudeSession
from helix_store.contrib.openai_agents import DjangoSession
from helix_store.contrib.strands import DjangoSessionRepository
from helix_store.exceptions import FencedOutError, InvalidPayload
from helix_store.models import Item, UsageEntry
from helix_store.models import Session as StoredSession
from helix_store.stores import DatabaseLockManager
from tests.cells import for_each
from tests.databases import CommittedDatabase

Store = DjangoSessionStore | DjangoSessionRepository | DjangoSession
Make = Callable[[CommittedDatabase, int | None], Store]
Write = Callable[[Any], Any]

KEY: Final[Any] = {"project_key": "p", "session_id": "s"}


def claude(database: CommittedDatabase, token: int | None) -> Store:
    return DjangoSessionStore(database.alias, tenant=database.tenant, user_id="ada", fencing_token=token)


def strands(database: CommittedDatabase, token: int | None) -> Store:
    return DjangoSessionRepository(database.alias, tenant=database.tenant, user_id="ada", fencing_token=token)


def openai(database: CommittedDatabase, token: int | None) -> Store:
    return DjangoSession("s", using=database.alias, tenant=database.tenant, fencing_token=token)


def _append(store: DjangoSessionStore, session_id: str = "s", **key: str) -> None:
    entry = {"type": "user", "message": {"role": "user", "content": "hi"}}
    chosen: Any = {**KEY, "session_id": session_id, **key}
    async_to_sync(store.append)(chosen, [cast("Any", entry)])


def _create(store: DjangoSessionRepository, session_id: str = "s") -> None:
    store.create_session(Session(session_id=session_id, session_type=SessionType.AGENT))


def _agent(agent_id: str) -> SessionAgent:
    return SessionAgent(agent_id=agent_id, state={}, conversation_manager_state={})


def _message(number: int) -> SessionMessage:
    return SessionMessage({"role": "user", "content": [{"text": str(number)}]}, number)


def _add(session: DjangoSession, *contents: str) -> None:
    items = [{"role": "user", "content": content} for content in contents]
    async_to_sync(session.add_items)(cast("Any", items))


def _fill(store: Any) -> None:
    """A session with something to change."""
    if isinstance(store, DjangoSession):
        _add(store, "one", "two")
    elif isinstance(store, DjangoSessionStore):
        _append(store)
        _append(store, subpath="sub")
    else:
        _create(store)
        store.create_agent("s", _agent("guide"))
        store.create_message("s", "guide", _message(0))


CLAUDE: Final[dict[str, Write]] = {
    "append": _append,
    "append to a new session": lambda store: _append(store, "new"),
    "delete": lambda store: async_to_sync(store.delete)(KEY),
    "delete of a transcript": lambda store: async_to_sync(store.delete)({**KEY, "subpath": "sub"}),
}
STRANDS: Final[dict[str, Write]] = {
    "create_session": lambda store: _create(store, "new"),
    "create_agent": lambda store: store.create_agent("s", _agent("other")),
    "update_agent": lambda store: store.update_agent("s", _agent("guide")),
    "create_message": lambda store: store.create_message("s", "guide", _message(1)),
    "update_message": lambda store: store.update_message("s", "guide", _message(0)),
    "delete_session": lambda store: store.delete_session("s"),
}
OPENAI: Final[dict[str, Write]] = {
    "add_items": lambda session: _add(session, "three"),
    "pop_item": lambda session: async_to_sync(session.pop_item)(),
    "clear_session": lambda session: async_to_sync(session.clear_session)(),
}
WRITES: Final = [
    pytest.param(make, write, id=f"{make.__name__} {name}")
    for make, writes in ((claude, CLAUDE), (strands, STRANDS), (openai, OPENAI))
    for name, write in writes.items()
]


def _stored(database: CommittedDatabase) -> list[Any]:
    sessions = StoredSession.objects.using(database.alias).filter(tenant=database.tenant)
    return [
        list(rows.order_by("pk").values_list())
        for rows in (
            sessions,
            Item.objects.using(database.alias).filter(session__in=sessions),
            ClaudeSession.objects.using(database.alias).filter(tenant=database.tenant),
            UsageEntry.objects.using(database.alias).filter(tenant=database.tenant),
        )
    ]


def _locked_twice(database: CommittedDatabase) -> tuple[int, int]:
    """The tokens of a superseded owner and of the one after it, for each session of the tests."""
    locks = DatabaseLockManager(database.alias, tenant=database.tenant)
    tokens = set()
    for name in ("s", "new", session_id_for("p", "s"), session_id_for("p", "new")):
        first, second = locks.acquire(name), locks.take_over(name)
        assert first is not None
        tokens.add((first.fencing_token, second.fencing_token))
    (both,) = tokens
    return both


@pytest.mark.thorough
@for_each(("make", "write"), WRITES)
def test_a_superseded_owner_writes_nothing(committed_db: CommittedDatabase, make: Make, write: Write) -> None:
    _fill(make(committed_db, None))
    superseded, _ = _locked_twice(committed_db)
    before = _stored(committed_db)
    with pytest.raises(FencedOutError):
        write(make(committed_db, superseded))
    assert _stored(committed_db) == before


@pytest.mark.thorough
@for_each(("make", "write"), WRITES)
def test_the_new_owner_writes(committed_db: CommittedDatabase, make: Make, write: Write) -> None:
    _fill(make(committed_db, None))
    _, owner = _locked_twice(committed_db)
    before = _stored(committed_db)
    write(make(committed_db, owner))
    assert _stored(committed_db) != before


@pytest.mark.parametrize("make", [claude, strands])
def test_a_token_that_is_no_whole_number_is_refused(committed_db: CommittedDatabase, make: Any) -> None:
    with pytest.raises(InvalidPayload) as refused:
        make(committed_db, "1")
    assert refused.value.path == "/fencing_token"
