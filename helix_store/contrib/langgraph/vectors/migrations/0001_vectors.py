from typing import Any

from django.db import migrations, models

from helix_store.conf import constraint_name, table_name
from helix_store.contrib.langgraph.vectors.models import VectorField
from helix_store.migrations._operations import WholeMigration, surrogate_key
from helix_store.models.constraints import unique
from helix_store.models.fields import IdentifierField, LongIdentifierField


def create_extension(apps: Any, schema_editor: Any) -> None:
    if schema_editor.connection.vendor == "postgresql":
        # Only a superuser may create it, so it may already exist.
        with schema_editor.connection.cursor() as cursor:
            cursor.execute("SELECT 1 FROM pg_extension WHERE extname = 'vector'")
            if cursor.fetchone() is None:
                schema_editor.execute("CREATE EXTENSION vector")


def delete_with_memories(apps: Any, schema_editor: Any) -> None:
    quote = schema_editor.quote_name
    vectors, memories = quote(table_name("lg_vector")), quote(table_name("lg_memory"))
    name = quote(constraint_name("lg_vector_memory"))
    if schema_editor.connection.vendor == "postgresql":
        schema_editor.execute(
            f"ALTER TABLE {vectors} ADD CONSTRAINT {name} FOREIGN KEY (tenant, namespace, key) "
            f"REFERENCES {memories} (tenant, namespace, key) ON DELETE CASCADE"
        )
    else:
        # SQLite cannot add a foreign key of several columns to a table.
        schema_editor.execute(
            f"CREATE TRIGGER {name} AFTER DELETE ON {memories} BEGIN DELETE FROM {vectors} "
            "WHERE tenant = OLD.tenant AND namespace = OLD.namespace AND key = OLD.key; END"
        )


def keep_without_memories(apps: Any, schema_editor: Any) -> None:
    if schema_editor.connection.vendor == "sqlite":
        schema_editor.execute(f"DROP TRIGGER {schema_editor.quote_name(constraint_name('lg_vector_memory'))}")


class Migration(WholeMigration):
    dependencies = [("helix_store_langgraph", "0002_memories")]

    operations = [
        migrations.RunPython(create_extension, migrations.RunPython.noop, elidable=False),
        migrations.CreateModel(
            name="LangGraphVector",
            fields=[
                ("id", surrogate_key()),
                ("tenant", IdentifierField(blank=True, default="", max_length=255)),
                ("namespace", IdentifierField(max_length=1024)),
                ("key", IdentifierField(blank=True, max_length=765)),
                ("path", LongIdentifierField()),
                ("written_at", models.DateTimeField()),
                ("embedding", VectorField()),
            ],
            options={
                "verbose_name": "LangGraph vector",
                "verbose_name_plural": "LangGraph vectors",
                "db_table": table_name("lg_vector"),
                "constraints": [
                    unique("lg_vector_uniq", ["tenant", "namespace", "key", "path"]),
                ],
            },
        ),
        migrations.RunPython(delete_with_memories, keep_without_memories, elidable=False),
    ]
