"""The page of one session: what it is, what it knows, and what it waits for."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

from django.contrib import admin
from django.db.models import Model, QuerySet
from django.http import HttpRequest
from django.utils.html import format_html
from django.utils.safestring import SafeString

from helix_store.admin.base import OF_SESSION, ReadOnlyAdmin
from helix_store.admin.elements import (
    NOTHING,
    badge,
    counted,
    hide_secrets,
    identifier,
    json_block,
    link,
    note,
    one_line,
    table,
    text_block,
)
from helix_store.admin.operating import OperatedAdmin
from helix_store.admin.payloads import (
    PayloadText,
    payload_of,
    whole_state,
    with_payloads,
)
from helix_store.admin.session_operations import SESSION_OPERATIONS
from helix_store.admin.upkeep_operations import CLEAN_UP
from helix_store.models import (
    Checkpoint,
    CheckpointKind,
    InterruptRequest,
    Message,
    Run,
    Session,
    StagedChange,
    SubSessionRef,
)

__all__ = ["CHILDREN_OF", "SessionPage"]

CHILDREN_OF: Final = ("tenant", "parent_session_id")
"""The filter of the list for the sessions below one session."""

_ROWS_SHOWN = 50
_STAGED_SHOWN = 20
_LINE_SHOWN = 1_000
_PAYLOADS = {
    "pending_calls": "pending_client_tool_calls",
    "completed_calls": "completed_client_tool_calls",
    "call_ownership": "client_tool_call_ownership",
    "suspension": "suspension_context",
    "awaited_children": "suspended_awaiting_children",
    "tracing": "tracing_context",
    "graph_metadata": "typed_metadata",
}
_TEXTS = {
    "title_text": "title",
    "failure": "failure_reason",
    "directory_text": "directory",
    "tag_list": "tags",
    "string_metadata": "metadata",
}
_EMPTY_TEXTS = {None, "", "[]", "{}"}
_MAY_BE_EMPTY = {
    "tenant",
    "user_id",
    "mode",
    "expires_at",
    "suspended_step_id",
    "suspension_kind",
    "workspace_id",
    "stream_id",
}
_IN_ENVELOPE_ONLY = ("output", "error", "workspace_refs")


class SessionPage(OperatedAdmin, ReadOnlyAdmin):
    """The page of a session: its columns, and related rows."""

    row_operations = SESSION_OPERATIONS
    table_operations = (CLEAN_UP,)

    fieldsets = (
        (
            None,
            {
                "fields": (
                    "session_id",
                    "tenant",
                    "title_text",
                    "agent_type",
                    "status_badge",
                    "failure",
                    "user_id",
                    "mode",
                    "progress",
                    "created_at",
                    "updated_at",
                    "expires_at",
                )
            },
        ),
        ("Records", {"fields": ("message_rows", "checkpoint_rows", "run_rows", "tree", "sub_sessions")}),
        ("State", {"fields": ("custom_state", "outcome")}),
        (
            "Waiting for",
            {
                "fields": (
                    "pending_calls",
                    "completed_calls",
                    "call_ownership",
                    "suspension_kind",
                    "suspension",
                    "awaited_children",
                    "suspended_step_id",
                    "interrupt",
                    "staged",
                )
            },
        ),
        (
            "Labels",
            {
                "fields": (
                    "tag_list",
                    "string_metadata",
                    "graph_metadata",
                    "workspace_id",
                    "directory_text",
                    "stream_id",
                    "tracing",
                )
            },
        ),
    )
    readonly_fields = (
        "title_text",
        "status_badge",
        "failure",
        "progress",
        "message_rows",
        "checkpoint_rows",
        "run_rows",
        "tree",
        "sub_sessions",
        "custom_state",
        "outcome",
        "pending_calls",
        "completed_calls",
        "call_ownership",
        "suspension",
        "awaited_children",
        "interrupt",
        "staged",
        "tag_list",
        "string_metadata",
        "directory_text",
        "tracing",
        "graph_metadata",
    )
    of_other_models = {
        "message_rows": Message,
        "checkpoint_rows": Checkpoint,
        "run_rows": Run,
        "sub_sessions": SubSessionRef,
        "interrupt": InterruptRequest,
        "staged": StagedChange,
    }

    def get_fieldsets(self, request: HttpRequest, obj: Session | None = None) -> Any:
        """The fields that have a value and that the user may view."""
        groups = [
            (heading, {**options, "fields": [name for name in options["fields"] if _has_value(obj, name)]})
            for heading, options in super().get_fieldsets(request, obj)
        ]
        return [(heading, options) for heading, options in groups if options["fields"]]

    @admin.display(description="status")
    def status_badge(self, session: Session) -> SafeString:
        return badge(session.status)

    @admin.display(description="title")
    def title_text(self, session: Session) -> str:
        return one_line(payload_of(session, "title") or NOTHING, _LINE_SHOWN)

    @admin.display(description="failure reason")
    def failure(self, session: Session) -> SafeString:
        return text_block(payload_of(session, "failure_reason") or NOTHING)

    @admin.display(description="progress")
    def progress(self, session: Session) -> str:
        return " · ".join(
            (
                f"version {session.version}",
                counted(session.step_count, "step"),
                counted(session.message_count, "message"),
                counted(session.resume_count, "resume"),
            )
        )

    @admin.display(description="messages")
    def message_rows(self, session: Session) -> SafeString:
        return self._rows_of(session, Message, counted(session.message_count, "message"))

    @admin.display(description="checkpoints")
    def checkpoint_rows(self, session: Session) -> SafeString:
        hidden = (CheckpointKind.STATE, CheckpointKind.BASE)
        count = session.checkpoints.exclude(kind__in=hidden).count()
        return self._rows_of(session, Checkpoint, counted(count, "checkpoint"))

    @admin.display(description="runs")
    def run_rows(self, session: Session) -> SafeString:
        return self._rows_of(session, Run, counted(session.runs.count(), "run"))

    def _rows_of(self, session: Session, model: type[Model], label: str) -> SafeString:
        return link(self.list_url(model, **{OF_SESSION: session.pk}), label)

    @admin.display(description="tree")
    def tree(self, session: Session) -> SafeString:
        above = self._session_links(session, (session.parent_session_id, session.root_session_id))
        below = dict(zip(CHILDREN_OF, (session.tenant, session.session_id), strict=True))
        children = _sessions_beside(session).filter(**below).count()
        return format_html(
            "parent {} · root {} · {}",
            above.get(session.parent_session_id, NOTHING),
            above.get(session.root_session_id, NOTHING),
            link(self.list_url(Session, **below), counted(children, "child session")),
        )

    @admin.display(description="sub-agents")
    def sub_sessions(self, session: Session) -> SafeString | str:
        refs = list(with_payloads(session.sub_session_refs.order_by("id"))[: _ROWS_SHOWN + 1])
        links = self._session_links(session, (ref.sub_session_id for ref in refs if ref.location == "local"))
        rows = (
            (
                links.get(ref.sub_session_id, identifier(ref.sub_session_id)),
                ref.agent_type,
                badge(ref.status),
                ref.location,
                ref.parent_tool_call_id,
                json_block(payload_of(ref, "output")),
                json_block(payload_of(ref, "error")),
            )
            for ref in refs
        )
        headings = ("Session", "Agent type", "Status", "Location", "Tool call", "Output", "Error")
        return table(headings, rows, limit=_ROWS_SHOWN)

    def _session_links(
        self, session: Session, session_ids: Iterable[str | None]
    ) -> dict[str | None, SafeString | str]:
        """A link for each id of a session of the same tenant; for other ids the id."""
        wanted = {session_id for session_id in session_ids if session_id is not None}
        found = _sessions_beside(session).filter(tenant=session.tenant, session_id__in=wanted)
        links: dict[str | None, SafeString | str] = {each: identifier(each) for each in wanted}
        for session_id, key in found.values_list("session_id", "pk"):
            links[session_id] = link(self.page_url(Session, key), identifier(session_id))
        return links

    @admin.display(description="custom state")
    def custom_state(self, session: Session) -> SafeString | str:
        row = _current_row(session, "base_id", PayloadText("payload"), PayloadText("base__payload"))
        if row is None:
            return note("The state of this session is missing.")
        base_id, payload, base = row
        return json_block(payload if base_id is None else whole_state(payload, base))

    @admin.display(description="output, error, workspaces")
    def outcome(self, session: Session) -> SafeString | str:
        (envelope,) = _current_row(session, PayloadText("envelope")) or (None,)
        return json_block(envelope, shown=_outcome)

    @admin.display(description="pending tool calls")
    def pending_calls(self, session: Session) -> SafeString | str:
        return json_block(payload_of(session, "pending_client_tool_calls"))

    @admin.display(description="answered tool calls")
    def completed_calls(self, session: Session) -> SafeString | str:
        return json_block(payload_of(session, "completed_client_tool_calls"))

    @admin.display(description="owners of tool calls")
    def call_ownership(self, session: Session) -> SafeString | str:
        return json_block(payload_of(session, "client_tool_call_ownership"))

    @admin.display(description="suspension")
    def suspension(self, session: Session) -> SafeString | str:
        return json_block(payload_of(session, "suspension_context"))

    @admin.display(description="awaited sub-agents")
    def awaited_children(self, session: Session) -> SafeString | str:
        return json_block(payload_of(session, "suspended_awaiting_children"))

    @admin.display(description="tags")
    def tag_list(self, session: Session) -> SafeString | str:
        return json_block(payload_of(session, "tags"))

    @admin.display(description="metadata")
    def string_metadata(self, session: Session) -> SafeString | str:
        return json_block(payload_of(session, "metadata"))

    @admin.display(description="directory")
    def directory_text(self, session: Session) -> str:
        return one_line(payload_of(session, "directory") or NOTHING, _LINE_SHOWN)

    @admin.display(description="metadata of the graph")
    def graph_metadata(self, session: Session) -> SafeString | str:
        return json_block(payload_of(session, "typed_metadata"))

    @admin.display(description="tracing context")
    def tracing(self, session: Session) -> SafeString | str:
        return json_block(payload_of(session, "tracing_context"), shown=hide_secrets)

    @admin.display(description="interrupt request")
    def interrupt(self, session: Session) -> SafeString | str:
        requests = InterruptRequest.objects.using(session._state.db).filter(session=session)
        rows = (
            (asked.kind, text_block(payload_of(asked, "reason") or NOTHING), asked.run_id, asked.requested_at)
            for asked in with_payloads(requests)
        )
        return table(("Kind", "Reason", "Run", "Requested at"), rows, limit=1)

    @admin.display(description="staged changes")
    def staged(self, session: Session) -> SafeString | str:
        changes = with_payloads(session.staged_changes.order_by("id"))[: _STAGED_SHOWN + 1]
        rows = (
            (
                change.step_id,
                change.tool_call_id,
                change.created_at,
                json_block(payload_of(change, "payload")),
            )
            for change in changes
        )
        return table(("Step", "Tool call", "Staged at", "Changes"), rows, limit=_STAGED_SHOWN)


def _has_value(session: Session | None, name: Any) -> bool:
    """Whether there is a value to show. An empty payload is damaged, and shown."""
    if name in _PAYLOADS:
        return payload_of(session, _PAYLOADS[name]) is not None
    if name in _TEXTS:
        return payload_of(session, _TEXTS[name]) not in _EMPTY_TEXTS
    return name not in _MAY_BE_EMPTY or getattr(session, name) not in (None, "")


def _sessions_beside(session: Session) -> QuerySet[Session]:
    """The sessions of the same database."""
    return Session.objects.using(session._state.db)


def _current_row(session: Session, *columns: str | PayloadText) -> tuple[Any, ...] | None:
    """Columns of the row that holds the current state."""
    if session.current_id is None:
        return None
    return session.checkpoints.filter(pk=session.current_id).values_list(*columns).first()


def _outcome(envelope: Any) -> Any:
    """The fields of a state that are not columns of its session. Another shape may hide a tracing context."""
    if not isinstance(envelope, dict):
        return hide_secrets(envelope)
    return {name: envelope[name] for name in _IN_ENVELOPE_ONLY if name in envelope}
