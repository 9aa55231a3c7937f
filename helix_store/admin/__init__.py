"""Read-only pages of Django admin."""

from helix_store.admin.checkpoints import CheckpointAdmin
from helix_store.admin.messages import MessageAdmin
from helix_store.admin.runs import RunAdmin
from helix_store.admin.sessions import SessionAdmin
from helix_store.admin.tables import LockAdmin, UsageEntryAdmin

__all__ = [
    "CheckpointAdmin",
    "LockAdmin",
    "MessageAdmin",
    "RunAdmin",
    "SessionAdmin",
    "UsageEntryAdmin",
]
