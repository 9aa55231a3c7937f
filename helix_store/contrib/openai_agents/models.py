"""Runs of OpenAI Agents SDK that wait for an approval."""

from __future__ import annotations

from django.db import models
from django.utils.translation import gettext_lazy as _

from helix_store.conf import table_name
from helix_store.models.constraints import unique
from helix_store.models.fields import IdentifierField, MomentField, PayloadField
from helix_store.models.sessions import session_key


class OpenAIRunState(models.Model):
    """The text of a ``RunState``, the user who may answer it, the deadline, and the resumer that claimed it.

    ``payload`` holds the text as a JSON string, so that any text is preserved exactly. The claim ends at
    ``claim_expires_at``; ``resumed_at`` is set when a claim is completed.
    """

    session = session_key("openai_run_states")
    state_id = IdentifierField()
    payload = PayloadField()
    size_bytes = models.BigIntegerField()
    owner = IdentifierField(null=True, blank=True)
    deadline = MomentField(null=True, blank=True)
    claim_owner = IdentifierField(null=True, blank=True)
    claim_token = models.BigIntegerField(default=0)
    claim_expires_at = MomentField(null=True, blank=True)
    resumed_at = MomentField(null=True, blank=True)
    created_at = MomentField()

    class Meta:
        db_table = table_name("openai_run_state")
        verbose_name = _("run state")
        verbose_name_plural = _("run states")
        constraints = [
            unique("openai_state_uniq", ["session", "state_id"]),
        ]

    def __str__(self) -> str:
        return str(self.state_id)
