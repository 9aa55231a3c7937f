"""Moving a tenant to another database, in phases: a repeat continues where a killed command stopped.

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

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

from django.db.migrations.recorder import MigrationRecorder

from helix_store.catalogue import tables
from helix_store.core import validation
from helix_store.core.serialization import Serializable
from helix_store.engine.aliases import alias_of, app_aliases
from helix_store.engine.database import Database
from helix_store.exceptions import InvalidQuery, StoreBusy, StoreUnavailable, shown_id
from helix_store.transfer.copying import ROWS, IncompleteCopy, TenantCopy, rows_of_tenant
from helix_store.transfer.fence_sql import COPYING, FENCED, unfenced
from helix_store.transfer.fences import (
    ARRIVING,
    RETURNING,
    Fence,
    fence_of,
    missing_rights,
    put_up,
    set_phase,
    take_down,
)

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
        if any(rows.exists() for rows in rows_of_tenant(self._target)):
            raise InvalidQuery(
                f"The database {target!r} already has rows of the tenant {shown_id(self.tenant)}.", path="to"
            )

    def _require_exports(self) -> None:
        """Refuse a move if rows that are not copied would be deleted with the tenant's sessions."""
        for child in unfenced():
            rows = child.related_model._base_manager.using(self._source.alias)
            if rows.filter(**{f"{child.field.name}__tenant": self.tenant}).exists():
                raise InvalidQuery(
                    f"The rows of {child.related_model._meta.label} are deleted with their session but are "
                    "not exported: call helix_store.adapters.register_table in its app.",
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
