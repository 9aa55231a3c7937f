"""What the contract says about a database and no other store shows: transactions, rows and costs."""

from __future__ import annotations

import math
import tracemalloc
from datetime import UTC, datetime, timedelta
from itertools import product
from typing import Any

import pytest
from django.apps import apps
from django.contrib.auth.models import Group
from django.db import DEFAULT_DB_ALIAS, transaction
from django.test.utils import CaptureQueriesContext

from helix_store.core.contracts import StateStore
from helix_store.exceptions import HelixStoreError, StaleStateError
from helix_store.models import (
    Checkpoint,
    Message,
    Session,
    UsageEntry,
)
from helix_store.models.fields import PayloadField
from helix_store.stores import DatabaseStateStore
from helix_store.testing.state_store.samples import (
    commit_step,
    full_session,
    loaded,
    messages,
)
from tests.cells import Cells, for_each
from tests.databases import CommittedDatabase
from tests.factories import UsageEntryFactory


@pytest.fixture
def store(committed_db: CommittedDatabase) -> DatabaseStateStore:
    return DatabaseStateStore(committed_db.alias, tenant=committed_db.tenant)


@pytest.fixture
def beside(committed_db: CommittedDatabase, store: DatabaseStateStore) -> Any:
    """What another connection sees of the sessions: name, version and number of messages."""

    def seen() -> list[tuple[Any, ...]]:
        with committed_db.second_connection() as connection, connection.cursor() as cursor:
            cursor.execute(
                f"SELECT session_id, version, message_count FROM {Session._meta.db_table} WHERE tenant = %s",
                [committed_db.tenant],
            )
            return list(cursor.fetchall())

    return seen


# --- The caller's transaction -----------------------------------------------------------------------


def test_a_step_and_the_callers_own_rows_are_committed_together(
    committed_db: CommittedDatabase, store: DatabaseStateStore, beside: Any
) -> None:
    store.create_session("session", agent_type="agent")
    with transaction.atomic(using=committed_db.alias):
        Group.objects.using(committed_db.alias).create(name=committed_db.tenant)
        commit_step(store, "session", 1, append=messages(2))
        assert beside() == [("session", 1, 0)]
    assert beside() == [("session", 2, 2)]
    assert Group.objects.using(committed_db.alias).filter(name=committed_db.tenant).exists()


def test_a_step_is_rolled_back_with_the_callers_own_rows(
    committed_db: CommittedDatabase, store: DatabaseStateStore
) -> None:
    full_session(store, "session")
    before = repr(store.load_state("session"))
    with transaction.atomic(using=committed_db.alias):
        Group.objects.using(committed_db.alias).create(name=committed_db.tenant)
        commit_step(store, "session", 3, append=messages(2))
        store.create_session("other", agent_type="agent")
        transaction.set_rollback(True, using=committed_db.alias)
    assert repr(store.load_state("session")) == before
    assert store.list_checkpoints("session").total == 2
    assert len(store.get_staged_changes("session", "step-3")) == 1
    assert not store.session_exists("other")
    assert not Group.objects.using(committed_db.alias).filter(name=committed_db.tenant).exists()


def test_a_refused_write_leaves_the_callers_transaction_whole(
    committed_db: CommittedDatabase, store: DatabaseStateStore
) -> None:
    store.create_session("session", agent_type="agent")
    with transaction.atomic(using=committed_db.alias):
        store.append_messages("session", messages(1))
        with pytest.raises(StaleStateError):
            store.append_messages("session", messages(1), expected_version=1)
        with pytest.raises(HelixStoreError):
            store.create_session("session", agent_type="agent")
        store.append_messages("session", messages(1, first=2))
    assert store.get_messages("session").messages == messages(2)


