"""Pruning of streams; a door to `helix_store.streams.retention`."""

from helix_store.streams.retention import prune_streams

__all__ = ["prune_streams"]
