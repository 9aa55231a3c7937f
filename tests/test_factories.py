"""What the factories write is what a store reads, and can go on with."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from helix_store.core import moments
from helix_store.core.types import (
    RunStatus,
    SessionStatus,
    StagedChanges,
)
from helix_store.stores import DatabaseStateStore
from helix_store.testing.state_store.samples import commit_step, message
from tests.databases import CommittedDatabase
from tests.factories import (
    CheckpointFactory,
    InterruptRequestFactory,
    LockFactory,
    MessageFactory,
    OperationFactory,
    RunFactory,
    SessionFactory,
    StagedChangeFactory,
    SubSessionRefFactory,
    UsageEntryFactory,
)
from tests.invariants import broken_invariants


@pytest.fixture
def store(committed_db: CommittedDatabase) -> DatabaseStateStore:
    return DatabaseStateStore(committed_db.alias, tenant=committed_db.tenant)


@pytest.fixture
def session(committed_db: CommittedDatabase) -> Any:
    return SessionFactory.create(
        using=committed_db.alias, tenant=committed_db.tenant, custom_state={"n": 1.0}
    )


def test_a_session_has_the_state_that_was_given(
    committed_db: CommittedDatabase, store: DatabaseStateStore
) -> None:
    given = {
        "session_id": "session",
        "status": SessionStatus.PAUSED,
        "custom_state": {"b": 1.0, "a": [None]},
        "output": [1],
        "tags": ["t"],
        "pending_client_tool_calls": {"call": {"tool_name": "ask"}},
        "expires_at": 1_900_000_000_000,
    }
    SessionFactory.create(using=committed_db.alias, tenant=committed_db.tenant, **given)
    state = store.load_state("session")
    assert repr({name: getattr(state, name) for name in given}) == repr(given)
    assert [head.session_id for head in store.list_sessions(status="paused", tags=["t"]).sessions] == [
        "session"
    ]


def test_messages_and_checkpoints_are_those_that_the_store_reads(
    store: DatabaseStateStore, session: Any
) -> None:
    MessageFactory.create(session=session, content="one")
    checkpoint = CheckpointFactory.create(
        session=session, state={"custom_state": {"n": 2}, "status": "running"}
    )
    MessageFactory.create(session=session, role="assistant", content=["two"])
    assert store.get_messages(session.session_id).messages == [message("one"), message(["two"], "assistant")]
    read = store.get_latest_checkpoint(session.session_id)
    assert read is not None
    assert (read.checkpoint_id, read.message_count) == (checkpoint.checkpoint_id, 1)
    assert (read.state.custom_state, read.status) == ({"n": 2}, SessionStatus.RUNNING)


def test_the_other_rows_of_a_session_are_those_that_the_store_reads(
    store: DatabaseStateStore, session: Any
) -> None:
    RunFactory.create(session=session)
    run = RunFactory.create(session=session, status=RunStatus.RUNNING)
    StagedChangeFactory.create(session=session, tool_call_id="call", merge_changes={"a": 1})
    SubSessionRefFactory.create(session=session, sub_session_id="sub")
    InterruptRequestFactory.create(session=session, reason="lunch")
    current = store.get_current_run(session.session_id)
    assert current is not None
    assert (current.run_id, current.turn, current.ended_at) == (run.run_id, 2, None)
    staged = store.get_staged_changes(session.session_id, "step-1")
    assert staged == [StagedChanges(tool_call_id="call", merge_changes={"a": 1})]
    assert [ref.sub_session_id for ref in store.get_sub_session_refs(session.session_id)] == ["sub"]
    interrupt = store.check_interrupt(session.session_id)
    assert interrupt is not None
    assert interrupt.reason == "lunch"


def test_a_store_goes_on_where_the_factories_left_off(
    committed_db: CommittedDatabase, store: DatabaseStateStore, session: Any
) -> None:
    MessageFactory.create(session=session)
    kept = CheckpointFactory.create(session=session)
    MessageFactory.create(session=session)
    commit = commit_step(store, session.session_id, 2, append=[message("three")])
    assert store.get_message_count(session.session_id) == 3
    assert broken_invariants(committed_db) == []
    assert store.restore_checkpoint(session.session_id, kept.checkpoint_id) == commit.new_version + 1
    assert broken_invariants(committed_db) == []


def test_a_row_without_a_session_gets_one_in_the_same_database(committed_db: CommittedDatabase) -> None:
    for row in (
        MessageFactory.create(using=committed_db.alias, session__tenant=committed_db.tenant),
        UsageEntryFactory.create(using=committed_db.alias, session__tenant=committed_db.tenant),
        OperationFactory.create(using=committed_db.alias, session__tenant=committed_db.tenant),
    ):
        row.refresh_from_db(using=committed_db.alias)
        assert row._state.db == row.session._state.db == committed_db.alias
        assert row.session.tenant == committed_db.tenant


def test_a_usage_entry_names_its_session_as_the_ledger_does(session: Any) -> None:
    entry = UsageEntryFactory.create(session=session)
    assert (entry.tenant, entry.recorded_for) == (session.tenant, session.session_id)
    assert entry.total_tokens == entry.prompt_tokens + entry.completion_tokens == 120


def test_a_lock_is_free_unless_it_is_given_a_holder(committed_db: CommittedDatabase) -> None:
    free = LockFactory.create(using=committed_db.alias, tenant=committed_db.tenant)
    expires_at = moments.now() + timedelta(minutes=1)
    held = LockFactory.create(
        using=committed_db.alias, tenant=committed_db.tenant, owner="me", expires_at=expires_at
    )
    assert (free.owner, free.expires_at) == (None, None)
    held.refresh_from_db(using=committed_db.alias)
    assert (held.owner, held.expires_at) == ("me", expires_at)
