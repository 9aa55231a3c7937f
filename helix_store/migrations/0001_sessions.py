"""Schema version 1: the base tables, constraints and indexes."""

from django.db import migrations, models

from helix_store.conf import constraint_name, table_name
from helix_store.migrations._operations import RefuseToLose, WholeMigration
from helix_store.models.fields import (
    CostField,
    IdentifierField,
    PayloadField,
)


class Migration(WholeMigration):
    initial = True

    dependencies = []

    operations = [
        migrations.CreateModel(
            name="Checkpoint",
            fields=[
                (
                    "id",
                    models.BigAutoField(
                        auto_created=True, primary_key=True, serialize=False, verbose_name="ID"
                    ),
                ),
                (
                    "kind",
                    models.CharField(
                        choices=[
                            ("state", "state between checkpoints"),
                            ("step", "step"),
                            ("graph", "graph"),
                            ("snapshot", "snapshot"),
                        ],
                        max_length=16,
                    ),
                ),
                ("namespace", IdentifierField(blank=True, default="", max_length=255)),
                ("version", models.BigIntegerField()),
                ("checkpoint_id", models.CharField(blank=True, max_length=320, null=True)),
                ("parent_checkpoint_id", models.CharField(blank=True, max_length=320, null=True)),
                (
                    "source",
                    models.CharField(
                        choices=[
                            ("input", "input"),
                            ("loop", "loop"),
                            ("interrupt", "interrupt"),
                            ("fork", "fork"),
                            ("step", "step"),
                        ],
                        max_length=16,
                    ),
                ),
                ("run_id", IdentifierField(blank=True, max_length=255, null=True)),
                ("step_id", IdentifierField(blank=True, max_length=255, null=True)),
                ("step_count", models.BigIntegerField(default=0)),
                ("status", models.CharField(blank=True, default="", max_length=16)),
                ("message_count", models.BigIntegerField(default=0)),
                ("stream_sequence", models.BigIntegerField(default=0)),
                ("payload", PayloadField()),
                ("envelope", PayloadField(default="{}")),
                ("size_bytes", models.BigIntegerField(default=0)),
                ("created_at", models.DateTimeField()),
            ],
            options={
                "db_table": table_name("checkpoint"),
            },
        ),
        migrations.CreateModel(
            name="Lock",
            fields=[
                (
                    "id",
                    models.BigAutoField(
                        auto_created=True, primary_key=True, serialize=False, verbose_name="ID"
                    ),
                ),
                ("tenant", IdentifierField(blank=True, default="", max_length=255)),
                ("name", IdentifierField(max_length=255)),
                ("owner", IdentifierField(blank=True, max_length=255, null=True)),
                ("token", models.BigIntegerField(default=0)),
                ("acquired_at", models.DateTimeField(blank=True, null=True)),
                ("expires_at", models.DateTimeField(blank=True, null=True)),
            ],
            options={
                "db_table": table_name("lock"),
                "constraints": [
                    models.UniqueConstraint(fields=("tenant", "name"), name=constraint_name("lock_name_uniq"))
                ],
            },
        ),
        migrations.CreateModel(
            name="Session",
            fields=[
                (
                    "id",
                    models.BigAutoField(
                        auto_created=True, primary_key=True, serialize=False, verbose_name="ID"
                    ),
                ),
                ("tenant", IdentifierField(blank=True, default="", max_length=255)),
                ("session_id", IdentifierField(max_length=255)),
                ("agent_type", IdentifierField(max_length=255)),
                (
                    "status",
                    models.CharField(
                        choices=[
                            ("active", "active"),
                            ("running", "running"),
                            ("paused", "paused"),
                            ("interrupted", "interrupted"),
                            ("completed", "completed"),
                            ("failed", "failed"),
                        ],
                        max_length=16,
                    ),
                ),
                ("version", models.BigIntegerField(default=1)),
                ("step_count", models.BigIntegerField(default=0)),
                ("resume_count", models.BigIntegerField(default=0)),
                ("message_count", models.BigIntegerField(default=0)),
                ("failure_reason", models.TextField(blank=True, null=True)),
                ("user_id", IdentifierField(blank=True, max_length=255, null=True)),
                ("tags", models.JSONField(blank=True, default=list)),
                ("metadata", models.JSONField(blank=True, default=dict)),
                ("title", models.TextField(blank=True, null=True)),
                ("workspace_id", IdentifierField(blank=True, max_length=255, null=True)),
                ("directory", models.TextField(blank=True, default="")),
                ("parent_session_id", IdentifierField(blank=True, max_length=255, null=True)),
                ("stream_id", IdentifierField(blank=True, max_length=255, null=True)),
                ("created_at", models.DateTimeField()),
                ("updated_at", models.DateTimeField()),
                (
                    "current",
                    models.ForeignKey(
                        db_constraint=False,
                        db_index=False,
                        editable=False,
                        null=True,
                        on_delete=models.DO_NOTHING,
                        related_name="+",
                        to="helix_store.checkpoint",
                    ),
                ),
                ("current_is_checkpoint", models.BooleanField(default=False, editable=False)),
            ],
            options={
                "db_table": table_name("session"),
            },
        ),
        migrations.CreateModel(
            name="Run",
            fields=[
                (
                    "id",
                    models.BigAutoField(
                        auto_created=True, primary_key=True, serialize=False, verbose_name="ID"
                    ),
                ),
                ("run_id", IdentifierField(max_length=255)),
                ("turn", models.BigIntegerField()),
                (
                    "status",
                    models.CharField(
                        choices=[
                            ("running", "running"),
                            ("completed", "completed"),
                            ("failed", "failed"),
                            ("interrupted", "interrupted"),
                            ("suspended_client_tool", "suspended_client_tool"),
                            ("suspended_awaiting_children", "suspended_awaiting_children"),
                            ("suspended_step_partial", "suspended_step_partial"),
                        ],
                        max_length=32,
                    ),
                ),
                ("step_count", models.BigIntegerField(default=0)),
                ("start_sequence", models.BigIntegerField(default=0)),
                ("fencing_token", models.BigIntegerField(blank=True, null=True)),
                ("error", PayloadField(blank=True, null=True)),
                ("started_at", models.DateTimeField()),
                ("ended_at", models.DateTimeField(blank=True, null=True)),
                (
                    "session",
                    models.ForeignKey(
                        db_index=False,
                        on_delete=models.CASCADE,
                        related_name="runs",
                        to="helix_store.session",
                    ),
                ),
            ],
            options={
                "db_table": table_name("run"),
            },
        ),
        migrations.CreateModel(
            name="Message",
            fields=[
                (
                    "id",
                    models.BigAutoField(
                        auto_created=True, primary_key=True, serialize=False, verbose_name="ID"
                    ),
                ),
                ("sequence", models.BigIntegerField()),
                ("role", IdentifierField(max_length=255)),
                ("payload", PayloadField()),
                ("created_at", models.DateTimeField()),
                (
                    "session",
                    models.ForeignKey(
                        db_constraint=False,
                        db_index=False,
                        on_delete=models.CASCADE,
                        related_name="messages",
                        to="helix_store.session",
                    ),
                ),
            ],
            options={
                "db_table": table_name("message"),
            },
        ),
        migrations.CreateModel(
            name="InterruptRequest",
            fields=[
                (
                    "id",
                    models.BigAutoField(
                        auto_created=True, primary_key=True, serialize=False, verbose_name="ID"
                    ),
                ),
                (
                    "kind",
                    models.CharField(choices=[("interrupt", "interrupt"), ("abort", "abort")], max_length=16),
                ),
                ("reason", models.TextField(blank=True, null=True)),
                ("run_id", IdentifierField(blank=True, max_length=255, null=True)),
                ("requested_at", models.DateTimeField()),
                (
                    "session",
                    models.OneToOneField(
                        on_delete=models.CASCADE, related_name="interrupt_request", to="helix_store.session"
                    ),
                ),
            ],
            options={
                "db_table": table_name("interrupt_request"),
            },
        ),
        migrations.AddField(
            model_name="checkpoint",
            name="session",
            field=models.ForeignKey(
                db_constraint=False,
                db_index=False,
                on_delete=models.CASCADE,
                related_name="checkpoints",
                to="helix_store.session",
            ),
        ),
        migrations.CreateModel(
            name="StagedChange",
            fields=[
                (
                    "id",
                    models.BigAutoField(
                        auto_created=True, primary_key=True, serialize=False, verbose_name="ID"
                    ),
                ),
                ("step_id", IdentifierField(max_length=255)),
                ("tool_call_id", IdentifierField(max_length=255)),
                ("payload", PayloadField()),
                ("created_at", models.DateTimeField()),
                (
                    "session",
                    models.ForeignKey(
                        db_constraint=False,
                        db_index=False,
                        on_delete=models.CASCADE,
                        related_name="staged_changes",
                        to="helix_store.session",
                    ),
                ),
            ],
            options={
                "db_table": table_name("staged_change"),
            },
        ),
        migrations.CreateModel(
            name="SubSessionRef",
            fields=[
                (
                    "id",
                    models.BigAutoField(
                        auto_created=True, primary_key=True, serialize=False, verbose_name="ID"
                    ),
                ),
                ("sub_session_id", IdentifierField(max_length=255)),
                ("agent_type", IdentifierField(max_length=255)),
                ("parent_tool_call_id", IdentifierField(blank=True, max_length=255, null=True)),
                ("status", IdentifierField(max_length=255)),
                ("output", PayloadField(blank=True, null=True)),
                ("error", PayloadField(blank=True, null=True)),
                ("created_at", models.DateTimeField()),
                ("updated_at", models.DateTimeField()),
                (
                    "session",
                    models.ForeignKey(
                        db_index=False,
                        on_delete=models.CASCADE,
                        related_name="sub_session_refs",
                        to="helix_store.session",
                    ),
                ),
            ],
            options={
                "db_table": table_name("sub_session_ref"),
            },
        ),
        migrations.CreateModel(
            name="UsageEntry",
            fields=[
                (
                    "id",
                    models.BigAutoField(
                        auto_created=True, primary_key=True, serialize=False, verbose_name="ID"
                    ),
                ),
                (
                    "session",
                    models.ForeignKey(
                        blank=True,
                        db_constraint=False,
                        db_index=False,
                        null=True,
                        on_delete=models.SET_NULL,
                        related_name="usage_entries",
                        to="helix_store.session",
                    ),
                ),
                ("timestamp", models.DateTimeField()),
                ("prompt_tokens", models.BigIntegerField(blank=True, null=True)),
                ("completion_tokens", models.BigIntegerField(blank=True, null=True)),
                ("reasoning_tokens", models.BigIntegerField(blank=True, null=True)),
                ("cached_tokens", models.BigIntegerField(blank=True, null=True)),
                ("total_tokens", models.BigIntegerField(blank=True, null=True)),
                ("duration_ms", models.BigIntegerField(blank=True, null=True)),
                ("cost_usd", CostField(blank=True, null=True)),
                ("amount", models.FloatField(blank=True, null=True)),
                ("success", models.BooleanField(blank=True, null=True)),
                (
                    "kind",
                    models.CharField(
                        choices=[
                            ("tokens", "tokens"),
                            ("tool", "tool"),
                            ("subagent", "subagent"),
                            ("custom", "custom"),
                        ],
                        max_length=16,
                    ),
                ),
                ("model", IdentifierField(blank=True, max_length=255, null=True)),
                ("tool_name", IdentifierField(blank=True, max_length=255, null=True)),
                ("agent_type", IdentifierField(blank=True, max_length=255, null=True)),
                ("custom_type", IdentifierField(blank=True, max_length=255, null=True)),
                ("custom_name", IdentifierField(blank=True, max_length=255, null=True)),
                ("tenant", IdentifierField(blank=True, default="", max_length=255)),
                ("entry_id", IdentifierField(max_length=255)),
                ("recorded_for", IdentifierField(max_length=255)),
                ("session_agent_type", IdentifierField(max_length=255)),
                ("user_id", IdentifierField(blank=True, max_length=255, null=True)),
                ("run_id", IdentifierField(blank=True, max_length=255, null=True)),
                ("step_count", models.BigIntegerField(default=0)),
                ("source_type", IdentifierField(max_length=255)),
                ("source_name", IdentifierField(max_length=255)),
                ("sub_session_id", IdentifierField(blank=True, max_length=255, null=True)),
                ("custom_unit", IdentifierField(blank=True, max_length=255, null=True)),
            ],
            options={
                "db_table": table_name("usage_entry"),
                "verbose_name_plural": "usage entries",
            },
        ),
        migrations.AddIndex(
            model_name="session",
            index=models.Index(
                fields=["tenant", "updated_at", "session_id"], name=constraint_name("session_updated_idx")
            ),
        ),
        migrations.AddIndex(
            model_name="session",
            index=models.Index(
                fields=["tenant", "created_at", "session_id"], name=constraint_name("session_created_idx")
            ),
        ),
        migrations.AddIndex(
            model_name="session",
            index=models.Index(
                fields=["tenant", "agent_type", "status", "updated_at", "session_id"],
                name=constraint_name("session_type_idx"),
            ),
        ),
        migrations.AddIndex(
            model_name="session",
            index=models.Index(
                fields=["tenant", "status", "updated_at", "session_id"],
                name=constraint_name("session_status_idx"),
            ),
        ),
        migrations.AddIndex(
            model_name="session",
            index=models.Index(
                condition=models.Q(("user_id__isnull", False)),
                fields=["tenant", "user_id", "updated_at", "session_id"],
                name=constraint_name("session_user_idx"),
            ),
        ),
        migrations.AddIndex(
            model_name="session",
            index=models.Index(
                condition=models.Q(("workspace_id__isnull", False)),
                fields=["tenant", "workspace_id", "updated_at", "session_id"],
                name=constraint_name("session_work_idx"),
            ),
        ),
        migrations.AddIndex(
            model_name="session",
            index=models.Index(
                fields=["tenant", "parent_session_id", "updated_at", "session_id"],
                name=constraint_name("session_parent_idx"),
            ),
        ),
        migrations.AddConstraint(
            model_name="session",
            constraint=models.UniqueConstraint(
                fields=("tenant", "session_id"), name=constraint_name("session_id_uniq")
            ),
        ),
        migrations.AddConstraint(
            model_name="session",
            constraint=models.CheckConstraint(
                condition=models.Q(
                    ("status__in", ["active", "running", "paused", "interrupted", "completed", "failed"])
                ),
                name=constraint_name("session_status_ck"),
            ),
        ),
        migrations.AddConstraint(
            model_name="run",
            constraint=models.UniqueConstraint(
                fields=("session", "run_id"), name=constraint_name("run_id_uniq")
            ),
        ),
        migrations.AddConstraint(
            model_name="run",
            constraint=models.UniqueConstraint(
                fields=("session", "turn"), name=constraint_name("run_turn_uniq")
            ),
        ),
        migrations.AddConstraint(
            model_name="run",
            constraint=models.UniqueConstraint(
                condition=models.Q(("status", "running")),
                fields=("session",),
                name=constraint_name("run_running_uniq"),
            ),
        ),
        migrations.AddConstraint(
            model_name="run",
            constraint=models.CheckConstraint(
                condition=models.Q(
                    (
                        "status__in",
                        [
                            "running",
                            "completed",
                            "failed",
                            "interrupted",
                            "suspended_client_tool",
                            "suspended_awaiting_children",
                            "suspended_step_partial",
                        ],
                    )
                ),
                name=constraint_name("run_status_ck"),
            ),
        ),
        migrations.AddConstraint(
            model_name="message",
            constraint=models.UniqueConstraint(
                fields=("session", "sequence"), name=constraint_name("message_seq_uniq")
            ),
        ),
        migrations.AddConstraint(
            model_name="interruptrequest",
            constraint=models.CheckConstraint(
                condition=models.Q(("kind__in", ["interrupt", "abort"])),
                name=constraint_name("interrupt_kind_ck"),
            ),
        ),
        migrations.AddConstraint(
            model_name="checkpoint",
            constraint=models.UniqueConstraint(
                fields=("session", "kind", "namespace", "version"),
                name=constraint_name("checkpoint_ver_uniq"),
            ),
        ),
        migrations.AddConstraint(
            model_name="checkpoint",
            constraint=models.UniqueConstraint(
                condition=models.Q(("checkpoint_id__isnull", False)),
                fields=("session", "checkpoint_id"),
                name=constraint_name("checkpoint_id_uniq"),
            ),
        ),
        migrations.AddConstraint(
            model_name="checkpoint",
            constraint=models.UniqueConstraint(
                condition=models.Q(("kind", "state")),
                fields=("session",),
                name=constraint_name("checkpoint_state_uniq"),
            ),
        ),
        migrations.AddConstraint(
            model_name="checkpoint",
            constraint=models.CheckConstraint(
                condition=models.Q(("kind__in", ["state", "step", "graph", "snapshot"])),
                name=constraint_name("checkpoint_kind_ck"),
            ),
        ),
        migrations.AddConstraint(
            model_name="checkpoint",
            constraint=models.CheckConstraint(
                condition=models.Q(("source__in", ["input", "loop", "interrupt", "fork", "step"])),
                name=constraint_name("checkpoint_source_ck"),
            ),
        ),
        migrations.AddConstraint(
            model_name="stagedchange",
            constraint=models.UniqueConstraint(
                fields=("session", "step_id", "tool_call_id"), name=constraint_name("staged_call_uniq")
            ),
        ),
        migrations.AddConstraint(
            model_name="subsessionref",
            constraint=models.UniqueConstraint(
                fields=("session", "sub_session_id"), name=constraint_name("sub_ref_uniq")
            ),
        ),
        migrations.AddIndex(
            model_name="usageentry",
            index=models.Index(
                fields=["session", "timestamp", "id"], name=constraint_name("usage_session_idx")
            ),
        ),
        migrations.AddIndex(
            model_name="usageentry",
            index=models.Index(
                condition=models.Q(("session__isnull", True)),
                fields=["tenant", "recorded_for", "timestamp", "id"],
                name=constraint_name("usage_kept_idx"),
            ),
        ),
        migrations.AddIndex(
            model_name="usageentry",
            index=models.Index(fields=["tenant", "timestamp", "id"], name=constraint_name("usage_time_idx")),
        ),
        migrations.AddIndex(
            model_name="usageentry",
            index=models.Index(
                condition=models.Q(("user_id__isnull", False)),
                fields=["tenant", "user_id", "timestamp", "id"],
                name=constraint_name("usage_user_idx"),
            ),
        ),
        migrations.AddConstraint(
            model_name="usageentry",
            constraint=models.UniqueConstraint(
                fields=("tenant", "entry_id"), name=constraint_name("usage_entry_uniq")
            ),
        ),
        migrations.AddConstraint(
            model_name="usageentry",
            constraint=models.CheckConstraint(
                condition=models.Q(("kind__in", ["tokens", "tool", "subagent", "custom"])),
                name=constraint_name("usage_kind_ck"),
            ),
        ),
        RefuseToLose("session"),
        RefuseToLose("usageentry"),
        RefuseToLose("lock", "expires_at"),
    ]
