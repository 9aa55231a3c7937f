"""Staged changes of a running step, and steps with an operation id."""

from __future__ import annotations

from django.db import models

from helix_store.conf import table_name
from helix_store.models.constraints import unique
from helix_store.models.fields import CallIdsField, IdentifierField, MomentField, PayloadField
from helix_store.models.sessions import session_key


class StagedChange(models.Model):
    session = session_key("staged_changes")
    step_id = IdentifierField()
    tool_call_id = IdentifierField()
    payload = PayloadField()
    created_at = MomentField()
    call_ids = CallIdsField()

    class Meta:
        db_table = table_name("staged_change")
        constraints = [
            unique("staged_call_uniq", ["session", "step_id", "tool_call_id"]),
        ]

    def __str__(self) -> str:
        return f"{self.step_id} {self.tool_call_id}"


class Operation(models.Model):
    """The result of a step with an operation id, which a repeat returns.

    It is kept when its checkpoint is pruned, so that a late repeat is not applied twice. A row without a
    digest marks a staged change that was promoted or discarded; it has the id of the call that staged it.
    """

    session = session_key("operations")
    operation_id = IdentifierField()
    digest = models.CharField(max_length=64)
    checkpoint_id = models.CharField(max_length=320)
    version = models.BigIntegerField()
    created_at = MomentField()

    class Meta:
        db_table = table_name("operation")
        constraints = [
            unique("operation_id_uniq", ["session", "operation_id"]),
        ]

    def __str__(self) -> str:
        return str(self.operation_id)
