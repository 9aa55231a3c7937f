"""The user of a framework's session: named by any write, never changed, and erased without a trace."""

from __future__ import annotations

from typing import Any, cast

import pytest
from asgiref.sync import async_to_sync

from helix_store import DatabaseStateStore, DatabaseUsageStore
from helix_store.adapters import SessionAdapter, registered_tables
from helix_store.cleanup import erase
from helix_store.contrib.openai_agents import DjangoSession
from helix_store.core.types import UsageKind
from helix_store.core.usage import UsageEntry, UsageSource
from helix_store.exceptions import ConflictError, InvalidPayload, LimitExceeded
from helix_store.models import Item, Session
from helix_store.models import UsageEntry as UsageRow
from tests.cells import for_each
from tests.databases import CommittedDatabase
from tests.frameworks.writes import WRITES, Write, langgraph, openai

each_write = for_each("write", WRITES, ids=lambda write: write.__name__)


def users(db: CommittedDatabase) -> list[str | None]:
    """The user of each session, of which there is only one."""
    sessions = Session.objects.using(db.alias).filter(tenant=db.tenant)
    return list(sessions.values_list("user_id", flat=True))


def rows(db: CommittedDatabase) -> dict[str, int]:
    models: list[Any] = [Session, Item, UsageRow, *(each.model for each in registered_tables())]
    counts = {model.__name__: model._base_manager.using(db.alias).count() for model in models}
    return {name: count for name, count in counts.items() if count}


@each_write
def test_the_first_write_names_the_user(committed_db: CommittedDatabase, write: Write) -> None:
    write(committed_db, "ada")
    assert users(committed_db) == ["ada"]


@pytest.mark.thorough
@each_write
def test_a_later_write_names_the_user_and_an_erasure_leaves_nothing(
    empty_db: CommittedDatabase, write: Write
) -> None:
    write(empty_db, None)
    assert users(empty_db) == [None]
    write(empty_db, "ada")
    assert users(empty_db) == ["ada"]
    write(empty_db, None)
    assert users(empty_db) == ["ada"]
    assert erase(using=empty_db.alias, user_id="ada").complete
    assert rows(empty_db) == {}


@each_write
def test_a_write_of_another_user_is_refused_and_stores_nothing(
    empty_db: CommittedDatabase, write: Write
) -> None:
    write(empty_db, "ada")
    before = rows(empty_db)
    with pytest.raises(ConflictError):
        write(empty_db, "bob")
    assert users(empty_db) == ["ada"]
    assert rows(empty_db) == before


def test_a_user_that_no_column_can_hold_is_refused(committed_db: CommittedDatabase) -> None:
    langgraph(committed_db, None)
    for user_id in ("a\x00", "\ud800", "a" * 800):
        with pytest.raises((InvalidPayload, LimitExceeded)):
            langgraph(committed_db, user_id)
    assert users(committed_db) == [None]


def test_a_branch_of_a_session_names_the_user(committed_db: CommittedDatabase) -> None:
    openai(committed_db, None)
    session = DjangoSession("s", using=committed_db.alias, tenant=committed_db.tenant, user_id="ada")
    async_to_sync(session.create_branch_from_turn)(1, "other")
    async_to_sync(session.add_items)(cast("Any", [{"role": "user", "content": "hi"}]))
    assert users(committed_db) == ["ada"]


def test_usage_that_was_recorded_before_belongs_to_the_user_who_is_named_later(
    committed_db: CommittedDatabase,
) -> None:
    openai(committed_db, None)
    ledger = DatabaseUsageStore(committed_db.alias, tenant=committed_db.tenant)
    entry = UsageEntry(
        kind=UsageKind.TOOL,
        session_id="s",
        step_count=0,
        timestamp=1,
        source=UsageSource(type="agent", name="guide"),
        tool_name="search",
        success=True,
        duration_ms=1,
    )
    ledger.record_entry(entry)
    openai(committed_db, "ada")
    assert len(ledger.query_usage(user_id="ada").entries) == 1


def test_a_name_is_a_change_of_the_session(committed_db: CommittedDatabase) -> None:
    adapter = SessionAdapter("third-party", committed_db.alias, tenant=committed_db.tenant)
    adapter.ensure("s")
    adapter.write("s", lambda session: None, user_id="ada")
    store = DatabaseStateStore(committed_db.alias, tenant=committed_db.tenant)
    state = store.load_state("s")
    assert state is not None
    assert (state.user_id, state.version) == ("ada", 2)
    adapter.write("s", lambda session: None, user_id="ada")
    unchanged = store.load_state("s")
    assert unchanged is not None
    assert unchanged.version == 2
