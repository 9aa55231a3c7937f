"""Payloads compressed with lz4 on PostgreSQL servers that have it: many times faster than their default."""

from django.db import migrations

from helix_store.migrations._operations import compress_quickly


class Migration(migrations.Migration):
    dependencies = [("helix_store", "0011_checkpoint_deltas")]

    operations = [
        compress_quickly("checkpoint", "payload", "envelope"),
        compress_quickly("message", "payload"),
        compress_quickly("stagedchange", "payload"),
        compress_quickly("streamchunk", "payload"),
    ]
