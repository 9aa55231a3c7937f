"""Rows whose JSON has another shape than their readers expect, or whose period is none."""

from __future__ import annotations

from helix_store import Store
from helix_store.doctor import diagnose
from helix_store.models import BudgetCounter, Decision, Effect
from tests.databases import CommittedDatabase


def test_the_doctor_finds_what_no_call_can_read(committed_db: CommittedDatabase) -> None:
    alias, tenant = committed_db.alias, committed_db.tenant
    store = Store(alias, tenant=tenant)
    with store.new_session("session", agent_type="agent").turn() as turn:
        with turn.effect("effect", input=1) as effect:
            effect.done(1)
        with turn.step() as step:
            step.ask_approval("call", "pay", {"euros": 5})
    store.sessions.submit_tool_result("session", "call", approved=True, approval_id="call", actor="ann")
    BudgetCounter.objects.using(alias).create(tenant=tenant, name="daily", period="x")
    Decision.objects.using(alias).filter(session__tenant=tenant).update(content="[]")
    Effect.objects.using(alias).filter(session__tenant=tenant).update(actors="1")
    found = {(each.id, each.table) for each in diagnose(using=alias, tenant=tenant).findings}
    assert found >= {
        ("app-rows-unsound", "budget_counter"),
        ("app-rows-unsound", "effect"),
        ("unreadable-payload", "decision"),
    }
