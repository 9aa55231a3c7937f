"""Changes that tool calls of a running step want, until the step promotes or discards them."""

from __future__ import annotations

from django.db import models

from helix_store.conf import constraint_name, table_name
from helix_store.models.fields import IdentifierField, PayloadField
from helix_store.models.sessions import Session

__all__ = ["StagedChange"]


class StagedChange(models.Model):
    session = models.ForeignKey(
        Session, on_delete=models.CASCADE, related_name="staged_changes", db_constraint=False, db_index=False
    )
    step_id = IdentifierField()
    tool_call_id = IdentifierField()
    payload = PayloadField()
    created_at = models.DateTimeField()

    class Meta:
        db_table = table_name("staged_change")
        constraints = [
            models.UniqueConstraint(
                fields=["session", "step_id", "tool_call_id"], name=constraint_name("staged_call_uniq")
            ),
        ]

    def __str__(self) -> str:
        return f"{self.step_id} {self.tool_call_id}"
