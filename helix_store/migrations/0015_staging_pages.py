"""Staged changes come and go: PostgreSQL keeps the pages of their table."""

from django.db import migrations

from helix_store.migrations._operations import keep_pages


class Migration(migrations.Migration):
    dependencies = [("helix_store", "0014_agent_type_lists")]

    operations = [keep_pages("stagedchange")]
