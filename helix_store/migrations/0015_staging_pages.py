"""Staged changes come and go: PostgreSQL keeps the pages of their table."""

from helix_store.migrations._operations import keep_pages
from helix_store.migrations._whole import WholeMigration


class Migration(WholeMigration):
    dependencies = [("helix_store", "0014_agent_type_lists")]

    operations = [keep_pages("stagedchange")]
