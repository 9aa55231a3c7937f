"""What must hold when the Nth statement of a call fails, for every N until the call has no such statement.

A call without a fault shows what there is to compare with: its result, and the rows after each commit.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from typing import Any, Final

from django.db import OperationalError
from django.db.backends.base.base import BaseDatabaseWrapper

from helix_store.exceptions import (
    HelixStoreError,
    OutcomeUnknown,
    SessionBusy,
    StoreBusy,
    StoreFull,
    StoreTimeout,
    StoreUnavailable,
)
from tests.databases import CommittedDatabase, fresh_tenant
from tests.faults.statements import CONTROL, Fault, Faults, Kind, Point, faults
from tests.faults.stored_rows import Rows, masked, rows_of

__all__ = ["Case", "Reference", "Trials"]

Call = Callable[[], object]

_FLAGS: Final[dict[type[HelixStoreError], tuple[bool, str]]] = {
    StoreUnavailable: (True, "no"),
    StoreBusy: (True, "no"),
    StoreTimeout: (False, "no"),
    StoreFull: (False, "no"),
    OutcomeUnknown: (False, "unknown"),
}
"""``retryable`` and ``applied`` of each error."""


@dataclass(frozen=True)
class Case:
    """A public call. ``prepare`` writes what it works on, and returns the call.

    A call ``in_batches`` has more transactions than one. One that ``ends`` also writes down how it ended, so
    that a failed one leaves more than whole batches; its lock may stay until the end of the lease. One
    ``in_a_block`` is made in a transaction of its caller, whose ``BEGIN`` and ``COMMIT`` raise errors of
    Django.
    """

    face: str
    name: str
    prepare: Callable[[CommittedDatabase], Call]
    in_batches: bool = False
    ends: bool = False
    in_a_block: bool = False

    def __str__(self) -> str:
        return f"{self.face}: {self.name}"


@dataclass
class Reference:
    """A call without a fault: ``prefixes`` are the rows before it and after each of its commits."""

    result: str
    prefixes: list[str]
    points: list[Point]


@dataclass
class Trials:
    """The trials on one database and in one form."""

    alias: str
    beside: str
    counts: Counter[str]
    _references: dict[str, Reference] = field(default_factory=dict)

    def check(self, case: Case, kind: Kind, *, after: bool) -> None:
        """Fail each statement of the call in turn."""
        reference = self.reference(case)
        world = _World.of(self, case)
        for nth in count(1):
            fault = Fault(nth, kind, after)
            made, result, error = world.call(fault)
            if made.hit is None:
                assert error is None, f"{case}: {error!r} without a fault"
                self._require_done(case, reference, world, result, "after all faults")
                return
            self.counts["injections"] += 1
            if not self._is_as_before(case, reference, world, fault, made.hit, result, error):
                world = _World.of(self, case)

    def reference(self, case: Case) -> Reference:
        if str(case) not in self._references:
            world = _World.of(self, case)
            prefixes = [world.masked()]

            def note() -> None:
                if (seen := world.masked()) != prefixes[-1]:
                    prefixes.append(seen)

            made, result, error = world.call(None, note)
            assert error is None, f"{case}: {error!r}"
            note()
            assert case.in_batches or len(prefixes) <= 2, f"{case} commits {len(prefixes) - 1} times"
            self._references[str(case)] = Reference(masked(repr(result)), prefixes, made.points)
            self.counts["calls"] += 1
            self.counts["statements"] += len(made.points)
        return self._references[str(case)]

    def _is_as_before(
        self,
        case: Case,
        reference: Reference,
        world: _World,
        fault: Fault,
        point: Point,
        result: object,
        error: Exception | None,
    ) -> bool:
        """Check what a fault has left. Returns whether that is what was there before the call."""
        where = f"{case}, {fault} ({point.sql[:60]!r})"
        _require_usable(world.connection, where)
        if error is None and _counts_an_error(result):
            self.counts["reported"] += 1
            assert world.call(None)[2] is None, f"{where}: repeated"
            assert world.masked() == reference.prefixes[-1], _difference(
                f"{where}, repeated", reference.prefixes, world.masked()
            )
            return False
        if error is None:
            self.counts["healed"] += 1
            self._require_done(case, reference, world, result, where)
            # Where no row has changed, an object of the caller may have: a session is on another branch.
            return False
        if case.in_a_block and (point.is_commit or point.sql.startswith(CONTROL)):
            assert isinstance(error, OperationalError), f"{where}: {error!r}"
        else:
            _require_typed(error, fault, point, where)
        self.counts[type(error).__name__] += 1
        if world.rows() == world.before:
            self.counts["all old"] += 1
            return True
        left = world.masked()
        if not case.ends:
            assert left in reference.prefixes, _difference(where, reference.prefixes, left)
        is_whole = left == reference.prefixes[-1]
        self.counts["all new" if is_whole else "whole batches"] += 1
        if not case.in_batches:
            assert isinstance(error, OutcomeUnknown), f"{where}: {error!r} but it is stored"
        elif not is_whole:
            error = world.call(None)[2]
            if not case.ends:
                assert error is None, f"{where}: repeated: {error!r}"
                assert world.masked() == reference.prefixes[-1], _difference(
                    f"{where}, repeated", reference.prefixes, world.masked()
                )
            else:
                assert error is None or type(error) is SessionBusy, f"{where}: repeated: {error!r}"
        return False

    def _require_done(
        self, case: Case, reference: Reference, world: _World, result: object, where: str
    ) -> None:
        assert masked(repr(result)) == reference.result, f"{where}: {result!r}, not {reference.result}"
        left = world.masked()
        assert left == reference.prefixes[-1], _difference(where, reference.prefixes[-1:], left)


def _counts_an_error(result: object) -> bool:
    """Whether a cleanup has gone on after the failure of one session, and says so."""
    summaries = result if isinstance(result, list) else [result]
    return any(getattr(each, "errors", 0) for each in summaries)


@dataclass
class _World:
    """A tenant that has what a call works on."""

    database: CommittedDatabase
    beside: str
    made: Call
    before: Rows
    hides_locks: bool

    @classmethod
    def of(cls, trials: Trials, case: Case) -> _World:
        database = CommittedDatabase(alias=trials.alias, tenant=fresh_tenant())
        made = case.prepare(database)
        before = rows_of(trials.beside, database.tenant)
        return cls(database, trials.beside, made, before, hides_locks=case.ends)

    @property
    def connection(self) -> BaseDatabaseWrapper:
        return self.database.connection

    def rows(self) -> Rows:
        return rows_of(self.beside, self.database.tenant)

    def masked(self) -> str:
        tables = self.rows()
        if self.hides_locks:
            tables.pop("helix_store.Lock", None)
        lines = (f"{table} {row}" for table, rows in tables.items() for row in rows)
        return masked("\n".join(lines).replace(self.database.tenant, "TENANT"))

    def call(
        self, fault: Fault | None, on_commit: Callable[[], None] = lambda: None
    ) -> tuple[Faults, object, Exception | None]:
        result: object = None
        error = None
        with faults(self.connection, fault, on_commit) as made:
            try:
                result = self.made()
            except Exception as exc:  # noqa: BLE001  its type is checked
                error = exc
        return made, result, error


def _require_usable(connection: BaseDatabaseWrapper, where: str) -> None:
    """No transaction is open, and the next statement runs."""
    assert not connection.in_atomic_block, where
    raw: Any = connection.connection
    if raw is not None:
        assert connection.get_autocommit(), where
        is_open = raw.in_transaction if connection.vendor == "sqlite" else raw.pgconn.transaction_status != 0
        assert not is_open, f"{where}: a transaction is open"
    with connection.cursor() as cursor:
        cursor.execute("SELECT 1")
        assert cursor.fetchone() == (1,)


def _require_typed(error: Exception, fault: Fault, point: Point, where: str) -> None:
    assert isinstance(error, HelixStoreError), f"{where}: {error!r}"
    if type(error) is OutcomeUnknown:
        is_cancelled_commit = fault.kind is Kind.TIMEOUT and point.is_commit
        assert point.may_commit, where
        assert fault.kind is Kind.LOST or is_cancelled_commit, f"{where}: {error!r}"
    else:
        assert type(error) is fault.kind.error, f"{where}: {error!r}"
    assert (error.retryable, error.applied) == _FLAGS[type(error)], where


def _difference(where: str, expected: list[str], found: str) -> str:
    nearest = min((set(each.splitlines()) ^ set(found.splitlines()) for each in expected), key=len)
    lines = [f"{'found  ' if line in found else 'missing'} {line}" for line in sorted(nearest)]
    return "\n".join([f"{where} leaves what no whole batch leaves:", *lines])
