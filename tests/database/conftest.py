"""A store in both of its forms, and a connection beside the one it uses."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from django.db.backends.base.base import BaseDatabaseWrapper
from django.test import override_settings

from helix_store.stores import DatabaseStateStore
from tests.database.separate import separate_connection
from tests.databases import CommittedDatabase


@pytest.fixture(params=[True, False], ids=["fast", "portable"])
def store(request: pytest.FixtureRequest, postgres_db: CommittedDatabase) -> Iterator[DatabaseStateStore]:
    with override_settings(HELIX_STORE={"FAST_PATHS": request.param}):
        yield DatabaseStateStore(postgres_db.alias, tenant=postgres_db.tenant)


@pytest.fixture
def other(postgres_db: CommittedDatabase) -> Iterator[BaseDatabaseWrapper]:
    with separate_connection(**postgres_db.connection.settings_dict) as connection:
        connection.ensure_connection()
        yield connection
