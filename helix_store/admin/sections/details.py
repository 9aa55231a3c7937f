"""The rows that belong to a session: family, state, checkpoints, usage, budgets and its stream."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from typing import Any, Final

from asgiref.sync import async_to_sync
from django.db.models.functions import Length, Substr
from django.http import Http404, HttpResponse
from django.urls import NoReverseMatch, reverse
from django.utils.translation import gettext_lazy as _
from django.utils.translation import pgettext

from helix_store import conf
from helix_store.actions.sessions import BRANCH, PRUNE_CHECKPOINTS, RESTORE
from helix_store.admin.elements import (
    JSON_LIMIT,
    MISSING,
    NOTHING,
    at,
    badge,
    difference,
    distance,
    duration_of,
    grouped,
    hide_secrets,
    identifier,
    json_block,
    link,
    matches,
    money,
    one_line,
    printable,
    progress,
    stamp,
    value_block,
)
from helix_store.admin.sections.section import ENVELOPE, NOT_IN_A_NAME, Section, SessionView, current_row
from helix_store.admin.usage import bars, capped, renewal
from helix_store.core import moments
from helix_store.core.payloads import decode, join_path
from helix_store.core.types import CheckpointHead, SessionState, StreamStatus
from helix_store.core.usage import CallStats, TokenCounts, UsageRollup
from helix_store.exceptions import HelixStoreError, IntegrityFault, InvalidCursor, InvalidPayload
from helix_store.models import Budget, Checkpoint, Session, StreamChunk, SubSessionRef, UsageEntry
from helix_store.models import Stream as StreamRow
from helix_store.reports.payloads import PayloadText, changes_between, json_start, shown_state, whole_state
from helix_store.reports.session import session_tree
from helix_store.stores.directory import TreeNode
from helix_store.streams.views import permitted_tenant

_IN_ENVELOPE_ONLY: Final = ("output", "error", "workspace_refs")
_EMPTY: Final = {None, "", "[]", "{}"}
_LONGEST_LINE: Final = 1_000


class Details(Section):
    name = "details"
    label = _("Details")

    def context(self, view: SessionView) -> dict[str, Any]:
        session = view.session
        view.read("directory", "tags", "metadata", "typed_metadata", "tracing_context", "title", ENVELOPE)
        # The fields that are shown are the last ones of the envelope.
        view.whole_document(ENVELOPE)
        facts = [
            (_("Session id"), session.session_id),
            (_("Tenant"), session.tenant),
            (_("Title"), (view.texts["title"] or "")[:_LONGEST_LINE]),
            (_("Agent type"), session.agent_type),
            (_("User"), session.user_id),
            (_("Mode"), session.mode),
            (_("Workspace"), session.workspace_id),
            (_("Directory"), (view.texts["directory"] or "")[:_LONGEST_LINE]),
            (_("Stream"), session.stream_id),
            (_("Parent"), session.parent_session_id),
            (_("Root"), session.root_session_id),
        ]
        times = [
            (_("Created"), session.created_at),
            (_("Updated"), session.updated_at),
            (_("Expires"), session.expires_at),
            (_("Next deadline"), session.pending_deadline),
        ]
        counts = [
            (_("Version"), session.version),
            (_("Steps"), session.step_count),
            (pgettext("of a conversation", "Messages"), session.message_count),
            (_("Resumes"), session.resume_count),
        ]
        documents = [
            (pgettext("of a session", "Tags"), "tags", None),
            (_("Metadata"), "metadata", None),
            (_("Metadata of the graph"), "typed_metadata", None),
            (_("Output, error, workspaces"), ENVELOPE, _outcome),
            (_("Tracing context"), "tracing_context", hide_secrets),
        ]
        return {
            "facts": [
                *((label, printable(value)) for label, value in facts if value),
                *((label, grouped(value)) for label, value in counts),
                *((label, stamp(value)) for label, value in times if value is not None),
            ],
            "documents": [
                (label, json_block(view.texts[column], shown=shown))
                for label, column, shown in documents
                if view.texts[column] not in _EMPTY
            ],
        }


def _outcome(envelope: Any) -> Any:
    """Return the state's fields that are not session columns. Others may hide a tracing context."""
    if not isinstance(envelope, dict):
        return hide_secrets(envelope)
    return {name: envelope[name] for name in _IN_ENVELOPE_ONLY if name in envelope}


