"""Schema version 7: everything a suspended session needs to be resumed anywhere, and its expiry."""

from django.db import migrations, models

from helix_store.conf import constraint_name
from helix_store.migrations._operations import RefuseToLose, WholeMigration
from helix_store.models.fields import IdentifierField, PayloadField


class Migration(WholeMigration):
    dependencies = [("helix_store", "0006_mode_and_completion_reason")]

    operations = [
        migrations.AddField(
            model_name="session",
            name="suspension_kind",
            field=models.CharField(
                blank=True,
                choices=[
                    ("suspended_client_tool", "suspended_client_tool"),
                    ("suspended_awaiting_children", "suspended_awaiting_children"),
                    ("suspended_step_partial", "suspended_step_partial"),
                ],
                max_length=32,
                null=True,
            ),
        ),
        migrations.AddField(
            model_name="session", name="suspension_context", field=PayloadField(blank=True, null=True)
        ),
        migrations.AddField(
            model_name="session",
            name="suspended_awaiting_children",
            field=PayloadField(blank=True, null=True),
        ),
        migrations.AddField(
            model_name="session",
            name="suspended_step_id",
            field=IdentifierField(blank=True, max_length=255, null=True),
        ),
        migrations.AddField(
            model_name="session", name="tracing_context", field=PayloadField(blank=True, null=True)
        ),
        migrations.AddField(
            model_name="session", name="expires_at", field=models.DateTimeField(blank=True, null=True)
        ),
        migrations.AddIndex(
            model_name="session",
            index=models.Index(
                condition=models.Q(
                    ("expires_at__isnull", False),
                    ("status__in", ["active", "running", "paused", "interrupted"]),
                ),
                fields=["expires_at", "id"],
                name=constraint_name("session_expiry_idx"),
            ),
        ),
        migrations.AddIndex(
            model_name="session",
            index=models.Index(
                condition=models.Q(("expires_at__isnull", False), ("failure_reason", "session_expired")),
                fields=["expires_at", "id"],
                name=constraint_name("session_expired_idx"),
            ),
        ),
        migrations.AddConstraint(
            model_name="session",
            constraint=models.CheckConstraint(
                condition=models.Q(
                    ("suspension_kind__isnull", True),
                    (
                        "suspension_kind__in",
                        ["suspended_client_tool", "suspended_awaiting_children", "suspended_step_partial"],
                    ),
                    _connector="OR",
                ),
                name=constraint_name("session_kind_ck"),
            ),
        ),
        RefuseToLose(
            "session",
            "suspension_kind",
            "suspension_context",
            "suspended_awaiting_children",
            "suspended_step_id",
            "tracing_context",
            "expires_at",
        ),
    ]
