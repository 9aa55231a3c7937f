"""The stream of a session."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

from asgiref.sync import async_to_sync
from django.db.models.functions import Substr
from django.urls import NoReverseMatch, reverse
from django.utils.translation import gettext_lazy as _

from helix_store import conf
from helix_store.admin.elements import badge, distance, one_line, printable
from helix_store.admin.sections.section import Section, SessionView
from helix_store.core import moments
from helix_store.core.payloads import decode
from helix_store.core.types import StreamStatus
from helix_store.exceptions import HelixStoreError, IntegrityFault
from helix_store.models import Stream as StreamRow
from helix_store.models import StreamChunk
from helix_store.reports.payloads import PayloadText
from helix_store.streams.views import permitted_tenant

_CHUNKS: Final = 60
_CHUNK: Final = 1_000
_TEXT_KEYS: Final = ("delta", "text", "content")


class Stream(Section):
    name = "stream"
    label = _("Stream")
    needs = (StreamRow,)

    def context(self, view: SessionView) -> dict[str, Any]:
        stream_id = view.session.stream_id or view.session.session_id
        row = StreamRow.objects.using(view.alias).filter(tenant=view.session.tenant, stream_id=stream_id)
        stream = row.defer("output", "error").first()
        if stream is None:
            return {"stream": None}
        last = view.number("before") or stream.last_sequence + 1
        chunks = self._chunks(view, stream, last)
        first = chunks[0]["sequence"] if chunks else last
        is_newest = last > stream.last_sequence
        return {
            "stream": {
                "status": badge(stream.status),
                "agent": printable(stream.agent_name),
                "writer": _writer(stream),
                "updated": distance(stream.updated_at),
                "count": stream.last_sequence - stream.floor,
                "removed": stream.floor,
                "last": stream.last_sequence,
            },
            "chunks": chunks,
            "older_url": view.url(before=first) if first > stream.floor + 1 else "",
            "newest_url": "" if is_newest else view.url(),
            "live_url": _live_url(view, stream) if is_newest else "",
        }

    def _chunks(self, view: SessionView, stream: StreamRow, before: int) -> list[dict[str, Any]]:
        start = PayloadText(Substr("payload", 1, _CHUNK + 1))
        rows = StreamChunk.objects.using(view.alias).filter(
            stream=stream.pk, sequence__gte=max(before - _CHUNKS, stream.floor + 1), sequence__lt=before
        )
        found = rows.order_by("sequence").values_list("sequence", start)
        return _joined({"sequence": sequence, **_chunk(text or "")} for sequence, text in found)


def _joined(chunks: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the chunks, merging consecutive texts of the same type into one."""
    joined: list[dict[str, Any]] = []
    for chunk in chunks:
        if chunk["type"] and joined and joined[-1]["type"] == chunk["type"]:
            joined[-1]["text"] += chunk["text"]
        else:
            joined.append(chunk)
    return joined


def _chunk(text: str) -> dict[str, str]:
    """Return the type and the text of a chunk, or its JSON if it does not have both."""
    try:
        chunk = decode(text) if len(text) <= _CHUNK else None
    except (IntegrityFault, RecursionError):
        return {"type": "", "text": str(_("This chunk cannot be read."))}
    if isinstance(chunk, dict):
        kind = chunk.get("type")
        said = next((chunk[key] for key in _TEXT_KEYS if isinstance(chunk.get(key), str)), None)
        if isinstance(kind, str) and said is not None:
            return {"type": printable(kind), "text": printable(said)}
    return {"type": "", "text": one_line(text, _CHUNK)}


def _writer(stream: StreamRow) -> Any:
    if stream.status != StreamStatus.ACTIVE or stream.lease_expires_at is None:
        return _("no writer")
    return _("writing now") if stream.lease_expires_at > moments.now() else _("the writer is lost")


def _live_url(view: SessionView, stream: StreamRow) -> str:
    """Return the URL of the events if the project has one and the user may read this tenant's stream."""
    permission = conf.stream_permission()
    if permission is None or stream.status in (StreamStatus.ENDED, StreamStatus.FAILED):
        return ""
    try:
        url = reverse("helix_store:stream", args=[stream.stream_id])
        tenant = async_to_sync(permitted_tenant)(view.request, stream.stream_id, permission=permission)
    except (NoReverseMatch, HelixStoreError):
        return ""
    return url if tenant == stream.tenant else ""
