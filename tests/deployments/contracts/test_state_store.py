"""The contract suite of the state store."""

from __future__ import annotations

from tests.contract.test_database import TestDatabaseStateStore

__all__ = ["TestDatabaseStateStore"]
