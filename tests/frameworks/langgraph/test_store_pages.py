"""Searches and lists of `DjangoStore` that read more than a page."""

from __future__ import annotations

from django.test.utils import CaptureQueriesContext
from langgraph.store.base import PutOp

from helix_store.core.limits import MAX_BIGINT
from tests.databases import CommittedDatabase
from tests.frameworks.langgraph.test_store import USER, store_of


def test_namespaces_are_cut_to_a_depth_in_pages(committed_db: CommittedDatabase) -> None:
    store = store_of(committed_db)
    store.batch([PutOp((f"{n % 7}", f"{n}", "leaf"), "k", {}) for n in range(1_100)])
    assert store.list_namespaces(max_depth=1, limit=100) == [(f"{n}",) for n in range(7)]
    assert store.list_namespaces(max_depth=1, limit=2, offset=3) == [("3",), ("4",)]
    assert len(store.list_namespaces(max_depth=2, limit=2_000)) == 1_100


def test_what_is_under_the_last_namespace_of_a_page_is_listed(committed_db: CommittedDatabase) -> None:
    store = store_of(committed_db)
    store.batch([PutOp((f"a{n:03}",), "k", {}) for n in range(999)])
    # The first page of a thousand ends with a namespace that is shorter than the depth.
    store.batch([PutOp(labels, "k", {}) for labels in [("b",), ("b", "c", "d"), ("b", "c", "e")]])
    assert store.list_namespaces(max_depth=2, limit=9, offset=998) == [("a998",), ("b",), ("b", "c")]


def test_a_filter_finds_a_few_matches_among_many_pages(committed_db: CommittedDatabase) -> None:
    store = store_of(committed_db)
    store.batch([PutOp(USER, f"{n:04}", {"n": n, "kind": f"k{n % 500}"}) for n in range(2_000)])
    found = store.search(("users",), filter={"n": {"$gte": 1990}}, limit=100)
    assert sorted(item.value["n"] for item in found) == list(range(1990, 2000))
    with CaptureQueriesContext(committed_db.connection) as queries:
        found = store.search(("users",), filter={"kind": "k7"}, limit=2, offset=1)
    assert {item.value["n"] % 500 for item in found} == {7}
    assert len(found) == 2
    # The database finds the four that hold the text, and one page has them.
    assert len(queries) == 1


def test_no_item_is_at_the_largest_offset(committed_db: CommittedDatabase) -> None:
    store = store_of(committed_db)
    store.put(USER, "k", {"n": 1})
    assert store.search((), filter={"n": 1}, offset=MAX_BIGINT) == []
    assert store.list_namespaces(max_depth=1, offset=MAX_BIGINT) == []
