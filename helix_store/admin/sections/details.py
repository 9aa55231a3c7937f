"""The remaining data of a session: its labels, its counts and times, and its output."""

from __future__ import annotations

from typing import Any, Final

from django.db.models.functions import Substr
from django.utils.translation import gettext_lazy as _

from helix_store.admin.elements import hide_secrets, json_block, printable
from helix_store.admin.sections.section import DOCUMENT_LIMIT, Section, SessionView, current_row
from helix_store.admin.times import stamp
from helix_store.reports.payloads import PayloadText

_IN_ENVELOPE_ONLY: Final = ("output", "error", "workspace_refs")
_EMPTY: Final = {None, "", "[]", "{}"}
_LONGEST_LINE: Final = 1_000


def current_envelope(view: SessionView) -> str | None:
    """Return the start of the current state's envelope. It is complete if it is within `DOCUMENT_LIMIT`."""
    found = (
        current_row(view)
        .values_list(PayloadText(Substr("envelope", 1, DOCUMENT_LIMIT + 1)), flat=True)
        .first()
    )
    return None if found is None else str(found)


class Details(Section):
    name = "details"
    label = _("Details")

    def context(self, view: SessionView) -> dict[str, Any]:
        session = view.session
        view.read("directory", "tags", "metadata", "typed_metadata", "tracing_context", "title")
        envelope = current_envelope(view)
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
            (_("Messages"), session.message_count),
            (_("Resumes"), session.resume_count),
        ]
        documents = [
            (_("Tags"), view.texts["tags"], None),
            (_("Metadata"), view.texts["metadata"], None),
            (_("Metadata of the graph"), view.texts["typed_metadata"], None),
            (_("Output, error, workspaces"), envelope, _outcome),
            (_("Tracing context"), view.texts["tracing_context"], hide_secrets),
        ]
        return {
            "facts": [
                *((label, printable(value)) for label, value in facts if value),
                *((label, f"{value:,}") for label, value in counts),
                *((label, stamp(value)) for label, value in times if value is not None),
            ],
            "documents": [
                (label, json_block(text, shown=shown))
                for label, text, shown in documents
                if text not in _EMPTY
            ],
        }


def _outcome(envelope: Any) -> Any:
    """Return the state's fields that are not session columns. Others may hide a tracing context."""
    if not isinstance(envelope, dict):
        return hide_secrets(envelope)
    return {name: envelope[name] for name in _IN_ENVELOPE_ONLY if name in envelope}
