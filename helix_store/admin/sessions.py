"""The admin of sessions: the list, the page of one session, and its operations.

Lists of the checkpointers' sessions: graph sessions, and threads of snapshots.

Both are sessions of one agent type. A list shows the newest checkpoint of each, found by one index lookup.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import islice
from typing import Any, ClassVar, Final
from urllib.parse import urlencode

from django import forms
from django.contrib import admin, messages
from django.contrib.admin.utils import unquote
from django.contrib.admin.views.main import SEARCH_VAR
from django.core.exceptions import PermissionDenied
from django.db.models import OuterRef, QuerySet, Subquery
from django.http import (
    FileResponse,
    Http404,
    HttpRequest,
    HttpResponse,
    HttpResponseNotAllowed,
    HttpResponseRedirect,
    JsonResponse,
)
from django.http.response import HttpResponseBase
from django.urls import URLPattern, path
from django.utils.html import format_html
from django.utils.safestring import SafeString
from django.utils.translation import gettext, ngettext, pgettext
from django.utils.translation import gettext_lazy as _

from helix_store.actions import SESSION_ACTIONS
from helix_store.actions.answers import ANSWER
from helix_store.actions.sessions import CLEAR_INTERRUPT, DELETE, MARK_FAILED, Action, Interrupt
from helix_store.actions.upkeep import CLEAN_UP
from helix_store.admin.approvals import inbox
from helix_store.admin.base import (
    OF_SESSION,
    SESSION_SECONDS,
    mark_of_session,
    mark_of_start,
    parameter_of,
    permitted_tenants,
    refuse_surrogates,
)
from helix_store.admin.elements import (
    NOTHING,
    badge,
    column,
    distance,
    dollars,
    grouped,
    identifier,
    json_block,
    link,
    money,
    name_of_status,
    names_of_users,
    narrow,
    note,
    number,
    one_line,
    own_column,
    printable,
    progress,
    short_id,
    stacked,
    under,
    user_link,
    value_block,
)
from helix_store.admin.filters import (
    LONGEST_NAME,
    MOST_FOUND,
    NEWEST_SEARCHED,
    ORDERS,
    REASON_LENGTH,
    AgentTypeFilter,
    ChangedFilter,
    ConditionFilter,
    ExpiryFilter,
    FamilyFilter,
    Found,
    OrderFilter,
    SessionStatusFilter,
    TagFilter,
    TenantFilter,
    UserFilter,
    WaitingFilter,
    found_sessions,
    is_folded,
    keep_views,
    kept_views,
    read_open_tools,
    reason_of,
    shown_views,
    status_or_condition,
    step_in_search,
    view_of,
)
from helix_store.admin.operating import CONFIRMED, OperatedAdmin, is_key, list_action, log
from helix_store.admin.records import claim_of
from helix_store.admin.sections import SECTIONS, Section, conversation_file, state_file
from helix_store.admin.sections.section import ENVELOPE, SessionView
from helix_store.admin.sections.timeline import Timeline
from helix_store.admin.sections.waits import Waits, open_calls_of
from helix_store.admin.usage import limit_words
from helix_store.catalogue import tables
from helix_store.checkpointers.graph.types import GRAPH_AGENT_TYPE
from helix_store.checkpointers.snapshots import SNAPSHOT_AGENT_TYPE
from helix_store.core import moments
from helix_store.core.transcript import ConversationMessage
from helix_store.core.types import NON_TERMINAL_STATUSES, TERMINAL_STATUSES, RunStatus, SessionStatus
from helix_store.engine.database import Database
from helix_store.engine.expressions import for_keys, list_parameter
from helix_store.engine.statement import table
from helix_store.exceptions import HelixStoreError
from helix_store.models import (
    Budget,
    Checkpoint,
    CheckpointKind,
    InterruptRequest,
    Lock,
    Run,
    Session,
    UsageEntry,
)
from helix_store.reports.conversations import line_of, outlined, outlines
from helix_store.reports.payloads import document_start, payload_of, start_of, with_payloads, without_payloads
from helix_store.reports.session import budget_that_stopped
from helix_store.stores.conditions import StuckSession, conditions_of, is_mere
from helix_store.transfer import DatabaseSource, write_export
from helix_store.transfer.records import spool
from helix_store.usage.store import SessionTotal, session_totals

_TITLE_LENGTH: Final = 80


class SessionTable(OperatedAdmin):
    """A list of sessions with a search."""

    ordering = ("-tenant", "-updated_at", "-session_id")
    list_texts = {
        "title_start": start_of("title", _TITLE_LENGTH),
        "failure_start": start_of("failure_reason", REASON_LENGTH),
    }
    search_fields = ("session_id",)
    search_help_text = _("Words of a title, a user, a tag or a session id.")

    def has_export_permission(self, request: HttpRequest) -> bool:
        """Return whether the user may change sessions and view the rows of each table of an export."""
        may_view = all(self.may_view(request, table.model) for table in tables())
        return may_view and self.has_operate_change_permission(request)

    def get_search_results(
        self, request: HttpRequest, queryset: QuerySet[Any], search_term: str
    ) -> tuple[QuerySet[Any], bool]:
        found = found_sessions(queryset, search_term, self.scope(request))
        request.found = found  # type: ignore[attr-defined]  # for `list_notes`
        if found.keys is None:
            return queryset, False
        # Omit the conditions, because these sessions meet them anyway: with them, SQLite would search a
        # tenant's index.
        sessions = self.get_queryset(request).annotate(**self.list_texts).filter(pk__in=found.keys)
        return sessions.order_by(*queryset.query.order_by), False

    def name_of(self, row: Any) -> str:
        stored = row.title_start if hasattr(row, "title_start") else payload_of(row, "title")
        return one_line(stored or "", _TITLE_LENGTH)

    def list_notes(self, request: HttpRequest) -> Iterator[str]:
        yield from super().list_notes(request)
        found: Found | None = getattr(request, "found", None)
        if found is not None and found.is_bounded:
            words = gettext("Only the newest %(count)s sessions were searched for words.")
            yield words % {"count": grouped(NEWEST_SEARCHED)}
        if found is not None and found.is_cut:
            words = gettext(
                "%(count)s or more sessions match, so some may be missing. Search for more words, or filter."
            )
            yield words % {"count": grouped(MOST_FOUND)}

    @admin.display(description=_("session"))
    def name(self, session: Any) -> SafeString:
        title = one_line(session.title_start or "", _TITLE_LENGTH)
        return format_html(
            "{}{}{}",
            title or note(gettext("No title")),
            short_id(session.session_id),
            under(gettext("tenant %(tenant)s") % {"tenant": session.tenant}) if session.tenant else "",
        )

    @admin.display(description=_("updated"))
    def changed(self, session: Session) -> SafeString:
        expiry, at = "", session.expires_at
        if at is not None and session.status not in TERMINAL_STATUSES:
            words = gettext("expired {}") if at <= moments.now() else gettext("expires {}")
            expiry = format_html('<span class="helix-under">{}</span>', format_html(words, distance(at)))
        return format_html("{}{}", distance(session.updated_at), expiry)


# --- The download of sessions with all their data, as JSON Lines that ``helix_import`` reads


class Export(Action):
    """The confirmation before a download."""

    name = "export-sessions"
    label = _("Export as JSON Lines")
    model = Session
    is_destructive = True
    warning = _("The file contains everything that is stored about these sessions, hidden values included.")


EXPORT: Final = Export()


@admin.action(description=EXPORT.label, permissions=["export"])
def export_sessions(
    page: OperatedAdmin, request: HttpRequest, queryset: QuerySet[Any]
) -> HttpResponseBase | None:
    """Ask for confirmation, then send a file. It is one snapshot, written before it is sent."""
    sessions = page.selected_rows(request, queryset)
    if sessions is None:
        return None
    if len({session.tenant for session in sessions}) > 1:
        words = gettext("Nothing was done: select sessions of one tenant.")
        page.message_user(request, words, messages.ERROR)
        return None
    if CONFIRMED not in request.POST:
        return page.confirm_rows(request, EXPORT, EXPORT.form(), sessions, "export_sessions")
    file = spool()
    ids = [session.session_id for session in sessions]
    write_export(DatabaseSource(sessions[0]._state.db, tenant=sessions[0].tenant, session_ids=ids), file)
    for session in sessions:
        log(request, Session, session.pk, session, "Exported.")
    file.seek(0)
    return FileResponse(file, as_attachment=True, filename="sessions.jsonl", content_type="application/jsonl")


_TEXT_LENGTH: Final = 60


class OfOneTypeTenantFilter(TenantFilter):
    """A tenant filter for a list of one agent type: the index on agent types begins with the tenant."""

    def needs_tenants(self, request: HttpRequest) -> bool:
        return True


class CheckpointerTable(SessionTable):
    """The sessions of one agent type, at a URL below that of the list of all sessions."""

    agent_type: ClassVar[str]
    list_filter = (ChangedFilter, OfOneTypeTenantFilter)
    actions = (list_action(DELETE), export_sessions)
    change_list_template = "admin/helix_store/side_list.html"

    def get_queryset(self, request: HttpRequest) -> QuerySet[Any]:
        sessions: QuerySet[Any] = super().get_queryset(request).filter(agent_type=self.agent_type)
        return sessions

    def complete_rows(self, request: HttpRequest, rows: list[Any]) -> None:
        """Set the newest checkpoint of each session."""
        if not self.may_view(request, Checkpoint):
            return
        checkpoints = Checkpoint.objects.using(self.alias)
        # This takes two statements, because in one PostgreSQL may read the checkpoints of all sessions.
        newest = self.newest_first(checkpoints.filter(session_id=OuterRef("pk"))).values("pk")[:1]
        keys = Session.objects.using(self.alias).filter(pk__in=[each.pk for each in rows])
        found = checkpoints.filter(pk__in=list(keys.values_list(Subquery(newest), flat=True)))
        by_session = {row.session_id: row for row in without_payloads(found)}
        for session in rows:
            session.newest = by_session.get(session.pk)

    def list_context(self, request: HttpRequest) -> dict[str, Any]:
        context = super().list_context(request)
        return {**context, "title": self.heading, "list_url": self.list_url(Session)}

    def newest_first(self, checkpoints: QuerySet[Checkpoint]) -> QuerySet[Checkpoint]:
        raise NotImplementedError

    def checkpoint_link(self, checkpoint: Checkpoint, label: str) -> SafeString:
        """Return a link to the newest checkpoint and, below it, a link to all checkpoints of the session."""
        version = gettext("version %(number)s") % {"number": grouped(checkpoint.version)}
        return format_html(
            '{}<span class="helix-under">{}, {}</span>',
            link(self.page_url(Checkpoint, checkpoint.pk), label),
            version,
            link(self.list_url(Checkpoint, **{OF_SESSION: checkpoint.session_id}), gettext("show all")),
        )


class GraphSessions(CheckpointerTable):
    """The list of sessions that belong to `GraphCheckpointStore`."""

    agent_type = GRAPH_AGENT_TYPE
    heading = _("Graph sessions")
    list_display = ("name", "place", "newest_node", "messages", "changed")
    list_texts: ClassVar = {
        **SessionTable.list_texts,
        "directory_start": start_of("directory", _TEXT_LENGTH),
    }
    of_other_models: ClassVar = {"newest_node": Checkpoint}

    def newest_first(self, checkpoints: QuerySet[Checkpoint]) -> QuerySet[Checkpoint]:
        return checkpoints.filter(kind=CheckpointKind.GRAPH).order_by("-version", "-pk")

    messages = column("message_count", _("messages"), number)

    @admin.display(description=_("workspace, directory"))
    def place(self, session: Any) -> SafeString:
        workspace = one_line(session.workspace_id or "", _TEXT_LENGTH)
        directory = one_line(session.directory_start or "", _TEXT_LENGTH)
        return stacked(narrow(workspace or NOTHING), directory)

    @admin.display(description=_("newest checkpoint"), empty_value=NOTHING)
    def newest_node(self, session: Any) -> SafeString | None:
        checkpoint = session.newest
        if checkpoint is None:
            return None
        node = one_line(checkpoint.step_id or "", _TEXT_LENGTH) or gettext("no node")
        return self.checkpoint_link(checkpoint, narrow(node))


class SnapshotThreads(CheckpointerTable):
    """The list of threads that `SnapshotCheckpointer` has created, with the claim on the newest snapshot."""

    agent_type = SNAPSHOT_AGENT_TYPE
    heading = _("Snapshots")
    list_display = ("name", "newest_snapshot", "size", "claim", "changed")
    of_other_models: ClassVar = dict.fromkeys(("newest_snapshot", "size", "claim"), Checkpoint)

    def newest_first(self, checkpoints: QuerySet[Checkpoint]) -> QuerySet[Checkpoint]:
        return checkpoints.filter(kind=CheckpointKind.SNAPSHOT, namespace="").order_by("-version")

    @admin.display(description=_("newest snapshot"), empty_value=NOTHING)
    def newest_snapshot(self, session: Any) -> SafeString | None:
        checkpoint = session.newest
        if checkpoint is None:
            return None
        return self.checkpoint_link(checkpoint, short_id(checkpoint.checkpoint_id))

    @admin.display(description=_("size"), empty_value=NOTHING)
    def size(self, session: Any) -> str | None:
        if session.newest is None:
            return None
        size = session.newest.size_bytes
        return ngettext("%(count)s byte", "%(count)s bytes", size) % {"count": grouped(size)}

    @admin.display(description=_("claim"), empty_value=NOTHING)
    def claim(self, session: Any) -> SafeString | None:
        return None if session.newest is None else claim_of(session.newest)


_TITLE: Final = 160
_REASON: Final = 2_000
_TOOLS: Final = 3
_TOOL: Final = 60


def summary(view: SessionView) -> dict[str, Any]:
    """Return the context for the top of the page: shortened texts, read in a constant number of queries."""
    session = view.session
    texts = ("title", "failure_reason", "pending_client_tool_calls", "suspended_awaiting_children")
    view.read(*texts, "live_decisions")
    calls = open_calls_of(view, view.document("pending_client_tool_calls"))
    run = _newest_run(view) if view.may_view(Run) else None
    stuck = None
    if is_mere(session.status) and view.may_view(Run):
        stuck = conditions_of(Database(session._state.db, ""), [session.pk]).get(session.pk)
    return {
        "heading": one_line(view.texts["title"] or "", _TITLE) or str(_("Untitled session")),
        "id": printable(session.session_id),
        "status": badge(status_or_condition(session, stuck)),
        "words": _words(view, calls) if stuck is None else _stuck_words(stuck),
        "facts": list(_facts(view, run)),
        "failure": _failure(view, run) if session.status == SessionStatus.FAILED else None,
        "stopped": _stopped(view, run),
        "interrupt": _interrupt(view) if view.may_view(InterruptRequest) else None,
        "buttons": view.buttons(*(each for each in view.page.row_operations if not each.is_in_section)),
        "waits_url": view.url("waits"),
        "open_calls": len(calls),
    }


def _stuck_words(stuck: StuckSession) -> SafeString:
    """Return since when the session cannot go on, and the detail."""
    since = format_html(gettext("since {when}"), when=distance(stuck.since))
    detail = one_line(stuck.detail or "", _TITLE)
    return format_html("{}: {}", since, detail) if detail else since


def _words(view: SessionView, calls: dict[str, dict[str, Any]]) -> Any:
    """Return the reason for the session's status."""
    session = view.session
    if session.status not in NON_TERMINAL_STATUSES:
        return ""
    if calls:
        first = islice(calls.values(), 10 * _TOOLS)
        names = dict.fromkeys(one_line(str(call.get("tool_name") or "?"), _TOOL) for call in first)
        shown = ", ".join(list(names)[:_TOOLS]) + (", …" if len(names) > _TOOLS else "")
        approvals = sum(1 for call in calls.values() if call.get("approval_id") is not None)
        words = (
            ngettext("waits for an approval: %s", "waits for approvals: %s", len(calls))
            if approvals == len(calls)
            else ngettext("waits for an answer: %s", "waits for answers: %s", len(calls))
        )
        return words % shown
    if session.suspension_kind == RunStatus.SUSPENDED_AWAITING_CHILDREN:
        awaited = view.document("suspended_awaiting_children")
        count = len(awaited) if isinstance(awaited, list) else 0
        return ngettext("waits for %d sub-agent", "waits for %d sub-agents", count) % count
    if session.suspension_kind is not None:
        return _("everything it waited for is answered; the agent has not continued yet")
    if session.status == SessionStatus.INTERRUPTED:
        return _("was interrupted")
    return ""


