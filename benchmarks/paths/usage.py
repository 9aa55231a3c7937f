"""The usage ledger: recording an entry, adding up a session and a tree."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

from benchmarks.bench import Bench
from benchmarks.evidence import Evidence
from benchmarks.figures import Target
from benchmarks.operations import Operation
from benchmarks.pgbench import Script
from benchmarks.races import Client, Comparison, Limit, Race
from benchmarks.reference import execute, reference_schema, reference_sessions
from benchmarks.sessions import AGENT_TYPE, PER_WORKER, live_sessions, sessions_of
from helix_store.core.usage import UsageRollup
from helix_store.models import UsageEntry
from helix_store.stores import DatabaseStateStore, DatabaseUsageStore

__all__ = ["CASES"]

ENTRIES = 10_000
TREE_SESSIONS = 50
MODELS = ("gpt-4o", "gpt-4o-mini", "claude-sonnet-4-5")
TOOLS = ("search", "fetch", "book", "mail")


class RecordEntry(Operation):
    def __init__(self, worker: int) -> None:
        self.usage = DatabaseUsageStore()
        self.sessions = itertools.cycle(sessions_of(worker))

    def __call__(self) -> None:
        self.usage.record_entry(entry(next(self.sessions), 1))


class Rollup(Operation):
    def __init__(self, worker: int, *, session_id: str, include_sub_agents: bool = False) -> None:
        self.usage = DatabaseUsageStore()
        self.session_id = session_id
        self.include_sub_agents = include_sub_agents
        self.found: UsageRollup | None = None

    def __call__(self) -> None:
        self.found = self.usage.get_rollup(self.session_id, include_sub_agents=self.include_sub_agents)

    def check(self) -> None:
        assert self.found is not None
        assert self.found.entry_count == ENTRIES
        assert self.found.session_count == (TREE_SESSIONS if self.include_sub_agents else 1)
        assert self.found.tokens.total == ENTRIES * 4 // 5 * 150
        assert self.found.tool_stats.total_calls == ENTRIES // 5
        assert set(self.found.tokens_by_model) == set(MODELS)


def entry(session_id: str, number: int) -> dict[str, Any]:
    """Four in five are tokens of a model, the fifth is a tool call; the cost is known, as for the limit."""
    shared = {
        "session_id": session_id,
        "step_count": number,
        "timestamp": time.time_ns() // 1_000_000,
        "source": {"type": "agent", "name": "bench"},
        "cost_usd": "0.00075",
    }
    if number % 5 == 0:
        return {
            **shared,
            "kind": "tool",
            "tool_name": TOOLS[number // 5 % len(TOOLS)],
            "success": number % 10 == 0,
            "duration_ms": 420,
        }
    tokens = {"prompt": 100, "completion": 50, "total": 150}
    return {**shared, "kind": "tokens", "model": MODELS[number % len(MODELS)], "tokens": tokens}


def ledger(bench: Bench) -> None:
    """10,000 entries of one session and 10,000 of a tree of 50, ours and the limit's."""
    store = DatabaseStateStore()
    usage = DatabaseUsageStore()
    store.create_session("ledger", agent_type=AGENT_TYPE)
    store.create_session("tree", agent_type=AGENT_TYPE)
    for number in range(1, TREE_SESSIONS):
        store.create_session(f"tree-{number}", agent_type=AGENT_TYPE, parent_session_id="tree")
    tree = ["tree", *(f"tree-{number}" for number in range(1, TREE_SESSIONS))]
    for session_id, entries in [("ledger", ENTRIES), *((each, ENTRIES // TREE_SESSIONS) for each in tree)]:
        for batch in _batches(entry(session_id, number) for number in range(1, entries + 1)):
            usage.record_entries(batch)
    bench.once(reference_schema)
    _copy_to_reference(tree)


def _copy_to_reference(tree: list[str]) -> None:
    execute(
        "default",
        f"""
        INSERT INTO ref_usage
        SELECT entry_id, recorded_for, kind, coalesce(model, tool_name), prompt_tokens, completion_tokens,
            total_tokens, NOT success, duration_ms, 10, timestamp
        FROM "{UsageEntry._meta.db_table}" WHERE recorded_for = 'ledger' OR recorded_for LIKE 'tree%%'""",
        [],
    )
    execute(
        "default",
        "INSERT INTO ref_tree SELECT id, nullif('tree', id) FROM unnest(%s::text[]) AS id",
        [tree],
    )


def _batches(entries: Iterator[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    while batch := list(itertools.islice(entries, 1_000)):
        yield batch


_SUMS = """
    kind, name, count(*), sum(prompt), sum(completion), sum(total), count(*) FILTER (WHERE is_failure),
    sum(duration_ms), sum(cost)
"""
_GROUPS = len(MODELS) + len(TOOLS)
_PICK = f"\\set s 1 + :client_id * {PER_WORKER} + :k % {PER_WORKER}"

CASES = [
    Race(
        contestants={
            "limit": Limit(
                script=Script(
                    choose=_PICK,
                    sql="""
                        INSERT INTO ref_usage
                        SELECT 'u-' || :tag || '-' || :client_id || '-' || :k, id, 'tokens', 'gpt-4o',
                            100, 50, 150, NULL, NULL, 750000000, clock_timestamp()
                        FROM ref_session WHERE id = 's-' || :s;""",
                ),
                evidence=Evidence("SELECT count(*) FROM ref_usage", (1,)),
            ),
            "ours": Client(
                operation=RecordEntry,
                evidence=Evidence(f'SELECT count(*) FROM "{UsageEntry._meta.db_table}"', (1,)),
            ),
        },
        comparisons=[Comparison(path="record_usage", target=Target(0.45, 0.65))],
        needs=[live_sessions, reference_sessions],
    ),
    Race(
        contestants={
            "limit": Limit(
                script=Script(
                    sql=f"SELECT {_SUMS} FROM ref_usage WHERE session_id = 'ledger' GROUP BY kind, name;",
                    rows=_GROUPS,
                )
            ),
            "ours": Client(operation=partial(Rollup, session_id="ledger")),
        },
        comparisons=[Comparison(path="rollup of 10,000 entries", target=Target(0.7, 1.0))],
        needs=[ledger],
    ),
    Race(
        contestants={
            "limit": Limit(
                script=Script(
                    sql=f"""
                        WITH RECURSIVE tree AS (
                            SELECT id FROM ref_tree WHERE id = 'tree'
                            UNION
                            SELECT child.id FROM ref_tree AS child JOIN tree ON child.parent_id = tree.id
                        )
                        SELECT {_SUMS} FROM ref_usage JOIN tree ON tree.id = session_id
                        GROUP BY kind, name;""",
                    rows=_GROUPS,
                )
            ),
            "ours": Client(operation=partial(Rollup, session_id="tree", include_sub_agents=True)),
        },
        comparisons=[Comparison(path="rollup of a tree of 50 x 200", target=Target(0.7, 1.0))],
        needs=[ledger],
    ),
]
