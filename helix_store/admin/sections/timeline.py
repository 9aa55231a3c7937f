"""The timeline and the stream of a session."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime, timedelta
from itertools import pairwise
from typing import Any, Final

from asgiref.sync import async_to_sync
from django.db.models.functions import Substr
from django.urls import NoReverseMatch, reverse
from django.utils.translation import gettext_lazy as _

from helix_store import conf
from helix_store.admin.elements import (
    NOTHING,
    badge,
    distance,
    duration,
    format_time,
    name_of_status,
    one_line,
    printable,
    stamp,
    tone,
)
from helix_store.admin.sections.section import Section, SessionView
from helix_store.core import moments
from helix_store.core.payloads import decode
from helix_store.core.types import SUSPENDED_STATUSES, StreamStatus
from helix_store.exceptions import HelixStoreError, IntegrityFault
from helix_store.models import Checkpoint, Message, Run, StreamChunk, SubSessionRef
from helix_store.models import Stream as StreamRow
from helix_store.reports.payloads import PayloadText, said_by, start_of
from helix_store.streams.views import permitted_tenant

_RUNS: Final = 12
_STEPS: Final = 60
_SUB_AGENTS: Final = 30
_REASON: Final = 120
_WIDTH: Final = 1000
_GAP: Final = 40
"""The width of a shortened idle time, in units of the axis."""

Span = tuple[datetime, datetime]


class Scale:
    """A map from times to positions on an axis of 1000 units.

    An idle time that is longer than the work around it is shortened.
    """

    def __init__(self, busy: Sequence[Span]) -> None:
        merged = _merged(busy)
        worked = sum((end - start for start, end in merged), timedelta())
        idle = [(end, start) for (_s, end), (start, _e) in pairwise(merged)]
        self.gaps = [gap for gap in idle if gap[1] - gap[0] > worked / 4]
        room = max(_WIDTH - _GAP * len(self.gaps), _WIDTH // 4)
        self._gap = (_WIDTH - room) / len(self.gaps) if self.gaps else 0.0
        self.start, self.end = merged[0][0], merged[-1][1]
        cut = sum((end - start for start, end in self.gaps), timedelta())
        self._unit = room / max((self.end - self.start - cut).total_seconds(), 0.001)

    def position(self, at: datetime) -> float:
        at = min(max(at, self.start), self.end)
        shown, skipped = at - self.start, 0.0
        for start, end in self.gaps:
            if at <= start:
                break
            inside = min(at, end) - start
            shown -= inside
            skipped += self._gap * (inside / (end - start))
        return shown.total_seconds() * self._unit + skipped


def _merged(spans: Sequence[Span]) -> list[Span]:
    merged: list[Span] = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((start, max(start, end)))
    return merged


class Timeline(Section):
    name = "timeline"
    label = _("Timeline")
    needs = (Run,)

    def context(self, view: SessionView) -> dict[str, Any]:
        runs = self._runs(view)
        shown = runs[:_RUNS][::-1]
        if not shown:
            return {"rows": [], "list_url": view.list_url(Run)}
        now = moments.now()
        sub_agents = self._sub_agents(view, shown[0]["started_at"]) if view.may_view(SubSessionRef) else []
        busy = [(run["started_at"], run["ended_at"] or now) for run in shown]
        busy += [(ref["created_at"], _end_of(ref, now)) for ref in sub_agents]
        if _waits(shown[-1]):
            busy.append((now, now))
        scale = Scale(busy)
        steps = self._steps(view, shown) if view.may_view(Checkpoint) else []
        if steps:
            earlier = view.steps.filter(version__lt=steps[0]["version"]).order_by("-version")
            _set_starts(steps, earlier.values("run_id", "created_at").first(), shown)
        return {
            "rows": list(self._rows(view, scale, shown, steps, sub_agents, now)),
            "gaps": [_span(scale, start, end) for start, end in scale.gaps],
            "list_url": view.list_url(Run),
            "starts": stamp(scale.start),
            "ends": stamp(scale.end),
            "older_url": view.url(before=shown[0]["turn"]) if len(runs) > _RUNS else "",
            "newest_url": view.url() if view.number("before") is not None else "",
            "steps_shown": len(steps) if len(steps) == _STEPS else 0,
        }

    def _runs(self, view: SessionView) -> list[dict[str, Any]]:
        runs = view.rows(Run)
        if (before := view.number("before")) is not None:
            runs = runs.filter(turn__lt=before)
        reason = start_of("completion_reason", _REASON)
        columns = ("pk", "run_id", "turn", "status", "step_count", "started_at", "ended_at")
        error = start_of("error", _REASON)
        return list(runs.order_by("-turn").values(*columns, reason=reason, error_start=error)[: _RUNS + 1])

    def _steps(self, view: SessionView, runs: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
        steps = view.steps.filter(run_id__in=[run["run_id"] for run in runs])
        columns = ("run_id", "step_id", "step_count", "created_at", "version")
        return list(steps.order_by("-version").values(*columns)[:_STEPS])[::-1]

    def _sub_agents(self, view: SessionView, since: datetime) -> list[dict[str, Any]]:
        refs = view.rows(SubSessionRef).filter(created_at__gte=since)
        columns = ("sub_session_id", "agent_type", "status", "created_at", "updated_at")
        return list(refs.order_by("-pk").values(*columns)[:_SUB_AGENTS])[::-1]

    def _rows(
        self,
        view: SessionView,
        scale: Scale,
        runs: list[dict[str, Any]],
        steps: list[dict[str, Any]],
        sub_agents: list[dict[str, Any]],
        now: datetime,
    ) -> Iterable[dict[str, Any]]:
        urls = view.session_urls(ref["sub_session_id"] for ref in sub_agents)
        for run, following in zip(runs, [*runs[1:], None], strict=True):
            end, next_start = run["ended_at"] or now, now if following is None else following["started_at"]
            yield _row(
                scale,
                "run",
                _("Run %d") % run["turn"],
                (run["started_at"], end),
                status=run["status"],
                note=" · ".join(
                    filter(None, (name_of_status(run["status"]), one_line(_reason(run), _REASON)))
                ),
                url=view.page.page_url(Run, run["pk"]),
            )
            for step in steps:
                if step["run_id"] != run["run_id"]:
                    continue
                label = _("Step %d") % step["step_count"]
                url = view.url("conversation", step=step["step_count"]) if view.may_view(Message) else ""
                step_id = printable(step["step_id"] or "")
                start, end = step["started_at"], step["created_at"]
                span = end if start is None else min(start, end), end
                yield _row(
                    scale, "step", label, span, status="", note=step_id, url=url, is_known=start is not None
                )
            for ref in sub_agents:
                if run["started_at"] <= ref["created_at"] < next_start:
                    span = ref["created_at"], _end_of(ref, now)
                    label, url = ref["agent_type"], urls.get(ref["sub_session_id"], "")
                    note = f"{_('sub-agent')} · {printable(name_of_status(ref['status']))}"
                    yield _row(scale, "sub-agent", label, span, status=ref["status"], note=note, url=url)
            if _waits(run):
                note = str(_("still waits")) if following is None else ""
                yield _row(scale, "wait", _("Wait"), (end, next_start), status="paused", note=note)


def _set_starts(
    steps: list[dict[str, Any]], before: dict[str, Any] | None, runs: Iterable[dict[str, Any]]
) -> None:
    """Set when each step began: when the previous step of its run ended, or when its run began.

    It is ``None`` if the previous step was deleted.
    """
    run_starts = {run["run_id"]: run["started_at"] for run in runs}
    for step in steps:
        if before is not None and before["run_id"] == step["run_id"]:
            step["started_at"] = before["created_at"]
        elif before is None and step["step_count"] > 1:
            step["started_at"] = None
        else:
            step["started_at"] = run_starts[step["run_id"]]
        before = step


def _reason(run: dict[str, Any]) -> str:
    """Return the error of a run, which begins with its reason, or only the reason."""
    return said_by(run["error_start"]) or run["reason"] or ""


def _waits(run: dict[str, Any]) -> bool:
    """Return whether the session waits from the end of this run until the next one starts."""
    return run["status"] in SUSPENDED_STATUSES and run["ended_at"] is not None


def _end_of(ref: dict[str, Any], now: datetime) -> datetime:
    end: datetime = now if ref["status"] == "running" else ref["updated_at"]
    return end


def _row(
    scale: Scale,
    kind: str,
    label: Any,
    span: Span,
    *,
    status: str,
    note: str,
    url: str = "",
    is_known: bool = True,
) -> dict[str, Any]:
    start, end = span
    return {
        "kind": kind,
        "label": printable(str(label)),
        "note": note,
        "tone": tone(status) if status else "plain",
        "took": duration(end - start) if is_known else NOTHING,
        "title": f"{format_time(start)} to {format_time(end)}",
        "url": url,
        **_span(scale, start, end),
    }


def _span(scale: Scale, start: datetime, end: datetime) -> dict[str, str]:
    """Return the position of a bar as strings: a template would format numbers in the user's language."""
    x = scale.position(start)
    # A short bar must stay visible, even at the end of the axis.
    width = max(scale.position(end) - x, 4.0)
    return {"x": f"{min(x, _WIDTH - width):.1f}", "width": f"{width:.1f}"}


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
