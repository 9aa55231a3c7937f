"""The tables of LangGraph's data: checkpoints of threads, which are sessions, and long-term memory.

LangGraph creates the ids and the serializer creates the bytes; the tables store both unchanged. A value of a
channel is stored once for each version, and checkpoints refer to it by channel and version. This module does
not import LangGraph.
"""

from __future__ import annotations

from django.db import models
from django.db.models import Q
from django.utils.translation import gettext_lazy as _

from helix_store.conf import table_name
from helix_store.core.limits import MAX_ID_BYTES, MAX_NAMESPACE_BYTES
from helix_store.models.constraints import index, unique
from helix_store.models.fields import IdentifierField, LongIdentifierField, MomentField, PayloadField
from helix_store.models.sessions import session_key


class LangGraphCheckpoint(models.Model):
    """A checkpoint of one namespace: ``""`` for the graph, ``node:task`` for a call of a subgraph.

    ``body`` holds the checkpoint, its metadata, and the values that are too small for their own row.
    ``versions`` names the values that have a row, as JSON with the version of each channel. ``metadata`` is a
    copy for filters. ``thread_id`` is the thread's id if the id of its session is derived from it.
    """

    session = session_key("langgraph_checkpoints")
    thread_id = models.TextField(null=True, blank=True)  # noqa: DJ001  None: that of the session
    namespace = LongIdentifierField(default="", blank=True)
    checkpoint_id = LongIdentifierField()
    parent_id = LongIdentifierField(null=True, blank=True)
    run_id = LongIdentifierField(null=True, blank=True)
    source = models.CharField(max_length=32, default="", blank=True)
    step = models.BigIntegerField(null=True, blank=True)
    metadata = models.JSONField(default=dict, blank=True)
    versions = models.TextField(default="{}")
    has_deltas = models.BooleanField(default=False)
    type = models.CharField(max_length=255)
    body = models.BinaryField()
    size_bytes = models.BigIntegerField(default=0)
    created_at = MomentField()

    class Meta:
        db_table = table_name("lg_checkpoint")
        verbose_name = _("LangGraph checkpoint")
        verbose_name_plural = _("LangGraph checkpoints")
        constraints = [
            # This index also finds the newest checkpoint and the pages of a namespace.
            unique("lg_checkpoint_uniq", ["session", "namespace", "checkpoint_id"]),
        ]
        indexes = [
            index("lg_run_idx", ["run_id"], where=Q(run_id__isnull=False)),
            # This index finds the newest checkpoints of all threads.
            index("lg_newest_idx", ["checkpoint_id", "id"]),
        ]

    def __str__(self) -> str:
        return str(self.checkpoint_id)


class LangGraphValue(models.Model):
    """The value of a channel at one version, to which any number of checkpoints in a namespace refer."""

    session = session_key("langgraph_values")
    namespace = LongIdentifierField(default="", blank=True)
    channel = LongIdentifierField()
    version = LongIdentifierField()
    type = models.CharField(max_length=255)
    blob = models.BinaryField()

    class Meta:
        db_table = table_name("lg_value")
        verbose_name = _("LangGraph value")
        verbose_name_plural = _("LangGraph values")
        constraints = [
            unique("lg_value_uniq", ["session", "namespace", "channel", "version"]),
        ]

    def __str__(self) -> str:
        return f"{self.channel} {self.short_version}"

    @property
    def short_version(self) -> str:
        """The version without the zeros with which LangGraph pads its number."""
        return self.version.lstrip("0") or "0"


class LangGraphWrite(models.Model):
    """A task's write to a channel after a checkpoint, which may be stored before the checkpoint itself. A
    ``position`` of 0 or more is the place among the writes of the task, and the first write is kept. Errors,
    interrupts and resume values have fixed negative positions, and the last write replaces earlier ones.
    """

    session = session_key("langgraph_writes")
    namespace = LongIdentifierField(default="", blank=True)
    checkpoint_id = LongIdentifierField()
    task_id = LongIdentifierField()
    position = models.IntegerField()
    task_path = LongIdentifierField(default="", blank=True)
    channel = LongIdentifierField()
    type = models.CharField(max_length=255)
    blob = models.BinaryField()

    class Meta:
        db_table = table_name("lg_write")
        verbose_name = _("LangGraph write")
        verbose_name_plural = _("LangGraph writes")
        constraints = [
            unique("lg_write_uniq", ["session", "namespace", "checkpoint_id", "task_id", "position"]),
        ]

    def __str__(self) -> str:
        return f"{self.channel} of {self.task_id}"


class LangGraphMemory(models.Model):
    """A value that a graph has stored in `DjangoStore`. It belongs to a tenant, not to a session.

    ``namespace`` has a dot after each label: ``users.alice.``.
    """

    tenant = IdentifierField(default="", blank=True)
    namespace = IdentifierField(max_length=MAX_NAMESPACE_BYTES)
    key = IdentifierField(max_length=MAX_ID_BYTES, blank=True)
    size_bytes = models.BigIntegerField()
    ttl_ms = models.BigIntegerField(null=True, blank=True)
    expires_at = MomentField(null=True, blank=True)
    created_at = MomentField()
    updated_at = MomentField()
    value = PayloadField()

    class Meta:
        db_table = table_name("lg_memory")
        verbose_name = _("LangGraph memory")
        verbose_name_plural = _("LangGraph memories")
        constraints = [
            unique("lg_memory_uniq", ["tenant", "namespace", "key"]),
        ]
        indexes = [
            index("lg_memory_expiry_idx", ["tenant", "expires_at"], where=Q(expires_at__isnull=False)),
        ]

    def __str__(self) -> str:
        return f"{self.namespace}{self.key}"
