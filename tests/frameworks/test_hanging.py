"""No way of running an agent inside ``atomic()`` hangs: each ends soon, with a result or a typed error."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

from tests.databases import CommittedDatabase
from tests.frameworks.cells import CELLS, OTHERS, Cell, run_cells
from tests.processes import WorkerProcess

_SECONDS: Final = 2.0
_SECONDS_OF_POLLED: Final = 10.0
"""A caller that looks again and again whether the call has ended seems to be busy."""
_ALL_SECONDS: Final = 400.0


def outcomes_of(db: CommittedDatabase, report: Path) -> dict[Cell, dict[str, Any]]:
    """Run all cells; a process that a hanging cell has ended is followed by another one."""
    outcomes: dict[int, dict[str, Any]] = {}
    while remaining := [number for number in range(len(CELLS)) if number not in outcomes]:
        process = WorkerProcess(run_cells, remaining, str(report), db.alias, db.tenant)
        ended = process.outcome(_ALL_SECONDS)
        lines = map(json.loads, report.read_text().splitlines()) if report.exists() else ()
        before = len(outcomes)
        outcomes = {line["number"]: line for line in lines}
        if len(outcomes) == before:
            ended.unwrap()
    return {CELLS[number]: outcome for number, outcome in outcomes.items()}


def table_of(outcomes: dict[Cell, dict[str, Any]]) -> str:
    return "\n".join(
        f"{cell.shape:15} {'recorder' if cell.recorder else '':9} {cell.call:23} {cell.writes:12} "
        f"{each['outcome']:28} {each['seconds']:5.2f} s"
        for cell, each in outcomes.items()
    )


_RECORDED: Final = {"one node": 1, "parallel tools": 5, "subgraph": 3, "interrupt": 2}
"""The calls of models and tools of each graph."""


def expected_of(cell: Cell) -> str:
    if cell in OTHERS:
        if cell.call == "polled":
            return "StoreBusy"
        return "stored" if cell.call == "async_to_sync" else "OutsideTransaction"
    if not cell.call.startswith("ainvoke"):
        return "OutsideTransaction"
    return f"stored, {_RECORDED[cell.shape] if cell.recorder else 0} calls recorded"


def is_independent(cell: Cell, vendor: str) -> bool:
    """A thread of the caller whose block has locked nothing has its own transaction, as in Django."""
    return vendor == "postgresql" and cell.shape == "a thread" and cell.writes == "nothing"


def is_wrong(cell: Cell, outcome: dict[str, Any], vendor: str) -> bool:
    if is_independent(cell, vendor):
        return bool(outcome["outcome"] != "stored" or outcome["seconds"] > _SECONDS)
    seconds = _SECONDS_OF_POLLED if cell.call == "polled" else _SECONDS
    return bool(outcome["seconds"] > seconds or outcome["outcome"] != expected_of(cell) or outcome["is_left"])


def test_no_run_hangs_in_its_callers_transaction(committed_db: CommittedDatabase, tmp_path: Path) -> None:
    outcomes = outcomes_of(committed_db, tmp_path / "report")
    wrong = {
        cell: outcome for cell, outcome in outcomes.items() if is_wrong(cell, outcome, committed_db.vendor)
    }
    stacks = next((each["stacks"] for each in wrong.values() if "stacks" in each), "")
    assert not wrong, f"{len(wrong)} of {len(CELLS)}\n{table_of(wrong)}\n{stacks}"
