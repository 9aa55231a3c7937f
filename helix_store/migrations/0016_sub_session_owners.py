"""Indexes to find what names a sub-session: retention and erasure ask for it."""

from django.db import migrations, models
from django.db.models import Q

from helix_store.conf import constraint_name
from helix_store.migrations._whole import WholeMigration


class Migration(WholeMigration):
    dependencies = [("helix_store", "0015_staging_pages")]

    operations = [
        migrations.AddIndex(
            model_name="subsessionref",
            index=models.Index(fields=["sub_session_id"], name=constraint_name("sub_ref_owner_idx")),
        ),
        migrations.AddIndex(
            model_name="usageentry",
            index=models.Index(
                condition=Q(sub_session_id__isnull=False),
                fields=["tenant", "sub_session_id"],
                name=constraint_name("usage_sub_idx"),
            ),
        ),
    ]
