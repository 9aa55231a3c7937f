import django.db.models.deletion
from django.db import migrations, models

from helix_store.models.fields import IdentifierField, PayloadField


class Migration(migrations.Migration):
    initial = True

    dependencies = [("helix_store", "0001_sessions")]

    operations = [
        migrations.CreateModel(
            name="Attachment",
            fields=[
                (
                    "id",
                    models.BigAutoField(
                        auto_created=True, primary_key=True, serialize=False, verbose_name="ID"
                    ),
                ),
                ("tenant", IdentifierField(blank=True, default="", max_length=255)),
                ("digest", models.CharField(max_length=64)),
                ("content", models.BinaryField()),
            ],
            options={
                "constraints": [
                    models.UniqueConstraint(fields=["tenant", "digest"], name="notebook_attachment_uniq")
                ],
            },
        ),
        migrations.CreateModel(
            name="Page",
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
                        db_constraint=False,
                        db_index=False,
                        on_delete=django.db.models.deletion.CASCADE,
                        related_name="+",
                        to="helix_store.session",
                    ),
                ),
                ("name", IdentifierField(max_length=255)),
                ("content", PayloadField()),
                ("attachment", IdentifierField(max_length=255, null=True)),
                ("written_at", models.DateTimeField()),
            ],
            options={
                "constraints": [
                    models.UniqueConstraint(fields=["session", "name"], name="notebook_page_uniq")
                ],
            },
        ),
    ]
