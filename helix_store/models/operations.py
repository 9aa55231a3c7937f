"""Steps that were given an operation id, so that a repeat returns the first result."""

from __future__ import annotations

from django.db import models

from helix_store.conf import constraint_name, table_name
from helix_store.models.fields import IdentifierField
from helix_store.models.sessions import Session

__all__ = ["Operation"]


class Operation(models.Model):
    """Outlives the checkpoint it made: pruning must not make an old operation apply twice."""

    session = models.ForeignKey(
        Session, on_delete=models.CASCADE, related_name="operations", db_constraint=False, db_index=False
    )
    operation_id = IdentifierField()
    digest = models.CharField(max_length=64)
    checkpoint_id = models.CharField(max_length=320)
    version = models.BigIntegerField()
    created_at = models.DateTimeField()

    class Meta:
        db_table = table_name("operation")
        constraints = [
            models.UniqueConstraint(
                fields=["session", "operation_id"], name=constraint_name("operation_id_uniq")
            ),
        ]

    def __str__(self) -> str:
        return str(self.operation_id)
