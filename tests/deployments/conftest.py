"""PostgreSQL behind a pooler in transaction mode."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Final

import pytest
from django.db import connections

from tests.databases import CommittedDatabase
from tests.deployments.deployments import Pooler, another_alias, socket_of
from tests.pooler import PGBOUNCER, Address, pgbouncer, transaction_pooler

__all__ = ["PooledAlias"]

PooledAlias = Callable[..., AbstractContextManager[str]]
"""With the settings that differ from those of the direct alias."""

_POOLERS: Final[dict[str, Pooler]] = {
    "pooler of the tests": transaction_pooler,
    "pgbouncer": partial(pgbouncer, options={"ignore_startup_parameters": "options"}),
}


@pytest.fixture(params=list(_POOLERS))
def pooled_alias(request: pytest.FixtureRequest, postgres_db: CommittedDatabase) -> Iterator[PooledAlias]:
    """Make an alias that reaches the database through a pooler, beside the direct alias."""
    if request.param == "pgbouncer" and PGBOUNCER is None:
        pytest.skip("pgbouncer is not installed")
    if socket_of(postgres_db.alias) is None:
        pytest.skip("the server of DATABASE_URL is not reached through a socket that trusts")
    with _POOLERS[request.param](Address.of(postgres_db.connection), 4) as port:
        direct: dict[str, Any] = connections.settings[postgres_db.alias]

        def pooled(**changes: Any) -> AbstractContextManager[str]:
            return another_alias("pooled", **{**direct, "HOST": "127.0.0.1", "PORT": port, **changes})

        yield pooled
