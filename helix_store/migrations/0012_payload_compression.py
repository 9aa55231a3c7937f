"""Payloads compressed with lz4 on PostgreSQL servers that have it: many times faster than their default."""

from helix_store.migrations._operations import compress_quickly
from helix_store.migrations._whole import WholeMigration


class Migration(WholeMigration):
    dependencies = [("helix_store", "0011_checkpoint_deltas")]

    operations = [
        compress_quickly("checkpoint", "payload", "envelope"),
        compress_quickly("message", "payload"),
        compress_quickly("stagedchange", "payload"),
        compress_quickly("streamchunk", "payload"),
    ]
