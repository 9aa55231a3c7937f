"""The pages of Django admin: every session, message, checkpoint and run, to read and never to write."""

from helix_store.admin.checkpoints import CheckpointAdmin
from helix_store.admin.locks import LockAdmin
from helix_store.admin.messages import MessageAdmin
from helix_store.admin.runs import RunAdmin
from helix_store.admin.sessions import SessionAdmin
from helix_store.admin.usage import UsageEntryAdmin

__all__ = [
    "CheckpointAdmin",
    "LockAdmin",
    "MessageAdmin",
    "RunAdmin",
    "SessionAdmin",
    "UsageEntryAdmin",
]
