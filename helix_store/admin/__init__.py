"""The pages of the Django admin. They read models, and only write by calling the public stores."""

from helix_store.admin.base import SessionChildAdmin
from helix_store.admin.budgets import BudgetAdmin
from helix_store.admin.checkpoints import CheckpointAdmin
from helix_store.admin.databases import DatabaseSite, database_sites
from helix_store.admin.locks import LockAdmin
from helix_store.admin.messages import ItemAdmin, MessageAdmin
from helix_store.admin.runs import RunAdmin
from helix_store.admin.sessions import SessionAdmin
from helix_store.admin.streams import StreamAdmin
from helix_store.admin.usage import UsageEntryAdmin

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
