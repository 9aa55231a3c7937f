"""Cleanup of expired sessions and overdue tool calls, and erasure of users, sessions and tenants.

Retention has its own public path: `helix_store.retention`.
"""

from helix_store.cleanup.erasure import erase
from helix_store.cleanup.expiry import expired_session_cleanup, expired_session_cleanup_batches
from helix_store.cleanup.workspaces import CleanupDetails, CleanupSummary, ErasureReceipt

__all__ = [
    "CleanupDetails",
    "CleanupSummary",
    "ErasureReceipt",
    "erase",
    "expired_session_cleanup",
    "expired_session_cleanup_batches",
]
