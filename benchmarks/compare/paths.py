"""The paths that are compared, by the name under which the table has them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from benchmarks.compare import operations as session
from benchmarks.compare import other_operations as other
from benchmarks.compare.names import BYTES_NAMES, NAMES

__all__ = ["PATHS", "Path"]


@dataclass(frozen=True, kw_only=True)
class Path:
    """``make(alias, key)`` makes the operation; ``helix_store`` is the setting of that name."""

    make: Callable[[str, str], session.Operation]
    alias: str = "default"
    helix_store: Mapping[str, Any] = field(default_factory=dict)


_ON_BOTH: dict[str, Callable[[str, str], session.Operation]] = {
    "load_state": session.LoadState,
    "step 4 KB": session.Step,
    "compare_and_set_status": session.SetStatus,
    "append_messages": session.AppendMessages,
    "lock acquire + release": session.AcquireAndRelease,
    "usage record_entry": other.RecordEntry,
    "stream write_sync of 10 chunks": other.WriteChunks,
    "snapshot put": other.PutSnapshot,
}


class _ManySteps(session.Step):
    SESSIONS = 20


PATHS: dict[str, Path] = {
    **{name: Path(make=make) for name, make in _ON_BOTH.items()},
    "step 16 KB": Path(make=partial(session.Step, kib=16)),
    "step 4 KB, 2 staged": Path(make=partial(session.Step, is_staged=True)),
    "step 4 KB inside atomic()": Path(make=session.StepInsideAtomic),
    "step 4 KB, portable": Path(make=session.Step, helix_store={"FAST_PATHS": False}),
    "get_messages of 50": Path(make=session.GetMessages),
    "get_latest_checkpoint": Path(make=session.LatestCheckpoint),
    "stage_changes": Path(make=session.StageChanges),
    "is_locked": Path(make=session.IsLocked),
    "usage get_rollup": Path(make=other.GetRollup),
    "stream read_after 500": Path(make=other.ReadAfter),
    "snapshot get": Path(make=other.GetSnapshot),
    "snapshot list of 20": Path(make=other.ListSnapshots),
    "graph save_checkpoint": Path(make=other.SaveGraphCheckpoint),
    **{f"SQLite {name}": Path(make=make, alias="sqlite") for name, make in _ON_BOTH.items()},
    **{name: Path(make=partial(_ManySteps, kib=kib)) for name, kib in BYTES_NAMES.items()},
}
assert set(NAMES) | set(BYTES_NAMES) == set(PATHS)
