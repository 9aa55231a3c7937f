"""The streams of sessions that are deleted: they go when no other session writes to them."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from helix_store.models import Session, Stream, StreamChunk
from helix_store.stores.database.notifications import announce_after_commit
from helix_store.stores.database.scope import Scope

__all__ = ["delete_unnamed", "streams_of"]


def streams_of(scope: Scope, session_keys: Collection[int]) -> list[str]:
    """The ids of the streams that sessions name and that exist."""
    named = Session.objects.using(scope.alias).filter(pk__in=session_keys, stream_id__isnull=False)
    streams = Stream.objects.using(scope.alias).filter(
        tenant=scope.tenant, stream_id__in=named.values("stream_id")
    )
    return list(streams.order_by("id").values_list("stream_id", flat=True))


def delete_unnamed(scope: Scope, stream_ids: Sequence[str]) -> None:
    """Delete those streams that no session names any more. Call in the transaction that deleted sessions."""
    for stream_id in stream_ids:
        if Session.objects.using(scope.alias).of_tenant(scope.tenant).naming_stream(stream_id).exists():
            continue
        streams = Stream.objects.using(scope.alias).filter(tenant=scope.tenant, stream_id=stream_id)
        for key in list(streams.select_for_update().values_list("pk", flat=True)):
            StreamChunk.objects.using(scope.alias).filter(stream_id=key).delete()
            streams.filter(pk=key)._raw_delete(scope.alias)
            announce_after_commit(scope.connection, key, 0)
