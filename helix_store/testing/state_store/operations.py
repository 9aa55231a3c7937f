"""Tests for operation ids: a repeated step returns the first result and applies nothing twice."""

from __future__ import annotations

from typing import Any

import pytest

from helix_store.core.contracts import StateStore
from helix_store.core.types import (
    SessionState,
    StepCommit,
    StepInfo,
)
from helix_store.exceptions import IdempotencyConflict, StaleStateError
from helix_store.testing.cells import table
from helix_store.testing.state_store.base import StoreTests
from helix_store.testing.state_store.samples import (
    commit_step,
    contents,
    loaded,
    message,
    messages,
    stage,
    step,
)

__all__ = ["OperationContract"]


class OperationContract(StoreTests):
    def test_a_repeat_returns_the_first_result_and_writes_nothing(
        self, store: StateStore, session_id: str
    ) -> None:
        stage(store, session_id, "call", merge_changes={"list": [1]})
        first = _commit(store, session_id)
        before = contents(store, session_id)
        assert [_commit(store, session_id) for _ in range(3)] == [first] * 3
        assert contents(store, session_id) == before

    def test_a_repeat_comes_before_the_version_check(self, store: StateStore, session_id: str) -> None:
        first = _commit(store, session_id, expected_version=1)
        store.update_status(session_id, "paused")
        assert _commit(store, session_id, expected_version=1) == first

    def test_a_repeat_returns_the_first_result_after_later_steps_and_pruning(
        self, store: StateStore, session_id: str
    ) -> None:
        first = _commit(store, session_id)
        commit_step(store, session_id, 2, append=messages(1))
        store.prune_checkpoints(session_id, keep=1)
        before = contents(store, session_id)
        assert _commit(store, session_id) == first
        assert contents(store, session_id) == before

    def test_a_repeat_leaves_what_was_staged_since(self, store: StateStore, session_id: str) -> None:
        first = _commit(store, session_id)
        stage(store, session_id, "late", merge_changes={"late": True})
        assert _commit(store, session_id) == first
        assert len(store.get_staged_changes(session_id, "step-1")) == 1

    def test_values_that_the_store_owns_make_no_other_payload(
        self, store: StateStore, session_id: str
    ) -> None:
        first = _commit(store, session_id)
        state = SessionState(session_id=session_id, agent_type="agent", version=99, message_count=42)
        assert _commit(store, session_id, state=state) == first

    @table(
        "other",
        [
            {"custom_state": {"n": 1}},
            {"title": "another"},
            {"status": "paused"},
            {"append": [message("other")]},
            {"append": []},
            {"append": [message("hello"), message("hello")]},
            {"step": StepInfo("step-2", 1, 10)},
            {"step": StepInfo("step-1", 2, 10)},
            {"step": StepInfo("step-1", 1, 11)},
            # The digits repeat in a row.
            {"step": StepInfo("step-1", 1, 1), "run_id": "0"},
            {"run_id": "run-1"},
        ],
    )
    def test_another_payload_under_the_same_id_is_refused(
        self, store: StateStore, session_id: str, other: dict[str, Any]
    ) -> None:
        store.start_run(session_id, "run-1")
        _commit(store, session_id)
        before = contents(store, session_id)
        with pytest.raises(IdempotencyConflict) as caught:
            _commit(store, session_id, **other)
        assert caught.value.operation_id == "operation"
        assert contents(store, session_id) == before

    @table(("first", "second"), [(1, 1.0), (1, True), (0.0, -0.0), ("\ud83d\ude00", "😀")])
    def test_payloads_that_are_merely_equal_in_python_are_different(
        self, store: StateStore, session_id: str, first: Any, second: Any
    ) -> None:
        _commit(store, session_id, custom_state={"value": first})
        with pytest.raises(IdempotencyConflict):
            _commit(store, session_id, custom_state={"value": second})

    def test_ids_of_operations_belong_to_their_session(self, store: StateStore, session_id: str) -> None:
        store.create_session("other", agent_type="agent")
        _commit(store, session_id)
        commit = _commit(store, "other", append=messages(3))
        assert commit.new_version == 2
        assert store.get_message_count("other") == 3

    def test_another_id_is_another_step(self, store: StateStore, session_id: str) -> None:
        first = _commit(store, session_id)
        second = _commit(store, session_id, append=messages(2), operation_id="another")
        assert second.new_version == first.new_version + 1
        assert _commit(store, session_id) == first
        assert _commit(store, session_id, append=messages(2), operation_id="another") == second
        assert store.get_message_count(session_id) == 3

    def test_a_refused_step_does_not_use_up_its_id(self, store: StateStore, session_id: str) -> None:
        with pytest.raises(StaleStateError):
            _commit(store, session_id, expected_version=9)
        assert _commit(store, session_id, expected_version=1).new_version == 2

    def test_the_same_operation_many_times_at_once_is_applied_once(
        self, store: StateStore, session_id: str
    ) -> None:
        commits = self.at_once(*[lambda: _commit(store, session_id, expected_version=1)] * 8)
        assert len(set(map(repr, commits))) == 1
        assert isinstance(commits[0], StepCommit)
        assert store.get_message_count(session_id) == 1
        assert loaded(store, session_id).version == 2


def _commit(
    store: StateStore,
    session_id: str,
    *,
    append: list[dict[str, Any]] | None = None,
    state: SessionState | None = None,
    step: StepInfo = step(1),  # noqa: B008  frozen
    expected_version: int | None = None,
    run_id: str | None = None,
    operation_id: str = "operation",
    **fields: Any,
) -> StepCommit:
    """Commit a step with defaults for the arguments that are not given."""
    state = state or SessionState(session_id=session_id, agent_type="agent", **fields)
    return store.save_state_and_promote_staging(
        session_id,
        state,
        [message("hello")] if append is None else append,
        step,
        expected_version=expected_version,
        operation_id=operation_id,
        run_id=run_id,
    )
