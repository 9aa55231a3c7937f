"""The contract suites examine their databases once a module."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Final

import pytest
from pytest_django import DjangoDbBlocker

from tests.databases import CommittedDatabase, fresh_tenant
from tests.invariants import broken_in_database

Examined = defaultdict[str, dict[str, str]]
"""By alias: the tenants of tests, each with the name of its test."""

_TENANT_LENGTH: Final = len(fresh_tenant())
"""The tests of a suite add names of their own to the tenant."""


@pytest.fixture(scope="module")
def examined(django_db_setup: None, django_db_blocker: DjangoDbBlocker) -> Iterator[Examined]:
    examined: Examined = defaultdict(dict)
    yield examined
    with django_db_blocker.unblock():
        broken = [
            f"{tests[tenant[:_TENANT_LENGTH]]}: {fault}"
            for alias, tests in examined.items()
            for tenant, fault in broken_in_database(alias)
            if tenant[:_TENANT_LENGTH] in tests
        ]
    assert broken == []


@pytest.fixture
def sound_db(
    committed_db: CommittedDatabase, examined: Examined, request: pytest.FixtureRequest
) -> CommittedDatabase:
    """``committed_db`` whose rows must agree with each other at the end of the module."""
    examined[committed_db.alias][committed_db.tenant] = request.node.nodeid
    return committed_db


@pytest.fixture
def sound_postgres(
    postgres_db: CommittedDatabase, examined: Examined, request: pytest.FixtureRequest
) -> CommittedDatabase:
    """``sound_db`` on PostgreSQL alone."""
    examined[postgres_db.alias][postgres_db.tenant] = request.node.nodeid
    return postgres_db
