"""Lists of sessions: every filter alone and the natural combinations, in both orders and directions."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any, Final

from tests.plans.calls import ANALYSED, PAGE, SQLITE, Call, gap
from tests.plans.rows import NOW, SESSIONS, World

__all__ = ["SESSION_LISTS"]

_FILTERS: Final[dict[str, dict[str, Any]]] = {
    "agent type": {"agent_type": "agent-3"},
    "status": {"status": "active"},
    "statuses": {"status": ["active", "paused"]},
    "user": {"user_id": "user-7"},
    "workspace": {"workspace_id": "workspace-7"},
    "roots": {"parent_session_id": None},
    "children": {"parent_session_id": "session-7"},
    "tree": {"root_session_id": "session-7"},
    "tag": {"tags": ["rare"]},
    "metadata": {"metadata": {"customer": "7"}},
    "created": {"created_from": NOW - timedelta(days=20), "created_to": NOW - timedelta(days=19)},
}
_COMBINATIONS: Final = (
    "",
    *_FILTERS,
    "agent type, status",
    "agent type, statuses",
    "agent type, user",
    "agent type, roots",
    "agent type, tag",
    "agent type, created",
    "agent type, status, created",
    "status, user",
    "status, workspace",
    "status, roots",
    "status, children",
    "status, tree",
    "status, tag",
    "status, created",
    "user, workspace",
    "user, roots",
    "user, metadata",
    "user, created",
    "workspace, roots",
)


_NO_INDEX_OF_TAGS: Final = (
    "SQLite has no index of tags and metadata: every session of the tenant is looked at"
)
_BY_CREATION: Final = (
    "no index goes on with created_at: without statistics SQLite passes over the tenant's sessions"
)
_ROOTS: Final = "no index goes on with created_at: SQLite sorts all roots of the tenant"

_GAPS: Final = {
    **{
        (f"{other}{name}", order): gap(_NO_INDEX_OF_TAGS, [SQLITE, ANALYSED])
        for other, name in (("", "tag"), ("", "metadata"), ("agent type, ", "tag"))
        for order in ("updated_at", "created_at")
    },
    ("status, tag", "created_at"): gap(_NO_INDEX_OF_TAGS, [SQLITE, ANALYSED]),
    ("user, metadata", "created_at"): gap(_BY_CREATION, [SQLITE]),
    ("user", "created_at"): gap(_BY_CREATION, [SQLITE]),
    ("workspace", "created_at"): gap(_BY_CREATION, [SQLITE]),
    ("agent type, user", "created_at"): gap(_BY_CREATION, [SQLITE]),
    ("status, user", "created_at"): gap(_BY_CREATION, [SQLITE]),
    ("status, workspace", "created_at"): gap(_BY_CREATION, [SQLITE]),
    ("status, children", "created_at"): gap(_BY_CREATION, [SQLITE]),
    ("status, tree", "created_at"): gap(_BY_CREATION, [SQLITE]),
    ("user, workspace", "created_at"): gap(_BY_CREATION, [SQLITE]),
    ("user, roots", "created_at"): gap(_BY_CREATION, [SQLITE]),
    ("workspace, roots", "created_at"): gap(_BY_CREATION, [SQLITE]),
    ("roots", "created_at"): gap(_ROOTS, [ANALYSED]),
    ("agent type, roots", "created_at"): gap(_ROOTS, [ANALYSED]),
    ("status, roots", "created_at"): gap(_ROOTS, [ANALYSED]),
}


def _arguments(names: str) -> dict[str, Any]:
    chosen = [_FILTERS[name] for name in names.split(", ") if name]
    return {argument: value for filters in chosen for argument, value in filters.items()}


def _is_in_order(names: str, order_by: str) -> bool:
    """Whether an index has the sessions of the filter in this order."""
    chosen = set(names.split(", "))
    if order_by == "created_at":
        return not names or ("created" in chosen and "user" not in chosen)
    return not chosen & {"tree", "tag", "metadata", "created"} and not {"agent type", "statuses"} <= chosen


def _pages(names: str, order_by: str) -> Callable[[World], Callable[[], object]]:
    """First pages and pages from the middle, forwards and backwards."""

    def make(world: World) -> Callable[[], object]:
        chosen = partial(world.store.list_sessions, **_arguments(names), order_by=order_by, count=False)
        total = world.store.list_sessions(**_arguments(names)).total or 0
        wanted: list[dict[str, Any]] = []
        for direction in ("desc", "asc"):
            # A filter that leaves one session has no second page.
            before = chosen(direction=direction, offset=max(0, total // 2 - 1), limit=1)
            cursors = [None, before.next_cursor] if before.next_cursor else [None]
            wanted += [{"direction": direction, "cursor": cursor} for cursor in cursors]
        return lambda: [chosen(limit=PAGE, **page) for page in wanted]

    return make


def _list_of(names: str, order_by: str) -> Call:
    name, gaps = f"list_sessions({names}) by {order_by}", _GAPS.get((names, order_by), {})
    if _is_in_order(names, order_by):
        return Call(name, _pages(names, order_by), gaps=gaps)
    # Few sessions, found by an index and sorted; or some passed over in the order of another filter's index.
    return Call(name, _pages(names, order_by), reads=1_000, sorts=10 * PAGE, gaps=gaps)


def _count_of(names: str) -> Call:
    """The total counts every session of the filter: in the tenant's part of an index, not in the table."""
    return Call(
        f"list_sessions({names}) counted",
        lambda world: partial(world.store.list_sessions, **_arguments(names), limit=1),
        reads=SESSIONS + PAGE,
        sorts=10 * PAGE,
        gaps=_GAPS.get((names, "count"), {}),
    )


SESSION_LISTS: Final = [
    *(_list_of(names, order_by) for names in _COMBINATIONS for order_by in ("updated_at", "created_at")),
    *(_count_of(names) for names in _COMBINATIONS),
]