def test_a_store_without_an_alias_uses_the_default_database(
    committed_db: CommittedDatabase,
) -> None:
    DatabaseStateStore(tenant=committed_db.tenant).create_session("session", agent_type="agent")
    expected = committed_db.alias == DEFAULT_DB_ALIAS
    store = DatabaseStateStore(committed_db.alias, tenant=committed_db.tenant)
    assert store.session_exists("session") is expected


# --- Rows -------------------------------------------------------------------------------------------


def test_a_deleted_tree_leaves_no_row_in_any_table(
    committed_db: CommittedDatabase, store: DatabaseStateStore
) -> None:
    children = [
        (model, field.name)
        for model in apps.get_app_config("helix_store").get_models()
        for field in model._meta.get_fields()
        if field.concrete and field.remote_field and field.remote_field.model is Session
    ]
    assert len(children) > 6
    full_session(store, "root")
    store.create_session("child", agent_type="agent", parent_session_id="root")
    commit_step(store, "child", 1, append=messages(3))
    state = loaded(store, "root")
    store.save_state_and_promote_staging(
        "root", state, [], {"step_id": "step-4", "step_count": 4}, operation_id="operation"
    )
    sessions = Session.objects.using(committed_db.alias).filter(tenant=committed_db.tenant)
    UsageEntryFactory.create(session=sessions.get(session_id="child"))
    keys = list(sessions.values_list("pk", flat=True))
    assert store.delete_session("root") == 2
    left = {
        model.__name__: model._base_manager.using(committed_db.alias).filter(**{f"{name}__in": keys}).count()
        for model, name in children
    }
    assert set(left.values()) == {0}, left
    assert not UsageEntry.objects.using(committed_db.alias).filter(tenant=committed_db.tenant).exists()


def test_usage_can_outlive_its_session(committed_db: CommittedDatabase, store: DatabaseStateStore) -> None:
    store.create_session("session", agent_type="agent")
    session = Session.objects.using(committed_db.alias).get(tenant=committed_db.tenant)
    entry = UsageEntryFactory.create(session=session)
    assert store.delete_session("session", keep_usage=True) == 1
    kept = UsageEntry.objects.using(committed_db.alias).get(tenant=committed_db.tenant)
    assert (kept.entry_id, kept.session_id, kept.recorded_for) == (entry.entry_id, None, "session")


def test_a_checkpoint_holds_no_copy_of_the_messages(
    committed_db: CommittedDatabase, store: DatabaseStateStore
) -> None:
    store.create_session("session", agent_type="agent")
    for number in range(1, 4):
        commit_step(store, "session", number, append=[{"role": "user", "content": f"needle {number}"}])
    session = Session.objects.using(committed_db.alias).get(tenant=committed_db.tenant)
    assert Message.objects.using(committed_db.alias).filter(session=session).count() == 3
    states = Checkpoint.objects.using(committed_db.alias).filter(session=session)
    assert len(states) == 3
    assert not [state for state in states if "needle" in state.payload + state.envelope]


def test_the_messages_of_a_branch_keep_their_times(
    committed_db: CommittedDatabase, store: DatabaseStateStore
) -> None:
    store.create_session("session", agent_type="agent")
    store.append_messages("session", messages(3))
    rows = Message.objects.using(committed_db.alias)
    for number, row in enumerate(rows.filter(session__tenant=committed_db.tenant)):
        rows.filter(pk=row.pk).update(created_at=datetime(2020, 1, 1, tzinfo=UTC) + timedelta(days=number))
    store.branch_session("session", new_session_id="branch")
    copied, original = (
        list(
            rows.filter(session__tenant=committed_db.tenant, session__session_id=session_id)
            .order_by("sequence")
            .values_list("sequence", "role", "payload", "created_at")
        )
        for session_id in ("branch", "session")
    )
    assert copied == original
    assert len(copied) == 3


