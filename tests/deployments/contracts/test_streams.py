"""The contract suite of streams."""

from __future__ import annotations

from tests.contract.test_streams_database import TestDatabaseStreamManager

__all__ = ["TestDatabaseStreamManager"]
