"""Tests for saving a state that `resume` returned: the fields that it cleared stay cleared."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

import pytest

from helix_store.core.contracts import StateStore
from helix_store.core.types import RunStatus, SessionState, SessionStatus
from helix_store.exceptions import ConflictError
from helix_store.testing.cells import table
from helix_store.testing.state_store.base import StoreTests
from helix_store.testing.state_store.samples import loaded, messages, stage, step

__all__ = ["ResumedStateContract"]

KIND: Final = RunStatus.SUSPENDED_CLIENT_TOOL
SUSPENSION: Final = (
    "suspension_kind",
    "suspension_context",
    "suspended_awaiting_children",
    "suspended_step_id",
    "tracing_context",
)


def _step(store: StateStore, state: SessionState) -> Any:
    return store.save_state_and_promote_staging("session", state, messages(1), step(4))


def _staged_step(store: StateStore, state: SessionState) -> Any:
    stage(store, "session", "call", step_id="step-4", merge_changes={"staged": 1})
    return _step(store, state)


SAVES: Final[dict[str, Callable[[StateStore, SessionState], Any]]] = {
    "save_state": lambda store, state: store.save_state("session", state),
    "a step": _step,
    "a step with staged changes": _staged_step,
}
COPIES: Final[dict[str, Callable[[SessionState], SessionState]]] = {
    "itself": lambda state: state,
    "a copy": copy.copy,
    "a deep copy": copy.deepcopy,
    "a pickled copy": lambda state: pickle.loads(pickle.dumps(state)),  # noqa: S301  our own bytes
}


def _resumed(store: StateStore) -> SessionState:
    store.create_session("session", agent_type="agent")
    store.suspend(
        "session",
        kind=KIND,
        context={"at": 3, "calls": ["call-1"]},
        awaiting_children=[{"sub_session_id": "child"}],
        step_id="step-3",
        tracing={"trace": "1"},
        expires_at=4_000_000_000_000,
    )
    return store.resume("session")


class ResumedStateContract(StoreTests):
    @table("save", SAVES)
    @table("kept", COPIES)
    def test_what_a_resume_returned_is_saved_without_what_it_cleared(
        self, store: StateStore, save: str, kept: str
    ) -> None:
        state = COPIES[kept](_resumed(store))
        assert [getattr(state, name) is None for name in SUSPENSION] == [False] * 5
        for round_ in (1, 2):
            state.custom_state["round"] = round_
            SAVES[save](store, state)
            stored = loaded(store, "session")
            assert [getattr(stored, name) for name in SUSPENSION] == [None] * 5
            assert stored.status is SessionStatus.ACTIVE
            assert stored.custom_state["round"] == round_
            assert state.suspension_context == {"at": 3, "calls": ["call-1"]}
        latest = store.get_latest_checkpoint("session")
        assert latest is None or latest.state.suspension_context is None
        with pytest.raises(ConflictError):
            store.resume("session")

    @table("save", SAVES)
    def test_a_context_that_was_read_to_pieces_stays_cleared(self, store: StateStore, save: str) -> None:
        state = _resumed(store)
        assert state.suspension_context is not None
        assert state.suspended_awaiting_children is not None
        state.suspension_context.pop("calls")
        state.suspended_awaiting_children.clear()
        state.status = SessionStatus.INTERRUPTED
        SAVES[save](store, state)
        assert [getattr(loaded(store, "session"), name) for name in SUSPENSION] == [None] * 5
        with pytest.raises(ConflictError):
            store.resume("session")

    @table("save", SAVES)
    @table("kept", COPIES)
    @table(
        ("assigned", "stored"),
        [
            ({"suspension_context": {"at": 9}}, {"suspension_context": {"at": 9}, "suspension_kind": KIND}),
            ({"suspension_context": {"at": 3, "calls": ["call-1"]}}, None),
            ({"suspended_step_id": "step-9"}, {"suspended_step_id": "step-9", "suspension_kind": KIND}),
            (
                {"suspended_awaiting_children": []},
                {"suspended_awaiting_children": [], "suspension_kind": KIND},
            ),
            ({"tracing_context": {}}, {"tracing_context": {}}),
            (
                {"suspension_kind": RunStatus.SUSPENDED_STEP_PARTIAL},
                {"suspension_kind": RunStatus.SUSPENDED_STEP_PARTIAL},
            ),
            (dict.fromkeys(SUSPENSION), {}),
        ],
    )
    def test_what_the_caller_assigns_is_saved_as_given(
        self,
        store: StateStore,
        save: str,
        kept: str,
        assigned: dict[str, Any],
        stored: dict[str, Any] | None,
    ) -> None:
        state = COPIES[kept](_resumed(store))
        for name, value in assigned.items():
            setattr(state, name, value)
        SAVES[save](store, state)
        expected = {**assigned, "suspension_kind": KIND} if stored is None else stored
        after = loaded(store, "session")
        assert {name: getattr(after, name) for name in SUSPENSION} == {
            **dict.fromkeys(SUSPENSION),
            **expected,
        }

    def test_a_later_suspension_is_not_taken_for_the_one_that_was_resumed(self, store: StateStore) -> None:
        state = _resumed(store)
        store.save_state("session", state)
        store.suspend("session", kind=KIND, context={"at": 3, "calls": ["call-1"]}, step_id="step-3")
        again = loaded(store, "session")
        store.save_state("session", again)
        assert repr(loaded(store, "session").suspension_context) == repr(again.suspension_context)
        assert store.resume("session").suspended_step_id == "step-3"

    @table("made", [replace, lambda state: SessionState.from_dict(state.to_dict())])
    def test_a_state_that_is_made_of_it_has_the_values_as_its_own(
        self, store: StateStore, made: Callable[[SessionState], SessionState]
    ) -> None:
        state = made(_resumed(store))
        store.save_state("session", state)
        stored = loaded(store, "session")
        assert {name: getattr(stored, name) for name in SUSPENSION} == {
            name: getattr(state, name) for name in SUSPENSION
        }
