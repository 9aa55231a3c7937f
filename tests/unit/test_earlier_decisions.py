"""What migration 0012 makes of the answers that sessions had stored before there were decisions."""

from __future__ import annotations

from datetime import UTC, datetime
from importlib import import_module
from typing import Any

from helix_store.core.approvals import call_digest
from helix_store.sessions.tool_calls import (
    LiveDecisions,
    StoredDecision,
    ToolCalls,
    approved_call,
    marks_of,
)

AT = datetime(2026, 1, 1, tzinfo=UTC)
T = 1_600_000_000_000
CALL: dict[str, Any] = {"tool_name": "pay", "input": 7, "approval_id": "a", "requested_at": T}
DIGEST = call_digest("pay", 7)
STORED = {"tool_name": "pay", "input": 7, "digest": DIGEST, "actors": ["ann", "user:1"]}
YES = {"approved": True, "reason": None, "submitted_at": T, "actors": ["ann", "user:1"]}

_migration = import_module("helix_store.migrations.0012_decisions")


def _moved(
    pending: dict[str, Any], completed: dict[str, Any], approved: dict[str, Any]
) -> tuple[list[StoredDecision], LiveDecisions]:
    rows, live = _migration.earlier_decisions(pending, completed, approved, at=AT)
    defaults = dict.fromkeys(("content", "reason", "used_at", "used_by_step", "used_by_effect"))
    decisions = [StoredDecision(**{**defaults, **row}) for row in rows]
    assert [each.version for each in decisions] == list(range(-len(rows), 0))
    decided = LiveDecisions(live)
    decided.keep(marks_of(pending, completed))
    assert decided.column() == (live or None)
    return decisions, decided


def test_an_unused_approval_can_be_used() -> None:
    for pending, completed in (({"c": {**CALL, **YES}}, {}), ({}, {"c": YES})):
        decisions, live = _moved(pending, completed, {"c": STORED})
        entry = (pending or completed)["c"]
        is_pending = bool(pending)
        _, call = approved_call("c", entry, live, decisions, is_pending=is_pending, is_own=True)
        assert (call.input, call.actors, call.digest) == (7, ["ann", "user:1"], DIGEST)


def test_an_approval_without_a_record_has_no_actors() -> None:
    decisions, live = _moved({"c": {**CALL, **YES}}, {}, {})
    _, call = approved_call("c", {**CALL, **YES}, live, decisions, is_pending=True, is_own=True)
    assert (call.input, call.actors) == (7, [])


def test_a_use_stays_a_use() -> None:
    used = {"digest": DIGEST, "actors": ["ann"], "used_by": "step-3"}
    (decision,), live = _moved({}, {"c": YES}, {"c": used})
    assert (decision.used_by_step, decision.actor, decision.is_final) == ("step-3", "ann", True)
    assert live.column() is None


def test_a_later_rejection_and_an_answer_that_was_reduced_do_not_count() -> None:
    no = {"approved": False, "reason": None, "submitted_at": T + 1, "actors": ["bob"]}
    decisions, live = _moved({"c": {**CALL, **no}}, {}, {"c": STORED})
    assert [each.outcome for each in decisions] == ["approved", "approved", "rejected"]
    assert live.column() is None
    assert _moved({}, {"c": {"submitted_at": T}}, {"c": STORED})[1].column() is None


def test_one_of_two_approvals_counts() -> None:
    call = {**CALL, "approvals": 2, "digest": DIGEST, "approved_by": ["ann"]}
    (decision,), live = _moved({"c": call}, {}, {})
    assert (decision.actor, decision.is_final) == ("ann", False)
    assert live.approved_by("c", call) == ["ann"]


def test_an_expired_answer_is_known() -> None:
    expired = {"approved": False, "reason": "deadline_passed", "submitted_at": T}
    (decision,), _ = _moved({"c": {**CALL, **expired}}, {}, {})
    assert decision.outcome == "expired"


def test_what_was_answered_is_not_open_again() -> None:
    """Also if its deadline has passed, whoever writes the state next."""
    answers: dict[str, dict[str, Any]] = {
        "approved": YES,
        "approved before approvals were stored": YES,
        "rejected": {"approved": False, "reason": None, "submitted_at": T + 1, "actors": ["bob"]},
        "failed": {"error": "no", "submitted_at": T + 2},
        "expired": {"approved": False, "reason": "deadline_passed", "submitted_at": T + 3},
    }
    pending = {name: {**CALL, "deadline": T, **answer} for name, answer in answers.items()}
    decisions, live = _moved(pending, {}, {"approved": STORED})
    calls = ToolCalls(pending, {}, live.column())
    assert calls.open(decisions) == {}
    assert calls.is_answered(decisions)
    live.use(asking for _, asking in live.askings())
    used = [each._replace(used_at=AT) if each.is_final else each for each in decisions]
    assert ToolCalls(pending, {}, live.column()).open(used) == {}
