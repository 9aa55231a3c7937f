"""`delete_namespace` deletes what is under a namespace, and nothing beside it."""

from __future__ import annotations

from typing import Any

import pytest
from langgraph.store.base import InvalidNamespaceError, PutOp

from helix_store.contrib.langgraph import DjangoStore
from helix_store.exceptions import InvalidPayload, LimitExceeded
from tests.cells import for_each
from tests.databases import CommittedDatabase, fresh_tenant
from tests.frameworks.langgraph.test_store import USER, store_of


def test_a_namespace_is_deleted_with_all_under_it_and_nothing_beside_it(
    committed_db: CommittedDatabase,
) -> None:
    store = store_of(committed_db)
    other = DjangoStore(using=committed_db.alias, tenant=fresh_tenant())
    other.put(USER, "theirs", {})
    gone = [USER, (*USER, "trips"), (*USER, "trips", "kyoto")]
    kept = [("users",), ("users", "alice2"), ("users", "alic"), ("others", "alice")]
    for namespace in gone + kept:
        store.put(namespace, "one", {})
        store.put(namespace, "two", {})
    assert store.delete_namespace(USER) == 6
    assert sorted({item.namespace for item in store.search((), limit=100)}) == sorted(kept)
    assert store.delete_namespace(USER) == 0
    assert other.get(USER, "theirs") is not None


async def test_a_namespace_is_deleted_from_async_code(committed_db: CommittedDatabase) -> None:
    store = store_of(committed_db)
    await store.aput(USER, "one", {})
    assert await store.adelete_namespace(USER) == 1


@for_each("prefix", [(), "users", ("users.alice",), ("users", ""), ("x" * 2_000,)])
def test_a_namespace_that_cannot_be_stored_deletes_nothing(
    committed_db: CommittedDatabase, prefix: Any
) -> None:
    store = store_of(committed_db)
    store.put(USER, "one", {})
    with pytest.raises((InvalidPayload, LimitExceeded, InvalidNamespaceError)):
        store.delete_namespace(prefix)
    assert store.get(USER, "one") is not None


def test_more_items_than_one_transaction_deletes_go_too(committed_db: CommittedDatabase) -> None:
    store = store_of(committed_db)
    store.batch([PutOp(USER, str(number), {}) for number in range(1_001)])
    assert store.delete_namespace(("users",)) == 1_001
