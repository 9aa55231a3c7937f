"""Every public write whose COMMIT, or its reply, is lost: its caller learns the outcome."""

from __future__ import annotations

import pytest

from tests.database.counted_calls import CALLS
from tests.databases import CommittedDatabase
from tests.faults.campaign import Trial, campaign
from tests.faults.lost_replies import Outcome, outcome_of
from tests.faults.proxy import Cut
from tests.faults.wires import Wire


@pytest.mark.campaign
def test_a_write_whose_commit_is_cut_has_the_outcome_of_one_that_is_not(wire: Wire) -> None:
    database = CommittedDatabase(alias=wire.alias, tenant=wire.tenant)
    kinds = [(face, call) for face, calls in CALLS.items() for call in calls]
    sound: dict[tuple[str, str, bool], Outcome] = {}

    def cut_one(trial: Trial) -> None:
        face, call = kinds[trial.seed * 61 % len(kinds)]
        fast, cut = trial.chance.choice([True, False]), trial.chance.choice(list(Cut))
        expected = sound.get((face, call, fast))
        if expected is None:
            expected = sound[face, call, fast] = outcome_of(database, wire.proxy, face, call, fast=fast)
        if not expected.commits:
            trial.count("nothing to cut")
            return
        number = trial.chance.randrange(expected.commits)
        found = outcome_of(database, wire.proxy, face, call, fast=fast, cut=(cut, number))
        trial.count(f"{face}, {cut.value}")
        where = f"{face}: {call}, fast {fast}, commit {number}, {cut.value}"
        assert found.answer == expected.answer, where
        assert found.rows == expected.rows, (where, found.rows - expected.rows, expected.rows - found.rows)

    with campaign("lost_replies", "postgres", sizes=(40, 1_000, 100_000)) as made:
        made.run(cut_one)
    assert wire.proxy.cuts == made.trials - made.counts["nothing to cut"]
