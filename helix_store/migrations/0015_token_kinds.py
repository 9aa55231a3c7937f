"""Counts of tokens that have a price of their own: tokens written to a cache, and tokens of audio."""

from django.db import models

from helix_store.migrations._operations import RefuseToLose, WholeMigration, add_fields


class Migration(WholeMigration):
    dependencies = [("helix_store", "0014_leftovers_of_moves")]

    operations = [
        *add_fields(
            "usageentry",
            cache_write_tokens=models.BigIntegerField(blank=True, null=True),
            audio_prompt_tokens=models.BigIntegerField(blank=True, null=True),
            audio_completion_tokens=models.BigIntegerField(blank=True, null=True),
        ),
        RefuseToLose("usageentry", "cache_write_tokens", "audio_prompt_tokens", "audio_completion_tokens"),
    ]