_NODES: Final = 200
_DEEPEST: Final = 8
_TITLE: Final = 80


class Family(Section):
    name = "tree"
    label = _("Sub-sessions")
    needs = (SubSessionRef,)

    def context(self, view: SessionView) -> dict[str, Any]:
        session = view.session
        try:
            tree = session_tree(view.store, session.session_id, root_id=session.root_session_id)
            nodes = list(islice(tree.walk(), _NODES + 1))
        except ValueError:
            # SQLite stores any bytes in a JSON column.
            raise IntegrityFault from None
        shown = nodes[:_NODES]
        below = {"tenant": session.tenant, "parent_session_id": session.session_id}
        links = view.session_links(node.session_id for _way, node in shown if node.head is not None)
        return {
            "nodes": [_node(view, len(way), node, links) for way, node in shown],
            "has_more": len(nodes) > _NODES,
            "limit": _NODES,
            "list_url": view.page.list_url(Session, **below),
        }


def _node(view: SessionView, depth: int, node: TreeNode, links: dict[str, Any]) -> dict[str, Any]:
    head, ref = node.head, node.ref
    return {
        "depth": min(depth, _DEEPEST),
        "link": links.get(node.session_id) or identifier(node.session_id),
        "is_here": node.session_id == view.session.session_id,
        "is_repeated": node.is_repeated,
        "is_missing": head is None and not node.is_remote,
        "is_remote": node.is_remote,
        "agent_type": printable(node.agent_type or NOTHING),
        "title": one_line(str(head.title or ""), _TITLE) if head is not None else "",
        "status": badge(node.status) if node.status else NOTHING,
        "progress": "" if head is None else progress(head.step_count, head.message_count),
        "updated": NOTHING if head is None else distance(head.updated_at),
        "call": printable(ref.parent_tool_call_id or "") if ref is not None else "",
    }


_LARGEST: Final = 4_000_000
"""The maximum number of bytes of a state that a page reads."""

_WHOLE: Final = 2_000
"""The longest document, in characters of indented JSON, that is shown as one block."""

_MEMBERS: Final = 200
_ROOM: Final = 200_000
"""The number of characters of HTML after which the values of further members are not shown."""

_NAME: Final = 300
_MATCHES: Final = 100


class State(Section):
    name = "state"
    label = _("State")

    def context(self, view: SessionView) -> dict[str, Any]:
        context: dict[str, Any] = {
            "download": view.page.view_url(Session, "state", view.session.pk),
            "term": view.text("q"),
        }
        size = _size(view)
        if size is None:
            return {"problem": _("The state of this session is missing.")}
        if size > _LARGEST:
            return {**context, "problem": _("The state is too large to be shown here; download it.")}
        text = state_text(view)
        try:
            document = decode(text or "")
            context["size"] = len(text or "")
            path = view.text("at")
            chosen = at(document, path)
            if chosen is MISSING:
                path, chosen = "", document
            context |= {"path": printable(path), **_shown(view, path, chosen)}
            context["whole_url"] = view.url() if path else ""
            if term := context["term"]:
                found = list(islice(matches(document, term), _MATCHES + 1))
                context["matches"] = [
                    {"path": printable(path), "value": value, "url": view.url(at=path, q=term)}
                    for path, value in found[:_MATCHES]
                ]
                context["has_more_matches"] = len(found) > _MATCHES
        except (IntegrityFault, RecursionError):
            return {**context, "problem": _("The stored text cannot be read as JSON.")}
        return context


