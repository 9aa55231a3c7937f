"""PostgreSQL in both forms of a write, and behind a proxy that can cut a connection."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from django.test import override_settings

from tests.databases import CommittedDatabase
from tests.faults.wires import Wire, opened_wire


@pytest.fixture(params=[True, False], ids=["one statement", "portable"])
def postgres_forms(
    request: pytest.FixtureRequest, postgres_db: CommittedDatabase
) -> Iterator[CommittedDatabase]:
    """PostgreSQL, once with the writes in one statement and once with their portable form."""
    with override_settings(HELIX_STORE={"FAST_PATHS": request.param}):
        yield postgres_db


@pytest.fixture
def wire(postgres_db: CommittedDatabase) -> Iterator[Wire]:
    with opened_wire(postgres_db.alias, postgres_db.tenant) as opened:
        yield opened
