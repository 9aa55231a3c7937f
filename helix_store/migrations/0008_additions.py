"""Additions of this package to schema version 7: streams, items, snapshots, deltas, operations and indexes.

It replaces the migrations of the versions before the first release.
"""

from __future__ import annotations

from typing import Any, Final

from django.db import migrations, models
from django.db.models import F, Q

from helix_store.conf import constraint_name, table_name
from helix_store.core.payloads import size_of
from helix_store.migrations._operations import (
    RefuseToLose,
    WholeMigration,
    add_constraints,
    add_fields,
    checkpoint_key,
    choices,
    compress_quickly,
    index_documents,
    keep_pages,
    parent,
    surrogate_key,
)
from helix_store.models.constraints import index, one_of, unique
from helix_store.models.fields import CallIdField, CallIdsField, IdentifierField, MomentField, PayloadField
from helix_store.sessions.deltas import apply_delta

ROWS_AT_ONCE: Final = 50
KINDS: Final = {
    "state": "state between checkpoints",
    "step": "step",
    "graph": "graph",
    "snapshot": "snapshot",
    "base": "base of steps",
}
NAMES: Final = {
    "checkpoint": ("checkpoint", "checkpoints"),
    "lock": ("lock", "locks"),
    "message": ("message", "messages"),
    "run": ("run", "runs"),
    "session": ("session", "sessions"),
    "usageentry": ("usage entry", "usage entries"),
}


def write_in_full(apps: Any, schema_editor: Any) -> None:
    """Store every step's full payload again, so that the kept bases are no longer needed."""
    model = apps.get_model("helix_store", "Checkpoint")
    checkpoints = model._base_manager.using(schema_editor.connection.alias)
    deltas = checkpoints.filter(base__isnull=False).select_related("base").order_by("pk")
    last = 0
    while rows := list(deltas.filter(pk__gt=last)[:ROWS_AT_ONCE]):
        for row in rows:
            payload = apply_delta(row.base.payload, row.payload)
            size_bytes = size_of(payload) + size_of(row.envelope)
            checkpoints.filter(pk=row.pk).update(payload=payload, size_bytes=size_bytes, base=None)
        last = rows[-1].pk
    checkpoints.filter(kind="base").delete()


