"""An index of the few sessions that wait for a person, for the lists of the admin."""

from django.db import migrations, models
from django.db.models import Q

from helix_store.conf import constraint_name
from helix_store.migrations._whole import WholeMigration


class Migration(WholeMigration):
    dependencies = [("helix_store", "0016_sub_session_owners")]

    operations = [
        migrations.AddIndex(
            model_name="session",
            index=models.Index(
                fields=["tenant", "updated_at", "session_id"],
                condition=Q(
                    status__in=["active", "running", "paused", "interrupted"],
                    suspension_kind__in=["suspended_client_tool"],
                ),
                name=constraint_name("session_waiting_idx"),
            ),
        ),
    ]
