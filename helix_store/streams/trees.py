"""The streams of sessions that are deleted: they go when no other session writes to them."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from helix_store.engine.database import Database
from helix_store.models import (
    Session,
    Stream,
    StreamChunk,
)
from helix_store.models.sessions import WRITES_ELSEWHERE
from helix_store.streams.notifications import announce_after_commit

__all__ = ["delete_unnamed", "streams_of"]


def streams_of(db: Database, session_keys: Collection[int]) -> list[str]:
    """The ids of the streams that sessions name and that exist."""
    named = Session.objects.using(db.alias).filter(pk__in=session_keys, stream_id__isnull=False)
    streams = Stream.objects.using(db.alias).filter(tenant=db.tenant, stream_id__in=named.values("stream_id"))
    return list(streams.order_by("id").values_list("stream_id", flat=True))


def delete_unnamed(db: Database, stream_ids: Sequence[str]) -> None:
    """Delete those streams that no session names any more. Call in the transaction that deleted sessions."""
    for stream_id in stream_ids:
        if _is_named(db, stream_id):
            continue
        streams = Stream.objects.using(db.alias).filter(tenant=db.tenant, stream_id=stream_id)
        for key in list(streams.select_for_update().values_list("pk", flat=True)):
            StreamChunk.objects.using(db.alias).filter(stream_id=key).delete()
            streams.filter(pk=key)._raw_delete(db.alias)
            announce_after_commit(db.connection, key, 0)


def _is_named(db: Database, stream_id: str) -> bool:
    """In two parts, so that either is one look-up in an index, also where SQLite has no statistics."""
    naming = Session.objects.using(db.alias).filter(tenant=db.tenant, stream_id=stream_id)
    return naming.filter(session_id=stream_id).union(naming.filter(WRITES_ELSEWHERE), all=True).exists()
