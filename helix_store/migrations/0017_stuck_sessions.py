"""What has stopped a session, and the indexes that find sessions which cannot go on."""

from __future__ import annotations

from typing import Any

from django.db import migrations, models
from django.db.models import Exists, OuterRef, Q, Subquery

from helix_store.migrations._operations import WholeMigration, add_constraints, add_fields
from helix_store.models.constraints import index
from helix_store.models.fields import MomentField

_NON_TERMINAL = ["active", "running", "paused", "interrupted"]
_ROWS = 500


def mark_stopped_sessions(apps: Any, schema_editor: Any) -> None:
    """Mark the sessions whose newest run has failed or was stopped by a budget."""
    alias = schema_editor.connection.alias
    sessions = apps.get_model("helix_store", "Session")._base_manager.using(alias)
    runs = apps.get_model("helix_store", "Run")._base_manager.using(alias)
    newest = runs.filter(session_id=OuterRef("pk")).order_by("-turn")
    stops = {
        "error": Q(status="failed"),
        "budget": Q(status="interrupted", completion_reason__startswith="budget:"),
    }
    for stopped_by, is_stopped in stops.items():
        later = runs.filter(session_id=OuterRef("session_id"), turn__gt=OuterRef("turn"))
        found = runs.filter(is_stopped, ~Exists(later), session__status__in=_NON_TERMINAL)
        page = found.order_by("pk").values_list("pk", "session_id")
        last = 0
        while rows := list(page.filter(pk__gt=last)[:_ROWS]):
            last = rows[-1][0]
            sessions.filter(pk__in=[key for _, key in rows]).update(
                stopped_by=stopped_by, stopped_at=Subquery(newest.values("ended_at")[:1])
            )


class Migration(WholeMigration):
    dependencies = [("helix_store", "0016_effects")]

    operations = [
        *add_fields(
            "session",
            stopped_by=models.CharField(blank=True, editable=False, max_length=16, null=True),
            stopped_at=MomentField(blank=True, editable=False, null=True),
        ),
        *add_constraints(
            "session",
            index(
                "session_stopped_idx",
                ["stopped_by", "stopped_at", "id"],
                where=Q(status__in=_NON_TERMINAL, stopped_by__isnull=False),
            ),
            index(
                "session_waits_idx",
                ["updated_at", "id"],
                where=Q(status__in=_NON_TERMINAL)
                & (Q(suspension_kind__in=["suspended_client_tool"]) | Q(waiting_kind__isnull=False)),
            ),
        ),
        *add_constraints("run", index("run_running_idx", ["started_at", "id"], where=Q(status="running"))),
        migrations.RunPython(mark_stopped_sessions, migrations.RunPython.noop, elidable=False),
    ]
