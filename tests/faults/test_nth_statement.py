"""Whichever statement of a public call fails: all old or whole batches, a typed error, no harm."""

from __future__ import annotations

import inspect
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import is_dataclass
from enum import Enum
from importlib import import_module
from typing import Any, Final

import pytest
from django.db.models import Model
from django.test.utils import override_settings

from tests.cells import for_each
from tests.database.test_query_counts import public_methods
from tests.databases import CommittedDatabase
from tests.faults.campaign import Trial, campaign
from tests.faults.nth_calls import CALLS, CASES, CLASSES, ELSEWHERE, FUNCTIONS, NO_STATEMENT
from tests.faults.nth_statement import Case, Trials
from tests.faults.statements import Kind
from tests.faults.stored_rows import beside
from tests.test_layout import ALL_NAMES, NOT_IN_DEV

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


# --- No call is left out ---------------------------------------------------------------------------


def _is_called(found: Any) -> bool:
    """Whether a public name is of something that may send statements: no data, no error, no protocol."""
    if not isinstance(found, type):
        return inspect.isfunction(found)
    is_protocol = getattr(found, "_is_protocol", False)
    is_plain = is_dataclass(found) or issubclass(found, BaseException | Enum | Model | dict)
    return not (is_protocol or is_plain)


def test_every_public_class_and_function_is_called_or_has_a_reason() -> None:
    found = {
        (path, name): getattr(import_module(path), name)
        for (path, _), names in ALL_NAMES.items()
        for name in names.split()
        if path not in ("helix_store.testing", *NOT_IN_DEV)
    }
    called = {key for key, each in found.items() if _is_called(each)}
    have_rows = {key for key, each in found.items() if each in CLASSES.values()}
    functions = {name.partition(" ")[0] for name in FUNCTIONS}
    have_rows |= {key for key in found if key[1] in functions}
    assert {f"{path}.{name}" for path, name in called - have_rows} == set(ELSEWHERE)


@for_each(("face", "cls"), CLASSES.items(), ids=str)
def test_every_public_method_has_a_row(face: str, cls: type[Any]) -> None:
    rows = {name.partition(" ")[0] for name in CALLS[face]}
    assert rows == public_methods(cls) - NO_STATEMENT.get(cls, set())


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
