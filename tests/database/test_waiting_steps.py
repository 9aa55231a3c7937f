"""A step that waits for the session's lock finds another session than the one that it saw at its start."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from django.db import transaction
from django.db.backends.base.base import BaseDatabaseWrapper

from helix_store.core.types import (
    SessionState,
    StepCommit,
    StepInfo,
)
from helix_store.exceptions import StaleStateError
from helix_store.stores import DatabaseStateStore
from tests.cells import for_each
from tests.database.waiting import in_background, until_it_waits
from tests.databases import CommittedDatabase
from tests.invariants import broken_invariants

STATE = SessionState(session_id="s", agent_type="t", custom_state={"saved": True})
MESSAGE = {"role": "user", "content": "hello"}

MEANWHILE: dict[str, Callable[[DatabaseStateStore], Any]] = {
    "its checkpoints are pruned": lambda store: store.prune_checkpoints("s", keep=0),
    "messages are appended": lambda store: store.append_messages("s", [MESSAGE]),
    "its state is saved": lambda store: store.save_state("s", STATE),
    "its state is saved and its checkpoints pruned": lambda store: (
        store.save_state("s", STATE),
        store.prune_checkpoints("s", keep=0),
    ),
    "another step is committed": lambda store: store.save_state_and_promote_staging(
        "s", STATE, [], StepInfo("other", 7)
    ),
    "a change is staged": lambda store: store.stage_changes(
        "s", "step-2", {"tool_call_id": "late", "merge_changes": {"late": 1}}
    ),
    "a staged change is replaced": lambda store: store.stage_changes(
        "s", "step-2", {"tool_call_id": "early", "merge_changes": {"early": 2}}
    ),
    "its status changes": lambda store: store.update_status("s", "paused"),
}


@pytest.mark.thorough
@for_each("has_checkpoint", [True, False], ids=["after a step", "after a save"])
@for_each("meanwhile", MEANWHILE.values(), ids=MEANWHILE)
@for_each("expected_version", [None, 2])
def test_a_step_that_waited_leaves_a_whole_session(
    store: DatabaseStateStore,
    other: BaseDatabaseWrapper,
    postgres_db: CommittedDatabase,
    meanwhile: Callable[[DatabaseStateStore], Any],
    has_checkpoint: bool,
    expected_version: int | None,
) -> None:
    store.create_session("s", agent_type="t")
    if has_checkpoint:
        store.save_state_and_promote_staging("s", STATE, [MESSAGE], StepInfo("step-1", 1))
    else:
        store.save_state("s", STATE)
    store.stage_changes("s", "step-2", {"tool_call_id": "early", "merge_changes": {"early": 1}})
    others_store = DatabaseStateStore(other.alias, tenant=postgres_db.tenant)

    with transaction.atomic(using=postgres_db.alias):
        meanwhile(store)
        moved_on = store.load_state("s").version != 2  # type: ignore[union-attr]  # it is there
        outcome = in_background(
            other,
            lambda: others_store.save_state_and_promote_staging(
                "s",
                SessionState(session_id="s", agent_type="t", custom_state={"step": 2}),
                [MESSAGE, MESSAGE],
                StepInfo("step-2", 2),
                expected_version=expected_version,
            ),
        )
        until_it_waits(postgres_db, other)

    result = outcome()
    assert broken_invariants(postgres_db) == []
    if expected_version is not None and moved_on:
        assert isinstance(result, StaleStateError)
    else:
        assert isinstance(result, StepCommit)
        # What was staged while the step waited is in its state or still staged, never half.
        left = store.get_staged_changes("s", "step-2")
        if left:
            store.promote_staging("s", "step-2")
        loaded = store.load_state("s")
        assert loaded is not None
        early = 2 if meanwhile is MEANWHILE["a staged change is replaced"] else 1
        late = {"late": 1} if meanwhile is MEANWHILE["a change is staged"] else {}
        assert loaded.custom_state == {"step": 2, "early": early, **late}
        assert loaded.version == result.new_version + bool(left)
    store.save_state("s", STATE)
    assert broken_invariants(postgres_db) == []
