"""Retention: the public path of `helix_store.cleanup.retention` and `helix_store.streams.database`."""

from helix_store.cleanup.retention import RetentionSummary, apply_retention
from helix_store.core.types import RetentionPolicy
from helix_store.streams.database import prune_streams

__all__ = ["RetentionPolicy", "RetentionSummary", "apply_retention", "prune_streams"]
