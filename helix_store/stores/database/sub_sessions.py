"""Sub-session refs in the database."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict

from django.db.models import QuerySet
from django.utils import timezone

from helix_store.core.sub_sessions import check_same_ref
from helix_store.core.types import SubSessionRef
from helix_store.exceptions import NotFoundError
from helix_store.models import SubSessionRef as SubSessionRow
from helix_store.stores.backend import EncodedRef
from helix_store.stores.database.locking import lock_session, session_key
from helix_store.stores.database.records import first_row, sub_session_ref_from
from helix_store.stores.database.scope import DatabaseVerbs, reads, writes

__all__ = ["DatabaseSubSessions"]


class DatabaseSubSessions(DatabaseVerbs):
    @writes
    def add(self, session_id: str, refs: Sequence[EncodedRef]) -> None:
        head = lock_session(self.scope, session_id)
        rows = self._of(head.pk)
        at = timezone.now()
        known: dict[str, SubSessionRow | EncodedRef] = {
            row.sub_session_id: row
            for row in rows.filter(sub_session_id__in=[ref.sub_session_id for ref in refs])
        }
        new = []
        for ref in refs:
            stored = known.setdefault(ref.sub_session_id, ref)
            check_same_ref(stored, ref)
            if stored is ref:
                new.append(SubSessionRow(session_id=head.pk, created_at=at, updated_at=at, **asdict(ref)))
        rows.bulk_create(new)

    @writes
    def update(self, session_id: str, sub_session_id: str, changes: Mapping[str, str]) -> SubSessionRef:
        rows = self._of(lock_session(self.scope, session_id).pk).filter(sub_session_id=sub_session_id)
        if changes:
            rows.update(updated_at=timezone.now(), **changes)
        row = first_row(rows)
        if row is None:
            raise NotFoundError("The session has no sub-session ref with this id.")
        return sub_session_ref_from(row)

    @reads
    def select(self, session_id: str) -> list[SubSessionRef]:
        return [
            sub_session_ref_from(row) for row in self._of(session_key(self.scope, session_id)).order_by("pk")
        ]

    def _of(self, key: int) -> QuerySet[SubSessionRow]:
        return SubSessionRow.objects.using(self.scope.alias).filter(session_id=key)
