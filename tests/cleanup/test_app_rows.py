"""A cleanup deletes the expired rows of other apps: here the memories of LangGraph."""

from __future__ import annotations

import re
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from django.test.utils import CaptureQueriesContext

from helix_store.catalogue.table import _tables
from helix_store.cleanup import CleanupDetails, CleanupSummary, expired_session_cleanup
from helix_store.cleanup.expiry import expired_session_cleanup_batches
from helix_store.contrib.langgraph import DjangoStore
from helix_store.contrib.langgraph.models import LangGraphMemory
from helix_store.core import moments
from helix_store.engine.database import Database
from helix_store.stores import DatabaseStateStore, InMemoryStateStore
from tests.adapters.conftest import describe
from tests.commands.running import run
from tests.databases import CommittedDatabase, fresh_tenant

LONG_AGO = datetime(2001, 6, 1, tzinfo=UTC)


def remember(database: CommittedDatabase, tenant: str, *, expired: int = 0, kept: int = 0) -> None:
    store = DjangoStore(using=database.alias, tenant=tenant)
    for number in range(expired):
        store.put(("users",), f"expired-{number}", {}, ttl=60)
    memories(database, tenant).update(expires_at=LONG_AGO)
    for number in range(kept):
        store.put(("users",), f"kept-{number}", {}, ttl=60 if number else None)


def memories(database: CommittedDatabase, tenant: str) -> Any:
    return LangGraphMemory.objects.using(database.alias).filter(tenant=tenant)


def describe_sweep(monkeypatch: pytest.MonkeyPatch, sweep: Any) -> None:
    """Let the app have registered another sweep."""
    describe(monkeypatch, replace(_tables[LangGraphMemory], sweep=sweep))


def test_what_has_expired_of_any_tenant_is_deleted_and_nothing_else(empty_db: CommittedDatabase) -> None:
    tenants = ["", fresh_tenant(), fresh_tenant()]
    for tenant in tenants:
        remember(empty_db, tenant, expired=2, kept=2)
    assert expired_session_cleanup(using=empty_db.alias) == CleanupSummary(swept=6)
    assert [memories(empty_db, tenant).count() for tenant in tenants] == [2, 2, 2]
    assert expired_session_cleanup(using=empty_db.alias) == CleanupSummary()


def test_a_cleanup_of_one_store_sweeps_its_tenant_alone(committed_db: CommittedDatabase) -> None:
    other = fresh_tenant()
    for tenant in (committed_db.tenant, other):
        remember(committed_db, tenant, expired=1)
    store = DatabaseStateStore(committed_db.alias, tenant=committed_db.tenant)
    assert expired_session_cleanup(state_store=store).swept == 1
    assert [memories(committed_db, tenant).count() for tenant in (committed_db.tenant, other)] == [0, 1]
    assert expired_session_cleanup(state_store=InMemoryStateStore()).swept == 0


def test_the_time_of_the_cleanup_decides(committed_db: CommittedDatabase) -> None:
    remember(committed_db, committed_db.tenant, expired=1, kept=2)
    store = DatabaseStateStore(committed_db.alias, tenant=committed_db.tenant)
    assert expired_session_cleanup(state_store=store, now=LONG_AGO - timedelta(days=1)).swept == 0
    later = datetime.now(UTC) + timedelta(days=1)
    assert expired_session_cleanup(state_store=store, now=later).swept == 2
    assert memories(committed_db, committed_db.tenant).get().key == "kept-0"


def test_a_dry_run_deletes_nothing(committed_db: CommittedDatabase) -> None:
    remember(committed_db, committed_db.tenant, expired=1)
    store = DatabaseStateStore(committed_db.alias, tenant=committed_db.tenant)
    assert expired_session_cleanup(state_store=store, dry_run=True) == CleanupSummary()
    assert memories(committed_db, committed_db.tenant).count() == 1


def test_a_sweep_that_fails_is_told_and_stops_no_other_tenant(
    empty_db: CommittedDatabase, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    usual = _tables[LangGraphMemory].sweep
    assert usual is not None

    def sweep(db: Database, now: datetime) -> int:
        if db.tenant == "a":
            raise LookupError("broken")
        return usual(db, now)

    describe_sweep(monkeypatch, sweep)
    for tenant in ("a", "b"):
        remember(empty_db, tenant, expired=1)
    details = CleanupDetails()
    *_, summary = expired_session_cleanup_batches(using=empty_db.alias, details=details)
    assert summary == CleanupSummary(errors=1, swept=1)
    assert (details.not_swept, details.with_problems) == ({"langgraph_memory"}, set())
    assert "Expired rows of langgraph_memory of tenant 'a' were not deleted." in caplog.text


def test_the_command_tells_what_it_has_swept_and_what_it_could_not(
    empty_db: CommittedDatabase, monkeypatch: pytest.MonkeyPatch
) -> None:
    remember(empty_db, "a", expired=3)
    ended = run(empty_db.alias, "cleanup_expired_sessions", "--format", "json")
    assert (ended.code, ended.data["swept"], ended.data["errors"]) == (0, 3, 0)
    remember(empty_db, "a", expired=1)
    describe_sweep(monkeypatch, lambda db, now: 1 // 0)
    failed = run(empty_db.alias, "cleanup_expired_sessions", "--format", "json")
    assert (failed.code, failed.data["swept"], failed.data["errors"]) == (1, 0, 1)
    assert "expired rows of langgraph_memory were not deleted" in failed.err


def test_a_tenant_is_one_look_up(empty_db: CommittedDatabase) -> None:
    """A statement for each tenant and one more, whatever number of memories they have."""

    def asked() -> int:
        with CaptureQueriesContext(empty_db.connection) as captured:
            expired_session_cleanup(using=empty_db.alias, now=moments.now())
        look_up = re.compile(r'SELECT "\w*lg_memory"\."tenant"( AS "tenant")? FROM')
        return sum(bool(look_up.match(query["sql"])) for query in captured)

    remember(empty_db, "a", kept=1)
    few = asked()
    remember(empty_db, "a", kept=20)
    assert asked() == few
    remember(empty_db, "b", kept=1)
    assert asked() == few + 1
