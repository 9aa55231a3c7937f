"""The base class of migrations, and operations that several of them use."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final

from django.db import migrations, models, router
from django.db.migrations.exceptions import IrreversibleError
from django.db.migrations.operations.base import Operation
from django.db.migrations.recorder import MigrationRecorder
from django.db.migrations.state import StateApps
from django.db.models import Q

_HOW_TO_REMOVE: Final = {
    "session": "Resume or finish these sessions, or delete them with delete_session().",
    "run": "Delete their sessions with delete_session().",
    "subsessionref": "Delete their sessions with delete_session().",
    "checkpoint": "Delete their threads with SnapshotCheckpointer.delete_threads().",
    "usageentry": "Delete them with DatabaseUsageStore.delete().",
    "budget": "Delete them with DatabaseBudgetStore.delete_budget().",
    "decision": "Delete their sessions with delete_session().",
    "effect": "Delete their sessions with delete_session().",
    "post": "Delete their sessions with delete_session().",
    "item": "Delete them with ItemLog.clear_all(), or their sessions with delete_session().",
    "lock": "Release these locks with force_release().",
    "operation": "Delete them with Operation.objects.all().delete() when no client repeats such a step.",
    "stream": "Delete them with delete_stream().",
}


class WholeMigration(migrations.Migration):
    """A migration that is recorded in the transaction that changes the schema, in both directions.

    Django records it in a second one if statements wait for the end of the first, such as those of an index,
    and always when it reverses the migration. A process that is killed in between leaves a schema that no
    later run of ``migrate`` can complete.
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


def choices(*values: str) -> list[tuple[str, str]]:
    """Return the choices of a field, which people see as they are stored."""
    return [(value, value) for value in values]


def surrogate_key() -> models.Field[Any, Any]:
    """Return the primary key of a table."""
    return models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name="ID")


def parent(model: str, children: str) -> models.Field[Any, Any]:
    """Return the key of the row that a row belongs to, without a constraint and an index of its own."""
    return models.ForeignKey(
        db_constraint=False,
        db_index=False,
        on_delete=models.CASCADE,
        related_name=children,
        to=f"helix_store.{model}",
    )


def checkpoint_key() -> models.Field[Any, Any]:
    """Return the key of a checkpoint that keeps its value if the checkpoint is deleted."""
    return models.ForeignKey(
        db_constraint=False,
        db_index=False,
        editable=False,
        null=True,
        on_delete=models.DO_NOTHING,
        related_name="+",
        to="helix_store.checkpoint",
    )


def add_constraints(model: str, *rules: models.Index | models.BaseConstraint) -> Iterator[Operation]:
    """Yield the operations that add indexes and constraints to a table."""
    for rule in rules:
        if isinstance(rule, models.Index):
            yield migrations.AddIndex(model_name=model, index=rule)
        else:
            yield migrations.AddConstraint(model_name=model, constraint=rule)


def add_fields(model: str, **fields: models.Field[Any, Any]) -> Iterator[Operation]:
    """Yield the operations that add columns to a table, in this order."""
    for name, field in fields.items():
        yield migrations.AddField(model_name=model, name=name, field=field)


class WithoutEffect(Operation):
    """An operation that changes neither the database nor the state; its subclasses do one thing."""

    reduces_to_sql = False

    def state_forwards(self, app_label: str, state: Any) -> None:
        pass

    def database_forwards(self, *args: Any) -> None:
        pass

    def database_backwards(self, *args: Any) -> None:
        pass


