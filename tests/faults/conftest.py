"""PostgreSQL behind a proxy that can cut a connection."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from django.db import connections

from tests.databases import CommittedDatabase
from tests.faults.proxy import FaultyProxy, faulty_proxy
from tests.pooler import Address

MARKER = b"cpv1-"
"""In the parameters of a step: its checkpoint id."""


@dataclass(frozen=True)
class Wire:
    """A database that is reached through a proxy."""

    alias: str
    tenant: str
    proxy: FaultyProxy


@pytest.fixture
def wire(postgres_db: CommittedDatabase) -> Iterator[Wire]:
    settings = connections[postgres_db.alias].settings_dict
    alias = f"wire-{uuid.uuid4().hex}"
    with faulty_proxy(Address.of(postgres_db.connection), marker=MARKER) as proxy:
        address = {"HOST": "127.0.0.1", "PORT": str(proxy.port)}
        options = {**settings["OPTIONS"], "sslmode": "disable", "gssencmode": "disable"}
        # Not an open connection: each thread makes its own.
        connections.settings[alias] = {**settings, **address, "OPTIONS": options}
        try:
            yield Wire(alias, postgres_db.tenant, proxy)
        finally:
            connections[alias].close()
            del connections[alias]
            del connections.settings[alias]
