"""Whichever statement of a public call fails: all old or whole batches, a typed error, no harm."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from typing import Any, Final

import pytest
from django.test.utils import override_settings

from tests.cells import for_each
from tests.databases import CommittedDatabase
from tests.faults.campaign import Trial, campaign
from tests.faults.nth_calls import CASES
from tests.faults.nth_statement import Case, Trials
from tests.faults.statements import Kind
from tests.faults.stored_rows import beside

Planned = tuple[Case, Kind, bool]


def _planned() -> list[Planned]:
    """Every call with every fault, in an order that has something of everything at its beginning.

    A deadlock is found, and a full disk met, before a statement has done its work.
    """
    faults = [(kind, False) for kind in Kind] + [(Kind.LOST, True), (Kind.TIMEOUT, True)]
    planned = [(case, kind, after) for case in CASES for kind, after in faults]
    random.Random(0).shuffle(planned)  # noqa: S311  the same order for ever
    return planned


PLANNED: Final = _planned()


@pytest.fixture(params=[True, False], ids=["fast", "portable"])
def trials(request: pytest.FixtureRequest, committed_db: CommittedDatabase) -> Iterator[Trials]:
    if request.param and committed_db.vendor == "sqlite":
        pytest.skip("SQLite has one form")
    with override_settings(HELIX_STORE={"FAST_PATHS": request.param}), beside(committed_db.alias) as other:
        yield Trials(committed_db.alias, other, Counter())


@pytest.mark.campaign
def test_a_failed_statement_leaves_whole_writes(trials: Trials, committed_db: CommittedDatabase) -> None:
    name = "sqlite" if committed_db.vendor == "sqlite" else "postgres"
    with campaign("nth_statement", name, sizes=(10, len(PLANNED) // 8, len(PLANNED))) as made:
        trials.counts = made.counts

        def fail_each(trial: Trial) -> None:
            case, kind, after = PLANNED[(trial.seed - 1) % len(PLANNED)]
            try:
                trials.check(case, kind, after=after)
            except BaseException:
                # What is open after a failure is no fault of the next trial.
                committed_db.connection.close()
                raise

        made.run(fail_each)


# --- The faults are real ---------------------------------------------------------------------------


@for_each("kind", Kind)
def test_a_fault_is_met_once_and_a_write_that_hides_it_is_found(trials: Trials, kind: Kind) -> None:
    (case,) = [case for case in CASES if str(case) == "state store: append_messages"]
    trials.check(case, kind, after=False)
    assert trials.counts["injections"] >= trials.counts["statements"] > 0
    torn = Case("planted", "two writes for one", _two_appends)
    with pytest.raises(AssertionError, match="commits 2 times"):
        trials.check(torn, kind, after=False)


def _two_appends(database: CommittedDatabase) -> Any:
    append = next(case for case in CASES if str(case) == "state store: append_messages").prepare(database)
    return lambda: (append(), append())
