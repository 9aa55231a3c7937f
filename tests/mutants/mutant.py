"""A mutant, and how it names the tests that must notice it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final

__all__ = [
    "ROOT",
    "Mutant",
    "Tests",
    "in_memory",
    "locks",
    "named",
    "names_of_tests",
    "state",
    "streams",
    "thorough_tests",
    "usage",
]

ROOT: Final = Path(__file__).parents[2]
Tests = tuple[str, ...]
"""Files of tests, and tests by ``file::name``."""


@dataclass(frozen=True)
class Mutant:
    """``text`` stands in the file exactly once. The first of the tests that fails has killed it."""

    kind: str
    file: str
    text: str
    replacement: str
    tests: Tests

    def __str__(self) -> str:
        return f"{self.file}: {' '.join(self.text.split())}"


def named(place: str, *words: str, written_in: str | None = None) -> Tests:
    """The tests of a file or class whose names have one of these words.

    ``written_in`` is the folder with the tests that a class of a contract suite inherits.
    """
    if written_in:
        sources = sorted((ROOT / written_in).glob("*.py"))
        names = [name for each in sources for name in re.findall(r"def (test_\w+)", each.read_text())]
    else:
        names = list(names_of_tests(ROOT / place))
    found = tuple(f"{place}::{name}" for name in names if any(word in name for word in words))
    if not all(any(word in name for name in names) for word in words):
        raise ValueError(f"no test of {place} for one of {words}")
    return found


def names_of_tests(file: Path) -> Iterator[str]:
    """The tests of a file, those of a class as ``Class::test``."""
    for name, _ in _marked_tests(file):
        yield name


@cache
def thorough_tests(file: Path) -> frozenset[str]:
    """The tests of a file that the quick tier leaves out, by the same names."""
    return frozenset(name for name, is_thorough in _marked_tests(file) if is_thorough)


def _marked_tests(file: Path) -> Iterator[tuple[str, bool]]:
    """The names of tests, and whether they or their classes are marked as thorough."""
    for node in ast.parse(file.read_text()).body:
        outer = [node] if isinstance(node, ast.ClassDef) else []
        for each in node.body if isinstance(node, ast.ClassDef) else [node]:
            if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef) and each.name.startswith("test_"):
                marks = [ast.unparse(mark) for part in (*outer, each) for mark in part.decorator_list]
                yield "::".join(part.name for part in (*outer, each)), "pytest.mark.thorough" in marks


def state(*words: str) -> Tests:
    """Tests of the contract suite of state stores, in the store's usual form."""
    place = "tests/contract/test_database.py::TestDatabaseStateStore"
    return named(place, *words, written_in="helix_store/testing/state_store")


def in_memory(*words: str) -> Tests:
    """The same in memory. A database has a second look in its statement; there the rule is alone."""
    place = "tests/contract/test_memory.py::TestInMemoryStateStore"
    return named(place, *words, written_in="helix_store/testing/state_store")


def usage(*words: str) -> Tests:
    """Tests of the contract suite of usage stores."""
    place = "tests/contract/test_usage_database.py::TestDatabaseUsageStore"
    return named(place, *words, written_in="helix_store/testing/usage")


def locks(*words: str) -> Tests:
    """Tests of the contract suite of lock managers."""
    place = "tests/contract/test_locks_database.py::TestDatabaseLockManager"
    return named(place, *words, written_in="helix_store/testing/locks")


def streams(*words: str) -> Tests:
    """Tests of the contract suite of stream managers."""
    place = "tests/contract/test_streams_database.py::TestDatabaseStreamManager"
    return named(place, *words, written_in="helix_store/testing/streams")
