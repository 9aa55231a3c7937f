"""Tests that limits in bytes apply to the stored result of a write, not only to its arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import pytest

from helix_store.core.contracts import StateStore
from helix_store.core.limits import MAX_METADATA_BYTES, MAX_REASON_BYTES, Limits
from helix_store.core.types import SessionState, SessionStatus
from helix_store.exceptions import LimitExceeded
from helix_store.testing.cells import table
from helix_store.testing.state_store.base import Contents, StoreTests
from helix_store.testing.state_store.samples import (
    contents,
    full_session,
    loaded,
    message,
    stage,
    step,
)

__all__ = ["LimitContract"]

SMALL = Limits(max_state_bytes=4_000, max_message_bytes=1_000, max_staged_bytes=2_000)


def _commit(
    store: StateStore, custom_state: dict[str, Any], *messages: dict[str, Any], number: int = 4
) -> Any:
    state = SessionState(session_id="session", agent_type="agent", custom_state=custom_state)
    return store.save_state_and_promote_staging("session", state, list(messages), step(number))


TOO_LARGE: dict[str, tuple[int, Callable[[StateStore, str], Any]]] = {
    "create": (
        4_000,
        lambda store, text: store.create_session("new", agent_type="agent", custom_state={"t": text}),
    ),
    "save custom_state": (
        4_000,
        lambda store, text: store.save_state(
            "session", SessionState(session_id="session", agent_type="agent", custom_state={"t": text})
        ),
    ),
    "save output": (
        4_000,
        lambda store, text: store.save_state(
            "session", SessionState(session_id="session", agent_type="agent", output=text)
        ),
    ),
    "merge": (4_000, lambda store, text: store.merge_custom_state("session", {"t": text})),
    "append": (
        1_000,
        lambda store, text: store.append_messages("session", [message("first"), message(text)]),
    ),
    "stage": (2_000, lambda store, text: stage(store, "session", "call", merge_changes={"t": text})),
    "step state": (4_000, lambda store, text: _commit(store, {"t": text})),
    "step message": (1_000, lambda store, text: _commit(store, {}, message("first"), message(text))),
}

_SIZED: Final[dict[str, Callable[[StateStore, str], Any]]] = {
    "create title": lambda store, text: store.create_session("new", agent_type="agent", title=text),
    "create directory": lambda store, text: store.create_session("new", agent_type="agent", directory=text),
    "create tags": lambda store, text: store.create_session("new", agent_type="agent", tags=[text]),
    "create metadata": lambda store, text: store.create_session(
        "new", agent_type="agent", metadata={"key": text}
    ),
    "save title": lambda store, text: _save(store, title=text),
    "save directory": lambda store, text: _save(store, directory=text),
    "save tags": lambda store, text: _save(store, tags=[text] * 2),
    "save metadata": lambda store, text: _save(store, metadata={text: ""}),
    "branch title": lambda store, text: store.branch_session("session", new_session_id="new", title=text),
    "completion reason": lambda store, text: store.update_run(
        "session", "run", status="completed", completion_reason=text
    ),
    "interrupt reason": lambda store, text: store.request_interrupt("session", reason=text),
    "answer reason": lambda store, text: store.submit_tool_result(
        "session", "approval", approval_id="approval", approved=True, reason=text
    ),
}
"""Text in columns of its own, which lists read."""

_FAILING: Final[dict[str, Callable[[StateStore, str], Any]]] = {
    "update_status": lambda store, text: store.update_status("session", "failed", failure_reason=text),
    "compare_and_set_status": lambda store, text: store.compare_and_set_status(
        "session", ["active", "paused"], "failed", failure_reason=text
    ),
    "save_state": lambda store, text: _save(store, status=SessionStatus.FAILED, failure_reason=text),
    "step": lambda store, text: store.save_state_and_promote_staging(
        "session", _state(status=SessionStatus.FAILED, failure_reason=text), [], step(4)
    ),
}


def _state(**fields: Any) -> SessionState:
    return SessionState(**{"session_id": "session", "agent_type": "agent", **fields})


def _save(store: StateStore, **fields: Any) -> Any:
    return store.save_state("session", _state(**fields))


class LimitContract(StoreTests):
    @table("write", _SIZED, shared=True)
    def test_a_long_text_in_a_column_is_refused_and_stores_nothing(
        self, stored: StateStore, before: Contents, write: str
    ) -> None:
        with self.storage_untouched(), pytest.raises(LimitExceeded):
            _SIZED[write](stored, "x" * 100_000)
        assert contents(stored, "session") == before
        assert not stored.session_exists("new")

    @table("call", _FAILING)
    @table("reason", ["x" * 1_000_000, "🙂" * 100_000, "nul \x00", "low \ude00", "€" * 2_731])
    def test_failing_a_session_succeeds_whatever_the_reason_is(
        self, store: StateStore, call: str, reason: str
    ) -> None:
        full_session(store, "session")
        _FAILING[call](store, reason)
        failed = loaded(store, "session")
        assert failed.status is SessionStatus.FAILED
        assert failed.failure_reason is not None
        assert failed.failure_reason.startswith(reason[:3])
        assert len(failed.failure_reason.encode()) <= MAX_REASON_BYTES
        assert store.save_state("session", failed, expected_version=failed.version) == failed.version + 1

    def test_a_branch_of_a_session_with_full_metadata_can_be_saved(self, store: StateStore) -> None:
        store.create_session("session", agent_type="agent", metadata={"k": "x" * (MAX_METADATA_BYTES - 8)})
        branch = store.branch_session("session", message_index=0)
        assert store.save_state(branch.session_id, branch, expected_version=branch.version) == 2

    @pytest.fixture
    def small(self) -> StateStore:
        """Return a store with small limits and a session."""
        store = self.make_store(limits=SMALL)
        full_session(store, "session")
        return store

    @table("write", TOO_LARGE, shared=True)
    def test_a_write_over_the_limit_is_refused_and_stores_nothing(
        self, small: StateStore, write: str
    ) -> None:
        limit, invoke = TOO_LARGE[write]
        before = contents(small, "session")
        for character in ("x", "ł", "🙂", "\x00"):
            too_large = character * (limit // len(character.encode()) + 1)
            with self.storage_untouched(), pytest.raises(LimitExceeded) as caught:
                invoke(small, too_large)
            assert caught.value.limit == limit, character
            assert caught.value.actual > limit, character
        assert contents(small, "session") == before
        assert not small.session_exists("new")

    @table("write", TOO_LARGE)
    def test_a_write_within_the_limit_is_taken(self, small: StateStore, write: str) -> None:
        limit, invoke = TOO_LARGE[write]
        before = contents(small, "session")
        invoke(small, "x" * (limit // 2))
        assert contents(small, "session") != before or small.session_exists("new")

    def test_a_small_graph_that_stands_for_a_huge_text_is_refused(self, store: StateStore) -> None:
        value: Any = "lol" * 30_000
        for _ in range(100):
            value = [value, value]
        with self.storage_untouched(), pytest.raises(LimitExceeded):
            store.create_session("session", agent_type="agent", custom_state={"v": value})
        assert not store.session_exists("session")

    def test_merges_that_grow_the_state_over_the_limit_are_refused(self, small: StateStore) -> None:
        small.merge_custom_state("session", {"list": ["x" * 1_500]})
        small.merge_custom_state("session", {"list": ["x" * 1_500]})
        before = contents(small, "session")
        with pytest.raises(LimitExceeded) as caught:
            small.merge_custom_state("session", {"list": ["x" * 1_500]})
        assert caught.value.limit == 4_000
        assert contents(small, "session") == before

    @table(
        "changes",
        [
            {"merge_changes": {"list": ["x" * 1_500]}},
            {"patches": [{"op": "add", "path": "/list/-", "value": "x" * 1_500}]},
        ],
    )
    def test_a_promotion_that_grows_the_state_over_the_limit_is_refused(
        self, small: StateStore, changes: dict[str, Any]
    ) -> None:
        small.merge_custom_state("session", {"list": []})
        for number in range(3):
            stage(small, "session", f"call-{number}", **changes)
        before = contents(small, "session")
        with pytest.raises(LimitExceeded) as caught:
            small.promote_staging("session", "step-1")
        assert caught.value.limit == 4_000
        assert contents(small, "session") == before

    def test_a_step_whose_staging_grows_the_state_over_the_limit_is_refused(self, small: StateStore) -> None:
        for number in range(2):
            stage(small, "session", f"call-{number}", merge_changes={"list": ["x" * 1_500]})
        before = contents(small, "session")
        with pytest.raises(LimitExceeded):
            _commit(small, {"list": ["x" * 1_500]}, message("lost"), number=1)
        assert contents(small, "session") == before

    def test_copies_that_multiply_a_small_patch_are_refused(self, small: StateStore) -> None:
        small.merge_custom_state("session", {"a": "x" * 100})
        copies = [{"op": "copy", "from": "", "path": f"/copy{number}"} for number in range(20)]
        stage(small, "session", "call", patches=copies)
        before = contents(small, "session")
        with pytest.raises(LimitExceeded):
            small.promote_staging("session", "step-1")
        assert contents(small, "session") == before

    def test_changes_that_nest_the_state_too_deeply_are_refused(
        self, store: StateStore, session_id: str
    ) -> None:
        value: Any = 1
        for _ in range(150):
            value = [value]
        store.merge_custom_state(session_id, {"v": value})
        path = "/v" + "/0" * 149 + "/-"
        stage(store, session_id, "call", patches=[{"op": "add", "path": path, "value": value}])
        before = contents(store, session_id)
        with pytest.raises(LimitExceeded):
            store.promote_staging(session_id, "step-1")
        assert contents(store, session_id) == before

    @table(("field", "text"), [("custom_state", "x"), ("output", "\ud83d\ude00")])
    def test_a_larger_limit_holds_for_every_field_of_a_state(self, field: str, text: str) -> None:
        store = self.make_store(limits=Limits(max_state_bytes=64 * 2**20))
        store.create_session("session", agent_type="agent")
        large: Any = {"v": text + "x" * 9 * 2**20}
        store.save_state("session", SessionState(session_id="session", agent_type="agent", **{field: large}))
        assert getattr(loaded(store, "session"), field) == large

    def test_what_is_stored_can_be_read_under_smaller_limits(self) -> None:
        full_session(self.make_store(), "session")
        tiny = self.make_store(limits=Limits(max_state_bytes=1, max_message_bytes=1, max_staged_bytes=1))
        assert loaded(tiny, "session").custom_state == {"n": 2}
        assert len(tiny.get_messages("session").messages) == 4
        assert len(tiny.get_staged_changes("session", "step-3")) == 1
