"""PostgreSQL in both forms of a write."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from django.test import override_settings

from tests.databases import CommittedDatabase


@pytest.fixture(params=[True, False], ids=["one statement", "portable"])
def postgres_forms(
    request: pytest.FixtureRequest, postgres_db: CommittedDatabase
) -> Iterator[CommittedDatabase]:
    """PostgreSQL, once with the writes in one statement and once with their portable form."""
    with override_settings(HELIX_STORE={"FAST_PATHS": request.param}):
        yield postgres_db
