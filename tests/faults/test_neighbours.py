"""Two tenants in each of two databases, in the threads of one process: each has what it would have alone."""

from __future__ import annotations

from typing import Final

import pytest

from tests.databases import CommittedDatabase
from tests.faults.campaign import Trial, campaign
from tests.faults.neighbours import live
from tests.faults.restores import Restorable
from tests.processes import run_in_threads

_TENANTS: Final = ("here", "there")


def live_beside(aliases: tuple[str, str], prefix: str, trial: Trial) -> None:
    """Tell four stories at once, and each of them again where nobody disturbs it."""
    places = [(alias, f"{prefix}-{tenant}") for alias in aliases for tenant in _TENANTS]
    seeds = [trial.chance.randrange(1_000_000) for _ in places]
    told = [(*place, seed) for place, seed in zip(places, seeds, strict=True)]
    beside = [outcome.unwrap() for outcome in run_in_threads(live, told)]
    alone = [live(alias, f"{tenant}-alone", seed) for alias, tenant, seed in told]
    for place, seen, expected in zip(places, beside, alone, strict=True):
        assert seen == expected, f"{place} differs from what it is alone"
    trial.count("rows", sum(map(len, beside)))


@pytest.mark.campaign
def test_neighbours_in_one_process_do_not_meet(
    committed_db: CommittedDatabase, restorable: Restorable
) -> None:
    name = "sqlite" if committed_db.vendor == "sqlite" else "postgres"
    aliases = (committed_db.alias, restorable.worker)
    with campaign("neighbours", name, sizes=(2, 40, 2_000)) as made:
        made.run(lambda trial: live_beside(aliases, f"{committed_db.tenant}-{trial.seed}", trial))
    assert made.counts["rows"], made.counts
