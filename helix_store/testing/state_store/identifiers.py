"""Tests that each call refuses invalid identifiers, including reads."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any
from uuid import UUID

import pytest

from helix_store.core.contracts import StateStore
from helix_store.core.types import (
    SessionState,
    StagedChanges,
    StepInfo,
    SubSessionRef,
)
from helix_store.exceptions import InvalidPayload, NotFoundError
from helix_store.testing.cells import table
from helix_store.testing.state_store.base import Contents, StoreTests
from helix_store.testing.state_store.calls import CALLS, Call
from helix_store.testing.state_store.samples import (
    contents,
    full_session,
    step,
)

__all__ = ["IdentifierContract"]

NO_IDENTIFIERS: list[Any] = [
    "",
    "x" * 256,
    "🙂" * 192,
    "nul\x00",
    "line\nbreak",
    "tab\t",
    "\x1f",
    "delete\x7f",
    "\x85",
    "\x9f",
    "high\ud83d",
    "low\ude00",
    b"bytes",
    7,
    True,
    1.5,
    ["session"],
]


def _state(**fields: Any) -> SessionState:
    return SessionState(**{"session_id": "session", "agent_type": "agent", **fields})


ARGUMENTS: dict[str, Callable[[StateStore, Any], Any]] = {
    "create session_id": lambda store, bad: store.create_session(bad, agent_type="agent"),
    "create agent_type": lambda store, bad: store.create_session(agent_type=bad),
    "create user_id": lambda store, bad: store.create_session(agent_type="agent", user_id=bad),
    "create parent": lambda store, bad: store.create_session(agent_type="agent", parent_session_id=bad),
    "create stream_id": lambda store, bad: store.create_session(agent_type="agent", stream_id=bad),
    "save agent_type": lambda store, bad: store.save_state("session", _state(agent_type=bad)),
    "save user_id": lambda store, bad: store.save_state("session", _state(user_id=bad)),
    "save parent": lambda store, bad: store.save_state("session", _state(parent_session_id=bad)),
    "save root": lambda store, bad: store.save_state("session", _state(root_session_id=bad)),
    "save stream_id": lambda store, bad: store.save_state("session", _state(stream_id=bad)),
    "save suspended_step_id": lambda store, bad: store.save_state("session", _state(suspended_step_id=bad)),
    "stage step_id": lambda store, bad: store.stage_changes(
        "session", bad, StagedChanges(tool_call_id="call")
    ),
    "stage tool_call_id": lambda store, bad: store.stage_changes(
        "session", "step-1", StagedChanges(tool_call_id=bad)
    ),
    "staged step_id": lambda store, bad: store.get_staged_changes("session", bad),
    "promote step_id": lambda store, bad: store.promote_staging("session", bad),
    "discard step_id": lambda store, bad: store.discard_staging("session", bad),
    "step step_id": lambda store, bad: store.save_state_and_promote_staging(
        "session", _state(), [], StepInfo(step_id=bad, step_count=1)
    ),
    "step run_id": lambda store, bad: store.save_state_and_promote_staging(
        "session", _state(), [], step(1), run_id=bad
    ),
    "step operation_id": lambda store, bad: store.save_state_and_promote_staging(
        "session", _state(), [], step(1), operation_id=bad
    ),
    "branch new_session_id": lambda store, bad: store.branch_session("session", new_session_id=bad),
    "start run_id": lambda store, bad: store.start_run("session", bad, supersede=True),
    "update run_id": lambda store, bad: store.update_run("session", bad, status="completed"),
    "ref sub_session_id": lambda store, bad: store.add_sub_session_refs(
        "session", [SubSessionRef(sub_session_id=bad, agent_type="helper")]
    ),
    "ref agent_type": lambda store, bad: store.add_sub_session_refs(
        "session", [SubSessionRef(sub_session_id="new", agent_type=bad)]
    ),
    "ref parent_tool_call_id": lambda store, bad: store.add_sub_session_refs(
        "session", [SubSessionRef(sub_session_id="new", agent_type="helper", parent_tool_call_id=bad)]
    ),
    "update sub_session_id": lambda store, bad: store.update_sub_session_ref(
        "session", bad, status="completed"
    ),
    "interrupt run_id": lambda store, bad: store.request_interrupt("session", run_id=bad),
    "check run_id": lambda store, bad: store.check_interrupt("session", run_id=bad),
}


class IdentifierContract(StoreTests):
    @table("user_id", [42, -1, UUID(int=7)])
    def test_the_primary_key_of_a_user_is_stored_as_text(
        self, store: StateStore, user_id: int | UUID
    ) -> None:
        assert store.create_session("session", agent_type="agent", user_id=user_id).user_id == str(user_id)
        store.create_session("other", agent_type="agent", user_id="other")
        state: Any = store.load_state("other")
        state.user_id = user_id
        store.save_state("other", state)
        for key in (user_id, str(user_id)):
            page = store.list_sessions(user_id=key)
            assert {head.session_id: head.user_id for head in page.sessions} == dict.fromkeys(
                ("session", "other"), str(user_id)
            )

    def test_a_number_that_is_no_primary_key_is_no_user_id(self, store: StateStore) -> None:
        for bad in (True, 1.0, 10**4_000, 10**5_000):
            with self.storage_untouched(), pytest.raises(InvalidPayload):
                store.create_session(agent_type="agent", user_id=bad)  # type: ignore[arg-type]
            with self.storage_untouched(), pytest.raises(InvalidPayload):
                store.list_sessions(user_id=bad)  # type: ignore[arg-type]

    @table("call", CALLS, shared=True)
    def test_no_method_takes_a_bad_session_id(self, stored: StateStore, before: Contents, call: Call) -> None:
        for bad in (*NO_IDENTIFIERS, None):
            with self.storage_untouched(), pytest.raises(InvalidPayload):
                call.invoke(stored, bad)
        assert contents(stored, "session") == before
        assert stored.list_sessions().total == 1

    @table("argument", ARGUMENTS, shared=True)
    def test_no_other_argument_takes_a_bad_identifier(
        self, stored: StateStore, before: Contents, argument: str
    ) -> None:
        for bad in NO_IDENTIFIERS:
            if argument.endswith("user_id") and type(bad) is int:
                continue
            with self.storage_untouched(), pytest.raises(InvalidPayload):
                ARGUMENTS[argument](stored, bad)
        assert contents(stored, "session") == before
        assert stored.list_sessions().total == 1

    @table("argument", [name for name in ARGUMENTS if not name.startswith("create ")])
    def test_an_identifier_of_255_characters_is_taken_or_merely_unknown(
        self, store: StateStore, argument: str
    ) -> None:
        full_session(store, "session")
        with suppress(NotFoundError):
            ARGUMENTS[argument](store, "€" * 255)
