"""The store service: Django ORM, transactions and locks."""

from helix_store.stores.database.state_store import DatabaseStateStore

__all__ = ["DatabaseStateStore"]
