"""The table of mutants is complete and can be applied. `python -m tests.mutants` runs it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import Final

import pytest

from tests.cells import for_each
from tests.mutants.mutant import ROOT, Mutant, names_of_tests
from tests.mutants.runner import PACKAGE, mutated
from tests.mutants.table import MUTANTS

_PREDICATE: Final = re.compile(
    r"""
    version\ =\ %\(expected_version\)s | \btoken\ [<>]?=?\ %\(\w*token\)s | token\ >\ %
    | token\ =\ token\ \+\ 1 | COALESCE\(claim_token,\ 0\)\ \+\ %\(gap\)s
    | status\ =\ 'active'(?!,) | status\ =\ ANY | <>\ '\{SUPERSEDED\}'
    | (?:WHERE|AND|OR|\(|^|")\ ?\w*(?:expires_at|deadline)\ (?:>|<=)
    | (?:resumed_at|claim_done_at)\ IS\ NULL\ AND
    | \btenant\ =\ (?:%\(tenant\)s|\(SELECT\ %\(tenant\)s\)|(?!validation)\w+\.tenant)
    | Final\ =\ "(?:session_id|lane)\ =\ %\(\w+\)s" | \{_HAS_KEY\}\ DO
    | owner\ =\ %\(owner\)s(?!,) | writer_id\ =\ %\(writer_id\)s\ RETURNING
    | FOR\ KEY\ SHARE | FOR\ UPDATE\ SKIP\ LOCKED | FOR\ NO\ KEY\ UPDATE\ SKIP\ LOCKED\)
    """,
    re.VERBOSE,
)
"""A condition on which a write, or what a tenant sees, depends."""

SQL: Final = (
    "budgets.py",
    "checkpointers/snapshots.py",
    "cleanup/erasure.py",
    "contrib/openai_agents/run_states.py",
    "items.py",
    "locks.py",
    "sessions/effects.py",
    "sessions/messages.py",
    "sessions/statements.py",
    "streams/chunks.py",
    "usage/ledger.py",
)
PURE: Final = ("core/validation.py", "sessions/runs.py", "sessions/waiting.py")


def _lines_of(mutant: Mutant) -> set[int]:
    """The lines that a mutant changes."""
    source = (PACKAGE / mutant.file).read_text()
    start = source.index(mutant.text)
    first = source.count("\n", 0, start) + 1
    return set(range(first, first + mutant.text.rstrip("\n").count("\n") + 1))


def _functions(tree: ast.Module, *, methods_of: str) -> Iterator[ast.FunctionDef]:
    """The functions of a module, and the methods of one class."""
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == methods_of]
    for node in (*tree.body, *(method for each in classes for method in each.body)):
        if isinstance(node, ast.FunctionDef):
            yield node


def _comments_and_docs(source: str) -> set[int]:
    """The lines of docstrings and of texts that stand alone, and of comments."""
    lines = {number for number, line in enumerate(source.splitlines(), 1) if line.lstrip().startswith("#")}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            lines |= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return lines


@pytest.mark.thorough
@for_each("mutant", MUTANTS, ids=str)
def test_a_mutant_is_python(mutant: Mutant) -> None:
    assert ast.parse(mutated(mutant)).body


@for_each("mutant", MUTANTS, ids=str)
def test_a_mutant_can_be_applied(mutant: Mutant) -> None:
    assert mutated(mutant)
    assert mutant.tests
    # An option would apply to the tests of all mutants, when these must pass first.
    assert not any(test.startswith("-") for test in mutant.tests)


def test_every_test_that_a_mutant_names_exists() -> None:
    """Those of a contract suite are read from it; `named` refuses a word that no test has."""
    tests = dict.fromkeys(test for mutant in MUTANTS for test in mutant.tests)
    written = {place: place.partition("::")[0] for place in tests if not place.startswith("tests/contract/")}
    assert written
    assert [place for place, file in written.items() if not (ROOT / file).is_file()] == []
    assert [
        place
        for place, file in written.items()
        if place != file and place not in {f"{file}::{name}" for name in names_of_tests(ROOT / file)}
    ] == []


def test_the_docs_say_how_many_mutants_there_are() -> None:
    root = PACKAGE.parent
    assert f"There are {len(MUTANTS)} mutants" in (root / "docs" / "reliability.md").read_text()


def test_no_mutant_stands_twice_in_the_table() -> None:
    assert len({(each.file, each.text, each.replacement) for each in MUTANTS}) == len(MUTANTS)


@for_each("file", SQL)
def test_every_predicate_of_a_statement_has_a_mutant(file: str) -> None:
    source = (PACKAGE / file).read_text()
    ignored = _comments_and_docs(source)
    predicates = {
        number: line.strip()
        for number, line in enumerate(source.splitlines(), 1)
        if _PREDICATE.search(line) and number not in ignored
    }
    mutants = set().union(*(_lines_of(mutant) for mutant in MUTANTS if mutant.file == file))
    assert predicates
    assert {number: line for number, line in predicates.items() if number not in mutants} == {}


@pytest.mark.parametrize("file", PURE)
def test_every_function_that_refuses_has_a_mutant(file: str) -> None:
    """Its name says so: it checks, requires, or finds out what is stale."""
    source = (PACKAGE / file).read_text()
    guards = {
        node.name: range(node.lineno, (node.end_lineno or node.lineno) + 1)
        for node in _functions(ast.parse(source), methods_of="Guard")
        if re.match(r"check_|require_|is_stale", node.name)
    }
    lines = set().union(*(_lines_of(mutant) for mutant in MUTANTS if mutant.file == file))
    assert guards
    assert [name for name, body in guards.items() if lines.isdisjoint(body)] == []