def _shown(view: SessionView, path: str, value: Any) -> dict[str, Any]:
    """Return a short value as one block, and the members of a long one each with a block and an address."""
    if not isinstance(value, dict | list) or not json_start(value, _WHOLE)[1]:
        return {"document": value_block(value, open_up_to=JSON_LIMIT)}
    rows: list[dict[str, Any]] = []
    room = _ROOM
    for name, member in islice(value.items() if isinstance(value, dict) else enumerate(value), _MEMBERS):
        block = value_block(member, open_up_to=0) if room > 0 else ""
        room -= len(block)
        url = view.url(at=join_path(path, name))
        rows.append({"name": printable(str(name))[:_NAME], "url": url, "value": block})
    more = len(value) - len(rows)
    return {"members": rows, "more": _("… %d more") % more if more else ""}


def _size(view: SessionView) -> int | None:
    """Return the lengths in characters of the stored state and its base, or ``None`` if there is no state."""
    lengths = Length(PayloadText("payload")), Length(PayloadText("base__payload"))
    found = current_row(view).values_list(*lengths).first()
    return None if found is None else sum(length or 0 for length in found)


def state_text(view: SessionView) -> str | None:
    """Return the exact text of the custom state, or ``None`` if there is none."""
    columns = "base_id", PayloadText("payload"), PayloadText("base__payload")
    row = current_row(view).values_list(*columns).first()
    if row is None:
        return None
    base_id, payload, base = row
    return str(payload) if base_id is None else whole_state(payload, base)


def state_file(view: SessionView) -> HttpResponse:
    """Return the exact text as a file to download."""
    text = state_text(view)
    if text is None:
        raise Http404
    # Text with a leading mark encodes the bytes of a document with lone surrogates.
    body = text[1:].encode("latin-1", "replace") if text.startswith("~") else text.encode(errors="replace")
    name = NOT_IN_A_NAME.sub("_", view.session.session_id)[:80]
    response = HttpResponse(body, content_type="application/json; charset=utf-8")
    response["Content-Disposition"] = f'attachment; filename="state-{name}.json"'
    response["X-Content-Type-Options"] = "nosniff"
    return response


CURRENT: Final = "current"

_PAGE: Final = 25
_SHORT_ID: Final = 16


class Checkpoints(Section):
    name = "checkpoints"
    label = _("Checkpoints")
    needs = (Checkpoint,)

    def context(self, view: SessionView) -> dict[str, Any]:
        session_id = view.session.session_id
        try:
            page = view.store.list_checkpoints(session_id, limit=_PAGE, cursor=view.text("cursor") or None)
        except InvalidCursor:
            page = view.store.list_checkpoints(session_id, limit=_PAGE)
        a, b = view.text("a"), view.text("b")
        found = view.rows(Checkpoint).filter(checkpoint_id__in=[head.checkpoint_id for head in page.items])
        keys = dict(found.values_list("checkpoint_id", "pk"))
        newest = page.items[0].checkpoint_id if page.items else ""
        return {
            "rows": [_row(view, head, keys) for head in page.items],
            "total": page.total,
            "list_url": view.list_url(Checkpoint),
            "next_url": view.url(cursor=page.next_cursor) if page.next_cursor else "",
            "first_url": view.url() if view.text("cursor") else "",
            "cursor": view.text("cursor"),
            "a": a or (page.items[1].checkpoint_id if len(page.items) > 1 else ""),
            "b": b or newest,
            "current": CURRENT,
            "difference": self._difference(view, a, b) if a and b else None,
            "restore": view.button(RESTORE),
            "branch": view.button(BRANCH),
            "prune": view.button(PRUNE_CHECKPOINTS) if page.items else None,
        }

    def _difference(self, view: SessionView, a: str, b: str) -> dict[str, Any]:
        try:
            before, after = self._state(view, a), self._state(view, b)
        except HelixStoreError as error:
            return {"problem": str(error)}
        if before is None or after is None:
            return {"problem": _("A chosen checkpoint has been deleted.")}
        changes = changes_between(shown_state(before), shown_state(after))
        return {"a": printable(a), "b": printable(b), **difference(changes)}

    def _state(self, view: SessionView, checkpoint_id: str) -> SessionState | None:
        session_id = view.session.session_id
        if checkpoint_id == CURRENT:
            return view.store.load_state(session_id)
        try:
            found = view.store.get_checkpoint(session_id, checkpoint_id)
        except InvalidPayload:
            return None
        return None if found is None else found.state


