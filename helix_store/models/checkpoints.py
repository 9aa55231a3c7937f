"""Checkpoints of steps, graphs and snapshots, and states between checkpoints."""

from __future__ import annotations

from django.db import models
from django.db.models import Q
from django.utils.translation import gettext_lazy as _

from helix_store.conf import constraint_name, table_name
from helix_store.core.types import CheckpointSource
from helix_store.models.fields import CallIdField, IdentifierField, MomentField, PayloadField
from helix_store.models.sessions import Session

__all__ = ["Checkpoint", "CheckpointKind"]


class CheckpointKind(models.TextChoices):
    STATE = "state", "state between checkpoints"
    STEP = "step", "step"
    GRAPH = "graph", "graph"
    SNAPSHOT = "snapshot", "snapshot"
    BASE = "base", "base of steps"


class Checkpoint(models.Model):
    """A stored state. Each state is written once: ``Session.current`` points at its row.

    Kind ``state`` is the current state of a session whose last write was not a step. A session has at most
    one; lists omit it, and the next step turns it into that step's checkpoint. ``payload`` is the custom
    state, ``envelope`` the rest of the session state. Graphs and snapshots use only ``payload``. The columns
    ``claim_…`` belong to a snapshot that is being or was resumed.

    If ``base`` is set, it is an older row of the session with a full payload, and ``payload`` is the delta
    from it. Kind ``base`` is a deleted checkpoint of a step that deltas still need; lists omit it.
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
    # It has no constraint and no index: it is only read forwards, and a row stays while a delta needs it.
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
    call_id = CallIdField()
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
            # Graph checkpoints are looked up by their id alone.
            models.Index(
                fields=["checkpoint_id"],
                condition=Q(kind=CheckpointKind.GRAPH),
                name=constraint_name("checkpoint_graph_idx"),
            ),
            # This index finds the newest checkpoint of all namespaces.
            models.Index(
                fields=["session", "version", "id"],
                condition=Q(kind=CheckpointKind.GRAPH),
                name=constraint_name("checkpoint_order_idx"),
            ),
        ]

    def __str__(self) -> str:
        return self.checkpoint_id or f"state at version {self.version}"
