"""Moving a tenant to another database, in phases that a killed command leaves and the next one goes on from.

====================== ==================== ================ ===========================================
phase                  the tenant is        writes           a repeat
====================== ==================== ================ ===========================================
(no fence)             in the source        in the source    puts the fence up
``copying``            in the source        refused          copies what is missing, and compares
``copied``             in both, equal       refused, then    is for the person who changes the router
                                            in the target
``deleting``           in the target        in the target    deletes the rest of the source
``moved``              in the target        in the target    (the fence refuses writers that are late)
``aborting``           in the source        refused          deletes the rest of the copy
====================== ==================== ================ ===========================================

The fence is up in the source in every phase. It holds the phase, so that the two cannot disagree. While rows
are copied, and while a copy is deleted, a fence is up in the target too, in the phase ``arriving``: a cleanup
of all databases must not change what is compared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final

from django.db.migrations.recorder import MigrationRecorder
from django.db.models import Model, QuerySet

from helix_store.app_tables import registered_tables
from helix_store.core import validation
from helix_store.core.serialization import Serializable
from helix_store.engine.aliases import alias_of, app_aliases
from helix_store.engine.database import Database
from helix_store.engine.expressions import tenant_parameter
from helix_store.exceptions import InvalidQuery, StoreUnavailable, shown_id
from helix_store.models import Lock, Session, Stream, UsageEntry
from helix_store.sessions.database.locking import lock_sessions
from helix_store.sessions.database.trees import delete_locked_sessions
from helix_store.transfer.database import DatabaseSource
from helix_store.transfer.fences import (
    ARRIVING,
    Fence,
    fence_of,
    put_up,
    set_phase,
    take_down,
    through_the_fence,
    unfenced,
)
from helix_store.transfer.importing import import_units
from helix_store.transfer.summary import ExportSummary, ImportSummary
from helix_store.transfer.writing import write_export

__all__ = ["MoveReport", "TenantMove", "find_move"]

_ROWS: Final = 100


@dataclass(slots=True)
class MoveReport(Serializable):
    """Where a move stands. ``records`` and ``sha256`` are those of both databases, when they are equal."""

    tenant: str
    source: str
    target: str
    phase: str
    records: dict[str, int] = field(default_factory=dict)
    sha256: str | None = None
    problems: list[str] = field(default_factory=list)


def find_move(tenant: str) -> Fence | None:
    """The move of a tenant that has begun and has not ended, in whichever database it was.

    A database that is not available does not hide a move that goes on between others.
    """
    found: list[Fence] = []
    failure: StoreUnavailable | None = None
    for alias in app_aliases():
        try:
            fence = fence_of(Database(alias, validation.tenant(tenant)))
        except StoreUnavailable as exc:
            failure = failure or exc
        else:
            if fence is not None and fence.phase != ARRIVING:
                found.append(fence)
    found.sort(key=lambda fence: fence.phase == "moved")
    if failure is not None and (not found or found[0].phase == "moved"):
        raise failure
    return found[0] if found else None


class TenantMove:
    """The move of one tenant. One process at a time may drive it.

    ``force`` does not ask the router where the tenant is: for a project that passes ``using`` itself. Then an
    abort does not compare what it deletes, and does without a target that cannot be reached.
    ``progress`` is called with a text. Every call is safe to repeat, and raises `InvalidQuery` when the move
    is in another phase.
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
        self._source = Database(source, self.tenant)
        self._target = Database(target, self.tenant)
        self._force = force
        self._say = progress or (lambda text: None)
        self._is_stopped = is_stopped or (lambda: False)

    def copy(self) -> MoveReport:
        """Refuse the tenant's writers in the source, copy its rows to the target, and compare both whole.

        The copy is complete in the phase ``copied``. Otherwise the report tells the problems, and the source
        stays what the router names.
        """
        fence = fence_of(self._source)
        if fence is None or fence.phase == "moved":
            self._require_a_start()
            if fence is not None:
                take_down(self._source)
            self._say("Refusing the writers of the tenant…")
            self._close_target()
            try:
                put_up(self._source, self._target.alias, "copying")
            except Exception:
                self._open_target()
                raise
        elif fence.target != self._target.alias:
            raise InvalidQuery(
                f"The tenant is moved to {fence.target!r} already; abort that first.", path="to"
            )
        elif fence.phase == "copied":
            return self._report()
        self._require_phase("copying")
        # Again, behind the fence: a writer may have been faster.
        self._require_exports()
        self._close_target()
        problems = self._copied_rows()
        if self._is_stopped():
            return self._report(problems=["It was stopped; run it again to go on."])
        source, is_equal = self._compared()
        problems += [str(problem) for problem in source.problems]
        if not is_equal:
            problems.append("What is in the two databases differs; the tenant stays where it is.")
        if problems:
            return self._report(problems=problems)
        self._open_target()
        self._advance("copied", after=("copying",))
        return self._report(records=dict(sorted(source.counts.items())), sha256=source.sha256)

    def finish(self) -> MoveReport:
        """Delete the tenant's rows in the source. The fence stays, and refuses writers that are late."""
        self._require_phase("copied", "deleting", "moved")
        if not self._force and alias_of(self.tenant) == self._source.alias:
            raise InvalidQuery(
                f"The router still has the tenant in {self._source.alias!r}; change it first, and start the"
                " processes again that do not read the change.",
                path="finish",
            )
        # An abort may have begun to delete the copy, or was stopped before it did.
        self._advance("deleting", after=("copied", "deleting", "moved"))
        self._open_target()
        if self._delete(self._source):
            self._advance("moved", after=("deleting",))
        return self._report()

    def abort(self) -> MoveReport:
        """Delete the copy in the target, and let writers use the source again.

        With ``force``, also without a target that cannot be reached; what was copied stays in it.
        """
        phase = self._require_phase("copying", "copied", "aborting")
        if self._force and not self._can_reach_target():
            take_down(self._source)
            return self._report(
                problems=[f"{self._target.alias!r} cannot be reached: what was copied is still in it."]
            )
        if not self._force and alias_of(self.tenant) == self._target.alias:
            raise InvalidQuery(
                f"The router has the tenant in {self._target.alias!r}, where there may be new writes: finish"
                " the move, or change the router back first.",
                path="abort",
            )
        self._close_target()
        if phase == "copied" and not self._force and not self._compared()[1]:
            self._open_target()
            raise InvalidQuery(
                f"The rows in {self._target.alias!r} have changed since they were copied, and would be lost:"
                " finish the move, and move the tenant back.",
                path="abort",
            )
        self._advance("aborting", after=("copying", "copied", "aborting"))
        if self._delete(self._target):
            self._open_target()
            take_down(self._source)
        return self._report()

    def release(self) -> MoveReport:
        """Remove the fence of a move that has ended, when no process has the old answer of the router."""
        self._require_phase("moved")
        take_down(self._source)
        return self._report()

    # --- Phases --------------------------------------------------------------------------------------

    def _require_a_start(self) -> None:
        source, target = self._source.alias, self._target.alias
        known = app_aliases()
        for alias in (source, target):
            if alias not in known:
                raise InvalidQuery(f"The app is not in a database {alias!r}: {', '.join(known)}.", path="to")
        if source == target:
            raise InvalidQuery(f"The tenant is in {target!r} already.", path="to")
        if different := _migrations(self._source) ^ _migrations(self._target):
            raise InvalidQuery(
                f"Only one of the two databases has the migrations {', '.join(sorted(different))}.", path="to"
            )
        self._require_exports()
        fence = fence_of(self._target)
        if fence is not None and fence.phase not in ("moved", ARRIVING):
            raise InvalidQuery(f"The tenant is moved from {target!r} at the moment.", path="to")
        if any(rows.exists() for rows in _rows(self._target)):
            raise InvalidQuery(
                f"The database {target!r} has rows of the tenant {shown_id(self.tenant)} already.", path="to"
            )
        if fence is not None:
            take_down(self._target)

    def _require_exports(self) -> None:
        """No rows may go with the tenant's sessions that are not copied."""
        for child in unfenced():
            rows = child.related_model._base_manager.using(self._source.alias)
            if rows.filter(**{f"{child.field.name}__tenant": self.tenant}).exists():
                raise InvalidQuery(
                    f"The rows of {child.related_model._meta.label} go with their session, and no export has"
                    " them: call helix_store.adapters.register_table in its app.",
                    path="tenant",
                )

    def _close_target(self) -> None:
        if fence_of(self._target) is None:
            put_up(self._target, self._source.alias, ARRIVING)

    def _open_target(self) -> None:
        fence = fence_of(self._target)
        if fence is not None and fence.phase == ARRIVING:
            take_down(self._target)

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
        return fence.phase

    def _advance(self, phase: str, *, after: tuple[str, ...]) -> None:
        if not set_phase(self._source, phase, after=after):
            raise InvalidQuery("Another process has changed the phase of the move.", path="tenant")

    def _report(self, **given: Any) -> MoveReport:
        fence = fence_of(self._source)
        phase = "none" if fence is None else fence.phase
        return MoveReport(self.tenant, self._source.alias, self._target.alias, phase, **given)

    # --- Rows ----------------------------------------------------------------------------------------

    def _copied_rows(self) -> list[str]:
        """Copy, and return what could not be. What an earlier attempt has stored is compared."""
        source = DatabaseSource(self._source.alias, tenant=self.tenant)

        def tell(done: ImportSummary) -> None:
            if done.sessions % _ROWS == 0:
                self._say(f"{done.sessions:,} of {total:,} sessions")

        with source.reading():
            total = source.session_count
            summary = import_units(
                source.units(),
                self._target.alias,
                tenant=self.tenant,
                progress=tell,
                is_stopped=self._is_stopped,
                transact=through_the_fence,
            )
        return [str(problem) for problem in summary.problems]

    def _compared(self) -> tuple[ExportSummary, bool]:
        """What is in the source, and whether the target has the same."""
        source, target = (self._fingerprint(db) for db in (self._source, self._target))
        return source, source.counts == target.counts and source.sha256 == target.sha256

    def _fingerprint(self, db: Database) -> ExportSummary:
        """The counts and the hash of an export of the tenant: equal for equal rows in any two databases."""
        self._say(f"Reading {db.alias!r} to compare…")
        return write_export(DatabaseSource(db.alias, tenant=self.tenant), _Nowhere())

    def _delete(self, db: Database) -> bool:
        """Delete the rows of the tenant in small transactions; ``False`` when it was stopped."""

        def some_sessions() -> bool:
            keys = list(next(_rows(db)).values_list("pk", flat=True)[:_ROWS])
            heads = lock_sessions(db, keys)
            delete_locked_sessions(db, [head.pk for head in heads], keep_usage=False)
            return bool(keys)

        def some_rows() -> bool:
            for rows in _rows(db):
                keys = list(rows.values_list("pk", flat=True)[:_ROWS])
                if keys:
                    rows.model._base_manager.using(db.alias).filter(pk__in=keys).delete()
                    return True
            return False

        for batch in (some_sessions, some_rows):
            while through_the_fence(db, batch):
                self._say(f"Deleting in {db.alias!r}…")
                if self._is_stopped():
                    return False
        return True


class _Nowhere:
    """A file that keeps nothing. What is written to it is hashed by the export itself."""

    def write(self, data: bytes, /) -> None:
        pass


def _migrations(db: Database) -> set[str]:
    """The applied migrations of the apps whose tables are copied."""
    labels = {"helix_store", *(each.model._meta.app_label for each in registered_tables())}
    applied = db.query(lambda: MigrationRecorder(db.connection).applied_migrations())
    return {f"{label}.{name}" for label, name in applied if label in labels}


def _rows(db: Database) -> Iterator[QuerySet[Any]]:
    """The rows that have the tenant themselves, each in the order of an index by tenant; sessions first."""
    # In the order of the key, PostgreSQL may pass the rows of all other tenants to come to the first one.
    own: list[tuple[type[Model], tuple[str, ...]]] = [
        (Session, ("session_id",)),
        (UsageEntry, ("entry_id",)),
        (Stream, ("stream_id",)),
        (Lock, ("name",)),
    ]
    for model, order in (*own, *((each.model, each.order) for each in registered_tables("tenant"))):
        yield model._base_manager.using(db.alias).filter(tenant=tenant_parameter(db.tenant)).order_by(*order)