def _facts(view: SessionView, run: dict[str, Any] | None) -> Any:
    session = view.session
    yield _("Agent"), printable(session.agent_type)
    if session.user_id:
        names = names_of_users([session.user_id])
        yield _("User"), user_link(view.page.list_url(Session), session.user_id, names)
    if session.tenant:
        yield _("Tenant"), printable(session.tenant)
    yield _("Progress"), progress(session.step_count, _message_count(view))
    if view.may_view(UsageEntry):
        yield from _spent(view)
    if run is not None:
        yield pgettext("of a turn", "Run"), _run_words(run)
    if view.may_view(Lock):
        yield from _lock(view)
    yield _("Updated"), distance(session.updated_at)
    if session.expires_at is not None and session.status in NON_TERMINAL_STATUSES:
        is_past = session.expires_at <= moments.now()
        yield (_("Expired") if is_past else _("Expires")), distance(session.expires_at)
    if session.parent_session_id is not None:
        above = view.session_links([session.parent_session_id])
        yield _("Sub-session of"), above[session.parent_session_id]


def _message_count(view: SessionView) -> int:
    """Return the number of messages: of the store's own, or if there are none, of an adapter's."""
    key, count = view.session.pk, view.session.message_count
    found = {} if count else outlines(view.db, [key], view.may_view)
    return found[key][1].count if key in found else count


