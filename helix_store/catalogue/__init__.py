"""The catalogue: every table is declared once, and every operation on all tables iterates over it.

Export, import, branches, erasure, retention, cleanup, the doctor, row-level security, moves and the admin
read the facts they need from the declarations.
"""

from helix_store.catalogue.table import (
    MOVED_CHANGES,
    MOVED_TENANTS,
    RECORD_KEY,
    TRANSIENT_TABLES,
    UNIT_RECORDS,
    AppTable,
    Branch,
    Conversation,
    ConversationPage,
    ConversationStep,
    Outline,
    Part,
    Table,
    TransientTable,
    conversations,
    copied_by,
    declared,
    other_references,
    register_conversation,
    register_table,
    registered_tables,
    tables,
)

__all__ = [
    "MOVED_CHANGES",
    "MOVED_TENANTS",
    "RECORD_KEY",
    "TRANSIENT_TABLES",
    "UNIT_RECORDS",
    "AppTable",
    "Branch",
    "Conversation",
    "ConversationPage",
    "ConversationStep",
    "Outline",
    "Part",
    "Table",
    "TransientTable",
    "conversations",
    "copied_by",
    "declared",
    "other_references",
    "register_conversation",
    "register_table",
    "registered_tables",
    "tables",
]
