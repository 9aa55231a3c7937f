"""Checkpoints of steps, graphs and snapshots, and states between checkpoints."""

from __future__ import annotations

from django.db import models
from django.db.models import Q
from django.utils.translation import gettext_lazy as _

from helix_store.conf import table_name
from helix_store.core.types import CheckpointSource
from helix_store.models.constraints import index, one_of, unique
from helix_store.models.fields import CallIdField, IdentifierField, MomentField, PayloadField
from helix_store.models.sessions import session_key


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
    ``claim_…`` belong to a snapshot that is being resumed or was resumed.

    If ``base`` is set, it is an older row of the session with a full payload, and ``payload`` is the delta
    from it. Kind ``base`` is a deleted checkpoint of a step that deltas still need; lists omit it.
    """

    session = session_key("checkpoints")
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
    # It has no constraint and no index: it is only followed forwards, and rows stay while deltas need them.
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
            unique("checkpoint_ver_uniq", ["session", "kind", "namespace", "version"]),
            unique("checkpoint_id_uniq", ["session", "checkpoint_id"], where=Q(checkpoint_id__isnull=False)),
            unique("checkpoint_state_uniq", ["session"], where=Q(kind=CheckpointKind.STATE)),
            one_of("checkpoint_kind_ck", "kind", CheckpointKind),
            one_of("checkpoint_source_ck", "source", CheckpointSource),
        ]
        indexes = [
            # Graph checkpoints are looked up by their id alone.
            index("checkpoint_graph_idx", ["checkpoint_id"], where=Q(kind=CheckpointKind.GRAPH)),
            # This index finds the newest checkpoint of all namespaces.
            index("checkpoint_order_idx", ["session", "version", "id"], where=Q(kind=CheckpointKind.GRAPH)),
        ]

    def __str__(self) -> str:
        return self.checkpoint_id or f"state at version {self.version}"
