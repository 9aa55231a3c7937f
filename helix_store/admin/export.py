"""The download of selected sessions with all their data, as JSON Lines that ``helix_import`` reads."""

from __future__ import annotations

from tempfile import SpooledTemporaryFile
from typing import Any, Final

from django.contrib import admin, messages
from django.db.models import QuerySet
from django.http import FileResponse, HttpRequest
from django.http.response import HttpResponseBase
from django.utils.translation import gettext
from django.utils.translation import gettext_lazy as _

from helix_store.actions.action import Action, NoInput
from helix_store.admin.operating import CONFIRMED, OperatedAdmin, log
from helix_store.models import Session
from helix_store.transfer import DatabaseSource, write_export

_IN_MEMORY: Final = 1 << 20


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
    """Ask for confirmation, then send a file. It is one snapshot of the database, written before sending."""
    sessions = page.selected_rows(request, queryset)
    if sessions is None:
        return None
    if len({session.tenant for session in sessions}) > 1:
        words = gettext("Nothing was done: select sessions of one tenant.")
        page.message_user(request, words, messages.ERROR)
        return None
    if CONFIRMED not in request.POST:
        return page.confirm_rows(request, EXPORT, NoInput(), sessions, "export_sessions")
    file = SpooledTemporaryFile(max_size=_IN_MEMORY)  # noqa: SIM115  the response closes it
    ids = [session.session_id for session in sessions]
    write_export(DatabaseSource(sessions[0]._state.db, tenant=sessions[0].tenant, session_ids=ids), file)
    for session in sessions:
        log(request, Session, session.pk, session, "Exported.")
    file.seek(0)
    return FileResponse(file, as_attachment=True, filename="sessions.jsonl", content_type="application/jsonl")