def test_sessions_of_the_same_moment_are_ordered_by_their_ids(
    committed_db: CommittedDatabase, store: StateStore
) -> None:
    # By code point, as no locale would put them.
    names = ["B", "Z", "a", "b", "é", "🙂"]
    for name in ("b", "🙂", "B", "é", "Z", "a"):
        store.create_session(name, agent_type="agent")
    moment = datetime(2026, 1, 1, tzinfo=UTC)
    sessions = Session.objects.using(committed_db.alias).filter(tenant=committed_db.tenant)
    sessions.update(created_at=moment, updated_at=moment)

    def walk(order_by: str, direction: str, limit: int) -> None:
        walked: list[str] = []
        cursor = None
        while not walked or cursor is not None:
            page = store.list_sessions(order_by=order_by, direction=direction, limit=limit, cursor=cursor)
            walked += [session.session_id for session in page.sessions]
            cursor = page.next_cursor
        assert walked == (names if direction == "asc" else names[::-1])

    with Cells() as cells:
        for row in product(("created_at", "updated_at"), ("asc", "desc"), (1, 2, 3)):
            with cells.check(row):
                walk(*row)


# --- Costs ------------------------------------------------------------------------------------------


@for_each("history", [0, 1, 1_000])
def test_loading_a_state_is_one_query_whatever_the_history(
    committed_db: CommittedDatabase, store: DatabaseStateStore, history: int
) -> None:
    session_id = store.create_session(agent_type="agent").session_id
    for number in range(1, 4):
        commit_step(store, session_id, number, append=messages(history // 3))
    with CaptureQueriesContext(committed_db.connection) as captured:
        store.load_state(session_id)
    assert len(captured) == 1


def test_lists_never_read_a_payload(committed_db: CommittedDatabase, store: DatabaseStateStore) -> None:
    full_session(store, "session")
    payloads = {
        field.column
        for model in (Session, Checkpoint)
        for field in model._meta.fields
        if isinstance(field, PayloadField)
    }
    assert {"payload", "envelope", "suspension_context"} <= payloads
    with CaptureQueriesContext(committed_db.connection) as captured:
        store.list_sessions(tags=["t"], metadata={"m": "1"})
        store.list_checkpoints("session")
    read = " ".join(query["sql"] for query in captured.captured_queries)
    assert len(captured) >= 2
    assert {column for column in payloads if f'"{column}"' in read} == set()


@for_each("chunk_size", [1, 40, 100, 1_000])
def test_iterating_is_one_query_for_each_chunk(
    committed_db: CommittedDatabase, store: DatabaseStateStore, chunk_size: int
) -> None:
    session_id = store.create_session(agent_type="agent").session_id
    store.append_messages(session_id, messages(200))
    with CaptureQueriesContext(committed_db.connection) as captured:
        assert sum(1 for _ in store.iter_messages(session_id, chunk_size=chunk_size)) == 200
    # One to see that the session is there, and perhaps one to see that nothing follows.
    assert math.ceil(200 / chunk_size) <= len(captured) <= math.ceil(200 / chunk_size) + 2


def test_iterating_takes_the_memory_of_a_chunk_and_not_of_the_history(store: DatabaseStateStore) -> None:
    store.create_session("session", agent_type="agent")
    long = [{"role": "user", "content": "x" * 10_000}] * 500
    for _ in range(4):
        store.append_messages("session", long)
    tracemalloc.start()
    try:
        count = sum(1 for _ in store.iter_messages("session", chunk_size=20))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert count == 2_000
    assert peak < 4_000_000, "twenty messages are 200 kB, all of them are 20 MB"


def test_branching_copies_any_number_of_messages_with_the_same_statements(
    committed_db: CommittedDatabase, store: DatabaseStateStore
) -> None:
    counts = set()
    for history in (1, 500):
        name = f"session {history}"
        store.create_session(name, agent_type="agent")
        store.append_messages(name, messages(history))
        with CaptureQueriesContext(committed_db.connection) as captured:
            store.branch_session(name)
        counts.add(len(captured))
    assert len(counts) == 1
