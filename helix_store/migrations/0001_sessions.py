"""Schema version 1: the base tables, constraints and indexes."""

from django.db import migrations, models
from django.db.models import Q

from helix_store.conf import table_name
from helix_store.migrations._operations import (
    RefuseToLose,
    WholeMigration,
    add_constraints,
    add_fields,
    checkpoint_key,
    choices,
    parent,
    surrogate_key,
)
from helix_store.models.constraints import index, one_of, unique
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
                ("id", surrogate_key()),
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
                        choices=choices("input", "loop", "interrupt", "fork", "step"), max_length=16
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
                ("id", surrogate_key()),
                ("tenant", IdentifierField(blank=True, default="", max_length=255)),
                ("name", IdentifierField(max_length=255)),
                ("owner", IdentifierField(blank=True, max_length=255, null=True)),
                ("token", models.BigIntegerField(default=0)),
                ("acquired_at", models.DateTimeField(blank=True, null=True)),
                ("expires_at", models.DateTimeField(blank=True, null=True)),
            ],
            options={
                "db_table": table_name("lock"),
                "constraints": [unique("lock_name_uniq", ["tenant", "name"])],
            },
        ),
        migrations.CreateModel(
            name="Session",
            fields=[
                ("id", surrogate_key()),
                ("tenant", IdentifierField(blank=True, default="", max_length=255)),
                ("session_id", IdentifierField(max_length=255)),
                ("agent_type", IdentifierField(max_length=255)),
                (
                    "status",
                    models.CharField(
                        choices=choices("active", "running", "paused", "interrupted", "completed", "failed"),
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
                ("current", checkpoint_key()),
                ("current_is_checkpoint", models.BooleanField(default=False, editable=False)),
            ],
            options={
                "db_table": table_name("session"),
            },
        ),
        migrations.CreateModel(
            name="Run",
            fields=[
                ("id", surrogate_key()),
                ("run_id", IdentifierField(max_length=255)),
                ("turn", models.BigIntegerField()),
                (
                    "status",
                    models.CharField(
                        choices=choices(
                            "running",
                            "completed",
                            "failed",
                            "interrupted",
                            "suspended_client_tool",
                            "suspended_awaiting_children",
                            "suspended_step_partial",
                        ),
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
                ("id", surrogate_key()),
                ("sequence", models.BigIntegerField()),
                ("role", IdentifierField(max_length=255)),
                ("payload", PayloadField()),
                ("created_at", models.DateTimeField()),
                ("session", parent("session", "messages")),
            ],
            options={
                "db_table": table_name("message"),
            },
        ),
        migrations.CreateModel(
            name="InterruptRequest",
            fields=[
                ("id", surrogate_key()),
                ("kind", models.CharField(choices=choices("interrupt", "abort"), max_length=16)),
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
        *add_fields("checkpoint", session=parent("session", "checkpoints")),
        migrations.CreateModel(
            name="StagedChange",
            fields=[
                ("id", surrogate_key()),
                ("step_id", IdentifierField(max_length=255)),
                ("tool_call_id", IdentifierField(max_length=255)),
                ("payload", PayloadField()),
                ("created_at", models.DateTimeField()),
                ("session", parent("session", "staged_changes")),
            ],
            options={
                "db_table": table_name("staged_change"),
            },
        ),
        migrations.CreateModel(
            name="SubSessionRef",
            fields=[
                ("id", surrogate_key()),
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
                ("id", surrogate_key()),
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
                    models.CharField(choices=choices("tokens", "tool", "subagent", "custom"), max_length=16),
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
        *add_constraints(
            "session",
            index("session_updated_idx", ["tenant", "updated_at", "session_id"]),
            index("session_created_idx", ["tenant", "created_at", "session_id"]),
            index("session_type_idx", ["tenant", "agent_type", "status", "updated_at", "session_id"]),
            index("session_status_idx", ["tenant", "status", "updated_at", "session_id"]),
            index(
                "session_user_idx",
                ["tenant", "user_id", "updated_at", "session_id"],
                where=Q(user_id__isnull=False),
            ),
            index(
                "session_work_idx",
                ["tenant", "workspace_id", "updated_at", "session_id"],
                where=Q(workspace_id__isnull=False),
            ),
            index("session_parent_idx", ["tenant", "parent_session_id", "updated_at", "session_id"]),
            unique("session_id_uniq", ["tenant", "session_id"]),
            one_of(
                "session_status_ck",
                "status",
                ["active", "running", "paused", "interrupted", "completed", "failed"],
            ),
        ),
        *add_constraints(
            "run",
            unique("run_id_uniq", ["session", "run_id"]),
            unique("run_turn_uniq", ["session", "turn"]),
            unique("run_running_uniq", ["session"], where=Q(status="running")),
            one_of(
                "run_status_ck",
                "status",
                [
                    "running",
                    "completed",
                    "failed",
                    "interrupted",
                    "suspended_client_tool",
                    "suspended_awaiting_children",
                    "suspended_step_partial",
                ],
            ),
        ),
        *add_constraints("message", unique("message_seq_uniq", ["session", "sequence"])),
        *add_constraints("interruptrequest", one_of("interrupt_kind_ck", "kind", ["interrupt", "abort"])),
        *add_constraints(
            "checkpoint",
            unique("checkpoint_ver_uniq", ["session", "kind", "namespace", "version"]),
            unique("checkpoint_id_uniq", ["session", "checkpoint_id"], where=Q(checkpoint_id__isnull=False)),
            unique("checkpoint_state_uniq", ["session"], where=Q(kind="state")),
            one_of("checkpoint_kind_ck", "kind", ["state", "step", "graph", "snapshot"]),
            one_of("checkpoint_source_ck", "source", ["input", "loop", "interrupt", "fork", "step"]),
        ),
        *add_constraints("stagedchange", unique("staged_call_uniq", ["session", "step_id", "tool_call_id"])),
        *add_constraints("subsessionref", unique("sub_ref_uniq", ["session", "sub_session_id"])),
        *add_constraints(
            "usageentry",
            index("usage_session_idx", ["session", "timestamp", "id"]),
            index(
                "usage_kept_idx", ["tenant", "recorded_for", "timestamp", "id"], where=Q(session__isnull=True)
            ),
            index("usage_time_idx", ["tenant", "timestamp", "id"]),
            index("usage_user_idx", ["tenant", "user_id", "timestamp", "id"], where=Q(user_id__isnull=False)),
            unique("usage_entry_uniq", ["tenant", "entry_id"]),
            one_of("usage_kind_ck", "kind", ["tokens", "tool", "subagent", "custom"]),
        ),
        RefuseToLose("session"),
        RefuseToLose("usageentry"),
        RefuseToLose("lock", "expires_at"),
    ]
