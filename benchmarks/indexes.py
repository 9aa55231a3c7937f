"""``python -m benchmarks.indexes``: what each index of the session table costs a step.

Every variant leaves indexes out, or space in the pages of the table, and is measured against the table as it is: the
write-ahead log of a step, how many steps there are in a second, and how many of the updates of a head are HOT, which
write no index at all. No checkpoint of the server falls into the run, so that no page is logged as a whole.
"""

from __future__ import annotations

import argparse
import itertools
import random
import statistics
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from benchmarks.server import benchmark_server, create_database

_FILLERS = 10_000
_LIVE = 50
_WARM_UP = 2
"""Steps that each session makes before the measured ones, until updates find the space that earlier ones left."""


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

    @property
    def size_bytes(self) -> int:
        return sum(index.size_bytes for index in self.without)


@dataclass
class Measured:
    """One figure a round."""

    wal_bytes: list[float] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)
    hot_shares: list[float] = field(default_factory=list)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.indexes", description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=6, help="of each session, in a round")
    arguments = parser.parse_args()
    with benchmark_server() as cluster:
        create_database(cluster, "default")
        steps = _prepared_steps()
        variants = list(_variants(_indexes()))
        measured = {variant.name: Measured() for variant in variants}
        shuffle = random.Random(1).shuffle  # noqa: S311  an order, not a secret
        for _ in range(arguments.rounds):
            shuffle(variants)
            for variant in variants:
                with _in_place(variant):
                    _measure(steps, arguments.steps * _LIVE, measured[variant.name])
        _print(_variants(_indexes()), measured)
    return 0


def _prepared_steps() -> Iterator[None]:
    """Live sessions among many others; each item drawn is one more step of one of them."""
    from benchmarks.payloads import STATES, message, state_of
    from helix_store.core.types import SessionState, StepInfo
    from helix_store.stores import DatabaseStateStore

    store = DatabaseStateStore()
    # What an application usually fills in: the partial indexes have an entry of such a session.
    columns: dict[str, Any] = {
        "agent_type": "bench",
        "user_id": "user",
        "workspace_id": "workspace",
        "expires_at": 4_000_000_000_000,
    }
    names = [f"live-{number}" for number in range(_LIVE)]
    versions = {name: store.create_session(name, **columns).version for name in names}
    _add_fillers(names[0])
    states = [state_of(4, step) for step in range(STATES)]
    messages = [message(1), message(2)]

    def steps() -> Iterator[None]:
        for number in itertools.count(1):
            name = names[number % _LIVE]
            state = SessionState(
                session_id=name,
                **columns,
                root_session_id=name,
                stream_id=name,
                custom_state=states[number // _LIVE % STATES],
                step_count=number,
            )
            commit = store.save_state_and_promote_staging(
                name,
                state,
                messages,
                StepInfo(f"step-{number}", number),
                expected_version=versions[name],
            )
            versions[name] = commit.new_version
            yield

    return steps()


def _add_fillers(like: str) -> None:
    """Sessions that nobody works on, so that the table is not a toy."""
    from helix_store.models import Session

    head = Session.objects.get(session_id=like)
    values = {field.attname: getattr(head, field.attname) for field in Session._meta.concrete_fields}
    del values["id"]
    own = ("session_id", "root_session_id", "stream_id")
    Session.objects.bulk_create(
        (Session(**{**values, **dict.fromkeys(own, f"other-{number}")}) for number in range(_FILLERS)),
        batch_size=1_000,
    )


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


def _indexes() -> list[Index]:
    """All but the unique ones: those are rules."""
    rows = _fetched(
        """
        SELECT indexrelid::regclass::text, pg_get_indexdef(indexrelid), pg_relation_size(indexrelid)
        FROM pg_index WHERE indrelid = %s::regclass AND NOT indisunique ORDER BY 1""",
        [_table()],
    )
    return [Index(*row) for row in rows]


@contextmanager
def _in_place(variant: Variant) -> Iterator[None]:
    """The table of a variant, written anew, so that all of them begin alike."""
    for index in variant.without:
        _execute(f"DROP INDEX {index.name}")
    _execute(f"ALTER TABLE {_table()} SET (fillfactor = {variant.fillfactor})")
    _execute(f"VACUUM (FULL, ANALYZE) {_table()}")
    try:
        yield
    finally:
        for index in variant.without:
            _execute(index.definition)


def _measure(steps: Iterator[None], count: int, measured: Measured) -> None:
    _consume(steps, _WARM_UP * _LIVE)
    updates, hot_updates, position = _counters()
    started = time.perf_counter()
    _consume(steps, count)
    seconds = time.perf_counter() - started
    later_updates, later_hot_updates, later_position = _counters()
    assert later_updates - updates >= count, "every step updates its session's head"
    measured.rates.append(count / seconds)
    measured.wal_bytes.append((later_position - position) / count)
    measured.hot_shares.append((later_hot_updates - hot_updates) / (later_updates - updates))


def _consume(steps: Iterator[None], count: int) -> None:
    for _ in itertools.islice(steps, count):
        pass


def _counters() -> tuple[int, int, int]:
    """Updates of heads, those that were HOT, and the position in the write-ahead log."""
    _fetched("SELECT pg_stat_force_next_flush()")
    ((updates, hot_updates, position),) = _fetched(
        """
        SELECT n_tup_upd, n_tup_hot_upd, pg_current_wal_insert_lsn() - '0/0'::pg_lsn
        FROM pg_stat_user_tables WHERE relid = %s::regclass""",
        [_table()],
    )
    return updates, hot_updates, int(position)


def _print(variants: Iterable[Variant], measured: dict[str, Measured]) -> None:
    base = measured["as it is"]
    usual = statistics.median(base.wal_bytes)
    columns = "{:<42} {:>8} {:>8} {:>7} {:>15} {:>5} {:>9}"
    print(columns.format("session table", "WAL B", "less", "rate", "lowest–highest", "HOT", "index KB"))
    for variant in variants:
        figures = measured[variant.name]
        ratios = [own / other for own, other in zip(figures.rates, base.rates, strict=True)]
        wal_bytes = statistics.median(figures.wal_bytes)
        print(
            columns.format(
                variant.name,
                f"{wal_bytes:.0f}",
                f"{usual - wal_bytes:.0f}",
                f"{statistics.median(ratios):.2f}",
                f"{min(ratios):.2f}–{max(ratios):.2f}",
                f"{statistics.median(figures.hot_shares):.2f}",
                f"{variant.size_bytes / 1024:.0f}",
            )
        )
    print(
        f"Rates are ratios to the table as it is, in the same round: {statistics.median(base.rates):.0f}/s."
    )


def _table() -> str:
    from helix_store.models import Session

    return Session._meta.db_table


def _execute(sql: str) -> None:
    from django.db import connection

    with connection.cursor() as cursor:
        cursor.execute(sql)


def _fetched(sql: str, parameters: list[str] | None = None) -> list[tuple[Any, ...]]:
    from django.db import connection

    with connection.cursor() as cursor:
        cursor.execute(sql, parameters)
        return cursor.fetchall()


if __name__ == "__main__":
    sys.exit(main())
