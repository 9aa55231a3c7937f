"""The contract suite of usage."""

from __future__ import annotations

from tests.contract.test_usage_database import TestDatabaseUsageStore

__all__ = ["TestDatabaseUsageStore"]
