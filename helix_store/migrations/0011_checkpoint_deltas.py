"""States of steps as what changed since an earlier one."""

from typing import Any

import django.db.models.deletion
from django.db import migrations, models

from helix_store.conf import constraint_name
from helix_store.core.payloads import size_of
from helix_store.migrations._whole import WholeMigration
from helix_store.sessions.deltas import apply_deltas

ROWS_AT_ONCE = 50


def write_in_full(apps: Any, schema_editor: Any) -> None:
    """Give every step its full payload again; then nothing needs the bases that were kept for them."""
    model = apps.get_model("helix_store", "Checkpoint")
    checkpoints = model._base_manager.using(schema_editor.connection.alias)
    deltas = checkpoints.filter(base__isnull=False).select_related("base").order_by("pk")
    last = 0
    while rows := list(deltas.filter(pk__gt=last)[:ROWS_AT_ONCE]):
        for row in rows:
            payload = apply_deltas(row.base.payload, [row.payload])
            size_bytes = size_of(payload) + size_of(row.envelope)
            checkpoints.filter(pk=row.pk).update(payload=payload, size_bytes=size_bytes, base=None)
        last = rows[-1].pk
    checkpoints.filter(kind="base").delete()


class Migration(WholeMigration):
    dependencies = [("helix_store", "0010_streams")]

    operations = [
        migrations.RemoveConstraint(model_name="checkpoint", name=constraint_name("checkpoint_kind_ck")),
        migrations.AddField(
            model_name="checkpoint",
            name="base",
            field=models.ForeignKey(
                db_constraint=False,
                db_index=False,
                editable=False,
                null=True,
                on_delete=django.db.models.deletion.DO_NOTHING,
                related_name="+",
                to="helix_store.checkpoint",
            ),
        ),
        migrations.AlterField(
            model_name="checkpoint",
            name="kind",
            field=models.CharField(
                choices=[
                    ("state", "state between checkpoints"),
                    ("step", "step"),
                    ("graph", "graph"),
                    ("snapshot", "snapshot"),
                    ("base", "base of steps"),
                ],
                max_length=16,
            ),
        ),
        migrations.AddConstraint(
            model_name="checkpoint",
            constraint=models.CheckConstraint(
                condition=models.Q(("kind__in", ["state", "step", "graph", "snapshot", "base"])),
                name=constraint_name("checkpoint_kind_ck"),
            ),
        ),
        migrations.AddField(
            model_name="session",
            name="base_key",
            field=models.BigIntegerField(editable=False, null=True),
        ),
        migrations.RunPython(migrations.RunPython.noop, write_in_full, elidable=False),
    ]
