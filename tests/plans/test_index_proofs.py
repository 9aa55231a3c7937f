"""Every list, filter and sweep of the public API finds its rows by an index, and reads few others."""

from __future__ import annotations

from django.test import override_settings

from tests.cells import for_each
from tests.plans.admin_calls import ADMIN_CALLS
from tests.plans.budget_calls import BUDGET_CALLS
from tests.plans.calls import PORTABLE, POSTGRES, Call
from tests.plans.checkpointer_calls import CHECKPOINTER_CALLS
from tests.plans.doctor_calls import DOCTOR_CALLS
from tests.plans.explained import Plan, plans_of
from tests.plans.retention_calls import RETENTION_CALLS
from tests.plans.rows import World
from tests.plans.session_calls import SESSION_CALLS
from tests.plans.session_lists import SESSION_LISTS
from tests.plans.usage_and_stream_calls import STREAM_CALLS, USAGE_CALLS

CALLS = [
    *SESSION_LISTS,
    *SESSION_CALLS,
    *CHECKPOINTER_CALLS,
    *USAGE_CALLS,
    *BUDGET_CALLS,
    *STREAM_CALLS,
    *RETENTION_CALLS,
    *DOCTOR_CALLS,
    *ADMIN_CALLS,
]


@for_each("call", CALLS, ids=lambda call: call.name)
def test_rows_are_found_by_an_index_and_come_in_its_order(world: World, call: Call) -> None:
    for form, fast_paths in _forms(world):
        with override_settings(HELIX_STORE={"FAST_PATHS": fast_paths}):
            plans = plans_of(world.database, call.make(world), undone=not call.commits)
        assert plans
        faults = [fault for plan in plans if (fault := _fault(call, plan))]
        if form in call.gaps:
            assert faults, f"An index serves this now ({form}): the call has a gap less."
        else:
            assert not faults, faults[0]


def _forms(world: World) -> tuple[tuple[str, bool], ...]:
    """On PostgreSQL hot calls have two forms."""
    return ((POSTGRES, True), (PORTABLE, False)) if world.name == POSTGRES else ((world.name, True),)


def _fault(call: Call, plan: Plan) -> str | None:
    if plan.read_whole:
        return f"{plan.read_whole} read as a whole:\n{plan.text}"
    if plan.rows_read > call.reads:
        return f"{plan.rows_read} rows read, not {call.reads}:\n{plan.text}"
    if plan.sorted_rows > call.sorts:
        return f"{plan.sorted_rows} rows sorted, not {call.sorts}:\n{plan.text}"
    return None
