"""PostgreSQL behind a proxy that can cut a connection."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.databases import CommittedDatabase
from tests.faults.wires import Wire, opened_wire


@pytest.fixture
def wire(postgres_db: CommittedDatabase) -> Iterator[Wire]:
    with opened_wire(postgres_db.alias, postgres_db.tenant) as opened:
        yield opened
