"""Tests for changes staged by tool calls, and for their promotion."""

from __future__ import annotations

from typing import Any

import pytest

from helix_store.core.contracts import StateStore
from helix_store.core.types import StagedChanges
from helix_store.exceptions import (
    InvalidPayload,
    LimitExceeded,
    PatchError,
    StaleStateError,
)
from helix_store.testing.cells import table
from helix_store.testing.state_store.base import StoreTests
from helix_store.testing.state_store.samples import (
    contents,
    full_session,
    loaded,
    stage,
)

__all__ = ["StagingContract"]


class StagingContract(StoreTests):
    # Staging

    def test_staged_changes_are_invisible_until_they_are_promoted(self, store: StateStore) -> None:
        full_session(store, "session")
        before = contents(store, "session")
        stage(store, "session", "call", merge_changes={"a": 1})
        after = contents(store, "session")
        assert after.pop("staged") != before.pop("staged")
        assert after == before

    def test_staged_changes_come_back_as_they_were_given(self, store: StateStore, session_id: str) -> None:
        given = [
            StagedChanges(
                tool_call_id="both",
                patches=[{"op": "add", "path": "/a", "value": 1.0}],
                merge_changes={"z": [None], "a": True},
                timestamp=1_900_000_000_123,
            ),
            StagedChanges(tool_call_id="patches", patches=[{"op": "remove", "path": ["a", 0]}]),
            StagedChanges(tool_call_id="merge", merge_changes={}),
            StagedChanges(tool_call_id="neither"),
        ]
        for staged in given:
            store.stage_changes(session_id, "step-1", staged)
        assert repr(store.get_staged_changes(session_id, "step-1")) == repr(given)

    def test_staged_changes_may_be_given_as_a_dict(self, store: StateStore, session_id: str) -> None:
        store.stage_changes(session_id, "step-1", {"tool_call_id": "call", "merge_changes": {"a": 1}})
        staged = StagedChanges(tool_call_id="call", merge_changes={"a": 1})
        assert store.get_staged_changes(session_id, "step-1") == [staged]
        store.stage_changes(session_id, "step-2", staged.to_dict())
        assert store.get_staged_changes(session_id, "step-2") == [staged]

    def test_staging_a_tool_call_again_replaces_it_in_its_place(
        self, store: StateStore, session_id: str
    ) -> None:
        for tool_call_id in ("first", "second", "third"):
            stage(store, session_id, tool_call_id, merge_changes={"list": [tool_call_id]}, timestamp=1)
        stage(store, session_id, "first", merge_changes={"list": ["again"]}, timestamp=2)
        staged = store.get_staged_changes(session_id, "step-1")
        assert [changes.tool_call_id for changes in staged] == ["first", "second", "third"]
        store.promote_staging(session_id, "step-1")
        assert loaded(store, session_id).custom_state == {"list": ["again", "second", "third"]}

    def test_order_is_that_of_staging_and_not_that_of_timestamps_or_ids(
        self, store: StateStore, session_id: str
    ) -> None:
        for timestamp, tool_call_id in ((30, "c"), (10, "b"), (20, "a")):
            stage(
                store, session_id, tool_call_id, merge_changes={"list": [tool_call_id]}, timestamp=timestamp
            )
        store.promote_staging(session_id, "step-1")
        assert loaded(store, session_id).custom_state == {"list": ["c", "b", "a"]}

    def test_steps_and_sessions_do_not_see_each_others_staging(
        self, store: StateStore, session_id: str
    ) -> None:
        store.create_session("other", agent_type="agent")
        stage(store, session_id, "call", step_id="step-1", merge_changes={"a": 1})
        stage(store, session_id, "call", step_id="step-2", merge_changes={"a": 2})
        stage(store, "other", "call", step_id="step-1", merge_changes={"a": 3})
        store.promote_staging(session_id, "step-1")
        assert loaded(store, session_id).custom_state == {"a": 1}
        assert loaded(store, "other").custom_state == {}
        assert len(store.get_staged_changes(session_id, "step-2")) == 1
        assert len(store.get_staged_changes("other", "step-1")) == 1
        assert store.get_staged_changes(session_id, "step-3") == []

    def test_what_was_staged_is_detached_from_the_store(self, store: StateStore, session_id: str) -> None:
        changes: dict[str, Any] = {"list": [1]}
        stage(store, session_id, "call", merge_changes=changes)
        changes["list"].append(2)
        (staged,) = store.get_staged_changes(session_id, "step-1")
        assert staged.merge_changes == {"list": [1]}
        staged.merge_changes["list"].append(3)
        store.promote_staging(session_id, "step-1")
        assert loaded(store, session_id).custom_state == {"list": [1]}

    @table(
        "bad",
        [
            {"tool_call_id": "call", "merge_changes": [1]},
            {"tool_call_id": "call", "merge_changes": "text"},
            {"tool_call_id": "call", "patches": {"op": "add"}},
            {"tool_call_id": "call", "patches": None},
            {"tool_call_id": "call", "timestamp": 1_700_000_000},
            {"tool_call_id": "call", "timestamp": -1},
            {"tool_call_id": "call", "timestamp": 1.5},
            {"tool_call_id": "call", "unknown": 1},
            {"merge_changes": {"a": 1}},
            {},
            None,
            "call",
        ],
        shared=True,
    )
    def test_what_is_no_staged_change_is_refused(self, store: StateStore, session_id: str, bad: Any) -> None:
        with self.storage_untouched(), pytest.raises(InvalidPayload):
            store.stage_changes(session_id, "step-1", bad)
        assert store.get_staged_changes(session_id, "step-1") == []

    def test_a_patch_that_moves_its_own_list_too_often_is_not_staged(
        self, store: StateStore, session_id: str
    ) -> None:
        patches: list[Any] = [{"op": "add", "path": "/list", "value": [0] * 200_000}]
        patches += [{"op": "add", "path": "/list/0", "value": 1}] * 400
        with self.storage_untouched(), pytest.raises(LimitExceeded) as refused:
            store.stage_changes(session_id, "step-1", StagedChanges(tool_call_id="call", patches=patches))
        assert refused.value.name == "moved list elements"
        assert store.get_staged_changes(session_id, "step-1") == []

    # Promoting

    def test_a_promotion_applies_both_forms_in_order_and_clears_them(self, store: StateStore) -> None:
        store.create_session("session", agent_type="agent", custom_state={"notes": ["a"], "n": 1})
        stage(store, "session", "call-1", patches=[{"op": "add", "path": "/notes/-", "value": "b"}])
        stage(store, "session", "call-2", merge_changes={"notes": ["c"], "n": 2})
        stage(store, "session", "call-3", patches=[{"op": "replace", "path": ["notes", 0], "value": "A"}])
        assert store.promote_staging("session", "step-1") == 2
        assert repr(loaded(store, "session").custom_state) == repr({"notes": ["A", "b", "c"], "n": 2})
        assert loaded(store, "session").version == 2
        assert store.get_staged_changes("session", "step-1") == []

    def test_where_a_change_holds_both_forms_the_patches_win(
        self, store: StateStore, session_id: str
    ) -> None:
        patches = [{"op": "add", "path": "/by", "value": "patch"}]
        stage(store, session_id, "call", patches=patches, merge_changes={"by": "merge", "other": 1})
        store.promote_staging(session_id, "step-1")
        assert loaded(store, session_id).custom_state == {"by": "patch"}

    def test_promoting_nothing_writes_nothing(self, store: StateStore) -> None:
        full_session(store, "session")
        before = contents(store, "session")
        assert store.promote_staging("session", "step-1") == loaded(store, "session").version
        assert contents(store, "session") == before

    def test_one_bad_patch_keeps_all_changes_out_and_the_staging_in_place(self, store: StateStore) -> None:
        store.create_session("session", agent_type="agent", custom_state={"list": []})
        stage(store, "session", "call-1", merge_changes={"list": [1]})
        bad = [{"op": "add", "path": "/a", "value": 1}, {"op": "remove", "path": "/missing"}]
        stage(store, "session", "call-2", patches=bad)
        before = contents(store, "session")
        with pytest.raises(PatchError) as caught:
            store.promote_staging("session", "step-1")
        assert (caught.value.index, caught.value.op) == (1, "remove")
        assert contents(store, "session") == before
        stage(store, "session", "call-2", patches=bad[:1])
        assert store.promote_staging("session", "step-1") == 2
        assert loaded(store, "session").custom_state == {"list": [1], "a": 1}

    @table(
        "patch",
        [
            {"op": "replace", "path": "/missing", "value": 1},
            {"op": "test", "path": "/one", "value": True},
            {"op": "add", "path": "/list/01", "value": 1},
            {"op": "add", "path": "/list/9", "value": 1},
            {"op": "add", "path": "one", "value": 1},
            {"op": "add", "path": "/__proto__/polluted", "value": 1},
            {"op": "add", "path": ["constructor"], "value": 1},
            {"op": "move", "from": "/missing", "path": "/a"},
            {"op": "copy", "path": "/a"},
            {"op": "add", "path": "/a"},
            {"op": "increment", "path": "/one"},
            {"path": "/one", "value": 1},
            {"op": "replace", "path": "", "value": [1]},
            "add",
        ],
    )
    def test_a_patch_that_cannot_be_applied_changes_nothing(self, store: StateStore, patch: Any) -> None:
        store.create_session("session", agent_type="agent", custom_state={"one": 1, "list": [1]})
        stage(store, "session", "call", patches=[patch])
        before = contents(store, "session")
        with pytest.raises(PatchError):
            store.promote_staging("session", "step-1")
        assert contents(store, "session") == before

    def test_a_promotion_on_top_of_another_version_writes_nothing(
        self, store: StateStore, session_id: str
    ) -> None:
        stage(store, session_id, "call", merge_changes={"a": 1})
        before = contents(store, session_id)
        with pytest.raises(StaleStateError):
            store.promote_staging(session_id, "step-1", expected_version=2)
        assert contents(store, session_id) == before
        assert store.promote_staging(session_id, "step-1", expected_version=1) == 2

    def test_changes_staged_while_others_are_promoted_are_never_lost(
        self, store: StateStore, session_id: str
    ) -> None:
        def work(name: str) -> None:
            for number in range(5):
                stage(store, session_id, f"{name}{number}", merge_changes={"list": [f"{name}{number}"]})
                store.promote_staging(session_id, "step-1")

        self.at_once(*(lambda name=name: work(name) for name in "abcd"))
        store.promote_staging(session_id, "step-1")
        expected = {f"{name}{number}" for name in "abcd" for number in range(5)}
        promoted = loaded(store, session_id).custom_state["list"]
        assert sorted(promoted) == sorted(expected)

    # Discarding

    def test_discarding_returns_how_many_changes_there_were(self, store: StateStore, session_id: str) -> None:
        for tool_call_id in ("a", "b", "c"):
            stage(store, session_id, tool_call_id, merge_changes={"a": 1})
        stage(store, session_id, "a", step_id="step-2", merge_changes={"b": 1})
        assert store.discard_staging(session_id, "step-1") == 3
        assert store.discard_staging(session_id, "step-1") == 0
        assert store.promote_staging(session_id, "step-1") == 1
        assert store.promote_staging(session_id, "step-2") == 2
        assert loaded(store, session_id).custom_state == {"b": 1}
