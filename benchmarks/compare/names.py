"""The names of the paths, for the process that does not set Django up."""

from __future__ import annotations

__all__ = ["BYTES_NAMES", "NAMES", "is_sqlite"]

NAMES = (
    "load_state",
    "step 4 KB",
    "step 16 KB",
    "step 4 KB, 2 staged",
    "step 4 KB inside atomic()",
    "step 4 KB, portable",
    "compare_and_set_status",
    "append_messages",
    "get_messages of 50",
    "get_latest_checkpoint",
    "stage_changes",
    "lock acquire + release",
    "is_locked",
    "usage record_entry",
    "usage get_rollup",
    "stream write_sync of 10 chunks",
    "stream read_after 500",
    "snapshot put",
    "snapshot get",
    "snapshot list of 20",
    "graph save_checkpoint",
    "SQLite load_state",
    "SQLite step 4 KB",
    "SQLite compare_and_set_status",
    "SQLite append_messages",
    "SQLite lock acquire + release",
    "SQLite usage record_entry",
    "SQLite stream write_sync of 10 chunks",
    "SQLite snapshot put",
)
BYTES_NAMES = {"bytes of a step 4 KB": 4, "bytes of a step 16 KB": 16}
"""The paths whose write-ahead log and tables are measured, with their KiB of state."""


def is_sqlite(name: str) -> bool:
    return name.startswith("SQLite ")