def _row(view: SessionView, head: CheckpointHead, keys: dict[str | None, int]) -> dict[str, Any]:
    key = keys.get(head.checkpoint_id)
    return {
        "id": head.checkpoint_id,
        "shown_id": printable(head.checkpoint_id),
        "short_id": printable(head.checkpoint_id.rpartition("-")[2])[:_SHORT_ID],
        "url": "" if key is None else view.page.page_url(Checkpoint, key),
        "step": printable(head.step_id),
        "step_count": head.step_count,
        "messages": head.message_count,
        "status": badge(head.status),
        "at": stamp(head.created_at),
    }


_ROWS: Final = 50


class Usage(Section):
    name = "usage"
    label = _("Usage")
    needs = (UsageEntry,)

    def context(self, view: SessionView) -> dict[str, Any]:
        session_id = view.session.session_id
        own = view.usage.get_rollup(session_id)
        tree = view.usage.get_rollup(session_id, include_sub_agents=True)
        if own is None or tree is None:
            return {"columns": []}
        columns = [(_("This session"), own)]
        if tree.session_count > 1:
            columns.append((_("With sub-sessions"), tree))
        return {
            "columns": [_column(heading, rollup) for heading, rollup in columns],
            "models": [_tokens(_name(name), counts) for name, counts in _first(tree.tokens_by_model)],
            "calls": [
                *(_calls(view, _("tool"), name, stats) for name, stats in _first(tree.tool_stats.by_tool)),
                *(_calls(view, _("sub-agent"), name, stats) for name, stats in _first(tree.sub_agents)),
            ],
            "custom": [
                {"kind": printable(kind), "name": _name(name), "amount": grouped(amount)}
                for kind, amounts in _first(tree.custom)
                for name, amount in _first(amounts)
            ],
        }


def _name(name: str | None) -> str:
    # A row that was not written by a store may have no name.
    return NOTHING if name is None else printable(name)


def _first(values: dict[str, Any]) -> Any:
    return islice(values.items(), _ROWS)


def _column(heading: Any, rollup: UsageRollup) -> dict[str, Any]:
    return {
        "heading": heading,
        "cost": money(rollup.cost_usd),
        "entries": grouped(rollup.entry_count),
        "sessions": grouped(rollup.session_count),
        "calls": grouped(rollup.tool_stats.total_calls),
        **_tokens("", rollup.tokens),
    }


def _tokens(name: str, counts: TokenCounts) -> dict[str, str]:
    numbers = {key: grouped(value) for key, value in counts.to_dict().items()}
    return {"name": name, "audio": grouped(counts.audio_prompt + counts.audio_completion), **numbers}


def _calls(view: SessionView, kind: Any, name: str | None, stats: CallStats) -> dict[str, Any]:
    return {
        "kind": kind,
        "name": _name(name),
        "calls": grouped(stats.calls),
        "failures": stats.failures,
        "failures_url": view.url("timeline", failed=name or ""),
        "took": duration_of(stats.total_duration_ms),
    }


class Budgets(Section):
    name = "budgets"
    label = _("Budgets")
    needs = (Budget,)

    def context(self, view: SessionView) -> dict[str, Any]:
        reports = view.budgets
        names = [report.status.name for report in reports]
        rows = Budget.objects.using(view.alias).filter(tenant=view.session.tenant, name__in=names)
        keys = dict(rows.values_list("name", "pk")) if names else {}
        return {
            "budgets": [
                {
                    "name": link(
                        view.page.page_url(Budget, keys.get(report.status.name, 0)),
                        printable(report.status.name),
                    ),
                    "caps": capped(report.scope, "" if report.is_for_each else report.status.value or ""),
                    "renewal": renewal(report.period, report.status),
                    "bars": bars(report),
                }
                for report in reports
            ]
        }


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
