"""Steps with an operation id: a repeat returns the first result, also after its checkpoint was pruned."""

from django.db import migrations, models

from helix_store.conf import constraint_name, table_name
from helix_store.migrations._operations import RefuseToLose
from helix_store.migrations._whole import WholeMigration
from helix_store.models.fields import IdentifierField


class Migration(WholeMigration):
    dependencies = [("helix_store", "0007_suspension_context")]

    operations = [
        migrations.CreateModel(
            name="Operation",
            fields=[
                (
                    "id",
                    models.BigAutoField(
                        auto_created=True, primary_key=True, serialize=False, verbose_name="ID"
                    ),
                ),
                ("operation_id", IdentifierField(max_length=255)),
                ("digest", models.CharField(max_length=64)),
                ("checkpoint_id", models.CharField(max_length=320)),
                ("version", models.BigIntegerField()),
                ("created_at", models.DateTimeField()),
                (
                    "session",
                    models.ForeignKey(
                        db_constraint=False,
                        db_index=False,
                        on_delete=models.CASCADE,
                        related_name="operations",
                        to="helix_store.session",
                    ),
                ),
            ],
            options={
                "db_table": table_name("operation"),
            },
        ),
        migrations.AddConstraint(
            model_name="operation",
            constraint=models.UniqueConstraint(
                fields=("session", "operation_id"), name=constraint_name("operation_id_uniq")
            ),
        ),
        RefuseToLose("operation"),
    ]
