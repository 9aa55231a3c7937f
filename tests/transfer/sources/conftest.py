"""Databases of the two other stores, each in a schema of its own on the server of the tests."""

from __future__ import annotations

import uuid
from collections.abc import Iterator

import pytest
from psycopg.conninfo import make_conninfo

from tests.transfer.sources.origins import ObskuTables, ZiroTable, server_address


@pytest.fixture
def server(django_db_setup: None) -> str:
    """The connection string of a PostgreSQL database."""
    return make_conninfo(**server_address())


@pytest.fixture
def schema() -> str:
    return f"origin_{uuid.uuid4().hex}"


@pytest.fixture
def obsku(server: str, schema: str) -> Iterator[ObskuTables]:
    tables = ObskuTables(server, schema)
    yield tables
    tables.drop()


@pytest.fixture
def ziro(server: str, schema: str) -> Iterator[ZiroTable]:
    table = ZiroTable(server, schema)
    yield table
    table.drop()
