"""The copy of a tenant in another database: its rows, changes that writers make later, and a comparison."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from types import SimpleNamespace
from typing import Any, Final, TypeAlias

from django.db.models import Q, QuerySet

from helix_store.catalogue import Table, declared, tables
from helix_store.engine.database import Database
from helix_store.engine.expressions import tenant_parameter
from helix_store.models import Session, UsageEntry
from helix_store.sessions.database.locking import lock_sessions
from helix_store.sessions.database.trees import delete_locked_sessions
from helix_store.transfer import fence_sql as sql
from helix_store.transfer.database import DatabaseSource
from helix_store.transfer.fences import changes_of, through_the_fence
from helix_store.transfer.file import write_export
from helix_store.transfer.importing import at_places, import_units
from helix_store.transfer.records import ExportSummary, ImportSummary, Unit

ROWS: Final = 100
"""The maximum number of rows that one transaction deletes, or one statement names."""

_Chosen: TypeAlias = tuple[Table, Q]


class IncompleteCopy(Exception):
    """The copy cannot continue at the moment. The phase of the move does not change."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__(problems)
        self.problems = problems


@dataclass(frozen=True)
class TenantCopy:
    """The rows of a tenant in two databases. The target has its fence while rows are written there."""

    source: Database
    target: Database
    say: Callable[[str], object]
    is_stopped: Callable[[], bool]

    def copy_rows(self) -> None:
        """Copy the rows that are missing in the target. Rows from an earlier attempt are compared."""
        source = DatabaseSource(self.source.alias, tenant=self.source.tenant)
        total = source.session_count

        def tell(done: ImportSummary) -> None:
            if done.sessions % ROWS == 0:
                self.say(f"{done.sessions:,} of {total:,} sessions")

        self._copy(lambda changed: source.units(), progress=tell)

    def copy_changes(self) -> int:
        """Copy the logged changes again, and return their number."""
        source = DatabaseSource(self.source.alias, tenant=self.source.tenant)
        return self._copy(
            lambda changed: chain.from_iterable(source.units_of(table, rows) for table, rows in changed)
        )

    def _copy(self, units_of: Callable[[list[_Chosen]], Iterable[Unit]], **options: Any) -> int:
        """Delete the copies of everything that has changed, copy the units, and return the number of changes.

        All reads see the source at the same moment, so from the first inserted unit on, the target has only
        rows from that moment. Raises `IncompleteCopy`; a repeat deletes and copies the same rows again.
        """
        tenant = {"tenant": self.source.tenant}
        # A snapshot that begins later contains the marked changes.
        self.source.write(sql.MARK, tenant)
        with self.source.snapshot():
            changes = changes_of(self.source)
            changed = list(_chosen(self.source.tenant, changes))
            for table, rows in changed:
                copies = table.model._base_manager.using(self.target.alias).filter(rows)
                # A session's rows in other tables are also deleted, except rows that several sessions share.
                through_the_fence(self.target, copies.delete)
            summary = import_units(
                units_of(changed),
                self.target.alias,
                tenant=self.source.tenant,
                is_stopped=self.is_stopped,
                reads_back=True,
                transact=through_the_fence,
                is_trusted=True,
                **options,
            )
        if summary.problems:
            raise IncompleteCopy(list(map(str, summary.problems)))
        if not summary.is_complete:
            raise IncompleteCopy(["It was stopped; run it again to continue."])
        self.source.write(sql.FORGET_MARKED, tenant)
        return sum(map(len, changes.values()))

    def compared(self) -> dict[str, int]:
        """Return the number of rows of each table. Raises `IncompleteCopy` if they differ in the target.

        Each unit was compared when it was copied. The counts also reveal rows that the source never had.
        """
        source, target = _counted(self.source), _counted(self.target)
        if source != target:
            raise IncompleteCopy(["The content of the two databases differs; the tenant stays where it is."])
        return source

    def fingerprint(self, db: Database) -> ExportSummary:
        """Return the counts and hash of an export of the tenant, which are equal if the rows are equal."""
        self.say(f"Reading {db.alias!r} to compare…")
        # The export itself hashes the data that it writes.
        nowhere = SimpleNamespace(write=lambda data: None)
        return write_export(DatabaseSource(db.alias, tenant=db.tenant), nowhere)

    def delete(self, db: Database) -> bool:
        """Delete the rows of the tenant in small transactions; return ``False`` if stopped."""

        def some_sessions() -> bool:
            keys = list(next(rows_of_tenant(db)).values_list("pk", flat=True)[:ROWS])
            heads = lock_sessions(db, keys)
            delete_locked_sessions(db, [head.pk for head in heads], keep_usage=False)
            return bool(keys)

        def some_rows() -> bool:
            for rows in rows_of_tenant(db):
                keys = list(rows.values_list("pk", flat=True)[:ROWS])
                if keys:
                    rows.model._base_manager.using(db.alias).filter(pk__in=keys).delete()
                    return True
            return False

        for batch in (some_sessions, some_rows):
            while through_the_fence(db, batch):
                self.say(f"Deleting in {db.alias!r}…")
                if self.is_stopped():
                    return False
        return True


def _chosen(tenant: str, changes: Mapping[str, Sequence[Sequence[Any]]]) -> Iterator[_Chosen]:
    """Yield tables with a condition for some of their rows, until all changes are covered."""
    for table in _tables_of_tenants():
        names = changes.get(table.record, ())
        for start in range(0, len(names), ROWS):
            places = [dict(zip(table.order, name, strict=False)) for name in names[start : start + ROWS]]
            if not all(places):
                yield table, Q(tenant=tenant)
                continue
            yield table, at_places(tenant, table.order, places)
            if table.model is Session:
                session_ids = [place["session_id"] for place in places]
                yield declared(UsageEntry), Q(tenant=tenant, recorded_for__in=session_ids)


def _tables_of_tenants() -> list[Table]:
    return [each for each in tables() if each.names_tenant]


def rows_of_tenant(db: Database) -> Iterator[QuerySet[Any]]:
    """Yield the rows that name a tenant, each table in the order of an index by tenant, sessions first."""
    # In key order, PostgreSQL might read the rows of all other tenants before it finds the first one.
    for each in _tables_of_tenants():
        rows = each.model._base_manager.using(db.alias).filter(tenant=tenant_parameter(db.tenant))
        yield rows.order_by(*each.order)


def _counted(db: Database) -> dict[str, int]:
    """Return the number of the tenant's rows in each table that has any."""

    def count(each: Table) -> int:
        path = "tenant" if each.names_tenant else f"{each.parent_field.name}__tenant"
        return each.model._base_manager.using(db.alias).filter(**{path: db.tenant}).count()

    counts = db.query(lambda: {each.record: count(each) for each in tables()})
    return {record: number for record, number in sorted(counts.items()) if number}
