"""What the store keeps of a conversation, and whom it shows it to."""

from __future__ import annotations

import sys
from typing import Any

import pytest
from asgiref.sync import async_to_sync
from django.db import transaction
from pydantic_ai import Agent, BinaryContent, DeferredToolRequests
from pydantic_ai.conversation import Conversation
from pydantic_ai.conversation_store import ConversationConflict, ConversationEntry, ConversationRecord
from pydantic_ai.messages import (
    ModelMessagesTypeAdapter,
    ModelRequest,
    ToolCallPart,
    ToolReturnPart,
    UserPromptPart,
)
from pydantic_ai.models.test import TestModel

import helix_store.contrib.pydantic_ai as package
from helix_store.exceptions import InvalidPayload, LimitExceeded
from helix_store.models import Session
from tests.cells import for_each
from tests.databases import CommittedDatabase, fresh_tenant
from tests.frameworks.pydantic_ai.conversations import entry_ids, families, forked, saved, say, store_of, turn

HARD: list[Any] = [
    {"z": 1, "a": 1.0, "t": True, "n": None, "m": -0.0, "big": 10**30, "float": 1e16, "__proto__": {}},
    "a\x00b \udc00 \ud83e\udd8a é\u2028 ~",
    "~" * 3,
]


def _load(database: CommittedDatabase, name: str, **arguments: Any) -> Conversation:
    conversation = async_to_sync(store_of(database).load)(name, **arguments)
    assert conversation is not None
    return conversation


def _session(database: CommittedDatabase, session_id: str) -> Session:
    return Session.objects.using(database.alias).get(tenant=database.tenant, session_id=session_id)


async def test_an_agent_continues_a_stored_conversation(committed_db: CommittedDatabase) -> None:
    store, agent = store_of(committed_db), Agent(TestModel())
    for number in (1, 2, 3):
        conversation = await store.load("trip") or Conversation(conversation_id="trip")
        result = await agent.run(f"question {number}", conversation=conversation)
        new = await store.save(result, scope="ada")
        assert len(new) == 2
    loaded = await store.load("trip", scope="ada")
    assert loaded is not None
    assert (len(loaded.messages), loaded.usage.requests) == (6, 3)
    assert loaded.messages == result.all_messages()
    assert await store.load("trip", scope="grace") is None


@for_each("value", HARD, ids=["json", "text", "tildes"])
def test_messages_come_back_exactly(committed_db: CommittedDatabase, value: Any) -> None:
    conversation = Conversation(conversation_id="hard")
    conversation.messages = [
        ModelRequest(parts=[ToolReturnPart(tool_name="look", content=value, tool_call_id="1")]),
        ModelRequest(parts=[UserPromptPart(content=str(value))], metadata={"value": value}),
    ]
    conversation.deferred_tool_requests = DeferredToolRequests(
        approvals=[ToolCallPart("look", {"value": value}, "1")], metadata={"1": {"value": value}}
    )
    async_to_sync(store_of(committed_db).save)(conversation)
    loaded = _load(committed_db, "hard")
    # By the text: 1, 1.0 and True are equal, and so are 0.0 and -0.0.
    dump = ModelMessagesTypeAdapter.dump_python
    assert repr(dump(loaded.messages, mode="json")) == repr(dump(conversation.messages, mode="json"))
    assert repr(loaded.deferred_tool_requests) == repr(conversation.deferred_tool_requests)


def test_files_in_messages_and_in_metadata_are_kept(committed_db: CommittedDatabase) -> None:
    data = bytes(range(256)) * 40
    conversation = Conversation(conversation_id="files")
    file = BinaryContent(data=data, media_type="application/pdf")
    conversation.messages = [ModelRequest(parts=[UserPromptPart(content=["look", file])])]
    conversation.deferred_tool_requests = DeferredToolRequests(
        approvals=[ToolCallPart("look", {}, "1")], metadata={"1": {"raw": b"\xff"}}
    )
    async_to_sync(store_of(committed_db).save)(conversation)
    loaded = _load(committed_db, "files")
    assert loaded.messages == conversation.messages
    assert loaded.deferred_tool_requests is not None


def test_ids_and_scopes_of_any_text_are_kept(committed_db: CommittedDatabase) -> None:
    name, scope = "an id\nof two lines \x00" + "x" * 500, "s\x00" * 300
    saved(committed_db, name, "hello", scope=scope)
    saved(committed_db, name + "x", "hello", scope=scope + "x")
    (record,) = async_to_sync(store_of(committed_db).list_conversations)(scope=scope)
    assert (record.conversation_id, record.scope) == (name, scope)
    assert _load(committed_db, name, scope=scope).conversation_id == name


def test_a_conversation_is_a_session_of_its_scope(committed_db: CommittedDatabase) -> None:
    conversation = saved(committed_db, "trip", "one", scope="ada")
    session = _session(committed_db, "trip")
    assert (session.agent_type, session.user_id, session.metadata) == ("pydantic_ai", "ada", {})
    turn(conversation, "two")
    async_to_sync(store_of(committed_db).save)(conversation)
    assert _session(committed_db, "trip").updated_at > session.updated_at
    forked(committed_db, "trip", "other")
    assert _session(committed_db, "other").metadata == {"branched_from": "trip"}


