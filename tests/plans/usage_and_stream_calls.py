"""Lists and sweeps of the usage ledger and of streams.

What `tests/database/test_usage_statements.py` proves of rollups and single filters is not repeated.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any, Final

from asgiref.sync import async_to_sync

from helix_store.streams.database import list_streams, tenants_of_stream
from helix_store.testing.usage.base import custom
from helix_store.usage.store import usage_report
from tests.plans.calls import ANALYSED, PAGE, SQLITE, Call, gap
from tests.plans.rows import BUSY, LONG, NOW, World

__all__ = ["STREAM_CALLS", "USAGE_CALLS"]

_STREAM: Final = "session-50"
_FILTERS: Final[dict[str, dict[str, Any]]] = {
    "agent type": {"agent_type": "agent-3"},
    "kind": {"kinds": "tool"},
    "model": {"model": "no-such-model"},
    "user": {"user_id": "user-7"},
    "user and kind": {"user_id": "user-7", "kinds": "tool"},
    "dates": {"date_from": NOW - timedelta(days=3), "date_to": NOW - timedelta(days=2)},
    "agent type and dates": {
        "agent_type": "agent-3",
        "date_from": NOW - timedelta(days=3),
        "date_to": NOW - timedelta(days=2),
    },
    "a model that nobody used": {"model": "another-model"},
    "an agent type that spent nothing": {"agent_type": "another-agent"},
}

_ONE_BOUND: Final = gap(
    "of dates and a cursor SQLite takes the dates, and passes over what comes before", [SQLITE, ANALYSED]
)
_GAPS: Final = {
    "dates": _ONE_BOUND,
    "agent type and dates": {ANALYSED: _ONE_BOUND[ANALYSED]},
}
_LAST_HOUR: Final = {"date_from": NOW - timedelta(hours=1), "date_to": NOW}
_HEADS: Final = "how many chunks a stream has is in no index: every head is looked at"

Make = Callable[[World], Callable[[], object]]


def _of_usage(method: str, *arguments: Any, **options: Any) -> Make:
    return lambda world: partial(getattr(world.usage, method), *arguments, **options)


def _pages(filters: dict[str, Any]) -> Make:
    """First pages and pages from the middle, forwards and backwards."""

    def make(world: World) -> Callable[[], object]:
        chosen = partial(world.usage.query_usage, **filters, count=False)
        total = world.usage.query_usage(**filters).total or 0
        wanted: list[dict[str, Any]] = []
        for order in ("desc", "asc"):
            before = chosen(order=order, offset=total // 2, limit=1)
            cursors = [None, before.next_cursor] if before.next_cursor else [None]
            wanted += [{"order": order, "cursor": cursor} for cursor in cursors]
        return lambda: [chosen(limit=PAGE, **page) for page in wanted]

    return make


def _report(by: str, given: dict[str, Any]) -> Make:
    """Over every tenant."""
    return lambda world: partial(usage_report, by=by, using=world.database.alias, **given)


def _report_of_tenant(given: dict[str, Any]) -> Make:
    return lambda world: _report("session", {"tenant": world.usage.tenant, **given})(world)


def _of_streams(method: str, *arguments: Any, **options: Any) -> Make:
    def make(world: World) -> Callable[[], object]:
        return partial(async_to_sync(getattr(world.streams, method)), *arguments, **options)

    return make


USAGE_CALLS: Final = [
    Call("record_entry", _of_usage("record_entry", custom(BUSY)), commits=True),
    Call("get_entries of a kind", _of_usage("get_entries", BUSY, kinds="tool", limit=PAGE)),
    Call("get_entries of steps", _of_usage("get_entries", BUSY, step_range=(1, None), limit=PAGE)),
    *[
        Call(f"query_usage by {name}", _pages(filters), gaps=_GAPS.get(name, {}))
        for name, filters in _FILTERS.items()
    ],
    # Whatever was spent in that hour is added up.
    *[
        Call(
            f"timeseries by {group}",
            _of_usage("timeseries", date_from=NOW - timedelta(hours=1), date_to=NOW, group_by=group),
            reads=2_200,
        )
        for group in ("model", "agent_type", "user", "kind")
    ],
    # Whatever was spent is added up and grouped, and the groups are sorted by their cost.
    *[
        Call(f"usage_report by {by} of an hour", _report(by, _LAST_HOUR), reads=3_300, sorts=LONG)
        for by in ("session", "tree", "model", "agent_type", "user", "day")
    ],
    *[
        Call(
            f"usage_report of a tenant by {name}",
            _report_of_tenant(_FILTERS[name]),
            reads=45_000,
            sorts=2 * LONG,
        )
        for name in ("user", "dates", "agent type and dates", "a model that nobody used")
    ],
    # As many as it deletes.
    # On SQLite the work counts, and each row goes from seven indexes.
    # What budgets count is grouped by spender and day.
    Call("usage delete", _of_usage("delete", BUSY), reads=6 * LONG, sorts=2 * LONG),
]


def _stream_pages(world: World, **filters: Any) -> Callable[[], object]:
    """The first page, and the one after it."""
    chosen = partial(list_streams, using=world.database.alias, limit=PAGE, **filters)
    cursor = chosen().next_cursor
    return lambda: (chosen(), chosen(cursor=cursor))


STREAM_CALLS: Final = [
    Call("list_streams", _stream_pages),
    Call("list_streams by status", partial(_stream_pages, status="active")),
    Call(
        "list_streams of a tenant",
        lambda world: _stream_pages(world, tenant=world.streams.tenant),
        gaps=gap("without statistics SQLite takes the index of the tenant, and sorts its streams", [SQLITE]),
    ),
    Call("tenants_of_stream", lambda world: partial(tenants_of_stream, _STREAM, using=world.database.alias)),
    Call("get_info", _of_streams("get_info", _STREAM)),
    Call("read_after", lambda world: partial(world.streams.read_after, _STREAM, 500, limit=PAGE), sorts=PAGE),
    Call(
        "write_sync",
        lambda world: partial(world.streams.write_sync, "session-100", [{"type": "text"}]),
        commits=True,
    ),
    Call("delete_stream", _of_streams("delete_stream", _STREAM), reads=LONG),
    Call("reset_stream", _of_streams("reset_stream", _STREAM), reads=LONG),
    # Every active stream is asked for its lease, which is in no index: appends change it.
    Call(
        "prune, dry",
        _of_streams("prune", older_than=timedelta(days=1), dry_run=True),
        reads=600,
        sorts=LONG,
    ),
    Call(
        "prune",
        _of_streams("prune", older_than=timedelta(days=20)),
        reads=LONG,
        sorts=PAGE,
    ),
    Call(
        "prune to a number of chunks, dry",
        _of_streams("prune", older_than=None, keep_chunks=10, dry_run=True),
        reads=600,
        sorts=LONG,
        gaps=gap(_HEADS),
    ),
]
