"""Retention of counters of ended periods, and of the records of repeated steps."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from helix_store.cleanup.retention import apply_retention
from helix_store.core.types import RetentionPolicy, StagedChanges, StepInfo
from helix_store.doctor import diagnose
from helix_store.models import Budget, BudgetCounter, Operation
from helix_store.stores import DatabaseBudgetStore, DatabaseStateStore, DatabaseUsageStore
from helix_store.testing.usage.base import tokens
from tests.databases import CommittedDatabase


def _at(moment: datetime) -> int:
    return int(moment.timestamp() * 1000)


def _kept(database: CommittedDatabase) -> dict[str, list[str]]:
    rows = BudgetCounter.objects.using(database.alias).filter(tenant=database.tenant)
    found: dict[str, list[str]] = {}
    for name, period in rows.order_by("name", "period").values_list("name", "period"):
        found.setdefault(name, []).append(period)
    return found


@pytest.mark.parametrize("page_size", [1, 200])
def test_counters_of_ended_periods_are_deleted_and_not_counted_again(
    committed_db: CommittedDatabase, page_size: int
) -> None:
    alias, tenant = committed_db.alias, committed_db.tenant
    store = DatabaseStateStore(alias, tenant=tenant)
    store.create_session("s", agent_type="agent", user_id="ada")
    budgets = DatabaseBudgetStore(alias, tenant=tenant)
    for period in ("day", "month", "total"):
        budgets.set_budget(period, scope="user", period=period, limit_tokens=100)
    # As if the budgets had been created long ago.
    rows = Budget.objects.using(alias).filter(tenant=tenant)
    rows.filter(name="day").update(counted_from="2026-01-01")
    rows.filter(name="month").update(counted_from="2026-01")
    usage = DatabaseUsageStore(alias, tenant=tenant)
    moments = [datetime(2026, month, 10, tzinfo=UTC) for month in (3, 4, 5)]
    for moment in moments:
        usage.record_entry(tokens("s", total=1, timestamp=_at(moment)))
    now = datetime(2026, 5, 12, tzinfo=UTC)
    policy = RetentionPolicy(budget_periods_days=10)
    counted = apply_retention(using=alias, tenant=tenant, policy=policy, now=now, dry_run=True)
    assert _kept(committed_db)["day"] == ["2026-03-10", "2026-04-10", "2026-05-10"]
    report = apply_retention(using=alias, tenant=tenant, policy=policy, now=now, page_size=page_size)
    expected = {"day": ["2026-05-10"], "month": ["2026-05"], "total": [""]}
    assert _kept(committed_db) == expected
    assert report.budget_periods == counted.budget_periods == {"budget_counter": 4}
    # A late entry of an ended period is not counted, so the counters agree with the ledger.
    usage.record_entry(tokens("s", total=1, timestamp=_at(moments[0])))
    assert _kept(committed_db) == expected
    faults = [finding.id for finding in diagnose(using=alias, tenant=tenant).findings if finding.table]
    assert faults == []
    again = apply_retention(using=alias, tenant=tenant, policy=policy, now=now)
    assert again.budget_periods in ({}, {"budget_counter": 0})


def test_old_records_of_repeats_are_deleted_in_one_tenant(committed_db: CommittedDatabase) -> None:
    alias = committed_db.alias
    for tenant in (committed_db.tenant, f"{committed_db.tenant} other"):
        store = DatabaseStateStore(alias, tenant=tenant)
        state = store.create_session("s", agent_type="agent")
        for number in (1, 2):
            store.stage_changes("s", f"step-{number}", StagedChanges(tool_call_id="call"))
            commit = store.save_state_and_promote_staging(
                "s",
                state,
                [{"role": "user", "content": "x"}],
                StepInfo(f"step-{number}", number),
                operation_id=f"operation-{number}",
            )
            state.version = commit.new_version
    rows = Operation.objects.using(alias).filter(session__tenant__startswith=committed_db.tenant)
    rows.filter(operation_id="operation-1").update(created_at=datetime.now(UTC) - timedelta(days=40))
    policy = RetentionPolicy(operations_days=30)
    counted = apply_retention(using=alias, tenant=committed_db.tenant, policy=policy, dry_run=True)
    before = rows.count()
    report = apply_retention(using=alias, tenant=committed_db.tenant, policy=policy, page_size=1)
    assert report.operations == counted.operations == {"operation": 1}
    assert rows.count() == before - 1
    assert rows.filter(operation_id="operation-1").count() == 1
    assert rows.filter(operation_id="operation-2").count() == 2
