"""PostgreSQL behind a proxy that can cut a connection."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from django.db import connections

from tests.databases import close_connections
from tests.faults.proxy import FaultyProxy, faulty_proxy
from tests.pooler import Address
from tests.streams.background import wait_for_background_threads

__all__ = ["Wire", "opened_wire"]


@dataclass(frozen=True)
class Wire:
    """A database that is reached through a proxy; ``direct`` is the alias without it."""

    alias: str
    direct: str
    tenant: str
    proxy: FaultyProxy


@contextmanager
def opened_wire(direct: str, tenant: str) -> Iterator[Wire]:
    settings = connections[direct].settings_dict
    alias = f"wire-{uuid.uuid4().hex}"
    with faulty_proxy(Address.of(connections[direct])) as proxy:
        address = {"HOST": "127.0.0.1", "PORT": str(proxy.port)}
        options = {**settings["OPTIONS"], "sslmode": "disable", "gssencmode": "disable"}
        # Not an open connection: each thread makes its own.
        connections.settings[alias] = {**settings, **address, "OPTIONS": options}
        try:
            yield Wire(alias, direct, tenant, proxy)
        finally:
            # Those of readers close their own connections while the settings name them.
            wait_for_background_threads(alias)
            close_connections()
            del connections[alias]
            del connections.settings[alias]