def _spent(view: SessionView) -> Any:
    try:
        rollup = view.usage.get_rollup(view.session.session_id)
    except HelixStoreError:
        return
    if rollup is not None and rollup.entry_count:
        total = rollup.tokens.total
        yield _("Spent"), f"{money(rollup.cost_usd)} · {grouped(total)} " + str(_("tokens"))


def _lock(view: SessionView) -> Any:
    lock = Lock.objects.using(view.alias).filter(tenant=view.session.tenant, name=view.session.session_id)
    held = lock.filter(expires_at__gt=moments.now()).first()
    if held is not None:
        yield (
            _("Lock"),
            format_html(str(_("held by {owner}")), owner=identifier(held.owner or "?")),
        )


def _newest_run(view: SessionView) -> Any:
    runs = view.rows(Run).order_by("-turn")
    return runs.values(
        "turn",
        "status",
        "started_at",
        "ended_at",
        reason=start_of("completion_reason", _TITLE),
        error_start=document_start("error"),
    ).first()


def _run_words(run: dict[str, Any]) -> Any:
    if run["ended_at"] is None:
        return format_html(
            str(_("{turn}, started {when}")), turn=run["turn"], when=distance(run["started_at"])
        )
    return format_html(
        str(_("{turn}, {status} {when}")),
        turn=run["turn"],
        status=printable(name_of_status(run["status"])),
        when=distance(run["ended_at"]),
    )


