"""Migrations that a killed process leaves either complete or not started."""

from __future__ import annotations

from typing import Any

from django.db import migrations
from django.db.migrations.recorder import MigrationRecorder

__all__ = ["WholeMigration"]


class WholeMigration(migrations.Migration):
    """A migration that is recorded in the transaction that changes the schema, in both directions.

    Django records it in a second one when statements wait for the end of the first, such as those of an
    index, and always backwards. A process that is killed in between leaves a schema that no later run of
    ``migrate`` can complete.
    """

    def apply(self, project_state: Any, schema_editor: Any, collect_sql: bool = False) -> Any:
        state = super().apply(project_state, schema_editor, collect_sql)
        for statement in schema_editor.deferred_sql:
            schema_editor.execute(statement, None)
        # If no statement waits, Django records the migration before the commit.
        schema_editor.deferred_sql.clear()
        return state

    def unapply(self, project_state: Any, schema_editor: Any, collect_sql: bool = False) -> Any:
        state = super().unapply(project_state, schema_editor, collect_sql)
        if not collect_sql:
            # Django does it again after the commit, which then changes nothing.
            recorder = MigrationRecorder(schema_editor.connection)
            for app_label, name in [*self.replaces, (self.app_label, self.name)]:
                recorder.record_unapplied(app_label, name)
        return state
