"""The comparison of two states: the values that were added, removed and replaced, by JSON pointer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final, Literal

from helix_store.core.payload_faults import join_path
from helix_store.core.types import SessionState

_OF_EACH_WRITE: Final = frozenset({"version", "message_count", "created_at", "updated_at"})
_MISSING: Final = object()


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A difference. ``before`` is missing if the value was added, ``after`` if it was removed."""

    op: Literal["add", "remove", "replace"]
    path: str
    before: Any = None
    after: Any = None

    def to_dict(self) -> dict[str, Any]:
        values = {"before": self.before, "after": self.after}
        if self.op != "replace":
            del values["before" if self.op == "add" else "after"]
        return {"op": self.op, "path": self.path, **values}


def comparable(state: SessionState) -> dict[str, Any]:
    """Return a state as JSON values, without the fields that every write changes."""
    return {name: value for name, value in state.to_dict().items() if name not in _OF_EACH_WRITE}


def shown_state(state: SessionState) -> dict[str, Any]:
    """Return a comparable state without its tracing context, which may contain vendors' keys."""
    return {name: value for name, value in comparable(state).items() if name != "tracing_context"}


def changes_between(before: Any, after: Any, path: str = "") -> Iterator[Change]:
    """Yield the changes that lead from one JSON value to the other, in document order.

    Array items are compared by position, after equal items at the start and at the end have been skipped.
    """
    if type(before) is dict and type(after) is dict:
        for key in [*before, *(key for key in after if key not in before)]:
            yield from _of_member(before.get(key, _MISSING), after.get(key, _MISSING), join_path(path, key))
    elif type(before) is list and type(after) is list:
        yield from _of_arrays(before, after, path)
    elif type(before) is not type(after) or before != after:
        yield Change(op="replace", path=path, before=before, after=after)


def _of_member(before: Any, after: Any, path: str) -> Iterator[Change]:
    if before is _MISSING:
        yield Change(op="add", path=path, after=after)
    elif after is _MISSING:
        yield Change(op="remove", path=path, before=before)
    else:
        yield from changes_between(before, after, path)


def _of_arrays(before: list[Any], after: list[Any], path: str) -> Iterator[Change]:
    shorter = min(len(before), len(after))
    start = 0
    while start < shorter and _is_same(before[start], after[start]):
        start += 1
    end = 0
    while end < shorter - start and _is_same(before[-1 - end], after[-1 - end]):
        end += 1
    for index in range(start, max(len(before), len(after)) - end):
        old = before[index] if index < len(before) - end else _MISSING
        new = after[index] if index < len(after) - end else _MISSING
        yield from _of_member(old, new, join_path(path, index))


def _is_same(before: Any, after: Any) -> bool:
    """Return whether two values are the same JSON. ``1``, ``True`` and ``1.0`` are all different."""
    return next(changes_between(before, after), None) is None