def _failure(view: SessionView, run: dict[str, Any] | None) -> dict[str, Any]:
    """Return the reason and the errors of a session that failed."""
    errors: list[tuple[Any, SafeString | str]] = []
    view.read(ENVELOPE)
    rest = view.whole_document(ENVELOPE)
    if isinstance(rest, dict) and rest.get("error") is not None:
        errors.append((_("Error of the session"), value_block(rest["error"])))
    if run is not None and run["error_start"] is not None:
        errors.append((_("Error of the run"), json_block(run["error_start"])))
    reason = printable(view.texts["failure_reason"] or "")
    return {
        "reason": reason[:_REASON],
        "rest": reason[_REASON : 10 * _REASON],
        "errors": errors[:1] if len({block for _label, block in errors}) == 1 else errors,
    }


def _stopped(view: SessionView, run: dict[str, Any] | None) -> dict[str, Any] | None:
    """Return the budget that ended the newest run, and the amounts left in it now."""
    name = None if run is None else budget_that_stopped(run["reason"])
    if name is None or view.session.status not in NON_TERMINAL_STATUSES:
        return None
    stopped: dict[str, Any] = {"name": one_line(name, _TITLE), "limits": "", "resets": ""}
    if not view.may_view(Budget):
        return stopped
    try:
        found = next((each for each in view.budgets if each.status.name == name), None)
    except HelixStoreError:
        return stopped
    stopped["url"] = view.url("budgets")
    if found is None:
        return {**stopped, "is_gone": True}
    limits = ", ".join(map(limit_words, found.limits))
    return {**stopped, "limits": limits, "resets": distance(found.status.resets_at)}


