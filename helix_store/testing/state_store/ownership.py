"""Tests that the root's record of tool call owners belongs to the store, whatever the root writes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from helix_store.core.contracts import StateStore
from helix_store.core.types import SessionState, StepInfo
from helix_store.testing.cells import table
from helix_store.testing.state_store.base import StoreTests
from helix_store.testing.state_store.samples import loaded
from helix_store.testing.state_store.tool_calls import ASK, create_family

__all__ = ["OwnershipContract"]


def _save(store: StateStore, state: SessionState) -> None:
    store.save_state("root", state, expected_version=state.version)


def _save_any_version(store: StateStore, state: SessionState) -> None:
    store.save_state("root", state)


def _step(store: StateStore, state: SessionState, **options: Any) -> None:
    store.save_state_and_promote_staging(
        "root", state, [], StepInfo("step-1", 1), expected_version=state.version, **options
    )


def _step_with_staging(store: StateStore, state: SessionState) -> None:
    store.stage_changes("root", "step-1", {"tool_call_id": "call-0", "merge_changes": {"n": 1}})
    _step(store, state)


def _step_any_version(store: StateStore, state: SessionState) -> None:
    store.save_state_and_promote_staging("root", state, [], StepInfo("step-1", 1))


def _step_with_an_operation_id(store: StateStore, state: SessionState) -> None:
    _step(store, state, operation_id="operation")


OWNER_WRITES: Final[dict[str, Callable[[StateStore, SessionState], None]]] = {
    "save": _save,
    "save of any version": _save_any_version,
    "step": _step,
    "step of any version": _step_any_version,
    "step with staging": _step_with_staging,
    "step with an operation id": _step_with_an_operation_id,
}


class OwnershipContract(StoreTests):
    @table("write", OWNER_WRITES)
    def test_a_write_of_the_root_keeps_the_owners_that_others_recorded_since_it_was_loaded(
        self, store: StateStore, write: str
    ) -> None:
        create_family(store)
        store.add_pending_tool_calls("root", {"call-0": ASK})
        store.add_pending_tool_calls("child", {"call-1": ASK})
        state = loaded(store, "root")
        store.add_pending_tool_calls("child", {"call-2": ASK})
        store.add_pending_tool_calls("grandchild", {"call-3": ASK})
        state.client_tool_call_ownership |= {"call-2": "grandchild", "call-9": "grandchild"}
        del state.client_tool_call_ownership["call-1"]
        OWNER_WRITES[write](store, state)
        assert loaded(store, "root").client_tool_call_ownership == {
            "call-0": "root",
            "call-1": "child",
            "call-2": "child",
            "call-3": "grandchild",
            "call-9": "grandchild",
        }
        for call, owner in {"call-1": "child", "call-2": "child", "call-3": "grandchild"}.items():
            submission = store.submit_tool_result("root", call, result=1)
            assert (submission.outcome, submission.session_id) == ("accepted", owner)

    def test_a_restored_root_keeps_the_owners_that_others_recorded_since(self, store: StateStore) -> None:
        create_family(store)
        state = loaded(store, "root")
        commit = store.save_state_and_promote_staging("root", state, [], StepInfo("step-1", 1))
        store.add_pending_tool_calls("root", {"call-0": ASK})
        store.add_pending_tool_calls("child", {"call-1": ASK})
        store.restore_checkpoint("root", commit.checkpoint_id)
        assert loaded(store, "root").client_tool_call_ownership == {"call-1": "child"}
        assert store.submit_tool_result("root", "call-1", result=1).session_id == "child"

    def test_an_id_that_reads_like_an_entry_of_the_record_takes_no_call_from_its_owner(
        self, store: StateStore
    ) -> None:
        create_family(store)
        store.add_pending_tool_calls("child", {"c": ASK})
        for disguised in ('a,"c":"root"', ',"c":"root"', 'a\',"c":"root"', '\\,"c":"root"'):
            store.add_pending_tool_calls("root", {disguised: ASK})
        assert store.submit_tool_result("root", "c", result=1).session_id == "child"
        assert store.submit_tool_result("root", ',"c":"root"', result=1).session_id == "root"
