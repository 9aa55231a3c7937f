"""The contract suite of locks."""

from __future__ import annotations

from tests.contract.test_locks_database import TestDatabaseLockManager

__all__ = ["TestDatabaseLockManager"]
