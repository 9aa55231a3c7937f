"""Calls on several sessions in one block of the caller are isolated as its transaction is."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import pytest
from django.db import connections, transaction

from helix_store.engine.threads import keep_open
from helix_store.stores import DatabaseStateStore
from tests.cells import for_each
from tests.database.separate import separate_connection
from tests.databases import CommittedDatabase
from tests.faults.anomalies import Append, Read, Transaction, anomalies_of
from tests.faults.campaign import Trial, campaign
from tests.faults.transactions import Place, create_sessions, lists_at_the_end, transactions
from tests.processes import run_in_threads

_CLIENTS: Final = 6
_TRANSACTIONS: Final = 20
_READ_COMMITTED: Final = "READ COMMITTED"
_REPEATABLE_READ: Final = "REPEATABLE READ"
_ALLOWED: Final = {_READ_COMMITTED: ("G-single", "lost update of messages")}
"""What a transaction of PostgreSQL does not promise unless it asks for more."""


def race(place: Place, seed: int, trial: Trial | None = None) -> list[str]:
    """Transactions of several threads. Returns their anomalies."""
    create_sessions(place)

    def work(number: int) -> list[Transaction]:
        with keep_open():
            return transactions(place, number, seed, _TRANSACTIONS)

    outcomes = run_in_threads(work, [(number,) for number in range(_CLIENTS)])
    made = [each for outcome in outcomes for each in outcome.unwrap()]
    if trial is not None:
        for each in made:
            trial.count(f"{place.level or 'serial'}: {each.result}")
            trial.count("calls", len(each.operations))
    return anomalies_of(made, lists_at_the_end(place))


@pytest.mark.campaign
def test_transactions_over_several_sessions_are_isolated(committed_db: CommittedDatabase) -> None:
    is_postgresql = committed_db.vendor == "postgresql"
    levels = [_READ_COMMITTED, _REPEATABLE_READ] if is_postgresql else [None]

    def race_once(trial: Trial) -> None:
        level = levels[trial.seed % len(levels)]
        place = Place(committed_db.alias, f"{committed_db.tenant}-{trial.seed}", level)
        found = race(place, trial.seed, trial)
        allowed = _ALLOWED.get(level or "", ())
        forbidden = [each for each in found if not each.startswith(allowed)] if allowed else found
        trial.count("allowed at READ COMMITTED", len(found) - len(forbidden))
        assert not forbidden, "\n".join(forbidden[:5])

    name = "postgres" if is_postgresql else "sqlite"
    sizes = (2, 100, 1_000) if is_postgresql else (2, 30, 300)
    with campaign("isolation", name, sizes=sizes) as made:
        made.run(race_once)
    assert any(count for outcome, count in made.counts.items() if outcome.endswith(": ok")), made.counts


# The checker finds each anomaly.

ANOMALIES: Final[dict[str, tuple[list[Transaction], dict[str, list[int]]]]] = {
    "G0": (
        [
            Transaction([Append("x", 1), Append("y", 1)], "ok"),
            Transaction([Append("x", 2), Append("y", 2)], "ok"),
        ],
        {"x": [1, 2], "y": [2, 1]},
    ),
    "G1a": (
        [Transaction([Append("x", 1)], "fail"), Transaction([Read("x", (1,))], "ok")],
        {"x": []},
    ),
    "G1b": (
        [Transaction([Append("x", 1), Append("x", 2)], "ok"), Transaction([Read("x", (1,))], "ok")],
        {"x": [1, 2]},
    ),
    "G1c": (
        [
            Transaction([Append("x", 1), Read("y", (1,))], "ok"),
            Transaction([Append("y", 1), Read("x", (1,))], "ok"),
        ],
        {"x": [1], "y": [1]},
    ),
    "G-single": (
        [
            Transaction([Append("x", 1), Append("y", 1)], "ok"),
            Transaction([Read("x", ()), Read("y", (1,))], "ok"),
        ],
        {"x": [1], "y": [1]},
    ),
    "lost update": (
        [
            Transaction([Read("x", ()), Append("x", 1)], "ok"),
            Transaction([Read("x", ()), Append("x", 2)], "ok"),
        ],
        {"x": [1, 2]},
    ),
    "lost": ([Transaction([Append("x", 1)], "ok")], {"x": []}),
    "doubled": ([Transaction([Append("x", 1)], "ok")], {"x": [1, 1]}),
    "internal": ([Transaction([Append("x", 1), Read("x", ())], "ok")], {"x": [1]}),
    "no order": (
        [
            Transaction([Append("x", 1)], "ok"),
            Transaction([Append("x", 2)], "ok"),
            Transaction([Read("x", (2,))], "ok"),
        ],
        {"x": [1, 2]},
    ),
}


@for_each("name", ANOMALIES)
def test_the_checker_names_an_anomaly(name: str) -> None:
    found = anomalies_of(*ANOMALIES[name])
    assert any(each.startswith((f"{name}:", f"{name} of")) for each in found), found


def test_the_checker_allows_a_write_skew_and_an_unknown_outcome() -> None:
    made = [
        Transaction([Read("x", ()), Append("y", 1)], "ok"),
        Transaction([Read("y", ()), Append("x", 1)], "info"),
        Transaction([Append("x", 2)], "info"),
    ]
    assert anomalies_of(made, {"x": [1], "y": [1]}) == []


# Faults planted in a store are found.


@contextmanager
def another_connection(database: CommittedDatabase) -> Iterator[str]:
    with separate_connection(**database.connection.settings_dict) as connection:
        yield connection.alias


def test_appends_outside_of_the_block_are_found(postgres_db: CommittedDatabase) -> None:
    # Threads do not share a connection: each needs the alias among its own.
    connections.settings["outside"] = {**postgres_db.connection.settings_dict}
    try:
        place = Place(postgres_db.alias, postgres_db.tenant, _REPEATABLE_READ, outside="outside")
        found = {each.split(":")[0] for each in race(place, 1)}
    finally:
        del connections.settings["outside"]
    assert {"G1a", "G1b"} <= found


def test_saves_that_ignore_the_version_are_found(postgres_db: CommittedDatabase) -> None:
    found = itertools.chain.from_iterable(
        race(Place(postgres_db.alias, f"{postgres_db.tenant}-{seed}", ignores_versions=True), seed)
        for seed in range(1, 4)
    )
    assert any(each.startswith("lost update of state") for each in found)


@pytest.mark.parametrize(("level", "expected"), [(_READ_COMMITTED, ["G-single"]), (_REPEATABLE_READ, [])])
def test_two_reads_of_a_block_see_one_moment_if_its_isolation_level_says_so(
    postgres_db: CommittedDatabase, level: str, expected: list[str]
) -> None:
    place = Place(postgres_db.alias, postgres_db.tenant)
    create_sessions(place)
    message = {"role": "user", "content": 1}
    writing = Transaction([Append("messages a", 1), Append("messages b", 1)], "ok")
    with another_connection(postgres_db) as alias:
        reader = DatabaseStateStore(alias, tenant=postgres_db.tenant)
        with transaction.atomic(using=alias):
            with connections[alias].cursor() as cursor:
                cursor.execute(f"SET TRANSACTION ISOLATION LEVEL {level}")
            first = tuple(each["content"] for each in reader.get_messages("a").messages)
            with transaction.atomic(using=postgres_db.alias):
                place.store.append_messages("a", [message])
                place.store.append_messages("b", [message])
            second = tuple(each["content"] for each in reader.get_messages("b").messages)
    reading = Transaction([Read("messages a", first), Read("messages b", second)], "ok")
    found = anomalies_of([writing, reading], lists_at_the_end(place))
    assert [each.split(":")[0] for each in found] == expected