class Migration(WholeMigration):
    replaces = [
        ("helix_store", "0008_operations"),
        ("helix_store", "0009_graph_checkpoints_and_snapshots"),
        ("helix_store", "0010_streams"),
        ("helix_store", "0011_checkpoint_deltas"),
        ("helix_store", "0012_payload_compression"),
        ("helix_store", "0013_list_indexes"),
        ("helix_store", "0014_agent_type_lists"),
        ("helix_store", "0015_staging_pages"),
        ("helix_store", "0016_sub_session_owners"),
        ("helix_store", "0017_waiting_sessions"),
        ("helix_store", "0018_model_names"),
        ("helix_store", "0019_items"),
        ("helix_store", "0020_item_versions"),
        ("helix_store", "0021_call_ids"),
    ]

    dependencies = [("helix_store", "0007_suspension_context")]

    operations = [
        migrations.CreateModel(
            name="Operation",
            fields=[
                ("id", surrogate_key()),
                ("operation_id", IdentifierField(max_length=255)),
                ("digest", models.CharField(max_length=64)),
                ("checkpoint_id", models.CharField(max_length=320)),
                ("version", models.BigIntegerField()),
                ("created_at", models.DateTimeField()),
                ("session", parent("session", "operations")),
            ],
            options={
                "db_table": table_name("operation"),
                "constraints": [
                    unique("operation_id_uniq", ["session", "operation_id"]),
                ],
            },
        ),
        migrations.CreateModel(
            name="Stream",
            fields=[
                ("id", surrogate_key()),
                ("tenant", IdentifierField(blank=True, default="", max_length=255)),
                ("stream_id", IdentifierField(max_length=255)),
                (
                    "status",
                    models.CharField(choices=choices("active", "paused", "ended", "failed"), max_length=16),
                ),
                ("last_sequence", models.BigIntegerField(default=0)),
                ("floor", models.BigIntegerField(default=0)),
                ("generation", models.BigIntegerField(default=0)),
                ("run_id", IdentifierField(max_length=255)),
                ("agent_name", IdentifierField(max_length=255)),
                ("writer_id", IdentifierField(blank=True, max_length=255, null=True)),
                ("lease_expires_at", models.DateTimeField(blank=True, null=True)),
                ("output", PayloadField(blank=True, null=True)),
                ("error", PayloadField(blank=True, null=True)),
                ("created_at", models.DateTimeField()),
                ("updated_at", models.DateTimeField()),
                ("ended_at", models.DateTimeField(blank=True, null=True)),
                ("keep_until", models.DateTimeField(blank=True, null=True)),
                ("is_emptied", models.BooleanField(default=False)),
            ],
            options={
                "db_table": table_name("stream"),
                "verbose_name": "stream",
                "verbose_name_plural": "streams",
                "constraints": [
                    unique("stream_id_uniq", ["tenant", "stream_id"]),
                    one_of("stream_status_ck", "status", ["active", "paused", "ended", "failed"]),
                    models.CheckConstraint(
                        condition=Q(floor__gte=0, floor__lte=F("last_sequence")),
                        name=constraint_name("stream_floor_ck"),
                    ),
                ],
                "indexes": [
                    index("stream_active_idx", ["id"], where=Q(status="active")),
                    index(
                        "stream_ended_idx", ["ended_at"], where=Q(ended_at__isnull=False, is_emptied=False)
                    ),
                    index(
                        "stream_keep_idx", ["keep_until"], where=Q(keep_until__isnull=False, is_emptied=False)
                    ),
                ],
            },
        ),
        migrations.CreateModel(
            name="StreamChunk",
            fields=[
                ("id", surrogate_key()),
                ("sequence", models.BigIntegerField()),
                ("payload", PayloadField()),
                ("stream", parent("stream", "chunks")),
                ("call_id", CallIdField()),
            ],
            options={
                "db_table": table_name("stream_chunk"),
                "constraints": [
                    unique("chunk_seq_uniq", ["stream", "sequence"]),
                ],
            },
        ),
        migrations.CreateModel(
            name="Item",
            fields=[
                ("id", surrogate_key()),
                ("lane", IdentifierField(blank=True, default="", max_length=1000)),
                ("key", IdentifierField(blank=True, max_length=1000, null=True)),
                ("payload", PayloadField()),
                ("created_at", MomentField()),
                ("session", parent("session", "items")),
                ("session_version", models.BigIntegerField(blank=True, editable=False, null=True)),
            ],
            options={
                "db_table": table_name("item"),
                "verbose_name": "item",
                "verbose_name_plural": "items",
                "constraints": [
                    unique("item_key_uniq", ["session", "lane", "key"], where=Q(key__isnull=False)),
                ],
                "indexes": [
                    index("item_lane_idx", ["session", "lane", "id"]),
                ],
            },
        ),
        *add_fields("session", typed_metadata=PayloadField(blank=True, null=True)),
        *add_constraints(
            "checkpoint", index("checkpoint_graph_idx", ["checkpoint_id"], where=Q(kind="graph"))
        ),
        *add_fields(
            "checkpoint",
            snapshot_version=models.BigIntegerField(blank=True, null=True),
            claim_owner=IdentifierField(blank=True, max_length=255, null=True),
            claim_token=models.BigIntegerField(blank=True, null=True),
            claim_expires_at=models.DateTimeField(blank=True, null=True),
            claim_done_at=models.DateTimeField(blank=True, null=True),
        ),
        migrations.RemoveConstraint(model_name="checkpoint", name=constraint_name("checkpoint_kind_ck")),
        *add_fields("checkpoint", base=checkpoint_key()),
        migrations.AlterField(
            model_name="checkpoint",
            name="kind",
            field=models.CharField(choices=list(KINDS.items()), max_length=16),
        ),
        *add_constraints("checkpoint", one_of("checkpoint_kind_ck", "kind", list(KINDS))),
        *add_fields("session", base_key=models.BigIntegerField(editable=False, null=True)),
        *(
            migrations.AddField(model_name=model, name="call_id", field=CallIdField())
            for model in ("checkpoint", "lock")
        ),
        *(
            migrations.AddField(model_name=model, name="call_ids", field=CallIdsField())
            for model in ("run", "session", "stagedchange")
        ),
        *add_constraints(
            "session",
            index(
                "session_stream_idx",
                ["tenant", "stream_id"],
                where=Q(stream_id__lt=F("session_id")) | Q(stream_id__gt=F("session_id")),
            ),
        ),
        *add_constraints(
            "checkpoint", index("checkpoint_order_idx", ["session", "version", "id"], where=Q(kind="graph"))
        ),
        *add_constraints(
            "usageentry",
            index("usage_model_idx", ["tenant", "model", "timestamp", "id"], where=Q(model__isnull=False)),
            index("usage_agent_idx", ["tenant", "session_agent_type", "timestamp", "id"]),
        ),
        *add_constraints(
            "session", index("session_agent_idx", ["tenant", "agent_type", "updated_at", "session_id"])
        ),
        *add_constraints("subsessionref", index("sub_ref_owner_idx", ["sub_session_id"])),
        *add_constraints(
            "usageentry",
            index("usage_sub_idx", ["tenant", "sub_session_id"], where=Q(sub_session_id__isnull=False)),
        ),
        *add_constraints(
            "session",
            index(
                "session_waiting_idx",
                ["tenant", "updated_at", "session_id"],
                where=Q(
                    status__in=["active", "running", "paused", "interrupted"],
                    suspension_kind__in=["suspended_client_tool"],
                ),
            ),
        ),
        *(
            migrations.AlterModelOptions(
                name=model, options={"verbose_name": one, "verbose_name_plural": many}
            )
            for model, (one, many) in NAMES.items()
        ),
        migrations.RunPython(migrations.RunPython.noop, write_in_full, elidable=False),
        compress_quickly("checkpoint", "payload", "envelope"),
        *(compress_quickly(model, "payload") for model in ("message", "stagedchange", "streamchunk", "item")),
        index_documents("session", "tags", name=constraint_name("session_tags_idx"), empty="[]"),
        index_documents("session", "metadata", name=constraint_name("session_meta_idx"), empty="{}"),
        keep_pages("stagedchange"),
        RefuseToLose("operation"),
        RefuseToLose("session", "typed_metadata"),
        RefuseToLose("checkpoint", "snapshot_version"),
        RefuseToLose("stream"),
        RefuseToLose("item"),
    ]
