"""The custom state as JSON, a search in it, and its exact text as a file."""

from __future__ import annotations

import re
from itertools import islice
from typing import Any, Final

from django.db.models.functions import Length
from django.http import Http404, HttpResponse
from django.utils.translation import gettext_lazy as _

from helix_store.admin.documents import MISSING, at, matches
from helix_store.admin.elements import JSON_LIMIT, printable, value_block
from helix_store.admin.sections.section import Section, SessionView, current_row
from helix_store.core.payload_faults import join_path
from helix_store.core.payloads import decode
from helix_store.exceptions import IntegrityFault
from helix_store.models import Session
from helix_store.reports.payloads import PayloadText, json_start, whole_state

_LARGEST: Final = 4_000_000
"""The maximum number of bytes of a state that a page reads."""

_WHOLE: Final = 2_000
"""The longest document, in characters of indented JSON, that is shown as one block."""

_MEMBERS: Final = 200
_ROOM: Final = 200_000
"""The number of characters of HTML after which the values of further members are not shown."""

_NAME: Final = 300
_MATCHES: Final = 100
_NOT_IN_A_NAME: Final = re.compile(r"[^A-Za-z0-9_.-]+")


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
    name = _NOT_IN_A_NAME.sub("_", view.session.session_id)[:80]
    response = HttpResponse(body, content_type="application/json; charset=utf-8")
    response["Content-Disposition"] = f'attachment; filename="state-{name}.json"'
    response["X-Content-Type-Options"] = "nosniff"
    return response