def _interrupt(view: SessionView) -> dict[str, Any] | None:
    asked = with_payloads(view.rows(InterruptRequest)).first()
    if asked is None:
        return None
    return {
        "kind": printable(asked.kind),
        "reason": printable(payload_of(asked, "reason") or "")[:_REASON],
        "at": distance(asked.requested_at),
        "button": view.button(CLEAR_INTERRUPT),
    }


MOST_CHILDREN: Final = 20
"""The number of sub-sessions that are counted for a row of the list."""

_CHILDREN: Final = for_keys(
    f"""SELECT s.id, (SELECT count(*) FROM (SELECT c.id FROM {table(Session)} c
            WHERE c.tenant = s.tenant AND c.parent_session_id = s.session_id LIMIT {MOST_CHILDREN + 1}) page)
        FROM {table(Session)} s WHERE s.id IN %(keys)s"""
)


def sub_session_counts(db: Database, keys: list[int]) -> dict[int, int]:
    """Return the numbers of sub-sessions by the key of their parent. This takes one statement."""
    return dict(db.read(_CHILDREN, {"keys": list_parameter(db, keys)})) if keys else {}


CHILDREN_OF: Final = ("tenant", "parent_session_id")
"""The filter that limits the list to the sub-sessions of one session."""


class SessionPage(OperatedAdmin):
    """The page of a session. ``?section=`` selects the section; the page works without JavaScript."""

    row_operations = tuple(each for each in SESSION_ACTIONS if each.label)
    table_operations = (CLEAN_UP,)
    page_template = "admin/helix_store/session/change_form.html"

    class Media:
        css = {"all": ["helix_store/admin.css", "helix_store/session.css"]}

    def get_urls(self) -> list[URLPattern]:
        name = f"{self.opts.app_label}_{self.opts.model_name}"
        state = self.admin_site.admin_view(self.state_view)
        conversation = self.admin_site.admin_view(self.conversation_view)
        live = self.admin_site.admin_view(self.live_view)
        return [
            path("<path:object_id>/state.json", state, name=f"{name}_state"),
            path("<path:object_id>/conversation", conversation, name=f"{name}_conversation"),
            path("<path:object_id>/live.json", live, name=f"{name}_live"),
            path("live.json", self.admin_site.admin_view(self.live_start_view), name=f"{name}_live_start"),
            path("views/", self.admin_site.admin_view(self.views_view), name=f"{name}_views"),
            path("approvals/", self.admin_site.admin_view(self.approvals_view), name=f"{name}_approvals"),
            *super().get_urls(),
        ]

    def state_view(self, request: HttpRequest, object_id: str) -> HttpResponse:
        """Return the exact text of the custom state, as a file."""
        session = self.readable_row(request, object_id)
        if isinstance(session, HttpResponseRedirect):
            return session
        return state_file(SessionView(request=request, page=self, session=session))

    def conversation_view(self, request: HttpRequest, object_id: str) -> HttpResponseBase:
        """Return all conversations, or one message, as a file."""
        session = self.readable_row(request, object_id)
        if isinstance(session, HttpResponseRedirect):
            return session
        return conversation_file(SessionView(request=request, page=self, session=session))

    def live_view(self, request: HttpRequest, object_id: str) -> HttpResponse:
        """Return the mark of a session's page."""
        if not self.has_view_permission(request):
            raise PermissionDenied
        key = unquote(object_id)
        found = mark_of_session(self.rows(request, Session), int(key)) if is_key(key) else None
        if found is None:
            raise Http404
        return JsonResponse(found)

    def live_start_view(self, request: HttpRequest) -> HttpResponse:
        """Return the mark of the start page."""
        if not self.has_view_permission(request) or not self.may_view(request, Run):
            raise PermissionDenied
        return JsonResponse(mark_of_start(self.alias, permitted_tenants(request)))

    def approvals_view(self, request: HttpRequest) -> HttpResponse:
        """Return the inbox of a user who answers calls."""
        refuse_surrogates(request)
        if not self.has_view_permission(request) or not ANSWER.is_permitted(request.user):
            raise PermissionDenied
        address = self.view_url(Session, "approvals")
        context = {"title": gettext("Calls to answer"), **inbox(self, request, address)}
        return self.rendered(request, "admin/helix_store/approvals.html", context)

    def views_view(self, request: HttpRequest) -> HttpResponse:
        """Keep or remove a named filter of the list, and return to the list."""
        refuse_surrogates(request)
        if not self.has_view_permission(request):
            raise PermissionDenied
        if request.method != "POST":
            return HttpResponseNotAllowed(["POST"])
        name, query = request.POST.get("name", ""), request.POST.get("query", "")
        others = [each for each in kept_views(request) if each.name != name.strip()]
        parameters = map(parameter_of, (*self.get_list_filter(request), *self.link_lookups))
        view = view_of(name, query, {SEARCH_VAR, *parameters})
        if request.POST.get("action") == "remove":
            response = HttpResponseRedirect(self.list_url(Session))
            keep_views(request, response, others)
        elif view is None:
            self.message_user(request, gettext("This view cannot be kept."), messages.ERROR)
            response = HttpResponseRedirect(self.list_url(Session))
        else:
            response = HttpResponseRedirect(f"{self.list_url(Session)}?{view.query}")
            keep_views(request, response, [*others, view])
        return response

    def page_context(self, request: HttpRequest, row: Session, section: str = "") -> dict[str, Any]:
        view = SessionView(request=request, page=self, session=row, section=section)
        visible = [section for section in SECTIONS if section.is_visible(view)]
        chosen = self._chosen(view, visible)
        view.section = chosen.name
        # What changes while the page is read must change the mark: it is read first.
        live = _live(view)
        # The section reads some columns whole, of which the summary needs only the start.
        content = _content(chosen, view)
        shown = summary(view)
        return {
            "title": shown["heading"],
            "summary": shown,
            "live": live,
            "tabs": [
                {"label": each.label, "url": view.url(each.name), "is_chosen": each is chosen}
                for each in visible
            ],
            "section_name": chosen.name,
            "section_label": chosen.label,
            "section_template": chosen.template,
            **content,
        }

    def _confirmation(
        self, request: HttpRequest, operation: Action, row: Any, form: forms.Form
    ) -> HttpResponse:
        """Show an answer's form next to its call, where the input can be read, and not on a separate page.

        A changed input has its own page, which shows the difference.
        """
        if operation is not ANSWER or "edit" in form.fields:
            return super()._confirmation(request, operation, row, form)
        for field, problems in form.errors.items():
            for problem in problems:
                self.message_user(request, f"{form[field].label}: {problem}", messages.ERROR)
        return self.row_page(request, row, self.page_context(request, row, Waits.name))

    def _chosen(self, view: SessionView, visible: list[Section]) -> Section:
        """Return the section that the URL names, or the first one that the user may view."""
        asked = view.section or view.text("section")
        if not asked:
            return visible[0]
        for section in SECTIONS:
            if section.name == asked:
                if section not in visible:
                    raise PermissionDenied
                return section
        raise Http404(_("There is no such section."))


