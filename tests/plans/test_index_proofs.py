"""Every list, filter and sweep of the public API finds its rows by an index, and reads few others."""

from __future__ import annotations

import pytest
from django.test import override_settings

from tests.plans.calls import POSTGRES, Call
from tests.plans.checkpointer_calls import CHECKPOINTER_CALLS
from tests.plans.explained import plans_of
from tests.plans.rows import World
from tests.plans.session_calls import SESSION_CALLS
from tests.plans.session_lists import SESSION_LISTS
from tests.plans.usage_and_stream_calls import STREAM_CALLS, USAGE_CALLS

CALLS = [*SESSION_LISTS, *SESSION_CALLS, *CHECKPOINTER_CALLS, *USAGE_CALLS, *STREAM_CALLS]


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.name)
def test_rows_are_found_by_an_index_and_come_in_its_order(
    request: pytest.FixtureRequest, world: World, call: Call
) -> None:
    if world.name in call.gaps:
        request.applymarker(pytest.mark.xfail(reason=call.gaps[world.name], strict=True))
    # On PostgreSQL both forms of the hot calls.
    for fast_paths in (True, False) if world.name == POSTGRES else (True,):
        with override_settings(HELIX_STORE={"FAST_PATHS": fast_paths}):
            plans = plans_of(world.database, call.make(world), undone=not call.commits)
        assert plans
        for plan in plans:
            assert not plan.read_whole, plan.text
            assert plan.rows_read <= call.reads, f"read {plan.rows_read}: {plan.text}"
            assert plan.sorted_rows <= call.sorts, f"sorted {plan.sorted_rows}: {plan.text}"
