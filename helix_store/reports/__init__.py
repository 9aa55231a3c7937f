"""Reports: the data that an interface shows about a session, read once and rendered as HTML, text or JSON.

This is also the public path of operators' reports across tenants.
"""

from helix_store.reports.conversations import ItemConversation, Said
from helix_store.stores.directory import SessionDirectory
from helix_store.streams.database import list_streams
from helix_store.usage.store import usage_report

__all__ = ["ItemConversation", "Said", "SessionDirectory", "list_streams", "usage_report"]
