"""The remaining data of a session: its labels, its counts and times, and its output."""

from __future__ import annotations

from typing import Any, Final

from django.utils.translation import gettext_lazy as _

from helix_store.admin.elements import hide_secrets, json_block, printable
from helix_store.admin.sections.section import ENVELOPE, Section, SessionView
from helix_store.admin.times import stamp

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
            (_("Messages"), session.message_count),
            (_("Resumes"), session.resume_count),
        ]
        documents = [
            (_("Tags"), "tags", None),
            (_("Metadata"), "metadata", None),
            (_("Metadata of the graph"), "typed_metadata", None),
            (_("Output, error, workspaces"), ENVELOPE, _outcome),
            (_("Tracing context"), "tracing_context", hide_secrets),
        ]
        return {
            "facts": [
                *((label, printable(value)) for label, value in facts if value),
                *((label, f"{value:,}") for label, value in counts),
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
