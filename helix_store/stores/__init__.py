"""The public stores."""

from helix_store.stores.database import DatabaseStateStore

__all__ = ["DatabaseStateStore"]
