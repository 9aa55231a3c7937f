"""What an adapter is built with: a class that keeps the sessions of another framework in this store.

Public, also for adapters of other packages.
"""

from helix_store.adapters.copying import copy_rows
from helix_store.adapters.ids import session_id_for
from helix_store.adapters.session import LockedSession, SessionAdapter
from helix_store.app_tables import AppTable, Branch, register_table, registered_tables
from helix_store.engine.database import Database
from helix_store.engine.statement import Statement

__all__ = [
    "AppTable",
    "Branch",
    "Database",
    "LockedSession",
    "SessionAdapter",
    "Statement",
    "copy_rows",
    "register_table",
    "registered_tables",
    "session_id_for",
]
