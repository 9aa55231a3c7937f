"""Retention of adapters' sessions, which stay active: by the policy of the example project."""

from __future__ import annotations

import pytest

from tests.cells import for_each
from tests.databases import CommittedDatabase
from tests.frameworks.retention import assert_deleted_thirty_days_after_the_last_write
from tests.frameworks.writes import WRITES, Write


@pytest.mark.thorough
@for_each("write", WRITES, ids=lambda write: write.__name__)
def test_an_adapters_session_is_deleted_thirty_days_after_its_last_write(
    empty_db: CommittedDatabase, write: Write
) -> None:
    assert_deleted_thirty_days_after_the_last_write(empty_db, lambda: write(empty_db, None))
