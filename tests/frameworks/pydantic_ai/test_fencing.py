"""A store with the token of a lock: what a superseded owner of a conversation may still do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from asgiref.sync import async_to_sync
from pydantic_ai.conversation import Conversation
from pydantic_ai.conversation_store import ConversationRecord

from helix_store.contrib.pydantic_ai import DjangoConversationStore
from helix_store.exceptions import FencedOutError, InvalidPayload
from helix_store.models import Session
from helix_store.stores import DatabaseLockManager
from tests.cells import for_each
from tests.databases import CommittedDatabase
from tests.frameworks.pydantic_ai.conversations import (
    entry_ids,
    families,
    history,
    saved,
    store_of,
    turn,
)

Write = Callable[[DjangoConversationStore], Any]


def save(store: DjangoConversationStore) -> Any:
    conversation = async_to_sync(store.load)("trip")
    assert conversation is not None
    turn(conversation, "too late")
    return async_to_sync(store.save)(conversation)


def save_first(store: DjangoConversationStore) -> Any:
    conversation = Conversation(conversation_id="first")
    turn(conversation, "too late")
    return async_to_sync(store.save)(conversation)


def save_over_a_stale_revision(store: DjangoConversationStore) -> Any:
    record = ConversationRecord(conversation_id="trip", head_id=None)
    return async_to_sync(store.write_record)(record, expected_revision="stale")


def leave_a_branch(store: DjangoConversationStore) -> Any:
    conversation = async_to_sync(store.load)("trip")
    assert conversation is not None
    return async_to_sync(store.branch)("trip", at=0, expected_revision=conversation.revision)


def delete(store: DjangoConversationStore) -> Any:
    return async_to_sync(store.delete)("trip")


def _store(database: CommittedDatabase, token: int) -> DjangoConversationStore:
    return DjangoConversationStore(database.alias, tenant=database.tenant, fencing_token=token)


def _owners(database: CommittedDatabase, name: str) -> tuple[DjangoConversationStore, ...]:
    """The stores of a superseded owner and of the one that took the lock over."""
    locks = DatabaseLockManager(database.alias, tenant=database.tenant)
    first = locks.acquire(name, owner="first")
    assert first is not None
    second = locks.take_over(name, owner="second")
    return _store(database, first.fencing_token), _store(database, second.fencing_token)


def _stored(database: CommittedDatabase) -> tuple[Any, ...]:
    sessions = Session.objects.using(database.alias).filter(tenant=database.tenant)
    records = async_to_sync(store_of(database).list_conversations)()
    revisions = [(record.conversation_id, record.revision) for record in records]
    return entry_ids(database), families(database), revisions, list(sessions.values_list("session_id"))


@pytest.mark.thorough
@for_each(
    ("write", "name"),
    [
        (save, "trip"),
        (save_first, "first"),
        (save_over_a_stale_revision, "trip"),
        (leave_a_branch, "trip"),
        (delete, "trip"),
    ],
)
def test_a_superseded_owner_writes_nothing(committed_db: CommittedDatabase, write: Write, name: str) -> None:
    saved(committed_db, "trip", "one")
    superseded, _ = _owners(committed_db, name)
    before = _stored(committed_db)
    with pytest.raises(FencedOutError):
        write(superseded)
    assert _stored(committed_db) == before


@for_each("write", [save, leave_a_branch, delete])
def test_the_new_owner_writes(committed_db: CommittedDatabase, write: Write) -> None:
    saved(committed_db, "trip", "one")
    _, owner = _owners(committed_db, "trip")
    before = _stored(committed_db)
    write(owner)
    assert _stored(committed_db) != before


def test_a_superseded_owner_reads_what_the_new_one_saved(committed_db: CommittedDatabase) -> None:
    saved(committed_db, "trip", "one")
    superseded, owner = _owners(committed_db, "trip")
    save(owner)
    loaded = async_to_sync(superseded.load)("trip")
    assert loaded is not None
    assert len(loaded.messages) == len(history(committed_db, "trip") or ()) == 4


def test_a_fork_is_fenced_by_the_lock_of_its_own_id(committed_db: CommittedDatabase) -> None:
    saved(committed_db, "trip", "one")
    superseded, _ = _owners(committed_db, "trip")
    async_to_sync(superseded.fork)("trip", new_conversation_id="other")
    for number in range(2):
        DatabaseLockManager(committed_db.alias, tenant=committed_db.tenant).take_over(
            "third", owner=str(number)
        )
    with pytest.raises(FencedOutError):
        async_to_sync(superseded.fork)("trip", new_conversation_id="third")
    assert history(committed_db, "third") is None
    assert len(history(committed_db, "other") or ()) == 2


@for_each("token", ["1", 1.5, True])
def test_a_token_that_is_no_whole_number_is_refused(committed_db: CommittedDatabase, token: Any) -> None:
    with pytest.raises(InvalidPayload) as refused:
        _store(committed_db, token)
    assert refused.value.path == "/fencing_token"
