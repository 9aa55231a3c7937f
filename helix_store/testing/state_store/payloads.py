"""Tests that payloads keep value, type and key order, or are refused before anything is stored."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

import pytest

from helix_store.core.contracts import StateStore
from helix_store.core.types import (
    SessionState,
    StagedChanges,
    SubSessionRef,
)
from helix_store.exceptions import (
    HelixStoreError,
    InvalidPayload,
    LimitExceeded,
)
from helix_store.testing.cells import table
from helix_store.testing.state_store.base import Contents, StoreTests
from helix_store.testing.state_store.samples import (
    commit_step,
    contents,
    full_session,
    loaded,
    stage,
    step,
)

__all__ = ["ENTRANCES", "PayloadContract"]


def _nested(depth: int, bottom: Any = "bottom") -> Any:
    value = bottom
    for level in range(depth):
        value = [value] if level % 2 else {"a": value}
    return value


def _cycle() -> list[Any]:
    value: list[Any] = []
    value.append({"again": value})
    return value


@dataclass
class Point:
    x: int = 1


EXACT: dict[str, Any] = {
    "NUL": "a\x00b",
    "NUL in a key": {"a\x00b": 1},
    "lone surrogates": ["\ud83d", "\ude00", "a\udfffb", {"\ud800": "\udc00"}],
    "a pair of surrogates and the character": ["\ud83d\ude00", "😀"],
    "text that looks like an escape": ["\\u0000", "\\ud800", "\\\\u0000", "\\"],
    "minus zero": [-0.0, 0.0, 0],
    "floats that stay floats": [1.0, 1e16, 1e23, 1.797e308, 5e-324, -1e22, 0.1],
    "integers that stay integers": [1, 2**53 + 1, 2**63, -(2**63) - 1, 10**40, 10**1000 - 1],
    "booleans are not numbers": [True, 1, 1.0, False, 0, None],
    "key order": {"z": 1, "a": {"10": 1, "9": 2, "b": 3, "A": 4}, "": 0},
    "names that other software trips over": {
        "__proto__": 1,
        "lc": 1,
        "__type": "x",
        "$ref": "#",
        "constructor": {},
    },
    "empty values": {"": "", "list": [], "object": {}, "nothing": None},
    "controls and quotes": "\x01\x1f\x7f\x85\u2028\u2029\ufeff\"'\\/",
    "texts that look like other values": ["null", "NaN", "1", "[]", "~", '~"a"', "2026-01-01T00:00:00Z"],
    "composed and decomposed": ["é", "e\u0301"],
    "a long text": "ł🚂" * 10_000,
}

REFUSED: dict[str, tuple[Any, type[HelixStoreError]]] = {
    "NaN": (float("nan"), InvalidPayload),
    "infinity": (float("inf"), InvalidPayload),
    "minus infinity": ([{"deep": float("-inf")}], InvalidPayload),
    "a set": ({1, 2}, InvalidPayload),
    "a tuple": ((1, 2), InvalidPayload),
    "bytes": (b"bytes", InvalidPayload),
    "a datetime": (datetime(2026, 1, 1, tzinfo=UTC), InvalidPayload),
    "a Decimal": (Decimal("1.5"), InvalidPayload),
    "a dataclass": (Point(), InvalidPayload),
    "a function": (_nested, InvalidPayload),
    "a key that is a number": ({1: "one"}, InvalidPayload),
    "a key that is None": ([{None: "none"}], InvalidPayload),
    "a cycle": (_cycle(), InvalidPayload),
    "201 levels": (_nested(201), LimitExceeded),
    "an integer of 1,001 digits": (10**1000, LimitExceeded),
    "a negative integer of 1,001 digits": (-(10**1000), LimitExceeded),
}


def _state(**fields: Any) -> SessionState:
    return SessionState(session_id="session", agent_type="agent", **fields)


def _step(store: StateStore, state: SessionState, *messages: dict[str, Any]) -> Any:
    return store.save_state_and_promote_staging("session", state, list(messages), step(4))


ENTRANCES: dict[str, Callable[[StateStore, Any], Any]] = {
    "create": lambda store, value: store.create_session("new", agent_type="agent", custom_state={"v": value}),
    "save custom_state": lambda store, value: store.save_state("session", _state(custom_state={"v": value})),
    "save output": lambda store, value: store.save_state("session", _state(output=value)),
    "save error": lambda store, value: store.save_state("session", _state(error=[value])),
    "save pending": lambda store, value: store.save_state(
        "session", _state(pending_client_tool_calls={"call": {"input": value}})
    ),
    "save completed": lambda store, value: store.save_state(
        "session", _state(completed_client_tool_calls={"call": {"result": value}})
    ),
    "save suspension": lambda store, value: store.save_state(
        "session", _state(suspension_context={"v": value})
    ),
    "save awaiting": lambda store, value: store.save_state(
        "session", _state(suspended_awaiting_children=[value])
    ),
    "save tracing": lambda store, value: store.save_state("session", _state(tracing_context={"v": value})),
    "save workspace": lambda store, value: store.save_state(
        "session", _state(workspace_refs={"w": {"v": value}})
    ),
    "merge": lambda store, value: store.merge_custom_state("session", {"v": value}),
    "append": lambda store, value: store.append_messages("session", [{"role": "user", "content": value}]),
    "stage merge": lambda store, value: store.stage_changes(
        "session", "step-4", StagedChanges(tool_call_id="call", merge_changes={"v": value})
    ),
    "stage patches": lambda store, value: store.stage_changes(
        "session",
        "step-4",
        StagedChanges(tool_call_id="call", patches=[{"op": "add", "path": "/v", "value": value}]),
    ),
    "step state": lambda store, value: _step(store, _state(custom_state={"v": value})),
    "step message": lambda store, value: _step(store, _state(), {"role": "user", "content": value}),
    "run error": lambda store, value: store.update_run("session", "run-1", status="failed", error=[value]),
    "ref remote": lambda store, value: store.add_sub_session_refs(
        "session",
        [SubSessionRef(sub_session_id="new", agent_type="a", location="remote", remote={"v": value})],
    ),
    "ref output": lambda store, value: store.add_sub_session_refs(
        "session", [SubSessionRef(sub_session_id="new", agent_type="a", output=[value])]
    ),
    "update ref output": lambda store, value: store.update_sub_session_ref("session", "sub", output=[value]),
    "update ref error": lambda store, value: store.update_sub_session_ref("session", "sub", error=[value]),
}
"""Every call that stores a payload, on a session made by `full_session`."""

PAIR = "\ud83d\ude00"
"""Two surrogates, which must not become the one character that they would be in UTF-16."""

WITH_A_PAIR: dict[str, dict[str, Any]] = {
    name: {name: {"v": _nested(199, PAIR)}}
    for name in (
        "custom_state",
        "output",
        "error",
        "pending_client_tool_calls",
        "completed_client_tool_calls",
        "suspension_context",
        "tracing_context",
        "workspace_refs",
    )
} | {
    "suspended_awaiting_children": {"suspended_awaiting_children": [_nested(199, PAIR)]},
    "fields with and without a pair": {
        "output": PAIR,
        "error": ["é🙂", "\udc00", "\x00", "~"],
        "title": "é🙂",
        "metadata": {"é": "🙂"},
        "suspension_context": {PAIR: ["\\ud83d\\ude00"]},
    },
}
"""Adjacent surrogates in each payload of a state, at full depth."""


class PayloadContract(StoreTests):
    @table("name", EXACT)
    def test_a_payload_comes_back_exactly_wherever_it_was_put(self, store: StateStore, name: str) -> None:
        value = EXACT[name]
        store.create_session("session", agent_type="agent", custom_state={"v": value})
        assert repr(loaded(store, "session").custom_state) == repr({"v": value})
        message = {"role": "user", "content": value, "thinking": value}
        store.append_messages("session", [message])
        assert repr(store.get_messages("session").messages) == repr([message])
        assert repr(list(store.iter_messages("session"))) == repr([message])
        patches = [{"op": "add", "path": "/patched", "value": value}]
        stage(store, "session", "call-1", patches=patches)
        stage(store, "session", "call-2", merge_changes={"merged": value})
        staged = [
            (changes.patches, changes.merge_changes)
            for changes in store.get_staged_changes("session", "step-1")
        ]
        assert repr(staged) == repr([(patches, None), ([], {"merged": value})])
        commit = commit_step(store, "session", 1, output=value, error={"e": value})
        after = loaded(store, "session")
        assert repr(after.custom_state) == repr({"v": value, "patched": value, "merged": value})
        assert repr((after.output, after.error)) == repr((value, {"e": value}))
        checkpoint = store.get_checkpoint("session", commit.checkpoint_id)
        assert checkpoint is not None
        assert repr(checkpoint.state.custom_state) == repr(after.custom_state)
        store.start_run("session", "run-1")
        assert repr(store.update_run("session", "run-1", status="failed", error=[value]).error) == repr(
            [value]
        )
        assert repr(store.list_runs("session")[0].error) == repr([value])
        ref = SubSessionRef(sub_session_id="sub", agent_type="a", remote={"r": value}, output=[value])
        store.add_sub_session_refs("session", [ref])
        store.update_sub_session_ref("session", "sub", error=[value])
        (stored,) = store.get_sub_session_refs("session")
        assert repr((stored.remote, stored.output, stored.error)) == repr(({"r": value}, [value], [value]))

    @table("entrance", ENTRANCES, shared=True)
    def test_a_value_that_is_not_plain_json_is_refused_at_every_entrance(
        self, stored: StateStore, before: Contents, entrance: str
    ) -> None:
        for value, error in REFUSED.values():
            with self.storage_untouched(), pytest.raises(error):
                ENTRANCES[entrance](stored, value)
        assert contents(stored, "session") == before
        assert stored.get_staged_changes("session", "step-4") == []
        assert not stored.session_exists("new")

    @table("entrance", ENTRANCES)
    def test_a_deep_value_within_the_limit_is_taken_at_every_entrance(
        self, store: StateStore, entrance: str
    ) -> None:
        full_session(store, "session")
        ENTRANCES[entrance](store, _nested(190))

    def test_two_hundred_levels_are_taken_and_one_more_is_not(self, store: StateStore) -> None:
        deepest = {"v": _nested(199)}
        store.create_session("session", agent_type="agent", custom_state=deepest)
        assert repr(loaded(store, "session").custom_state) == repr(deepest)
        with self.storage_untouched(), pytest.raises(LimitExceeded) as caught:
            store.merge_custom_state("session", {"v": _nested(200)})
        assert (caught.value.limit, caught.value.actual) == (200, 201)

    @table("name", WITH_A_PAIR)
    def test_adjacent_surrogates_are_kept_at_full_depth_in_every_field(
        self, store: StateStore, name: str
    ) -> None:
        fields = WITH_A_PAIR[name]
        store.create_session("session", agent_type="agent")
        store.save_state("session", _state(**fields))
        saved = loaded(store, "session")
        assert repr({field: getattr(saved, field) for field in fields}) == repr(fields)
        commit = commit_step(store, "session", 1, **fields)
        checkpoint = store.get_checkpoint("session", commit.checkpoint_id)
        assert checkpoint is not None
        for state in (loaded(store, "session"), checkpoint.state):
            assert repr({field: getattr(state, field) for field in fields}) == repr(fields)
        store.restore_checkpoint("session", commit.checkpoint_id)
        assert repr({field: getattr(loaded(store, "session"), field) for field in fields}) == repr(fields)

    def test_a_refusal_says_where_and_why_but_not_what(self, store: StateStore) -> None:
        with pytest.raises(InvalidPayload) as caught:
            store.create_session(agent_type="agent", custom_state={"a": [{"b/c": b"secret"}]})
        assert caught.value.path.endswith("/a/0/b~1c")
        assert caught.value.reason
        assert "secret" not in str(caught.value)

    @table("bad", ["\x00", "a\ud800", 1, None, 1.5, ["a"]], shared=True)
    def test_tags_metadata_and_texts_refuse_what_a_query_could_not_find(
        self, stored: StateStore, before: Contents, bad: Any
    ) -> None:
        fields: list[dict[str, Any]] = [{"tags": ["fine", bad]}, {"metadata": {"fine": "v", "k": bad}}]
        if isinstance(bad, str):
            fields += [{"metadata": {bad: "v"}}, {"title": bad}, {"directory": bad}]
        for field in fields:
            with self.storage_untouched(), pytest.raises(InvalidPayload):
                stored.create_session("new", agent_type="agent", **field)
            with self.storage_untouched(), pytest.raises(InvalidPayload):
                stored.save_state("session", _state(**field))
        assert contents(stored, "session") == before
        assert not stored.session_exists("new")
