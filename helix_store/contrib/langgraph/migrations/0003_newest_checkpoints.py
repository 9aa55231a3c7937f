from django.db import migrations, models

from helix_store.conf import constraint_name
from helix_store.migrations._operations import WholeMigration


class Migration(WholeMigration):
    dependencies = [("helix_store_langgraph", "0002_memories")]

    operations = [
        migrations.AddIndex(
            model_name="langgraphcheckpoint",
            index=models.Index(fields=["checkpoint_id", "id"], name=constraint_name("lg_newest_idx")),
        ),
    ]
