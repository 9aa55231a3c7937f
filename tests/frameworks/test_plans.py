"""The stores of frameworks find their rows by indexes where the tables are large."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any, Final, cast

from asgiref.sync import async_to_sync
from django.apps import apps
from django.db import transaction
from django.db.models import Model
from langchain_core.runnables import RunnableConfig
from langgraph.checkpoint.base import ChannelVersions, Checkpoint, empty_checkpoint
from langgraph.checkpoint.base.id import uuid6
from pydantic_ai.conversation import Conversation as Talk
from strands.types.session import Session, SessionAgent, SessionMessage, SessionType

from helix_store.contrib.claude_agent import DjangoSessionStore
from helix_store.contrib.claude_agent.models import ClaudeSession
from helix_store.contrib.langgraph import DjangoSaver, DjangoStore
from helix_store.contrib.langgraph.models import (
    LangGraphCheckpoint,
    LangGraphMemory,
    LangGraphValue,
    LangGraphWrite,
)
from helix_store.contrib.openai_agents import DjangoSession, RunStateStore
from helix_store.contrib.openai_agents.models import OpenAIRunState
from helix_store.contrib.pydantic_ai import DjangoConversationStore
from helix_store.contrib.pydantic_ai.models import Conversation, ConversationEntry, ConversationFamily
from helix_store.contrib.strands import DjangoSessionRepository
from helix_store.core import moments
from helix_store.models import Item
from helix_store.models import Session as StoredSession
from tests.databases import CommittedDatabase
from tests.frameworks.pydantic_ai.conversations import turn
from tests.plans.explained import plans_of

ROWS: Final = 10_000
LONG: Final = 60
"""Rows of the one session that the calls are about."""
FAR: Final = 10**12
"""Keys of sessions that there are not."""
OTHERS: Final = 10**11
"""Keys of sessions that there are."""
QUERIES: Final = {"tip", "history", "reached", "c", "v", "used", "chain"}
"""What a statement has found before."""
KEY: Final[Any] = {"project_key": "project", "session_id": "s"}

Calls = dict[str, Callable[[], Any]]


def _fill(database: CommittedDatabase) -> set[str]:
    """Rows of other sessions, of this tenant and of the same project, family by family; their tables."""
    at, tenant = moments.now(), database.tenant
    numbers = range(ROWS)
    rows: dict[type[Model], Any] = {
        StoredSession: (
            StoredSession(
                id=OTHERS + n,
                tenant=tenant,
                session_id=f"far-{n}",
                agent_type="agent",
                status="active",
                created_at=at,
                updated_at=at,
            )
            for n in range(ROWS // 10)
        ),
        LangGraphCheckpoint: (
            LangGraphCheckpoint(
                session_id=OTHERS + n // 10,
                checkpoint_id=str(uuid6(clock_seq=n)),
                type="json",
                body=b"{}",
                created_at=at,
            )
            for n in numbers
        ),
        LangGraphValue: (
            LangGraphValue(session_id=OTHERS + n // 10, channel=f"c{n}", version="1", type="json", blob=b"{}")
            for n in numbers
        ),
        LangGraphWrite: (
            LangGraphWrite(
                session_id=OTHERS + n // 10,
                checkpoint_id=f"c{n}",
                task_id="task",
                position=0,
                channel="c",
                type="json",
                blob=b"{}",
            )
            for n in numbers
        ),
        LangGraphMemory: (
            LangGraphMemory(
                tenant=tenant,
                namespace=f"users.u{n // 10}.",
                key=f"k{n}",
                size_bytes=2,
                expires_at=at + timedelta(days=n + 1),
                created_at=at,
                updated_at=at,
                value="{}",
            )
            for n in numbers
        ),
        Item: (
            Item(session_id=FAR + n // 10, lane="", key=f"k{n}", payload="1", created_at=at) for n in numbers
        ),
        OpenAIRunState: (
            OpenAIRunState(
                session_id=FAR + n // 10, state_id=f"s{n}", payload="1", size_bytes=1, created_at=at
            )
            for n in numbers
        ),
        ClaudeSession: (
            ClaudeSession(
                session_id=FAR + n,
                tenant=tenant,
                project_key=f"p{n % 500}",
                claude_session_id=f"c{n}",
                mtime_ms=n,
            )
            for n in numbers
        ),
        ConversationFamily: (ConversationFamily(tenant=tenant, family=f"f{n}") for n in numbers),
        Conversation: (
            Conversation(
                session_id=FAR + n,
                tenant=tenant,
                family=f"f{n}",
                head_id=f"e{n}",
                revision="r",
                scope=f"u{n % 500}",
                updated_at=at,
                document='{"conversation_id": "other", "head_id": null}',
            )
            for n in numbers
        ),
        ConversationEntry: (
            ConversationEntry(
                tenant=tenant,
                entry_id=f"e{n}",
                family=f"f{n}",
                kind="message",
                payload="{}",
                size_bytes=2,
                created_at=at,
            )
            for n in numbers
        ),
    }
    for model, made in rows.items():
        model._default_manager.using(database.alias).bulk_create(list(made), batch_size=2_000)
    with database.connection.cursor() as cursor:
        for model in rows:
            cursor.execute(f"ANALYZE {database.connection.ops.quote_name(model._meta.db_table)}")
    return {model._meta.db_table for model in rows}


def _langgraph(database: CommittedDatabase) -> Calls:
    saver = DjangoSaver(using=database.alias, tenant=database.tenant)
    config: RunnableConfig = {"configurable": {"thread_id": "thread", "checkpoint_ns": ""}}

    def put(step: int) -> RunnableConfig:
        version: ChannelVersions = {"text": f"{step:032}"}
        checkpoint: Checkpoint = {
            **empty_checkpoint(),
            "id": str(uuid6(clock_seq=step)),
            "channel_values": {"text": f"{step}" * 2_000},
            "channel_versions": version,
        }
        return saver.put(config, checkpoint, {"source": "loop", "step": step, "run_id": "run"}, version)

    for step in range(LONG):
        newest = put(step)
        saver.put_writes(newest, [("text", step)], "task")
    return {
        "put": lambda: put(LONG),
        "put_writes": lambda: saver.put_writes(newest, [("text", "more")], "other"),
        "get_tuple": lambda: saver.get_tuple(config),
        "get_tuple by id": lambda: saver.get_tuple(newest),
        "list of a namespace": lambda: list(saver.list(config, limit=5)),
        "list of a thread": lambda: list(saver.list({"configurable": {"thread_id": "thread"}}, limit=5)),
        "list of a tenant": lambda: list(saver.list(None, limit=5)),
        "list of a tenant, further on": lambda: list(saver.list(None, before=newest, limit=5)),
        "get_delta_channel_history": lambda: saver.get_delta_channel_history(
            config=config, channels=["text"]
        ),
        "copy_thread": lambda: saver.copy_thread("thread", "copy"),
        "prune": lambda: saver.prune(["copy"], strategy="keep_latest"),
        "delete_for_runs": lambda: saver.delete_for_runs(["run"]),
        "delete_thread": lambda: saver.delete_thread("thread"),
    }


def _memories(database: CommittedDatabase) -> Calls:
    store = DjangoStore(using=database.alias, tenant=database.tenant)
    for number in range(LONG):
        store.put(("users", "ada"), f"k{number}", {"n": number}, ttl=60)
    return {
        "memory put": lambda: store.put(("users", "ada"), "k1", {"n": -1}, ttl=60),
        "memory get": lambda: store.get(("users", "ada"), "k1"),
        "memory search": lambda: store.search(("users", "ada"), limit=5),
        "memory search by a field": lambda: store.search(("users", "ada"), filter={"n": 7}),
        "memory namespaces": lambda: store.list_namespaces(prefix=("users", "ada"), limit=5),
        "memory delete": lambda: store.delete(("users", "ada"), "k1"),
        "memory sweep": store.sweep_ttl,
        "memory delete_namespace": lambda: store.delete_namespace(("users", "ada")),
    }


def _openai(database: CommittedDatabase) -> Calls:
    session = DjangoSession("openai", using=database.alias, tenant=database.tenant)
    items = [{"role": "user", "content": str(n)} for n in range(LONG)]
    async_to_sync(session.add_items)(cast("Any", items))
    states = RunStateStore(database.alias, tenant=database.tenant)
    states.save("openai", "{}", state_id="waiting")
    return {
        "get_items": lambda: async_to_sync(session.get_items)(5),
        "add_items": lambda: async_to_sync(session.add_items)(cast("Any", items[:1])),
        "list_branches": lambda: async_to_sync(session.list_branches)(),
        "pop_item": lambda: async_to_sync(session.pop_item)(),
        "run state load": lambda: states.load("openai", "waiting"),
        "run state waiting": lambda: states.waiting("openai"),
        "run state claim": lambda: states.claim("openai", "waiting", resumer="worker"),
        "run state delete": lambda: states.delete("openai", "waiting"),
    }


def _claude(database: CommittedDatabase) -> Calls:
    store = DjangoSessionStore(database.alias, tenant=database.tenant)
    entries = [{"type": "user", "uuid": str(n), "message": {"content": "hi"}} for n in range(LONG)]
    append = async_to_sync(store.append)
    append(KEY, cast("Any", entries))
    return {
        "load": lambda: async_to_sync(store.load)(KEY),
        "append": lambda: append(KEY, cast("Any", [{"type": "user", "uuid": "new"}])),
        "list_sessions": lambda: async_to_sync(store.list_sessions)("p7"),
        "list_session_summaries": lambda: async_to_sync(store.list_session_summaries)("project"),
        "list_subkeys": lambda: async_to_sync(store.list_subkeys)(KEY),
        "claude delete": lambda: async_to_sync(store.delete)(KEY),
    }


def _pydantic(database: CommittedDatabase) -> Calls:
    store = DjangoConversationStore(database.alias, tenant=database.tenant)
    talk = Talk(conversation_id="talk")
    for number in range(LONG // 2):
        turn(talk, str(number))
    (*_, last) = async_to_sync(store.save)(talk, scope="ada")

    def save() -> None:
        turn(talk, "more")
        async_to_sync(store.save)(talk, scope="ada")

    return {
        "load": lambda: async_to_sync(store.load)("talk"),
        "read_entry": lambda: async_to_sync(store.read_entry)(last.id),
        "read_history": lambda: async_to_sync(store.read_history)(last.id),
        "read_records": lambda: async_to_sync(store.read_records)(limit=10),
        "read_records of a scope": lambda: async_to_sync(store.read_records)(scope="u7", limit=10),
        "fork": lambda: async_to_sync(store.fork)("talk", new_conversation_id="fork", source_scope="ada"),
        "save": save,
        "delete": lambda: async_to_sync(store.delete)("fork"),
    }


def _strands(database: CommittedDatabase) -> Calls:
    store = DjangoSessionRepository(database.alias, tenant=database.tenant)
    store.create_session(Session(session_id="strands", session_type=SessionType.AGENT))
    store.create_agent("strands", SessionAgent("guide", {}, {}))

    def create(number: int) -> None:
        message: Any = {"role": "user", "content": [{"text": "hi"}]}
        store.create_message("strands", "guide", SessionMessage(message, number))

    for number in range(LONG):
        create(number)
    return {
        "read_session": lambda: store.read_session("strands"),
        "read_agent": lambda: store.read_agent("strands", "guide"),
        "read_message": lambda: store.read_message("strands", "guide", 7),
        "list_messages": lambda: store.list_messages("strands", "guide", limit=10, offset=5),
        "create_message": lambda: create(LONG),
        "delete_session": lambda: store.delete_session("strands"),
    }


def _name_of(scan: str) -> str:
    """The table of ``SCAN table …`` of SQLite, or the name that PostgreSQL gives."""
    return scan.removeprefix("SCAN ").removeprefix("SEARCH ").partition(" ")[0]


def test_no_call_reads_a_table_as_a_whole(empty_db: CommittedDatabase) -> None:
    """Of the tables that are filled here: one of a few rows is rightly scanned."""
    faults, seen = [], 0
    with transaction.atomic(using=empty_db.alias):
        small = {model._meta.db_table for model in apps.get_models()} - _fill(empty_db)
        for make in (_langgraph, _memories, _openai, _claude, _pydantic, _strands):
            for name, call in make(empty_db).items():
                for plan in plans_of(empty_db, call, undone=False):
                    seen += 1
                    whole = [
                        each
                        for each in plan.read_whole
                        if _name_of(each) not in small | QUERIES and not each.endswith("CONSTANT ROWS")
                    ]
                    if whole or plan.rows_read > 10 * LONG:
                        faults.append(f"{name}: {whole} {plan.rows_read} rows\n{plan.text}")
        transaction.set_rollback(True, using=empty_db.alias)
    assert faults == []
    assert seen > 100
