"""Public import path of `merge_changes`."""

from helix_store.core.patches import merge_changes

__all__ = ["merge_changes"]
