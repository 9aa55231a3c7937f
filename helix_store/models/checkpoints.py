"""Checkpoints of steps, graphs and snapshots, and states between checkpoints."""

from __future__ import annotations

from django.db import models
from django.db.models import Q
from django.utils.translation import gettext_lazy as _

from helix_store.conf import constraint_name, table_name
from helix_store.core.types import CheckpointSource
from helix_store.models.fields import IdentifierField, MomentField, PayloadField
from helix_store.models.sessions import Session

__all__ = ["Checkpoint", "CheckpointKind"]


class CheckpointKind(models.TextChoices):
    STATE = "state", "state between checkpoints"
    STEP = "step", "step"
    GRAPH = "graph", "graph"
    SNAPSHOT = "snapshot", "snapshot"
    BASE = "base", "base of steps"


class Checkpoint(models.Model):
    """A stored state. A state is written once: ``Session.current`` points at its row.

    Kind ``state`` is the current state of a session whose last write was not a step. A session has at most
    one; lists leave it out, and the next step changes it into the checkpoint of that step. ``payload`` is the
    custom state, ``envelope`` the rest of the session state. Graphs and snapshots use ``payload`` only. The
    columns ``claim_…`` are those of a snapshot that is or was resumed.

    If ``base`` is set, an older row of the session with a full payload, ``payload`` is the delta from it.
    Kind ``base`` is a deleted checkpoint of a step that deltas still need; lists leave it out.
    """

    session = models.ForeignKey(
        Session, on_delete=models.CASCADE, related_name="checkpoints", db_constraint=False, db_index=False
    )
    kind = models.CharField(max_length=16, choices=CheckpointKind.choices)
    namespace = IdentifierField(default="", blank=True)
    version = models.BigIntegerField()
    checkpoint_id = models.CharField(max_length=320, null=True, blank=True)  # noqa: DJ001  None: not a checkpoint
    parent_checkpoint_id = models.CharField(max_length=320, null=True, blank=True)  # noqa: DJ001  None: a root
    source = models.CharField(max_length=16, choices=[(s.value, s.value) for s in CheckpointSource])
    run_id = IdentifierField(null=True, blank=True)
    step_id = IdentifierField(null=True, blank=True)
    step_count = models.BigIntegerField(default=0)
    status = models.CharField(max_length=16, default="", blank=True)
    message_count = models.BigIntegerField(default=0)
    stream_sequence = models.BigIntegerField(default=0)
    payload = PayloadField()
    # No constraint, no index: it is only read forwards, and a row is not deleted while a delta needs it.
    base = models.ForeignKey(
        "self",
        null=True,
        editable=False,
        on_delete=models.DO_NOTHING,
        related_name="+",
        db_constraint=False,
        db_index=False,
    )
    envelope = PayloadField(default="{}")
    size_bytes = models.BigIntegerField(default=0)
    created_at = MomentField()
    snapshot_version = models.BigIntegerField(null=True, blank=True)
    claim_owner = IdentifierField(null=True, blank=True)
    claim_token = models.BigIntegerField(null=True, blank=True)
    claim_expires_at = MomentField(null=True, blank=True)
    claim_done_at = MomentField(null=True, blank=True)

    class Meta:
        db_table = table_name("checkpoint")
        verbose_name = _("checkpoint")
        verbose_name_plural = _("checkpoints")
        constraints = [
            models.UniqueConstraint(
                fields=["session", "kind", "namespace", "version"],
                name=constraint_name("checkpoint_ver_uniq"),
            ),
            models.UniqueConstraint(
                fields=["session", "checkpoint_id"],
                condition=Q(checkpoint_id__isnull=False),
                name=constraint_name("checkpoint_id_uniq"),
            ),
            models.UniqueConstraint(
                fields=["session"],
                condition=Q(kind=CheckpointKind.STATE),
                name=constraint_name("checkpoint_state_uniq"),
            ),
            models.CheckConstraint(
                condition=Q(kind__in=CheckpointKind.values), name=constraint_name("checkpoint_kind_ck")
            ),
            models.CheckConstraint(
                condition=Q(source__in=[source.value for source in CheckpointSource]),
                name=constraint_name("checkpoint_source_ck"),
            ),
        ]
        indexes = [
            # Graph checkpoints are found by their id alone.
            models.Index(
                fields=["checkpoint_id"],
                condition=Q(kind=CheckpointKind.GRAPH),
                name=constraint_name("checkpoint_graph_idx"),
            ),
            # The newest of all namespaces together.
            models.Index(
                fields=["session", "version", "id"],
                condition=Q(kind=CheckpointKind.GRAPH),
                name=constraint_name("checkpoint_order_idx"),
            ),
        ]

    def __str__(self) -> str:
        return self.checkpoint_id or f"state at version {self.version}"
