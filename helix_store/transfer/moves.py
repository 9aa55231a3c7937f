"""Moves between databases.

Moving a tenant to another database, in phases: a repeat continues where a killed command stopped.

====================== ==================== ================ ===========================================
phase                  the tenant is        writes           a repeat
====================== ==================== ================ ===========================================
(no fence)             in the source        in the source    begins
``copying``            in the source        in the source,   copies what is missing or has changed
                                            logged
``fenced``             in the source        refused          copies the last changes, and compares
``copied``             in both, equal       refused, then    does nothing until the router is changed
                                            in the target
``deleting``           in the target        in the target    deletes the rest of the source
``moved``              in the target        in the target    (the fence refuses late writers)
``aborting``           in the source        as before        deletes the rest of the copy
====================== ==================== ================ ===========================================

Everything is copied, read back and compared while writers continue. Triggers log the writers' changes, which
are copied and compared again until few are left. Only the last changes are copied while the fence is up.

From the phase ``fenced`` on, the source has the fence. It stores the phase, so the two cannot disagree. While
rows are copied and while a copy is deleted, the target also has a fence, in the phase ``arriving``, because a
cleanup of all databases must not change the compared rows. If the tenant returns to a database that still has
the fence of an earlier move, that fence stays, in the phase ``returning``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from types import SimpleNamespace
from typing import Any, Final, TypeAlias

from django.db.migrations.recorder import MigrationRecorder
from django.db.models import Q, QuerySet

from helix_store.catalogue import Table, declared, tables
from helix_store.catalogue.table import references_in
from helix_store.core import validation
from helix_store.core.payloads import Serializable
from helix_store.engine.database import Database, alias_of, app_aliases
from helix_store.engine.expressions import tenant_parameter
from helix_store.exceptions import InvalidQuery, NotFoundError, StoreBusy, StoreUnavailable, shown_id
from helix_store.models import Session, UsageEntry
from helix_store.sessions.heads import delete_locked_sessions
from helix_store.sessions.locking import lock_sessions
from helix_store.transfer.export_source import DatabaseSource, write_export
from helix_store.transfer.fences import (
    ARRIVING,
    COPYING,
    FENCED,
    FORGET_MARKED,
    MARK,
    RETURNING,
    Fence,
    changes_of,
    fence_of,
    missing_rights,
    put_up,
    set_phase,
    take_down,
    through_the_fence,
    unfenced,
    unknown_tables,
    write_log,
)
from helix_store.transfer.importing import import_units, with_order_keys
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
        # A snapshot that begins later contains the marked changes.
        write_log(self.source, MARK)
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
        write_log(self.source, FORGET_MARKED)
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
            keys = [dict(zip(table.order, name, strict=False)) for name in names[start : start + ROWS]]
            if not all(keys):
                yield table, Q(tenant=tenant)
                continue
            yield table, with_order_keys(tenant, table.order, keys)
            if table.model is Session:
                session_ids = [key["session_id"] for key in keys]
                yield declared(UsageEntry), Q(tenant=tenant, recorded_for__in=session_ids)


def _tables_of_tenants() -> list[Table]:
    return [each for each in tables() if each.names_tenant]


def rows_of_tenant(db: Database) -> Iterator[QuerySet[Any]]:
    """Yield the rows that name a tenant, each table in the order of an index by tenant, sessions first."""
    # In key order, PostgreSQL might read the rows of all other tenants before it finds the first one.
    for each in _tables_of_tenants():
        rows = each.model._base_manager.using(db.alias).filter(tenant=tenant_parameter(db.tenant))
        yield rows.order_by(*each.order)


def has_rows(db: Database) -> bool:
    """Return whether anything is stored for the tenant in the database."""
    return any(db.query(rows.exists) for rows in rows_of_tenant(db))


def require_rows(db: Database) -> None:
    """Raise `NotFoundError` if nothing is stored for the tenant in the database."""
    if not has_rows(db):
        raise NotFoundError(
            f"Nothing is stored for the tenant {shown_id(db.tenant)} in the database {db.alias!r}: there is "
            "nothing to move. A new tenant begins in the database that the project's router names."
        )


def _counted(db: Database) -> dict[str, int]:
    """Return the number of the tenant's rows in each table that has any."""

    def count(each: Table) -> int:
        path = "tenant" if each.names_tenant else f"{each.parent_field.name}__tenant"
        return each.model._base_manager.using(db.alias).filter(**{path: db.tenant}).count()

    counts = db.query(lambda: {each.record: count(each) for each in tables()})
    return {record: number for record, number in sorted(counts.items()) if number}


_ATTEMPTS: Final = 5
_IN_TARGET: Final = (ARRIVING, RETURNING)


@dataclass(slots=True)
class MoveSummary(Serializable):
    """The progress of a move. ``records`` counts the rows of both databases, if they are equal."""

    tenant: str
    source: str
    target: str
    phase: str
    records: dict[str, int] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)


