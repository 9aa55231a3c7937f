from helix_store.migrations._operations import WholeMigration, add_constraints
from helix_store.models.constraints import index


class Migration(WholeMigration):
    dependencies = [("helix_store_langgraph", "0002_memories")]

    operations = [
        *add_constraints("langgraphcheckpoint", index("lg_newest_idx", ["checkpoint_id", "id"])),
    ]
