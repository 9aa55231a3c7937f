"""The next deadline of a session is that of the first call that nobody has answered."""

from __future__ import annotations

from typing import Final

import pytest

from helix_store.doctor import Diagnosis, diagnose
from helix_store.models import Session
from helix_store.stores import DatabaseStateStore
from helix_store.testing.state_store.approvals import approve, ask_approval, forge_answer, use_once
from helix_store.testing.state_store.samples import loaded
from helix_store.testing.state_store.tool_calls import APPROVE, LONG_AGO
from tests.databases import CommittedDatabase

ANSWERED: Final = ("approved", "used", "rejected", "failed")


def _overdue(store: DatabaseStateStore) -> list[str]:
    return sorted(call.session_id for call in store.find_expired_pending())


def _diagnosed(database: CommittedDatabase, *, fix: bool = False) -> list[tuple[str, int, int]]:
    diagnosis: Diagnosis = diagnose(using=database.alias, tenant=database.tenant, fix=fix)
    return [(finding.id, finding.count, finding.fixed) for finding in diagnosis.findings]


@pytest.mark.thorough
def test_the_doctor_fixes_the_deadline_of_a_forged_answer_and_no_other(
    empty_db: CommittedDatabase,
) -> None:
    """An earlier version stored no deadline for it."""
    store = DatabaseStateStore(empty_db.alias, tenant=empty_db.tenant)
    for session_id in (*ANSWERED, "forged", "open"):
        store.create_session(session_id, agent_type="agent")
        ask_approval(store, session_id, {**APPROVE, "deadline": LONG_AGO, "on_expiry": "reject"})
    forge_answer(store, "forged")
    for session_id in ("approved", "used", "rejected"):
        approve(store, session_id, approved=session_id != "rejected")
    store.submit_tool_result("failed", "call", error="no")
    use_once(store, "used")
    assert _diagnosed(empty_db) == []
    rows = Session.objects.using(empty_db.alias).filter(tenant=empty_db.tenant)
    rows.filter(session_id="forged").update(pending_deadline=None)
    assert _overdue(store) == ["open"]
    assert _diagnosed(empty_db, fix=True) == [("deadline-off", 1, 1)]
    assert _overdue(store) == ["forged", "open"]
    # A deadline of an answered call hides no other call, but is not true.
    deadline = rows.get(session_id="forged").pending_deadline
    assert rows.filter(session_id__in=ANSWERED).update(pending_deadline=deadline) == len(ANSWERED)
    assert _overdue(store) == ["forged", "open"]
    assert _diagnosed(empty_db, fix=True) == [("deadline-off", len(ANSWERED), len(ANSWERED))]
    for session_id in ANSWERED:
        store.save_state(session_id, loaded(store, session_id))
    assert _diagnosed(empty_db) == []
