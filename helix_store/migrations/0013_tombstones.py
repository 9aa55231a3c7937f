"""Tombstones of erased sessions."""

from django.db import migrations, models

from helix_store.conf import table_name
from helix_store.migrations._operations import WholeMigration, surrogate_key
from helix_store.models.constraints import index, unique
from helix_store.models.fields import IdentifierField, MomentField


class Migration(WholeMigration):
    dependencies = [("helix_store", "0012_decisions")]

    operations = [
        migrations.CreateModel(
            name="Tombstone",
            fields=[
                ("id", surrogate_key()),
                ("tenant", IdentifierField(blank=True, default="")),
                ("digest", models.CharField(max_length=64)),
                ("erased_at", MomentField()),
            ],
            options={
                "db_table": table_name("tombstone"),
                "verbose_name": "tombstone",
                "verbose_name_plural": "tombstones",
                "constraints": [unique("tombstone_digest_uniq", ["tenant", "digest"])],
                "indexes": [index("tombstone_erased_idx", ["tenant", "erased_at"])],
            },
        ),
    ]
