"""Pruning of streams; the public path of `helix_store.streams.pruning.prune_streams`."""

from helix_store.streams.pruning import prune_streams

__all__ = ["prune_streams"]
