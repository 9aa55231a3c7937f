"""The building blocks of adapters, classes that keep the sessions of another framework in this store. They
are public so that adapters in other packages can use them.
"""

from helix_store.adapters.copying import copy_rows
from helix_store.adapters.ids import session_id_for
from helix_store.adapters.session import LockedSession, SessionAdapter
from helix_store.catalogue import (
    AppTable,
    Branch,
    Conversation,
    ConversationPage,
    ConversationStep,
    Outline,
    register_conversation,
    register_table,
    registered_tables,
)
from helix_store.core.transcript import ConversationMessage, Part
from helix_store.engine.database import Database
from helix_store.engine.statement import Statement

__all__ = [
    "AppTable",
    "Branch",
    "Conversation",
    "ConversationMessage",
    "ConversationPage",
    "ConversationStep",
    "Database",
    "LockedSession",
    "Outline",
    "Part",
    "SessionAdapter",
    "Statement",
    "copy_rows",
    "register_conversation",
    "register_table",
    "registered_tables",
    "session_id_for",
]
