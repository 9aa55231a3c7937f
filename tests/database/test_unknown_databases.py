"""A database that is not an alias of ``DATABASES``: one typed error from every store, and no statement."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any, Final

import pytest
from asgiref.sync import async_to_sync
from django.core.management import CommandError, call_command
from django.test import override_settings

from helix_store import (
    GraphCheckpointStore,
    SnapshotCheckpointer,
    Store,
    announce_due_posts,
    announce_ready,
    find_stuck,
)
from helix_store.adapters import SessionAdapter
from helix_store.cleanup import erase, expired_session_cleanup
from helix_store.contrib.claude_agent import DjangoSessionStore
from helix_store.contrib.langgraph import DjangoSaver, DjangoStore
from helix_store.contrib.metrics import read_figures
from helix_store.contrib.openai_agents import DjangoSession, RunStateStore
from helix_store.contrib.pydantic_ai import DjangoConversationStore
from helix_store.contrib.strands import DjangoSessionRepository
from helix_store.doctor import diagnose
from helix_store.exceptions import InvalidQuery
from helix_store.items import ItemLog
from helix_store.retention import prune_streams
from helix_store.schema import current_version
from helix_store.stores import (
    DatabaseLockManager,
    DatabaseStateStore,
    DatabaseStreamManager,
    DatabaseUsageStore,
)
from tests.cells import for_each

_CONFIG: Final[Any] = {"configurable": {"thread_id": "t", "checkpoint_ns": ""}}

_CALLS: Final[dict[str, Callable[[Any], object]]] = {
    "Store": lambda using: Store(using).session("s").messages(),
    "DatabaseStateStore": lambda using: DatabaseStateStore(using).create_session("s", agent_type="a"),
    "DatabaseLockManager": lambda using: DatabaseLockManager(using).acquire("s", owner="w"),
    "DatabaseUsageStore": lambda using: DatabaseUsageStore(using).get_rollup("s"),
    "DatabaseStreamManager": lambda using: DatabaseStreamManager(using).write_sync("s", [{"type": "t"}]),
    "GraphCheckpointStore": lambda using: GraphCheckpointStore(using).list_sessions(),
    "SnapshotCheckpointer": lambda using: SnapshotCheckpointer(using).get("s"),
    "ItemLog": lambda using: ItemLog("s", "lane", using=using).tail(),
    "SessionAdapter": lambda using: SessionAdapter("a", using).write("s", lambda session: None),
    "announce_due_posts": lambda using: announce_due_posts(using=using),
    "announce_ready": lambda using: announce_ready(using=using),
    "current_version": lambda using: current_version(using),
    "diagnose": lambda using: diagnose(using=using),
    "erase": lambda using: erase(using=using, session_id="s"),
    "expired_session_cleanup": lambda using: expired_session_cleanup(using=using),
    "find_stuck": lambda using: find_stuck(using=using),
    "prune_streams": lambda using: prune_streams(using=using, older_than=timedelta(days=1)),
    "read_figures": lambda using: read_figures(using),
    "DjangoSaver": lambda using: DjangoSaver(using).get_tuple(_CONFIG),
    "DjangoStore": lambda using: DjangoStore(using=using).get(("a",), "key"),
    "DjangoSession": lambda using: async_to_sync(DjangoSession("s", using=using).get_items)(),
    "RunStateStore": lambda using: RunStateStore(using).load("s", "state"),
    "DjangoSessionStore": lambda using: async_to_sync(DjangoSessionStore(using).list_sessions)("p"),
    "DjangoSessionRepository": lambda using: DjangoSessionRepository(using).read_session("s"),
    "DjangoConversationStore": lambda using: async_to_sync(DjangoConversationStore(using).read_entry)("e"),
}


@for_each("wrong", [7, b"default", ["default"], object(), False, "unknown", "Default"], ids=str, shared=True)
@for_each("call", _CALLS.values(), ids=list(_CALLS), shared=True)
def test_it_is_refused_before_sql(call: Callable[[Any], object], wrong: Any) -> None:
    """These tests may not use a database, so a statement fails them."""
    with pytest.raises(InvalidQuery) as caught:
        call(wrong)
    assert caught.value.path == "/using"
    assert "DATABASES" in str(caught.value)


class NotADatabase:
    def db_for_write(self, model: type[Any], **hints: Any) -> str:
        return "not-a-database"


@override_settings(DATABASE_ROUTERS=[f"{__name__}.NotADatabase"])
def test_an_answer_of_the_routers_is_checked_like_an_argument() -> None:
    with pytest.raises(InvalidQuery, match="not-a-database"):
        Store().session("s").messages()


_COMMANDS: Final = [
    ("cleanup_expired_sessions",),
    ("helix_checkpoints", "list", "s"),
    ("helix_doctor",),
    ("helix_erase", "--session", "s"),
    ("helix_export",),
    ("helix_import", "export.jsonl"),
    ("helix_move", "acme", "--to", "default"),
    ("helix_retention",),
    ("helix_sessions", "list"),
    ("helix_streams", "list"),
    ("helix_usage",),
]


@for_each("command", _COMMANDS, ids=lambda command: command[0])
def test_a_command_calls_it_wrong_usage(command: tuple[str, ...]) -> None:
    with pytest.raises(CommandError) as caught:
        call_command(*command, "--database", "unknown")
    assert caught.value.returncode == 2
    assert "unknown" in str(caught.value)
