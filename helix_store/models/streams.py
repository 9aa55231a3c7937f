"""Streams and their chunks."""

from __future__ import annotations

from django.db import models
from django.db.models import F, Q
from django.utils.translation import gettext_lazy as _

from helix_store.conf import constraint_name, table_name
from helix_store.core.types import StreamStatus
from helix_store.models.constraints import index, one_of, unique
from helix_store.models.fields import CallIdField, IdentifierField, MomentField, PayloadField


class Stream(models.Model):
    """The head of a stream. Its chunks have the sequences ``floor + 1`` to ``last_sequence``.

    ``floor`` is the highest sequence that was removed. ``generation`` counts resets. The lease belongs to the
    newest writer, or is null. If ``is_emptied``, the stream has ended and pruning has nothing left to remove.
    """

    tenant = IdentifierField(default="", blank=True)
    stream_id = IdentifierField()
    status = models.CharField(max_length=16, choices=[(s.value, s.value) for s in StreamStatus])
    last_sequence = models.BigIntegerField(default=0)
    floor = models.BigIntegerField(default=0)
    generation = models.BigIntegerField(default=0)
    run_id = IdentifierField()
    agent_name = IdentifierField()
    writer_id = IdentifierField(null=True, blank=True)
    lease_expires_at = MomentField(null=True, blank=True)
    output = PayloadField(null=True, blank=True)
    error = PayloadField(null=True, blank=True)
    created_at = MomentField()
    updated_at = MomentField()
    ended_at = MomentField(null=True, blank=True)
    keep_until = MomentField(null=True, blank=True)
    is_emptied = models.BooleanField(default=False)

    class Meta:
        db_table = table_name("stream")
        verbose_name = _("stream")
        verbose_name_plural = _("streams")
        constraints = [
            unique("stream_id_uniq", ["tenant", "stream_id"]),
            one_of("stream_status_ck", "status", StreamStatus),
            models.CheckConstraint(
                condition=Q(floor__gte=0, floor__lte=F("last_sequence")),
                name=constraint_name("stream_floor_ck"),
            ),
        ]
        indexes = [
            # Do not index a column that an append changes, such as the lease: it would write to the index.
            index("stream_active_idx", ["id"], where=Q(status="active")),
            index("stream_ended_idx", ["ended_at"], where=Q(ended_at__isnull=False, is_emptied=False)),
            index("stream_keep_idx", ["keep_until"], where=Q(keep_until__isnull=False, is_emptied=False)),
        ]

    def __str__(self) -> str:
        return str(self.stream_id)


class StreamChunk(models.Model):
    """A chunk. The first chunk of an append also stores the id of the call."""

    # The unique constraint serves each lookup by stream, and the stream row's lock protects the reference.
    stream = models.ForeignKey(
        Stream, on_delete=models.CASCADE, related_name="chunks", db_constraint=False, db_index=False
    )
    sequence = models.BigIntegerField()
    payload = PayloadField()
    call_id = CallIdField()

    class Meta:
        db_table = table_name("stream_chunk")
        constraints = [
            unique("chunk_seq_uniq", ["stream", "sequence"]),
        ]

    def __str__(self) -> str:
        return str(self.sequence)
