"""Entries that conversations share go with the last one that reaches them, whatever deletes it."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from asgiref.sync import async_to_sync

from helix_store.cleanup import erase, expired_session_cleanup
from helix_store.contrib.pydantic_ai.catalogue import release_entries
from helix_store.contrib.pydantic_ai.models import Conversation
from helix_store.core import moments
from helix_store.models import Session, UsageEntry
from helix_store.stores import DatabaseStateStore
from tests.cells import for_each
from tests.databases import CommittedDatabase
from tests.frameworks.pydantic_ai.conversations import (
    entry_ids,
    families,
    forked,
    history,
    saved,
    store_of,
    turn,
)

Way = Callable[[CommittedDatabase, str], object]


def by_the_store(database: CommittedDatabase, name: str) -> None:
    async_to_sync(store_of(database).delete)(name)


def by_the_session(database: CommittedDatabase, name: str) -> None:
    DatabaseStateStore(database.alias, tenant=database.tenant).delete_session(name)


def by_cleanup(database: CommittedDatabase, name: str) -> None:
    session = Session.objects.using(database.alias).filter(tenant=database.tenant, session_id=name)
    session.update(expires_at=moments.now() - timedelta(days=2))
    store = DatabaseStateStore(database.alias, tenant=database.tenant)
    expired_session_cleanup(state_store=store)
    expired_session_cleanup(state_store=store, delete_after=timedelta(hours=1))


def by_erasure(database: CommittedDatabase, name: str) -> None:
    erase(using=database.alias, tenant=database.tenant, session_id=name, keep_branches=True)


WAYS = [by_the_store, by_the_session, by_cleanup, by_erasure]


def _rest(database: CommittedDatabase) -> tuple[set[str], int, int]:
    conversations = Conversation.objects.using(database.alias).filter(tenant=database.tenant)
    return entry_ids(database), families(database), conversations.count()


@pytest.mark.thorough
@for_each("way", WAYS)
def test_an_entry_goes_with_the_last_conversation_that_reaches_it(
    committed_db: CommittedDatabase, way: Way
) -> None:
    saved(committed_db, "source", "one", "two", "three")
    forked(committed_db, "source", "fork", "four", at=4)
    forked(committed_db, "fork", "fork of the fork", at=2)
    kept = history(committed_db, "fork")
    assert kept is not None
    way(committed_db, "source")
    assert history(committed_db, "source") is None
    assert history(committed_db, "fork") == kept
    assert _rest(committed_db) == (set(kept), 1, 2)
    way(committed_db, "fork")
    assert _rest(committed_db) == (set(kept[:2]), 1, 1)
    way(committed_db, "fork of the fork")
    assert _rest(committed_db) == (set(), 0, 0)


@pytest.mark.thorough
@for_each("way", WAYS)
def test_a_branch_that_was_left_is_kept_and_goes_with_its_conversation(
    committed_db: CommittedDatabase, way: Way
) -> None:
    conversation = saved(committed_db, "source", "one", "two")
    left = entry_ids(committed_db)
    store = store_of(committed_db)
    branched = async_to_sync(store.branch)("source", at=2, expected_revision=conversation.revision)
    turn(branched, "another two")
    async_to_sync(store.save)(branched)
    saved(committed_db, "unrelated", "hello")
    assert left < entry_ids(committed_db)
    forked(committed_db, "source", "fork", at=0)
    by_the_store(committed_db, "fork")
    assert left < entry_ids(committed_db)
    way(committed_db, "source")
    assert entry_ids(committed_db) == set(history(committed_db, "unrelated") or ())


def test_an_erased_user_takes_the_forks_of_others_along(committed_db: CommittedDatabase) -> None:
    saved(committed_db, "of ada", "my secret", scope="ada")
    forked(committed_db, "of ada", "of grace", "four", scope="grace")
    saved(committed_db, "other", "hello", scope="grace")
    saved(committed_db, "another of ada", "one", "two", scope="ada")
    ada: Any = {"using": committed_db.alias, "tenant": committed_db.tenant, "user_id": "ada"}
    foreseen = erase(**ada, dry_run=True)
    assert (foreseen.deleted["pydantic_entry"], foreseen.deleted["pydantic_family"]) == (8, 2)
    assert erase(**ada).deleted == foreseen.deleted
    assert history(committed_db, "of grace") is None
    assert entry_ids(committed_db) == set(history(committed_db, "other") or ())


def test_an_erased_tenant_leaves_no_row(committed_db: CommittedDatabase) -> None:
    saved(committed_db, "one", "hello")
    forked(committed_db, "one", "two", "four")
    erase(using=committed_db.alias, tenant=committed_db.tenant)
    assert _rest(committed_db) == (set(), 0, 0)


def test_in_a_session_of_the_application_only_the_conversation_goes(committed_db: CommittedDatabase) -> None:
    sessions = DatabaseStateStore(committed_db.alias, tenant=committed_db.tenant)
    sessions.create_session("own", agent_type="agent")
    saved(committed_db, "own", "hello")
    by_the_store(committed_db, "own")
    assert sessions.load_state("own") is not None
    assert history(committed_db, "own") is None
    assert _rest(committed_db) == (set(), 0, 0)
    assert UsageEntry.objects.using(committed_db.alias).filter(tenant=committed_db.tenant).exists()


def test_many_sessions_go_by_few_statements(
    committed_db: CommittedDatabase, django_assert_max_num_queries: Any
) -> None:
    for number in range(12):
        saved(committed_db, f"talk-{number}", "one")
    sessions = Session.objects.using(committed_db.alias).filter(tenant=committed_db.tenant)
    keys = list(sessions.values_list("pk", flat=True))
    db = store_of(committed_db)._sessions.db
    with django_assert_max_num_queries(4, connection=committed_db.connection):
        counts = release_entries(db, keys)
    assert sorted(counts.values()) == [12, 24]
