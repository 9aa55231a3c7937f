"""Stores of Claude Agent SDK on each database, and entries as the SDK writes them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from helix_store.contrib.claude_agent import DjangoSessionStore
from tests.databases import CommittedDatabase, fresh_tenant

NewStore = Callable[..., DjangoSessionStore]


@pytest.fixture
def new_store(committed_db: CommittedDatabase) -> NewStore:
    """A store of a tenant of its own, so that it is empty."""

    def make(**options: Any) -> DjangoSessionStore:
        return DjangoSessionStore(committed_db.alias, **{"tenant": fresh_tenant(), **options})

    return make


@pytest.fixture
def store(new_store: NewStore, committed_db: CommittedDatabase) -> DjangoSessionStore:
    return new_store(tenant=committed_db.tenant)
