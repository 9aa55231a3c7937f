"""The fixes of ``--fix``. They use only facts from other rows, and lock the row that they change."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from django.db.models import Max

from helix_store.budgets.database import count_again
from helix_store.core.payloads import decode_object
from helix_store.doctor.checks import Check
from helix_store.doctor.findings import Fault
from helix_store.engine.database import Database
from helix_store.models import Checkpoint, CheckpointKind, Lock, Message, Session, Stream, UsageEntry
from helix_store.sessions.database.current_state import drop_unneeded_bases
from helix_store.sessions.database.locking import touch
from helix_store.sessions.post_sql import SET_NEXT_POST
from helix_store.sessions.tool_calls import earliest_deadline
from helix_store.streams.notifications import notify_after_commit

Fix = Callable[[Database, Any], object]
"""A function that fixes a locked row, or leaves it unchanged if a fix is not safe."""


def fix(db: Database, check: Check, rule: str, key: int, *, dry_run: bool) -> list[Fault]:
    """Fix a rule's faults in one row, in one transaction, and return the remaining faults.

    The check is repeated under the row's lock, so a row that has been fixed in the meantime is left
    unchanged. A dry run is rolled back. It is safe to repeat.
    """

    def mend() -> list[Fault]:
        assert check.of is not None and check.keyed is not None  # noqa: PT018, S101  a rule with a fix has both
        rows = check.of._base_manager.using(db.alias).filter(pk=key)
        row = next(iter(rows.select_for_update(no_key=True)), None)
        if row is None or not _found(db, check, rule, key):
            return []
        FIXES[rule](db, row)
        return _found(db, check, rule, key)

    with db.rolled_back(dry_run=dry_run):
        return db.transaction(mend)


def _found(db: Database, check: Check, rule: str, key: int) -> list[Fault]:
    assert check.keyed is not None  # noqa: S101
    return [fault for fault in check.keyed(db, [key]) if fault.rule_id == rule]


def _message_count(db: Database, head: Session) -> None:
    """Fix the count only if the history is complete. A longer checkpoint shows that messages were lost."""
    messages = Message.objects.using(db.alias).filter(session_id=head.pk)
    last = messages.aggregate(last=Max("sequence"))["last"] or 0
    beyond = Checkpoint.objects.using(db.alias).filter(
        session_id=head.pk, kind=CheckpointKind.STEP, message_count__gt=last
    )
    if messages.count() == last and not beyond.exists():
        _update(db, head, message_count=last)


def _deadline(db: Database, head: Session) -> None:
    calls = head.pending_client_tool_calls
    _update(db, head, pending_deadline=earliest_deadline({} if calls is None else decode_object(calls)))


def _current(db: Database, head: Session) -> None:
    """Also clear the base key: without it, the next step stores a full payload, which is always correct."""
    current = (
        Checkpoint.objects.using(db.alias)
        .filter(pk=head.current_id or 0)
        .values_list("kind", flat=True)
        .get()
    )
    if current in (CheckpointKind.STEP, CheckpointKind.STATE):
        _update(db, head, current_is_checkpoint=current == CheckpointKind.STEP, base_key=None)


def _unneeded_state(db: Database, head: Session) -> None:
    rows = Checkpoint.objects.using(db.alias).filter(session_id=head.pk)
    current = rows.get(pk=head.current_id or 0)
    older = rows.filter(kind=CheckpointKind.STATE, version__lt=current.version)
    older.exclude(pk=current.pk).delete()
    touch(db, head)


def _unneeded_bases(db: Database, head: Session) -> None:
    drop_unneeded_bases(db, head)
    touch(db, head)


def _usage(db: Database, entry: UsageEntry) -> None:
    if not Session.objects.using(db.alias).filter(pk=entry.session_id or 0).exists():
        UsageEntry.objects.using(db.alias).filter(pk=entry.pk).update(session=None)


def _last_sequence(db: Database, stream: Stream) -> None:
    """Only increase the number. A lower one would be used for a chunk other than the one that readers saw."""
    newest = stream.chunks.using(db.alias).aggregate(newest=Max("sequence"))["newest"]
    if newest is not None and newest > stream.last_sequence:
        Stream.objects.using(db.alias).filter(pk=stream.pk).update(last_sequence=newest)
        notify_after_commit(db.alias, stream.pk, newest)


def _lock(db: Database, lock: Lock) -> None:
    Lock.objects.using(db.alias).filter(pk=lock.pk).update(owner=None, expires_at=None)


def _update(db: Database, head: Session, **columns: Any) -> None:
    Session.objects.using(db.alias).filter(pk=head.pk).update(**columns)


FIXES: Final[dict[str, Fix]] = {
    "message-count-off": _message_count,
    "deadline-off": _deadline,
    "next-post-off": lambda db, head: db.execute(SET_NEXT_POST, {"key": head.pk}),
    "current-mistaken": _current,
    "state-unneeded": _unneeded_state,
    "base-unneeded": _unneeded_bases,
    "usage-of-unknown-session": _usage,
    "budget-counter-off": lambda db, budget: count_again(Database(db.alias, budget.tenant), budget.name),
    "stream-last-off": _last_sequence,
    "lock-expired": _lock,
}
