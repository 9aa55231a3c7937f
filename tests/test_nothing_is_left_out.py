"""Every public class, function and method has a row in the tables of faults and of bounds, or a reason.

The tables themselves run nightly. A new name without a row fails here, in the quick tier.
"""

from __future__ import annotations

import inspect
from dataclasses import is_dataclass
from enum import Enum
from importlib import import_module
from typing import Any

from django.db.models import Model

import helix_store.stores
from tests.cells import for_each
from tests.contract import (
    test_budgets,
    test_database,
    test_locks_database,
    test_streams_database,
    test_usage_database,
)
from tests.database.test_query_counts import public_methods
from tests.faults.nth_calls import CALLS, CLASSES, ELSEWHERE, FUNCTIONS, NO_STATEMENT
from tests.security.arguments import ROOMS, WITHOUT_BOUNDS
from tests.test_layout import ALL_NAMES, NOT_IN_DEV


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
    without_rows = {f"{path}.{name}" for path, name in called - have_rows}
    assert sorted(without_rows - set(ELSEWHERE)) == []
    assert sorted(set(ELSEWHERE) - without_rows) == []


@for_each(("face", "cls"), CLASSES.items(), ids=str)
def test_every_public_method_has_a_row(face: str, cls: type[Any]) -> None:
    rows = {name.partition(" ")[0] for name in CALLS[face]}
    assert rows == public_methods(cls) - NO_STATEMENT.get(cls, set())


def test_the_arguments_of_every_public_class_are_tried() -> None:
    exported = [getattr(helix_store.stores, name) for name in helix_store.stores.__all__]
    tried = {cls for classes in ROOMS.values() for cls in classes}
    assert [
        cls for cls in exported if _is_called(cls) and cls not in tried and cls not in WITHOUT_BOUNDS
    ] == []


@for_each(
    "cls",
    [
        test_budgets.TestDatabaseBudgetStore,
        test_database.TestDatabaseStateStore,
        test_locks_database.TestDatabaseLockManager,
        test_streams_database.TestDatabaseStreamManager,
        test_usage_database.TestDatabaseUsageStore,
    ],
)
def test_the_long_tests_of_a_contract_suite_exist(cls: type[Any]) -> None:
    assert cls.long_tests
    assert [name for name in cls.long_tests if not hasattr(cls, name)] == []
