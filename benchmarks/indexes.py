"""``python -m benchmarks.indexes``: what each index of the session table costs a step.

Each variant is a database of its own that lacks indexes, or leaves space in the pages of the table. They make
their steps in turn, a few at a time, and are compared with the table as it is: the write-ahead log of a step,
the rate of steps, and the share of the updates of heads that are HOT, which write no index at all. No
checkpoint of the server falls into the run, so that no page is logged as a whole.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import psycopg

from benchmarks.server import benchmark_server, create_database, database_name

_FILLERS = 10_000
_LIVE = 50
_WARM_UP = 2
"""Rounds before those that count: later updates find the space that the first ones leave."""


@dataclass(frozen=True)
class Index:
    name: str
    definition: str
    size_bytes: int


@dataclass(frozen=True)
class Variant:
    name: str
    without: tuple[Index, ...] = ()
    fillfactor: int = 100


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.indexes", description=__doc__)
    parser.add_argument("--rounds", type=int, default=24, help=f"of {_LIVE} steps in every variant")
    arguments = parser.parse_args()
    with benchmark_server() as cluster:
        create_database(cluster, "default")
        _fill()
        steppers = [
            Stepper(variant, _copied_database(cluster.url, number, variant))
            for number, variant in enumerate(_variants(_indexes()))
        ]
        order = list(steppers)
        shuffle = random.Random(1).shuffle  # noqa: S311  an order, not a secret
        for number in range(_WARM_UP + arguments.rounds):
            if number == _WARM_UP:
                for stepper in steppers:
                    stepper.begin()
            shuffle(order)
            for stepper in order:
                stepper.step_each_session()
        _print(steppers)
    return 0


_COLUMNS: dict[str, Any] = {
    # What an application usually fills in: the partial indexes have an entry of such a session.
    "agent_type": "bench",
    "user_id": "user",
    "workspace_id": "workspace",
    "expires_at": 4_000_000_000_000,
}


def _fill() -> None:
    """Live sessions, and many that nobody works on, so that the table is not a toy."""
    from helix_store.models import Session
    from helix_store.stores import DatabaseStateStore

    store = DatabaseStateStore("default")
    for number in range(_LIVE):
        store.create_session(f"live-{number}", **_COLUMNS)
    head = Session.objects.get(session_id="live-0")
    values = {field.attname: getattr(head, field.attname) for field in Session._meta.concrete_fields}
    del values["id"]
    own = ("session_id", "root_session_id", "stream_id")
    Session.objects.bulk_create(
        (Session(**{**values, **dict.fromkeys(own, f"other-{number}")}) for number in range(_FILLERS)),
        batch_size=1_000,
    )


def _indexes() -> list[Index]:
    """All but the unique ones: those are rules."""
    rows = _fetched(
        "default",
        """
        SELECT indexrelid::regclass::text, pg_get_indexdef(indexrelid), pg_relation_size(indexrelid)
        FROM pg_index WHERE indrelid = %s::regclass AND NOT indisunique ORDER BY 1""",
        [_table()],
    )
    return [Index(*row) for row in rows]


def _variants(indexes: list[Index]) -> Iterator[Variant]:
    yield Variant("as it is")
    for index in indexes:
        yield Variant(f"without {index.name}", (index,))
    yield Variant("without any", tuple(indexes))
    yield Variant("fillfactor 90", fillfactor=90)
    yield Variant("fillfactor 70", fillfactor=70)
    moving = tuple(index for index in indexes if "updated_at" in index.definition)
    yield Variant("without updated_at", moving)
    yield Variant("without updated_at, fillfactor 90", moving, 90)
    yield Variant("without updated_at, fillfactor 70", moving, 70)


def _copied_database(server_url: str, number: int, variant: Variant) -> str:
    """The alias of a copy of the default database, changed as the variant says."""
    from django.db import connections

    alias, name = f"variant {number}", f"variant_{number}"
    connections["default"].close()
    connections.settings[alias] = {**connections.settings["default"], "NAME": name}
    with psycopg.connect(server_url, autocommit=True) as server:
        server.execute(f'CREATE DATABASE "{name}" TEMPLATE "{database_name("default")}"'.encode())
    with connections[alias].cursor() as cursor:
        for index in variant.without:
            cursor.execute(f"DROP INDEX {index.name}")
        cursor.execute(f"ALTER TABLE {_table()} SET (fillfactor = {variant.fillfactor})")
        # Rewritten, so that all of them start alike.
        cursor.execute(f"VACUUM (FULL, ANALYZE) {_table()}")
    return alias


class Stepper:
    """Makes the steps of one variant's sessions."""

    def __init__(self, variant: Variant, alias: str) -> None:
        from benchmarks.payloads import message, state_of
        from helix_store.stores import DatabaseStateStore

        self.variant = variant
        self.alias = alias
        self.rates: list[float] = []
        self.wal_bytes: list[float] = []
        self._store = DatabaseStateStore(alias)
        # Two states of one size: no variant has the larger ones.
        self._states = [state_of(4, step) for step in range(2)]
        self._messages = [message(1), message(2)]
        self._round = 0
        self._updates_before = (0, 0)

    def begin(self) -> None:
        """Forget what was before."""
        self.rates.clear()
        self.wal_bytes.clear()
        self._updates_before = self._updates()

    def step_each_session(self) -> None:
        from helix_store.core.types import SessionState, StepInfo

        self._round += 1
        state = self._states[self._round % 2]
        position = self._wal_position()
        started = time.perf_counter()
        for number in range(_LIVE):
            name = f"live-{number}"
            self._store.save_state_and_promote_staging(
                name,
                SessionState(
                    session_id=name,
                    root_session_id=name,
                    stream_id=name,
                    custom_state=state,
                    step_count=self._round,
                    **_COLUMNS,
                ),
                self._messages,
                StepInfo(f"step-{self._round}", self._round),
                expected_version=self._round,
            )
        self.rates.append(_LIVE / (time.perf_counter() - started))
        self.wal_bytes.append((self._wal_position() - position) / _LIVE)

    def hot_share(self) -> float:
        (updates_before, hot_before), (updates, hot) = self._updates_before, self._updates()
        assert updates - updates_before == len(self.rates) * _LIVE, "a step updates its session's head once"
        return (hot - hot_before) / (updates - updates_before)

    def ratio_to(self, other: Stepper) -> float:
        """The median over the rounds: the machine is shared, and only the steps of one round are alike."""
        return statistics.median(own / its for own, its in zip(self.rates, other.rates, strict=True))

    def _updates(self) -> tuple[int, int]:
        """Updates of heads, and those that were HOT."""
        _fetched(self.alias, "SELECT pg_stat_force_next_flush()")
        sql = "SELECT n_tup_upd, n_tup_hot_upd FROM pg_stat_user_tables WHERE relid = %s::regclass"
        ((updates, hot_updates),) = _fetched(self.alias, sql, [_table()])
        return updates, hot_updates

    def _wal_position(self) -> int:
        ((position,),) = _fetched(self.alias, "SELECT pg_current_wal_insert_lsn() - '0/0'::pg_lsn")
        return int(position)