def _live(view: SessionView) -> dict[str, Any] | None:
    """Return how the page stays up to date, or ``None`` if the session has ended."""
    found = mark_of_session(view.page.rows(view.request, Session), view.session.pk)
    if found is None or found["is_over"]:
        return None
    url = view.page.view_url(Session, "live", view.session.pk)
    return {"url": url, "mark": found["mark"], "seconds": SESSION_SECONDS}


def _content(section: Section, view: SessionView) -> dict[str, Any]:
    """Return a section's context, or why it is unreadable, so a damaged section cannot hide the others."""
    try:
        return {"section": section.context(view), "section_problem": ""}
    except HelixStoreError as error:
        return {"section": {}, "section_problem": str(error)}


_LAST_LENGTH: Final = 80


class InterruptMany(Interrupt):
    """An interrupt that asks for confirmation first, because one click must not stop fifty agents."""

    is_destructive = True
    warning = _("The agents of these sessions stop at their next step, and can continue.")


@admin.register(Session)
class SessionAdmin(SessionPage, SessionTable):
    list_display = (
        "name",
        own_column("agent_type"),
        "status_and_reason",
        "user",
        "length",
        "spent",
        "changed",
    )
    list_filter = (
        ("status", SessionStatusFilter),
        WaitingFilter,
        ConditionFilter,
        ExpiryFilter,
        ChangedFilter,
        AgentTypeFilter,
        TenantFilter,
        UserFilter,
        TagFilter,
        FamilyFilter,
        OrderFilter,
    )
    orders = ORDERS
    search_help_text = _("Words of a title, a user, a tag or a session id. ID@step-57 opens step 57.")
    link_lookups = CHILDREN_OF
    actions = (*map(list_action, (InterruptMany(), MARK_FAILED, DELETE)), export_sessions)
    of_other_models = {**SessionPage.of_other_models, "spent": UsageEntry}
    side_lists: ClassVar = {"graphs": GraphSessions, "snapshots": SnapshotThreads}

    def changelist_view(
        self, request: HttpRequest, extra_context: dict[str, Any] | None = None
    ) -> HttpResponse:
        """Return the list, or open the step that the search names."""
        refuse_surrogates(request)
        url = self._step_url(request)
        return HttpResponseRedirect(url) if url else super().changelist_view(request, extra_context)

    def _step_url(self, request: HttpRequest) -> str:
        """Return the address of the step that the search names, if it is one that the user may view."""
        term = request.GET.get(SEARCH_VAR, "") if request.method == "GET" else ""
        if not term or not all(self.may_view(request, each) for each in (Session, Run, Checkpoint)):
            return ""
        scope = self.scope(request)
        found = step_in_search(scope.rows(Session), term, scope)
        if found is None:
            return ""
        key, number = found
        query = urlencode({"section": Timeline.name, "step": number})
        return f"{self.page_url(Session, key)}?{query}#step-{number}"

    def list_context(self, request: HttpRequest) -> dict[str, Any]:
        context = super().list_context(request)
        saved = {**shown_views(request), "url": self.view_url(Session, "views"), "longest": LONGEST_NAME}
        context["saved"] = saved if saved["views"] or saved["query"] else None
        if ANSWER.is_permitted(request.user):
            inbox_link = (_("Calls to answer"), self.view_url(Session, "approvals"))
            context["side_links"] = [inbox_link, *context["side_links"]]
        return context

    def complete_rows(self, request: HttpRequest, rows: list[Any]) -> None:
        """Set the reason for each session's wait, its condition, its family, and the amount it has spent.

        A list of all sessions leaves out those whose parent is on the page.
        """
        if is_folded(request):
            shown = {(session.tenant, session.session_id) for session in rows}
            rows[:] = [each for each in rows if (each.tenant, each.parent_session_id) not in shown]
        read_open_tools(rows)
        children = sub_session_counts(Database(self.alias, ""), [session.pk for session in rows])
        names = names_of_users(session.user_id for session in rows)
        keys = [session.pk for session in rows] if self.may_view(request, Run) else []
        conditions = conditions_of(Database(self.alias, ""), keys)
        for session in rows:
            session.child_count, session.user_names = children.get(session.pk, 0), names
            session.stuck = conditions.get(session.pk)
        found = outlined(rows, self.alias, partial(self.may_view, request))
        for session in rows:
            session.outline = found[session.pk]
        if not self.may_view(request, UsageEntry):
            return
        totals = session_totals([session.pk for session in rows], using=self.alias)
        for session in rows:
            session.total = totals[session.pk]

    @admin.display(description=_("status"))
    def status_and_reason(self, session: Any) -> SafeString:
        return stacked(badge(status_or_condition(session, session.stuck)), reason_of(session, session.stuck))

    @admin.display(description=_("session"))
    def name(self, session: Any) -> SafeString:
        last: ConversationMessage | None = session.outline.last
        said = one_line(line_of((last and last.parts) or ()), _LAST_LENGTH)
        return stacked(super().name(session), said)

    @admin.display(description=_("user"), empty_value=NOTHING)
    def user(self, session: Any) -> SafeString | None:
        if not session.user_id:
            return None
        return user_link("", session.user_id, session.user_names)

    @admin.display(description=_("messages, steps"))
    def length(self, session: Any) -> SafeString:
        count, steps = session.outline.count, session.step_count
        messages = ngettext("%(count)s message", "%(count)s messages", count) % {
            "count": f"> {grouped(count)}" if session.outline.is_partial else grouped(count)
        }
        under = ngettext("%(count)s step", "%(count)s steps", steps) % {"count": grouped(steps)}
        return format_html("{}{}", stacked(messages, under), self._family(session))

    def _family(self, session: Any) -> SafeString | str:
        """Return a link to the list of the session's sub-sessions, which the list of all sessions folds."""
        count = session.child_count
        if not count:
            return ""
        words = ngettext("%(count)s sub-session", "%(count)s sub-sessions", count)
        shown = f"{MOST_CHILDREN}+" if count > MOST_CHILDREN else str(count)
        url = self.list_url(Session, tenant=session.tenant, parent_session_id=session.session_id)
        return format_html('<span class="helix-under">{}</span>', link(url, words % {"count": shown}))

    @admin.display(description=_("cost, tokens"))
    def spent(self, session: Any) -> SafeString:
        total: SessionTotal = session.total
        tokens = ngettext("%(count)s token", "%(count)s tokens", total.tokens) % {
            "count": grouped(total.tokens)
        }
        cost = dollars(total.cost_usd, is_partial=total.is_partial)
        return stacked(cost, f"> {tokens}" if total.is_partial else tokens)
