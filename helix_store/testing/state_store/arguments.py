"""Tests that invalid arguments other than identifiers are refused before anything is written."""

from __future__ import annotations

from typing import Any

import pytest

from helix_store.core.contracts import StateStore
from helix_store.core.types import (
    SessionState,
    StagedChanges,
    StepInfo,
)
from helix_store.exceptions import InvalidPayload
from helix_store.testing.cells import table
from helix_store.testing.state_store.base import Contents, StoreTests
from helix_store.testing.state_store.samples import (
    contents,
    loaded,
    message,
    step,
)

__all__ = ["ArgumentContract"]

BAD_FIELDS: list[tuple[str, Any]] = [
    ("status", "asleep"),
    ("status", None),
    ("mode", "eternal"),
    ("step_count", -1),
    ("step_count", 1.0),
    ("step_count", True),
    ("step_count", None),
    ("resume_count", -1),
    ("resume_count", "1"),
    ("custom_state", None),
    ("custom_state", []),
    ("custom_state", "text"),
    ("tags", "text"),
    ("tags", None),
    ("tags", {"t": 1}),
    ("metadata", None),
    ("metadata", ["k"]),
    ("title", 7),
    ("directory", None),
    ("workspace_id", 7),
    ("failure_reason", 7),
    ("pending_client_tool_calls", None),
    ("pending_client_tool_calls", []),
    ("completed_client_tool_calls", None),
    ("client_tool_call_ownership", None),
    ("suspension_context", []),
    ("suspended_awaiting_children", {}),
    ("tracing_context", "text"),
    ("workspace_refs", None),
    ("workspace_refs", []),
    *(("expires_at", bad) for bad in (1_700_000_000, -1, 1.9e12, "1900000000000", True, 10**18)),
]


class ArgumentContract(StoreTests):
    @table(("field", "bad"), BAD_FIELDS, shared=True)
    def test_a_field_that_cannot_be_stored_keeps_the_whole_state_out(
        self, stored: StateStore, before: Contents, field: str, bad: Any
    ) -> None:
        state = loaded(stored, "session")
        setattr(state, field, bad)
        with self.storage_untouched(), pytest.raises(InvalidPayload):
            stored.save_state("session", state)
        with self.storage_untouched(), pytest.raises(InvalidPayload):
            stored.save_state_and_promote_staging("session", state, [message("lost")], step(3))
        assert contents(stored, "session") == before

    @table(
        "bad",
        [
            {"tags": "text"},
            {"tags": [1]},
            {"metadata": {"k": 1}},
            {"metadata": {1: "v"}},
            {"custom_state": []},
            {"title": 7},
            {"directory": None},
            {"mode": "eternal"},
            {"expires_at": 1_700_000_000},
            {"expires_at": 1.9e12},
        ],
        shared=True,
    )
    def test_a_session_that_cannot_be_stored_is_not_created(
        self, store: StateStore, bad: dict[str, Any]
    ) -> None:
        with self.storage_untouched(), pytest.raises(InvalidPayload):
            store.create_session("session", agent_type="agent", **bad)
        assert not store.session_exists("session")

    @table("bad", [None, {}, {"session_id": "session", "agent_type": "agent"}, "state"], shared=True)
    def test_a_state_is_a_session_state(self, stored: StateStore, before: Contents, bad: Any) -> None:
        with self.storage_untouched(), pytest.raises(InvalidPayload):
            stored.save_state("session", bad)
        with self.storage_untouched(), pytest.raises(InvalidPayload):
            stored.save_state_and_promote_staging("session", bad, [], step(3))
        assert contents(stored, "session") == before

    @table(
        "bad",
        [
            StepInfo(step_id="step-3", step_count=-1),
            StepInfo(step_id="step-3", step_count=1.0),  # type: ignore[arg-type]
            StepInfo(step_id="step-3", step_count=3, stream_sequence=-1),
            StepInfo(step_id="step-3", step_count=3, stream_sequence=None),  # type: ignore[arg-type]
            "step-3",
            None,
        ],
        shared=True,
    )
    def test_a_step_says_which_one_it_is(self, stored: StateStore, before: Contents, bad: Any) -> None:
        state = loaded(stored, "session")
        with self.storage_untouched(), pytest.raises(InvalidPayload):
            stored.save_state_and_promote_staging("session", state, [], bad)
        assert contents(stored, "session") == before

    @table("bad", ["asleep", "", None, 7, ["paused"]], shared=True)
    def test_a_status_is_one_of_the_six(self, stored: StateStore, before: Contents, bad: Any) -> None:
        with self.storage_untouched(), pytest.raises(InvalidPayload):
            stored.update_status("session", bad)
        with self.storage_untouched(), pytest.raises(InvalidPayload):
            stored.compare_and_set_status("session", ["active"], bad)
        with self.storage_untouched(), pytest.raises(InvalidPayload):
            stored.compare_and_set_status("session", ["active", bad], "paused")
        assert contents(stored, "session") == before

    @table("bad", ["active", b"active", None, 7, {"active": 1}], shared=True)
    def test_what_is_expected_is_a_collection_of_statuses(self, stored: StateStore, bad: Any) -> None:
        with self.storage_untouched(), pytest.raises(InvalidPayload):
            stored.compare_and_set_status("session", bad, "paused")

    @table("bad", [None, [], "text", [("a", 1)]], shared=True)
    def test_changes_to_merge_are_an_object(self, stored: StateStore, before: Contents, bad: Any) -> None:
        with self.storage_untouched(), pytest.raises(InvalidPayload):
            stored.merge_custom_state("session", bad)
        with self.storage_untouched(), pytest.raises(InvalidPayload):
            stored.merge_custom_state("session", {"a": [1]}, array_replacements="a")
        assert contents(stored, "session") == before

    @table("bad", ["1", 1.0, True, -1], shared=True)
    def test_a_version_and_a_token_are_whole_numbers(
        self, stored: StateStore, before: Contents, bad: Any
    ) -> None:
        state = SessionState(session_id="session", agent_type="agent")
        oldest = stored.list_checkpoints("session").items[-1].checkpoint_id
        for guard in ({"expected_version": bad}, {"fencing_token": bad}):
            for write in (
                lambda guard=guard: stored.save_state("session", state, **guard),
                lambda guard=guard: stored.append_messages("session", [message("lost")], **guard),
                lambda guard=guard: stored.promote_staging("session", "step-3", **guard),
                lambda guard=guard: stored.save_state_and_promote_staging(
                    "session", state, [], step(3), **guard
                ),
                lambda guard=guard: stored.restore_checkpoint("session", oldest, **guard),
                lambda guard=guard: stored.start_run("session", supersede=True, **guard),
            ):
                with self.storage_untouched(), pytest.raises(InvalidPayload):
                    write()
        assert contents(stored, "session") == before

    @table("bad", [-1, 1.0, "1", None, True], shared=True)
    def test_a_run_starts_at_a_whole_number_of_the_stream(
        self, stored: StateStore, before: Contents, bad: Any
    ) -> None:
        with self.storage_untouched(), pytest.raises(InvalidPayload):
            stored.start_run("session", start_sequence=bad, supersede=True)
        assert contents(stored, "session") == before

    def test_a_staged_time_is_in_milliseconds(self, stored: StateStore) -> None:
        staged = StagedChanges(tool_call_id="call", timestamp=1_700_000_000)
        with self.storage_untouched(), pytest.raises(InvalidPayload):
            stored.stage_changes("session", "step-1", staged)
