"""Cleanup of expired sessions and overdue tool calls."""

from helix_store.cleanup.run import (
    CleanupSummary,
    expired_session_cleanup,
    expired_session_cleanup_batches,
)

__all__ = ["CleanupSummary", "expired_session_cleanup", "expired_session_cleanup_batches"]
