"""Tests for errors: they name the id, and the place of the value as a JSON pointer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import pytest

from helix_store.core.contracts import StateStore
from helix_store.core.types import SessionState, StagedChanges, StepInfo
from helix_store.exceptions import (
    CheckpointNotFound,
    ConflictError,
    HelixStoreError,
    InvalidPayload,
    InvalidQuery,
    NotFoundError,
    RunNotFound,
    SessionExists,
    SessionNotFound,
)
from helix_store.testing.cells import table
from helix_store.testing.state_store.base import StoreTests
from helix_store.testing.state_store.tool_calls import ASK

__all__ = ["ErrorContract"]

Call = Callable[[StateStore], Any]


def _state(**fields: Any) -> SessionState:
    return SessionState(session_id="session", agent_type="agent", **fields)


REFUSED_VALUES: Final[dict[str, Call]] = {
    "/session_id": lambda store: store.load_state(""),
    "/agent_type": lambda store: store.create_session(agent_type=""),
    "/custom_state/t": lambda store: store.create_session(agent_type="agent", custom_state={"t": {1}}),
    "/custom_state/a~1b~0c/1": lambda store: store.save_state(
        "session", _state(custom_state={"a/b~c": [0, b""]})
    ),
    "/metadata/a": lambda store: store.create_session(agent_type="agent", metadata={"a": 1}),  # type: ignore[dict-item]
    "/metadata/a~1b": lambda store: store.save_state("session", _state(metadata={"a/b": "\x00"})),
    "/tags/1": lambda store: store.create_session(agent_type="agent", tags=["fine", "\ud800"]),
    "/output/0": lambda store: store.save_state("session", _state(output=[float("nan")])),
    "/messages/1/role": lambda store: store.append_messages("session", [{"role": "user"}, {"role": ""}]),
    "/messages/0/content": lambda store: store.append_messages("session", [{"role": "user", "content": {1}}]),
    "/step_count": lambda store: store.save_state_and_promote_staging(
        "session", _state(), [], StepInfo("step", -1)
    ),
    "/tool_call_id": lambda store: store.stage_changes("session", "step", StagedChanges(tool_call_id="")),
    "/expected_version": lambda store: store.save_state("session", _state(), expected_version=-1),
    "/status": lambda store: store.update_status("session", "asleep"),
    "/kind": lambda store: store.request_interrupt("session", kind="pause"),
    "/context/a": lambda store: store.suspend("session", kind="suspended_client_tool", context={"a": {1}}),
    "/calls/call/tool_name": lambda store: store.add_pending_tool_calls("session", {"call": {}}),
    "/approved": lambda store: store.submit_tool_result("session", "call", approved=1),  # type: ignore[arg-type]
}

REFUSED_QUERIES: Final[dict[str, Call]] = {
    "/limit": lambda store: store.list_sessions(limit=0),
    "/offset": lambda store: store.list_sessions(offset=-1),
    "/status": lambda store: store.list_sessions(status="asleep"),
    "/order_by": lambda store: store.list_sessions(order_by="title"),
    "/direction": lambda store: store.list_sessions(direction="up"),
    "/created_from": lambda store: store.list_sessions(created_from="today"),  # type: ignore[arg-type]
    "/order": lambda store: store.get_messages("session", order="up"),
    "/keep": lambda store: store.prune_checkpoints("session", keep=-1),
    "/message_index": lambda store: store.branch_session("session", message_index=7),
}

LONG_ID: Final = "i" * 255


def _call_twice(store: StateStore) -> None:
    for number in (1, 2):
        store.add_pending_tool_calls("session", {LONG_ID: {**ASK, "input": number}})


NAMED: Final[dict[str, tuple[type[HelixStoreError], str, Call]]] = {
    "a session": (SessionNotFound, "session_id", lambda store: store.update_status(LONG_ID, "paused")),
    "a taken session": (
        SessionExists,
        "session_id",
        lambda store: [store.create_session(LONG_ID, agent_type="agent") for _ in range(2)],
    ),
    "a checkpoint": (
        CheckpointNotFound,
        "checkpoint_id",
        lambda store: store.restore_checkpoint("session", LONG_ID),
    ),
    "a run": (RunNotFound, "run_id", lambda store: store.update_run("session", LONG_ID, status="failed")),
    "a taken run": (
        ConflictError,
        "run_id",
        lambda store: [store.start_run("session", LONG_ID) for _ in range(2)],
    ),
    "a sub-session": (
        NotFoundError,
        "sub_session_id",
        lambda store: store.update_sub_session_ref("session", LONG_ID, status="done"),
    ),
    "a tool call": (ConflictError, "tool_call_id", _call_twice),
}


class ErrorContract(StoreTests):
    @table("path", REFUSED_VALUES)
    def test_a_refused_value_has_a_json_pointer(self, store: StateStore, path: str) -> None:
        store.create_session("session", agent_type="agent")
        with self.storage_untouched(), pytest.raises(InvalidPayload) as caught:
            REFUSED_VALUES[path](store)
        assert caught.value.path == path
        assert path in str(caught.value)

    @table("path", REFUSED_QUERIES)
    def test_a_refused_query_has_a_json_pointer(self, store: StateStore, path: str) -> None:
        store.create_session("session", agent_type="agent")
        with pytest.raises(InvalidQuery) as caught:
            REFUSED_QUERIES[path](store)
        assert caught.value.path == path

    @table("what", NAMED)
    def test_an_error_about_an_id_names_it_cut_in_the_text_and_whole_beside_it(
        self, store: StateStore, what: str
    ) -> None:
        store.create_session("session", agent_type="agent")
        error, attribute, call = NAMED[what]
        with pytest.raises(error) as caught:
            call(store)
        assert getattr(caught.value, attribute) == LONG_ID
        assert "i" * 60 in str(caught.value)
        assert "i" * 61 not in str(caught.value)
