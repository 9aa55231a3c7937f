"""The catalogue: every table is declared once, and every operation on all tables iterates over it.

Export, import, branches, erasure, retention, cleanup, the doctor, row-level security, moves and the admin
read the facts they need from the declarations.
"""

from helix_store.catalogue.conversations import (
    Conversation,
    ConversationPage,
    ConversationStep,
    Outline,
    conversations,
    register_conversation,
)
from helix_store.catalogue.registry import (
    RECORD_KEY,
    UNIT_RECORDS,
    declared,
    register_table,
    registered_tables,
    tables,
)
from helix_store.catalogue.table import AppTable, Branch, Part, Table, copied_by

__all__ = [
    "RECORD_KEY",
    "UNIT_RECORDS",
    "AppTable",
    "Branch",
    "Conversation",
    "ConversationPage",
    "ConversationStep",
    "Outline",
    "Part",
    "Table",
    "conversations",
    "copied_by",
    "declared",
    "register_conversation",
    "register_table",
    "registered_tables",
    "tables",
]
