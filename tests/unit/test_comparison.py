"""Two states compared, value by value."""

from __future__ import annotations

from typing import Any

from hypothesis import given

from helix_store.core.types import SessionState
from helix_store.reports.payloads import changes_between, comparable
from tests.cells import for_each
from tests.strategies import json_values


def compared(before: Any, after: Any) -> list[dict[str, Any]]:
    return [change.to_dict() for change in changes_between(before, after)]


@for_each(
    ("before", "after", "changes"),
    [
        ({"a": 1}, {"a": 1}, []),
        ({"a": 1}, {"a": 2}, [{"op": "replace", "path": "/a", "before": 1, "after": 2}]),
        ({"a": 1}, {"a": True}, [{"op": "replace", "path": "/a", "before": 1, "after": True}]),
        ({"a": 1}, {"a": 1.0}, [{"op": "replace", "path": "/a", "before": 1, "after": 1.0}]),
        ({"a": [1]}, {"a": [True]}, [{"op": "replace", "path": "/a/0", "before": 1, "after": True}]),
        ({}, {"a": None}, [{"op": "add", "path": "/a", "after": None}]),
        ({"a": None}, {}, [{"op": "remove", "path": "/a", "before": None}]),
        ({"a/b": {"~": 1}}, {"a/b": {}}, [{"op": "remove", "path": "/a~1b/~0", "before": 1}]),
        ([1, 2, 3], [1, 9, 2, 3], [{"op": "add", "path": "/1", "after": 9}]),
        ([1, 2, 3], [1, 3], [{"op": "remove", "path": "/1", "before": 2}]),
        ([{"n": 1}, 2], [{"n": 3}, 2], [{"op": "replace", "path": "/0/n", "before": 1, "after": 3}]),
        ([1], {"a": 1}, [{"op": "replace", "path": "", "before": [1], "after": {"a": 1}}]),
    ],
)
def test_changes_are_the_ones_that_were_made(before: Any, after: Any, changes: list[Any]) -> None:
    assert compared(before, after) == changes


@given(json_values(), json_values())
def test_only_equal_values_have_no_changes(before: Any, after: Any) -> None:
    assert compared(before, before) == []
    assert (compared(before, after) == []) == (compared(after, before) == [])


def test_what_each_write_changes_is_left_out() -> None:
    state = SessionState(session_id="trip-1", agent_type="travel", version=7)
    assert comparable(state)["agent_type"] == "travel"
    assert {"version", "message_count", "created_at", "updated_at"} & comparable(state).keys() == set()
