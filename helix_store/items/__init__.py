"""Items of a session in lanes: ordered, optionally with a key."""

from helix_store.items.log import ItemLog
from helix_store.items.rules import StoredItem

__all__ = ["ItemLog", "StoredItem"]