def find_move(tenant: str) -> Fence | None:
    """Return a tenant's move that has begun and has not ended, from the database that has its fence.

    An unavailable database does not hide a move between other databases.
    """
    found: list[Fence] = []
    failure: StoreUnavailable | None = None
    for alias in app_aliases():
        try:
            fence = fence_of(Database(alias, validation.tenant(tenant)))
        except StoreUnavailable as exc:
            failure = failure or exc
        else:
            if fence is not None and fence.phase not in _IN_TARGET:
                found.append(fence)
    found.sort(key=lambda fence: fence.phase == "moved")
    if failure is not None and (not found or found[0].phase == "moved"):
        raise failure
    return found[0] if found else None


class TenantMove:
    """The move of one tenant. One process at a time may drive it.

    With ``force``, the router is not asked where the tenant is; this is for a project that passes ``using``
    itself. An abort then does not compare the rows that it deletes, and works even if the target cannot be
    reached. ``progress`` is called with a string. Every call is safe to repeat, and raises `InvalidQuery` if
    the move is in another phase.
    """

    def __init__(
        self,
        tenant: str,
        source: str,
        target: str,
        *,
        force: bool = False,
        progress: Callable[[str], object] | None = None,
        is_stopped: Callable[[], bool] | None = None,
    ) -> None:
        self.tenant = validation.tenant(tenant)
        validation.query_flag(force, "force")
        self._source = Database(source, self.tenant)
        self._target = Database(target, self.tenant)
        self._force = force
        self._say = progress or (lambda text: None)
        self._copy = TenantCopy(self._source, self._target, self._say, is_stopped or (lambda: False))

    def copy(self) -> MoveSummary:
        """Copy the tenant's rows to the target, and then refuse its writers and copy their last changes.

        Before that, all rows are read once: if a session is damaged, nothing is started.

        When the copy is complete, the phase is ``copied``. Otherwise the summary lists the problems, and the
        tenant stays in the source.
        """
        fence = fence_of(self._source)
        if fence is None or fence.phase == "moved":
            self._require_a_start()
            if damaged := self._copy.fingerprint(self._source).problems:
                # Nothing is copied: repair the sessions first.
                return self._summary(problems=[str(problem) for problem in damaged])
            self._close_target()
            try:
                put_up(self._source, self._target.alias, COPYING)
            except Exception:
                self._leave_target()
                raise
        elif fence.target != self._target.alias:
            raise InvalidQuery(
                f"The tenant is already being moved to {fence.target!r}; abort that move first.", path="to"
            )
        elif fence.phase == "copied":
            return self._summary()
        phase = self._require_phase(COPYING, FENCED)
        self._close_target()
        try:
            if phase == COPYING:
                self._copy_beside_writers()
            # Check again while the fence is up, because a writer may have been faster.
            self._require_exports()
            self._copy.copy_changes()
            records = self._copy.compared()
        except IncompleteCopy as exc:
            return self._summary(problems=exc.problems)
        self._open_target()
        self._advance("copied", after=(FENCED,))
        return self._summary(records=records)

    def finish(self) -> MoveSummary:
        """Delete the tenant's rows in the source. The fence remains and refuses late writers."""
        self._require_phase("copied", "deleting", "moved")
        if not self._force and alias_of(self.tenant) == self._source.alias:
            raise InvalidQuery(
                f"The router still places the tenant in {self._source.alias!r}; change it first, and "
                "restart the processes that do not read the change.",
                path="finish",
            )
        # An abort may have begun to delete the copy, or may have stopped before it did.
        self._advance("deleting", after=("copied", "deleting", "moved"))
        self._open_target()
        if self._copy.delete(self._source):
            self._advance("moved", after=("deleting",))
        return self._summary()

    def abort(self) -> MoveSummary:
        """Delete the copy in the target, and let writers use the source again.

        With ``force``, the target may be unreachable; the rows that were copied to it then remain there.
        """
        phase = self._require_phase(COPYING, FENCED, "copied", "aborting")
        if self._force and not self._can_reach_target():
            take_down(self._source)
            return self._summary(
                problems=[f"{self._target.alias!r} cannot be reached: it still contains the copied rows."]
            )
        if not self._force and alias_of(self.tenant) == self._target.alias:
            raise InvalidQuery(
                f"The router places the tenant in {self._target.alias!r}, where there may be new writes: "
                "finish the move, or change the router back first.",
                path="abort",
            )
        if phase == "copied" and not self._force:
            self._close_target()
            source, target = map(self._copy.fingerprint, (self._source, self._target))
            if source.sha256 != target.sha256:
                self._open_target()
                raise InvalidQuery(
                    f"The rows in {self._target.alias!r} have changed since they were copied, and would be"
                    " lost: finish the move, and move the tenant back.",
                    path="abort",
                )
        try:
            self._advance("aborting", after=(COPYING, FENCED, "copied", "aborting"))
        except InvalidQuery:
            # Another process is finishing the move: the tenant is in the target.
            self._open_target()
            raise
        self._close_target()
        if self._copy.delete(self._target):
            self._leave_target()
            take_down(self._source)
        return self._summary()

    def release(self) -> MoveSummary:
        """Remove the fence of an ended move, once no process uses the router's old answer."""
        self._require_phase("moved")
        take_down(self._source)
        return self._summary()

    # --- Phases --------------------------------------------------------------------------------------

    def _require_a_start(self) -> None:
        source, target = self._source.alias, self._target.alias
        known = app_aliases()
        for alias in (source, target):
            if alias not in known:
                raise InvalidQuery(f"The app is not in a database {alias!r}: {', '.join(known)}.", path="to")
        if source == target:
            raise InvalidQuery(f"The tenant is already in {target!r}.", path="to")
        if missing := [right for db in (self._source, self._target) for right in missing_rights(db)]:
            raise InvalidQuery(
                f"A move puts triggers on the tables: {'; '.join(missing)}. Run the command as their owner.",
                path="database",
            )
        if different := _migrations(self._source) ^ _migrations(self._target):
            raise InvalidQuery(
                f"Only one of the two databases has the migrations {', '.join(sorted(different))}.", path="to"
            )
        self._require_exports()
        fence = fence_of(self._target)
        if fence is not None and fence.phase not in ("moved", *_IN_TARGET):
            raise InvalidQuery(f"The tenant is currently being moved from {target!r}.", path="to")
        if has_rows(self._target):
            raise InvalidQuery(
                f"The database {target!r} already has rows of the tenant {shown_id(self.tenant)}.", path="to"
            )
        require_rows(self._source)

    def _require_exports(self) -> None:
        """Refuse a move if other apps have rows that are not copied but need the tenant's sessions."""
        for child in unfenced():
            rows = child.related_model._base_manager.using(self._source.alias)
            if rows.filter(**{f"{child.field.name}__tenant": self.tenant}).exists():
                raise InvalidQuery(
                    f"The rows of {child.related_model._meta.label} are deleted with their session but are "
                    "not exported: call helix_store.adapters.register_table in its app.",
                    path="tenant",
                )
        for reference in references_in(self._source):
            label, name = reference.related_model._meta.label, reference.field.name
            rows = reference.related_model._base_manager.using(self._source.alias)
            if rows.filter(**{f"{name}__tenant": self.tenant}).exists():
                raise InvalidQuery(
                    f"Rows of {label} refer to sessions of the tenant, which have other keys in the other "
                    f"database: store the session's id instead of the foreign key {name}.",
                    path="tenant",
                )

    def _close_target(self) -> None:
        """Refuse writers in the target. The fence of an earlier move becomes this one, without a gap."""
        fence = fence_of(self._target)
        if fence is None or fence.phase == "moved":
            put_up(self._target, self._source.alias, ARRIVING if fence is None else RETURNING)

    def _open_target(self) -> None:
        """Let writers use the target: the tenant is there."""
        fence = fence_of(self._target)
        if fence is not None and fence.phase in _IN_TARGET:
            take_down(self._target)

    def _leave_target(self) -> None:
        """Undo `_close_target`, because the tenant is not there."""
        if not set_phase(self._target, "moved", after=(RETURNING,)):
            self._open_target()

    def _can_reach_target(self) -> bool:
        try:
            fence_of(self._target)
        except StoreUnavailable:
            return False
        return True

    def _require_phase(self, *phases: str) -> str:
        fence = fence_of(self._source)
        if fence is None:
            raise InvalidQuery(f"The tenant {shown_id(self.tenant)} is not being moved.", path="tenant")
        if fence.phase not in phases:
            raise InvalidQuery(f"The move is in the phase {fence.phase}.", path="tenant")
        if unknown := unknown_tables(self._source):
            raise InvalidQuery(
                f"The move also fences the tables {', '.join(unknown)}, which no installed app has: run the "
                "command with the settings with which the move began.",
                path="database",
            )
        return fence.phase

    def _advance(self, phase: str, *, after: tuple[str, ...]) -> None:
        if not set_phase(self._source, phase, after=after):
            raise InvalidQuery("Another process has changed the phase of the move.", path="tenant")

    def _summary(self, **given: Any) -> MoveSummary:
        fence = fence_of(self._source)
        phase = "none" if fence is None else fence.phase
        return MoveSummary(self.tenant, self._source.alias, self._target.alias, phase, **given)

    def _copy_beside_writers(self) -> None:
        """Copy all rows, then the changes until few are left, and refuse the writers."""
        self._copy.copy_rows()
        before, changes = None, self._copy.copy_changes()
        # If writers are faster than the copy, another pass does not help.
        while changes > ROWS and (before is None or changes < before):
            before, changes = changes, self._copy.copy_changes()
        self._say("Refusing the writers of the tenant…")
        for _ in range(_ATTEMPTS):
            try:
                return put_up(self._source, self._target.alias, FENCED)
            except StoreBusy:
                self._copy.copy_changes()
        return put_up(self._source, self._target.alias, FENCED)


def _migrations(db: Database) -> set[str]:
    """Return the applied migrations of the apps whose tables are copied."""
    labels = {each.model._meta.app_label for each in tables()}
    applied = db.query(lambda: MigrationRecorder(db.connection).applied_migrations())
    return {f"{label}.{name}" for label, name in applied if label in labels}
