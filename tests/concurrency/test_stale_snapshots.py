"""A write in a caller's transaction above READ COMMITTED does not decide by an old snapshot."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Final

import pytest

from tests.concurrency.stale_snapshots import LEVELS, PAIRS, Pair, Races
from tests.databases import CommittedDatabase
from tests.faults.stored_rows import beside
from tests.tiers import Tier

_SAMPLE: Final = 50
_SAMPLE_OF_QUICK: Final = 10
_KNOWN: Final = (
    Pair("sessions", "usage: record_entry", "usage: record_entries"),
    # A post that another write commits is received or withdrawn together with the others.
    Pair("sessions", "a step", "post_message"),
    Pair("sessions", "receive_posts", "post_message"),
    Pair("sessions", "withdraw_post", "post_message"),
    Pair("sessions", "delete the whole session", "post for tomorrow"),
    Pair("sessions", "delete the whole session", "stage for the next step"),
    Pair("sessions", "delete the whole session", "stage_changes"),
    Pair("sessions", "delete the whole session", "usage: record_entry"),
    Pair("sessions", "delete the session, keep usage", "usage: record_entry"),
    Pair("sessions", "delete the whole session", "create a child"),
    Pair("sessions", "usage with an amount", "budgets: create"),
    Pair("sessions", "budgets: create", "usage with an amount"),
    # Without any budget, an entry is inserted by one statement.
    Pair("first budget", "usage with an amount", "budgets: create"),
    # The copy of a thread without checkpoints must not create a session.
    Pair("logs", "langgraph saver: copy_thread", "langgraph saver: delete_for_runs"),
    # A run that was copied is deleted in the copy too.
    Pair("logs", "langgraph saver: delete_for_runs", "langgraph saver: copy_thread"),
)
"""Pairs that once had an unsound outcome."""


@pytest.fixture
def other(postgres_db: CommittedDatabase) -> Iterator[str]:
    with beside(postgres_db.alias) as alias:
        yield alias


def chosen(config: pytest.Config, level: str) -> list[Pair]:
    """All pairs with ``--unsampled``, or a sample that changes with the seed of the run."""
    if config.option.unsampled:
        return list(PAIRS)
    rng = random.Random(f"{config.option.seed} {level}")  # noqa: S311
    size = _SAMPLE_OF_QUICK if config.option.tier == Tier.QUICK else _SAMPLE
    return [*_KNOWN, *rng.sample(PAIRS, size)]


@pytest.mark.thorough
@pytest.mark.parametrize("level", LEVELS)
def test_a_write_after_another_ones_commit_fails_or_has_the_outcome_of_an_order(
    postgres_db: CommittedDatabase, other: str, request: pytest.FixtureRequest, level: str
) -> None:
    races = Races(postgres_db.alias, other, level)
    faults = [fault for pair in chosen(request.config, level) if (fault := races.fault_of(pair))]
    assert not faults, f"{len(faults)} pairs:\n" + "\n".join(faults)
    assert races.counts["as in order"], races.counts
    assert races.counts["StoreBusy"], races.counts