def _print(steppers: list[Stepper]) -> None:
    base = steppers[0]
    usual = statistics.median(base.wal_bytes)
    columns = "{:<40} {:>10} {:>12} {:>11} {:>10} {:>14}"
    print(columns.format("session table", "WAL B/step", "B less", "rate ratio", "HOT share", "left out, KB"))
    for stepper in steppers:
        wal_bytes = statistics.median(stepper.wal_bytes)
        left_out = sum(index.size_bytes for index in stepper.variant.without)
        print(
            columns.format(
                stepper.variant.name,
                f"{wal_bytes:.0f}",
                str(round(usual - wal_bytes)),
                f"{stepper.ratio_to(base):.2f}",
                f"{stepper.hot_share():.2f}",
                f"{left_out / 1024:.0f}",
            )
        )
    print(f"Median rate of the table as it is: {statistics.median(base.rates):.0f} steps/s.")


def _table() -> str:
    from helix_store.models import Session

    return Session._meta.db_table


def _fetched(alias: str, sql: str, parameters: list[str] | None = None) -> list[tuple[Any, ...]]:
    from django.db import connections

    with connections[alias].cursor() as cursor:
        cursor.execute(sql, parameters)
        rows: list[tuple[Any, ...]] = cursor.fetchall()
        return rows


if __name__ == "__main__":
    sys.exit(main())