def test_tenants_share_nothing(committed_db: CommittedDatabase) -> None:
    other = CommittedDatabase(alias=committed_db.alias, tenant=fresh_tenant())
    saved(committed_db, "trip", "one")
    entries = entry_ids(committed_db)
    assert async_to_sync(store_of(other).load)("trip") is None
    assert async_to_sync(store_of(other).list_conversations)() == []
    record = ConversationRecord(conversation_id="thief", head_id=max(entries))
    with pytest.raises(ConversationConflict):
        async_to_sync(store_of(other).write_record)(record, expected_revision=None)
    with pytest.raises(KeyError):
        async_to_sync(store_of(other).read_history)(max(entries))
    saved(other, "trip", "two")
    async_to_sync(store_of(other).delete)("trip")
    assert entry_ids(committed_db) == entries
    assert families(other) == 0


def test_a_refused_save_leaves_nothing(committed_db: CommittedDatabase) -> None:
    saved(committed_db, "trip", "one")
    before = entry_ids(committed_db)
    store = store_of(committed_db)
    lost = ConversationRecord(conversation_id="lost", head_id="unknown")
    entry = ConversationEntry(id="new", parent_id=None, message=say("x"))
    with pytest.raises(ConversationConflict):
        async_to_sync(store.write_record)(lost, new_entries=[entry], expected_revision=None)
    with pytest.raises(ConversationConflict):
        async_to_sync(store.write_record)(lost, new_entries=[entry], expected_revision="stale")
    assert entry_ids(committed_db) == before
    assert families(committed_db) == 1
    sessions = Session.objects.using(committed_db.alias).filter(tenant=committed_db.tenant)
    assert [session.session_id for session in sessions] == ["trip"]


def test_an_entry_does_not_change(committed_db: CommittedDatabase) -> None:
    saved(committed_db, "trip", "one")
    (first, *_) = entry_ids(committed_db)
    entry = ConversationEntry(id=first, parent_id=None, message=say("forged"))
    record = ConversationRecord(conversation_id="thief", head_id=first)
    with pytest.raises(InvalidPayload) as refused:
        async_to_sync(store_of(committed_db).write_record)(
            record, new_entries=[entry], expected_revision=None
        )
    assert refused.value.path == "/new_entries"
    assert async_to_sync(store_of(committed_db).load)("thief") is None


@for_each(
    ("ids", "path"),
    [
        ([("a", None), ("a", "a")], "new_entries/1/id"),
        ([("a", "b"), ("b", None)], "new_entries/0/parent_id"),
        ([("a", "a")], "new_entries/0/parent_id"),
        ([("", None)], "new_entries/0/id"),
        ([("x" * 256, None)], "new_entries/0/id"),
        ([("a", "\x00")], "new_entries/0/parent_id"),
    ],
)
def test_entries_that_make_no_history_are_refused(
    committed_db: CommittedDatabase, ids: list[tuple[str, str | None]], path: str
) -> None:
    entries = [ConversationEntry(id=name, parent_id=parent, message=say("x")) for name, parent in ids]
    record = ConversationRecord(conversation_id="new", head_id="a")
    with pytest.raises(InvalidPayload) as refused:
        async_to_sync(store_of(committed_db).write_record)(
            record, new_entries=entries, expected_revision=None
        )
    assert refused.value.path == f"/{path}"
    assert entry_ids(committed_db) == set()


def test_a_message_beyond_the_limit_is_refused(committed_db: CommittedDatabase, settings: Any) -> None:
    settings.HELIX_STORE = {**settings.HELIX_STORE, "LIMITS": {"max_state_bytes": 2_000}}
    with pytest.raises(LimitExceeded):
        saved(committed_db, "large", "x" * 2_001)
    assert entry_ids(committed_db) == set()


@pytest.mark.thorough
def test_a_history_of_a_thousand_messages_is_one_statement(
    committed_db: CommittedDatabase, django_assert_num_queries: Any
) -> None:
    conversation = Conversation(conversation_id="long", messages=[say(str(n)) for n in range(1_001)])
    store = store_of(committed_db)
    new = async_to_sync(store.save)(conversation)
    with django_assert_num_queries(1, connection=committed_db.connection):
        history = async_to_sync(store.read_history)(new[-1].id)
    assert history == new
    assert async_to_sync(store.read_history)(new[-1].id, limit=3) == new[-3:]


def test_a_save_is_part_of_the_transaction_of_its_caller(committed_db: CommittedDatabase) -> None:
    with transaction.atomic(using=committed_db.alias):
        saved(committed_db, "trip", "one")
        transaction.set_rollback(True, using=committed_db.alias)
    assert async_to_sync(store_of(committed_db).load)("trip") is None
    assert entry_ids(committed_db) == set()


def test_without_the_framework_the_class_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "helix_store.contrib.pydantic_ai.store")
    monkeypatch.delattr(package, "store")
    monkeypatch.setitem(sys.modules, "pydantic_ai.conversation_store", None)
    with pytest.raises(ImportError, match=r"helix_store\[pydantic-ai\]"):
        package.DjangoConversationStore  # noqa: B018  it is imported when it is asked for
