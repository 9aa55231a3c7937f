"""The pages of the Django admin. They read models, and only write by calling the public stores."""

from helix_store.admin.base import DatabaseSite, SessionChildAdmin, database_sites
from helix_store.admin.records import (
    CheckpointAdmin,
    ItemAdmin,
    LockAdmin,
    MessageAdmin,
    RunAdmin,
    StreamAdmin,
)
from helix_store.admin.sessions import SessionAdmin
from helix_store.admin.usage import BudgetAdmin, UsageEntryAdmin

__all__ = [
    "BudgetAdmin",
    "CheckpointAdmin",
    "DatabaseSite",
    "ItemAdmin",
    "LockAdmin",
    "MessageAdmin",
    "RunAdmin",
    "SessionAdmin",
    "SessionChildAdmin",
    "StreamAdmin",
    "UsageEntryAdmin",
    "database_sites",
]
