"""The common base of all lists of sessions: the columns that name a session, the search, and the download."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from django.contrib import admin, messages
from django.db.models import QuerySet
from django.http import FileResponse, HttpRequest
from django.http.response import HttpResponseBase
from django.utils.html import format_html
from django.utils.safestring import SafeString
from django.utils.translation import gettext
from django.utils.translation import gettext_lazy as _

from helix_store.actions.action import Action
from helix_store.admin.elements import note, one_line, short_id, under
from helix_store.admin.operating import CONFIRMED, OperatedAdmin, log
from helix_store.admin.reasons import REASON_LENGTH
from helix_store.admin.search import MOST_FOUND, NEWEST_SEARCHED, Found, found_sessions
from helix_store.admin.times import distance
from helix_store.catalogue import tables
from helix_store.core import moments
from helix_store.core.types import TERMINAL_STATUSES
from helix_store.models import Session
from helix_store.reports.payloads import start_of
from helix_store.transfer import DatabaseSource, write_export
from helix_store.transfer.records import spool

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
        found = found_sessions(queryset, search_term)
        request.found = found  # type: ignore[attr-defined]  # for `list_notes`
        if found.keys is None:
            return queryset, False
        # Omit the conditions, because these sessions meet them anyway: with them, SQLite would search a
        # tenant's index.
        sessions = self.get_queryset(request).annotate(**self.list_texts).filter(pk__in=found.keys)
        return sessions.order_by(*queryset.query.order_by), False

    def list_notes(self, request: HttpRequest) -> Iterator[str]:
        yield from super().list_notes(request)
        found: Found | None = getattr(request, "found", None)
        if found is not None and found.is_bounded:
            words = gettext("Only the newest %(count)s sessions were searched for words.")
            yield words % {"count": f"{NEWEST_SEARCHED:,}"}
        if found is not None and found.is_cut:
            words = gettext(
                "%(count)s or more sessions match, so some may be missing. Search for more words, or filter."
            )
            yield words % {"count": f"{MOST_FOUND:,}"}

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
