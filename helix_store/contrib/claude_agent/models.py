"""The table of Claude Agent SDK's sessions. Transcripts are items of the session."""

from __future__ import annotations

from django.db import models
from django.utils.translation import gettext_lazy as _

from helix_store.conf import table_name
from helix_store.core.limits import MAX_LANE_BYTES
from helix_store.models.constraints import index, unique
from helix_store.models.fields import IdentifierField, PayloadField
from helix_store.models.sessions import session_key


class ClaudeSession(models.Model):
    """The SDK's name for a session, and the summary of its main transcript.

    ``mtime_ms`` and ``summary`` are null as long as only transcripts of sub-agents are stored.
    """

    # The unique constraint serves every lookup by session.
    session = session_key("claude_sessions")
    # This copies the session's value, so that a list reads a single index.
    tenant = IdentifierField(default="", blank=True)
    project_key = IdentifierField(max_length=MAX_LANE_BYTES)
    claude_session_id = IdentifierField(max_length=MAX_LANE_BYTES)
    mtime_ms = models.BigIntegerField(null=True, blank=True)
    summary = PayloadField(null=True, blank=True)

    class Meta:
        db_table = table_name("claude_session")
        verbose_name = _("Claude session")
        verbose_name_plural = _("Claude sessions")
        constraints = [
            unique("claude_session_uniq", ["session"]),
        ]
        indexes = [
            index("claude_project_idx", ["tenant", "project_key", "mtime_ms"]),
        ]

    def __str__(self) -> str:
        return str(self.claude_session_id)
