"""Lists among very many sessions: every filter, the first page and one deep inside, timed by the server."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from django.db import connections
from django.test.utils import CaptureQueriesContext

from benchmarks.bench import Bench
from benchmarks.figures import Figure, Target
from benchmarks.large import LISTED_STATUS, RETIRED_TYPE, large_database
from benchmarks.operations import Operation
from benchmarks.pgbench import Script
from benchmarks.races import Case, Client, Comparison, Limit, Race
from benchmarks.server import settle
from helix_store.core.types import SessionPage
from helix_store.stores import DatabaseStateStore

__all__ = ["CASES", "ListCase"]

PAGE = 25
DEEP = 8_000
_IN_SERVER = Target(1, 0.03, at_most=True)
_TIMES_A_ROUND = 3

FILTERS: Mapping[str, Mapping[str, Any]] = {
    "no filter": {},
    "agent type": {"agent_type": "agent-1"},
    "agent type of old sessions alone": {"agent_type": RETIRED_TYPE},
    "status": {"status": LISTED_STATUS},
    "agent type and status": {"agent_type": "agent-1", "status": LISTED_STATUS},
    "three statuses": {"status": ["active", "running", "paused"]},
    "user": {"user_id": "user-1"},
    "workspace": {"workspace_id": "workspace-1"},
    "roots only": {"parent_session_id": None},
    "tag": {"tags": ["pinned"]},
    "metadata": {"metadata": {"team": "team-1"}},
    "agent type, by creation": {"agent_type": "agent-1", "order_by": "created_at"},
}


@dataclass(frozen=True)
class ListCase:
    """One filter: a page at the start, and one behind a cursor."""

    name: str
    filters: Mapping[str, Any]

    @property
    def paths(self) -> Sequence[str]:
        return [f"list_sessions by {self.name}, {place}" for place in ("first page", "deep", "counted")]

    def measure(self, bench: Bench, wanted: Callable[[str], bool]) -> Iterator[Figure]:
        first, deep, counted = self.paths
        if not any(map(wanted, self.paths)):
            return
        bench.once(large_database)
        bench.once(_settled)
        store = DatabaseStateStore("large")
        total = self._page(store, count=True, limit=1).total
        assert total is not None
        assert total >= PAGE
        times = bench.scale.rounds * _TIMES_A_ROUND
        if wanted(first):
            yield self._figure(first, store, times)
        if wanted(deep):
            offset = min(DEEP, total - PAGE - 1)
            cursor = self._page(store, offset=offset - 1, limit=1).next_cursor
            yield self._figure(deep, store, times, cursor=cursor, note=f"after {offset:,} of {total:,}")
        if wanted(counted):
            with CaptureQueriesContext(connections["large"]) as captured:
                self._page(store, count=True)
            (counting,) = [each["sql"] for each in captured.captured_queries if "COUNT(" in each["sql"]]
            yield _in_server(counted, counting, times, target=None, note=f"the count alone, {total:,}")

    def _figure(
        self, path: str, store: DatabaseStateStore, times: int, *, note: str = "", **position: Any
    ) -> Figure:
        with CaptureQueriesContext(connections["large"]) as captured:
            page = self._page(store, **position)
        assert len({head.session_id for head in page.sessions}) == PAGE
        (query,) = captured.captured_queries
        return _in_server(path, query["sql"], times, target=_IN_SERVER, note=note)

    def _page(self, store: DatabaseStateStore, **options: Any) -> SessionPage:
        return store.list_sessions(**{"limit": PAGE, "count": False, **self.filters, **options})


def _settled(bench: Bench) -> None:
    settle("large")


def _in_server(path: str, sql: str, times: int, *, target: Target | None, note: str) -> Figure:
    """How long the server takes for a query, without planning it, and by which plan."""
    _explain(sql)
    plans = [_explain(sql) for _ in range(times)]
    return Figure(
        path=path,
        values=[plan["Execution Time"] for plan in plans],
        unit="ms",
        target=target,
        note="; ".join(filter(None, [note, _scans(plans[-1]["Plan"])])),
    )


def _explain(sql: str) -> dict[str, Any]:
    with connections["large"].cursor() as cursor:
        # Timing every node takes longer than the nodes.
        cursor.execute(f"EXPLAIN (ANALYZE, TIMING OFF, FORMAT JSON) {sql}".replace("%", "%%"), [])
        plan = cursor.fetchone()[0]
    found: dict[str, Any] = (json.loads(plan) if isinstance(plan, str) else plan)[0]
    return found


def _scans(node: dict[str, Any]) -> str:
    """The scans of a plan, with their indexes and the rows that they gave or threw away."""
    found = []
    if "Scan" in node["Node Type"]:
        rows = node["Actual Rows"] * node["Actual Loops"] + node.get("Rows Removed by Filter", 0)
        found.append(f"{node.get('Index Name', node['Node Type'])}, {rows:,.0f} rows")
    return "; ".join([*found, *filter(None, map(_scans, node.get("Plans", [])))])


class ListPage(Operation):
    def __init__(self, worker: int) -> None:
        self.store = DatabaseStateStore("large")
        self.found: SessionPage | None = None

    def __call__(self) -> None:
        self.found = self.store.list_sessions(
            agent_type="agent-1", status=LISTED_STATUS, limit=PAGE, count=False
        )

    def check(self) -> None:
        assert self.found is not None
        assert len(self.found.sessions) == PAGE


CASES: Sequence[Case] = [
    *(ListCase(name, filters) for name, filters in FILTERS.items()),
    Race(
        contestants={
            "limit": Limit(
                script=Script(
                    sql=f"""
                        SELECT * FROM ref_head WHERE agent_type = 'agent-1' AND status = '{LISTED_STATUS}'
                        ORDER BY updated_at DESC, id DESC LIMIT {PAGE};""",
                    alias="large",
                    rows=PAGE,
                )
            ),
            "ours": Client(operation=ListPage),
        },
        comparisons=[
            Comparison(path="list_sessions page of 25, whole call, against the limit"),
            Comparison(
                path="list_sessions page of 25, whole call",
                of="ours",
                to=None,
                target=Target(0.6, 0.5, at_most=True),
            ),
        ],
        needs=[large_database],
        aliases=("large",),
    ),
]
