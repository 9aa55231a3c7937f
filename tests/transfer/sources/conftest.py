"""Databases of the two other stores, each in a schema of its own on the server of the tests."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from urllib.parse import urlencode

import pytest
from django.db import connections

from tests.databases import ALIASES
from tests.transfer.sources.origins import ObskuTables, ZiroTable


@pytest.fixture
def server(django_db_setup: None) -> str:
    """The connection string of a PostgreSQL database."""
    if "postgres" not in ALIASES:
        pytest.skip("HELIX_TEST_DATABASES leaves PostgreSQL out of this run, and the stores to read need it")
    settings = connections[ALIASES["postgres"]].settings_dict
    options = settings["OPTIONS"]
    names = {"user": "USER", "password": "PASSWORD", "dbname": "NAME", "host": "HOST", "port": "PORT"}
    address = {name: options.get(name) or settings[key] for name, key in names.items()}
    return "postgresql://?" + urlencode({name: value for name, value in address.items() if value}, safe="/")


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
