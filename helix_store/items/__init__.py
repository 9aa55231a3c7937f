"""Items of a session in lanes: ordered, optionally with a key."""

from helix_store.items.log import ItemLog
from helix_store.items.rules import Item

__all__ = ["Item", "ItemLog"]
