"""What each tier of the suite runs. `tests/README.md` says how many tests it has and how long it takes."""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum
from typing import Final

__all__ = [
    "LEFT_OUT",
    "LONGEST",
    "ON_ONE_DATABASE",
    "Tier",
    "is_below",
    "is_left_out",
]


class Tier(StrEnum):
    """``REST`` is everything that ``QUICK`` leaves out."""

    QUICK = "quick"
    REST = "rest"
    ALL = "all"


LEFT_OUT: Final[dict[str, str]] = {
    "tests/admin/test_answering.py": "the admin in a browser",
    "tests/admin/test_clicking.py": "the admin in a browser",
    "tests/admin/test_console.py": "the admin in a browser",
    "tests/admin/test_two_windows.py": "the admin in a browser",
    "tests/chat/test_campaign.py": "connections and servers cut at random",
    "tests/chat/test_clients.py": "released clients of both protocols in Node",
    "tests/chat/test_ending.py": "processes that end",
    "tests/chat/test_quick_start.py": "a project made from docs/chat.md",
    "tests/chat/test_validator.py": "the validator of AG-UI on a live server",
    "tests/checkpointers/test_concurrent_writers.py": "races of processes",
    "tests/catalogue/test_recorded_results.py": "every operation on recorded worlds",
    "tests/cleanup/test_crashes.py": "killed processes",
    "tests/cleanup/test_killed_runs.py": "killed processes",
    "tests/cleanup/test_plans.py": "plans of statements in filled databases",
    "tests/cleanup/test_races.py": "races of processes",
    "tests/commands/test_databases_of_the_app.py": "every command in databases without the app",
    "tests/commands/test_helix_sessions_changes.py": "commands in a terminal",
    "tests/concurrency/test_lock_durability.py": "crashes of the server",
    "tests/concurrency/test_lock_fights.py": "races of processes",
    "tests/concurrency/test_state_store.py": "races of processes",
    "tests/concurrency/test_usage.py": "races of processes",
    "tests/contract/test_payload_round_trips.py": "generated payloads",
    "tests/contract/test_the_suite.py": "faulty stores under the contract suite",
    "tests/contract/test_usage_against_reference.py": "generated ledgers",
    "tests/database/test_autovacuum.py": "a server that vacuums all the time",
    "tests/database/test_checkpoint_deltas.py": "generated histories of checkpoints",
    "tests/database/test_errors_failing_server.py": "crashes of the server",
    "tests/database/test_failing_statements.py": "every statement failing in turn",
    "tests/database/test_usage_statements.py": "the statements of the ledger",
    "tests/deployments/contracts": "the contract suites behind poolers",
    "tests/deployments/test_failover.py": "failover",
    "tests/deployments/test_isolation.py": "poolers",
    "tests/deployments/test_listening.py": "poolers",
    "tests/deployments/test_migration_under_workers.py": "migrations under workers",
    "tests/deployments/test_prefork.py": "forked workers",
    "tests/deployments/test_replica.py": "replicas",
    "tests/deployments/test_search_path.py": "schemas",
    "tests/docs/test_projects.py": "the tutorial and other pages, followed in new projects",
    "tests/docs/test_site.py": "the built site of the documentation",
    "tests/docs/test_types.py": "strict type checks of programs",
    "tests/example": "the example project in a browser",
    "tests/faults": "campaigns of faults",
    "tests/faults_found/test_checkpoints_kept.py": "races of processes",
    "tests/faults_found/test_one_statement_races.py": "races of processes",
    "tests/faults_found/test_poolers.py": "poolers",
    "tests/faults_found/test_without_time_zones.py": "every call in a project without time zones",
    "tests/frameworks/test_extras.py": "each framework alone",
    "tests/frameworks/test_hanging.py": "agents of all frameworks in a transaction of their caller",
    "tests/frameworks/test_killed_imports.py": "killed processes",
    "tests/frameworks/test_plans.py": "plans of statements",
    "tests/frameworks/test_the_example.py": "the agents of the example project",
    "tests/handles/test_killed_workers.py": "killed processes",
    "tests/items/test_item_log_races.py": "races of processes",
    "tests/migrations/test_changed_prefix.py": "migrations forwards and backwards, killed and at once",
    "tests/migrations/test_going_back.py": "migrations forwards and backwards, killed and at once",
    "tests/migrations/test_losing_rows.py": "migrations forwards and backwards, killed and at once",
    "tests/migrations/test_migrate.py": "migrations forwards and backwards, killed and at once",
    "tests/migrations/test_session_search.py": "migrations forwards and backwards, killed and at once",
    "tests/migrations/test_two_prefixes.py": "migrations forwards and backwards, killed and at once",
    "tests/migrations/test_unpublished_numbering.py": "migrations forwards and backwards, killed and at once",
    "tests/plans": "plans of statements in filled databases",
    "tests/security/test_admin_lookups.py": "every lookup that the admin allows",
    "tests/security/test_admin_scripts.py": "the admin in a browser",
    "tests/security/test_admin_wrong_shapes.py": "damaged rows on every page of the admin",
    "tests/security/test_bounds.py": "every argument at its bound",
    "tests/security/test_long_responses.py": "large pages",
    "tests/security/test_wrong_shapes.py": "damaged rows in every call",
    "tests/shards/test_admin.py": "the admin of several databases",
    "tests/shards/test_cleanup.py": "the cleanup of several databases",
    "tests/shards/test_contracts.py": "the contract suites through a router",
    "tests/shards/test_copies_beside_writers.py": "every write beside a move",
    "tests/shards/test_fences.py": "races of processes",
    "tests/shards/test_late_processes.py": "races of processes",
    "tests/shards/test_moves_beside_others.py": "moves beside what else a project has",
    "tests/shards/test_moves_under_load.py": "killed processes",
    "tests/shards/test_partitions.py": "the contract suites on partitioned tables",
    "tests/shards/test_shard_moves.py": "logical replication",
    "tests/shards/test_what_a_move_leaves.py": "what a move creates in a database",
    "tests/streams/test_stream_fights.py": "races of processes",
    "tests/streams/test_thousand_readers.py": "a thousand readers",
    "tests/transfer/test_memory.py": "the memory of large exports",
    "tests/test_release.py": "the wheel in environments of its own",
    "tests/unit/test_comparison.py": "generated values",
    "tests/unit/test_entries.py": "generated values",
}
"""Files and folders that the quick tier does not collect, and what they test."""