class RefuseToLose(WithoutEffect):
    """An operation that cannot be reversed while the table has rows, or rows with one of the columns.

    It is the last operation of its migration, so it comes first when the migration is reversed. Before
    ``migrate`` reverses the first migration, it asks all such operations in the plan.
    """

    def __init__(self, model_name: str, *columns: str, remove: str | None = None) -> None:
        self.model_name = model_name
        self.columns = columns
        self.remove = remove or _HOW_TO_REMOVE[model_name]

    def loss(self, apps: StateApps, app_label: str, alias: str) -> str | None:
        """Return a message that names the rows that reversing would delete, or ``None``."""
        model = apps.get_model(app_label, self.model_name)
        if not router.allow_migrate_model(alias, model):
            return None
        names = {field.name for field in model._meta.get_fields()}
        if self.columns and not names.issuperset(self.columns):
            # A later migration has moved these values, and refuses to lose them.
            return None
        holds_a_value = Q()
        for column in self.columns:
            holds_a_value |= Q(**{f"{column}__isnull": False})
        count = model._base_manager.using(alias).filter(holds_a_value).count()
        if not count:
            return None
        columns = f" with {' or '.join(self.columns)}" if self.columns else ""
        return f"Rows of {self.model_name}{columns}: {count}. {self.remove}"

    def database_backwards(self, app_label: str, schema_editor: Any, from_state: Any, to_state: Any) -> None:
        if loss := self.loss(from_state.apps, app_label, schema_editor.connection.alias):
            raise IrreversibleError(f"Going back would delete data. {loss}")

    def describe(self) -> str:
        return f"Refuse to go back while rows of {self.model_name} would be lost"


def compress_quickly(model_name: str, *columns: str) -> migrations.RunPython:
    """Return an operation that sets lz4 compression for text columns, if the PostgreSQL server supports it.

    It applies to values written later. Reversing it restores the default of the server.
    """

    def compress(method: str) -> Callable[[Any, Any], None]:
        def alter(apps: Any, schema_editor: Any) -> None:
            if not _has_lz4(schema_editor.connection):
                return
            table = _quoted_table(apps, schema_editor, model_name)
            for column in map(schema_editor.quote_name, columns):
                schema_editor.execute(f"ALTER TABLE {table} ALTER COLUMN {column} SET COMPRESSION {method}")

        return alter

    return migrations.RunPython(compress("lz4"), compress("DEFAULT"), elidable=False)


def index_documents(model_name: str, column: str, *, name: str, empty: str) -> migrations.RunPython:
    """Return an operation that creates a GIN index for JSON containment on PostgreSQL. It is not declared in
    a model.

    Documents equal to ``empty`` are left out, so they add no cost to writes. Each search reads the pending
    list of new entries, so the list is kept small.
    """

    def create(apps: Any, schema_editor: Any) -> None:
        if schema_editor.connection.vendor != "postgresql":
            return
        quote = schema_editor.quote_name
        table = _quoted_table(apps, schema_editor, model_name)
        schema_editor.execute(
            f"CREATE INDEX {quote(name)} ON {table} USING gin ({quote(column)} jsonb_path_ops) "
            f"WITH (gin_pending_list_limit = 64) WHERE {quote(column)} <> '{empty}'::jsonb"
        )

    def drop(apps: Any, schema_editor: Any) -> None:
        if schema_editor.connection.vendor == "postgresql":
            schema_editor.execute(f"DROP INDEX {schema_editor.quote_name(name)}")

    return migrations.RunPython(create, drop, elidable=False)


def keep_pages(model_name: str) -> migrations.RunPython:
    """Return an operation that stops PostgreSQL from truncating a table's empty pages, which locks the table.

    After a truncation, PostgreSQL plans sequential scans, as for a small table, until the next vacuum, even
    if the table has grown.
    """

    def alter(change: str) -> Callable[[Any, Any], None]:
        def run(apps: Any, schema_editor: Any) -> None:
            if schema_editor.connection.vendor == "postgresql":
                table = _quoted_table(apps, schema_editor, model_name)
                schema_editor.execute(f"ALTER TABLE {table} {change}")

        return run

    return migrations.RunPython(
        alter("SET (vacuum_truncate = false)"), alter("RESET (vacuum_truncate)"), elidable=False
    )


def _quoted_table(apps: Any, schema_editor: Any, model_name: str) -> Any:
    return schema_editor.quote_name(apps.get_model("helix_store", model_name)._meta.db_table)


def _has_lz4(connection: Any) -> bool:
    if connection.vendor != "postgresql":
        return False
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT EXISTS (SELECT 1 FROM pg_settings "
            "WHERE name = 'default_toast_compression' AND 'lz4' = ANY(enumvals))"
        )
        (has_lz4,) = cursor.fetchone()
    return bool(has_lz4)
