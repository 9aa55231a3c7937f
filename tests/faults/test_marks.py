"""Every public write whose reply is lost, in both forms, and after a restart of the server."""

from __future__ import annotations

import random
from typing import Final, NamedTuple

import pytest

from tests.database.counted_calls import CALLS
from tests.databases import CommittedDatabase
from tests.faults.lost_replies import Outcome, outcome_of
from tests.faults.proxy import Cut
from tests.faults.wires import Wire

_SAMPLE: Final = 30


class Cell(NamedTuple):
    face: str
    call: str
    fast: bool
    restarts: bool


_CELLS: Final = [
    Cell(face, call, fast, restarts)
    for face, calls in CALLS.items()
    for call in calls
    for fast in (True, False)
    for restarts in (True, False)
]
_KNOWN: Final = [
    cell
    for cell in _CELLS
    if cell.restarts
    and (cell.face, cell.call)
    in (
        ("state store", "start_run"),
        ("state store", "start_run that supersedes"),
        ("state store", "update_run"),
        ("state store", "stage_changes"),
        ("state store", "compare_and_set_status"),
    )
]
"""Calls of which both forms leave a mark. The portable form once was refused because of its own write."""


def _chosen(config: pytest.Config) -> list[Cell]:
    if config.option.unsampled:
        return _CELLS
    rng = random.Random(config.option.seed)  # noqa: S311
    return [*_KNOWN, *rng.sample(_CELLS, _SAMPLE)]


def _faults_of(database: CommittedDatabase, wire: Wire, cell: Cell) -> list[str]:
    face, call, fast, restarts = cell
    sound = outcome_of(database, wire.proxy, face, call, fast=fast)
    faults = []
    for number in range(sound.commits):
        cut = (Cut.AFTER, number)
        found = outcome_of(database, wire.proxy, face, call, fast=fast, cut=cut, restarts=restarts)
        may_be_open = restarts and cell not in _KNOWN and _is_open(found, number, sound)
        if not (_is_sound(found, sound) or may_be_open):
            rows = sorted(found.rows - sound.rows), sorted(sound.rows - found.rows)
            faults.append(f"{cell}, commit {number}: {found.answer} instead of {sound.answer}, {rows}")
    return faults


def _is_sound(found: Outcome, sound: Outcome) -> bool:
    return (found.answer, found.rows) == (sound.answer, sound.rows)


def _is_open(found: Outcome, number: int, sound: Outcome) -> bool:
    """Return whether the call says that it does not know, and everything up to the lost reply is stored."""
    is_last = number == sound.commits - 1
    return found.answer.startswith("OutcomeUnknown") and (not is_last or found.rows == sound.rows)


def test_a_write_whose_reply_is_lost_is_not_refused_because_of_itself(
    wire: Wire, request: pytest.FixtureRequest
) -> None:
    database = CommittedDatabase(alias=wire.alias, tenant=wire.tenant)
    faults = [fault for cell in _chosen(request.config) for fault in _faults_of(database, wire, cell)]
    assert not faults, f"{len(faults)} cells:\n" + "\n".join(faults)