_KEPT: Final[tuple[str, ...]] = ("tests/faults/test_lost_commits.py",)
"""Files in these folders that the quick tier collects: fast tests of code that it would not run otherwise."""

LONGEST: Final[tuple[str, ...]] = (
    "tests/concurrency/test_stale_snapshots.py",
    "tests/faults/test_marks.py",
    "tests/security/test_wrong_shapes.py",
    "tests/shards/test_copies_beside_writers.py",
)
"""Files with tests of several minutes. They begin first, because one that began last would run alone."""

ON_ONE_DATABASE: Final[tuple[str, ...]] = (
    "tests/adapters",
    "tests/admin",
    "tests/catalogue",
    "tests/chat",
    "tests/checkpointers",
    "tests/cleanup",
    "tests/commands",
    "tests/concurrency/test_fencing.py",
    "tests/contrib/test_metrics.py",
    "tests/doctor",
    "tests/faults_found/test_async_callers.py",
    "tests/faults_found/test_viewer.py",
    "tests/frameworks",
    "tests/handles/test_crashresume.py",
    "tests/security/test_admin_permissions.py",
    "tests/security/test_admin_tenants.py",
    "tests/security/test_fences_of_tenants.py",
    "tests/shards",
    "tests/streams/test_stream_view.py",
    "tests/transfer",
    "tests/usage/test_reports.py",
)
"""Files and folders that the quick tier runs on PostgreSQL only."""


def is_left_out(path: str) -> bool:
    """Return whether the quick tier leaves out a file or a whole folder."""
    return is_below(path, LEFT_OUT) and not any(is_below(kept, [path]) for kept in _KEPT)


def is_below(path: str, places: Iterable[str]) -> bool:
    """Return whether a file is in one of some files and folders; all paths start at the project's root."""
    return any(path == place or path.startswith(f"{place}/") for place in places)
