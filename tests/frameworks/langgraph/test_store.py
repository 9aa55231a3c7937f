"""`DjangoStore` keeps values by namespace and key, and searches them as LangGraph's own stores do."""

from __future__ import annotations

import asyncio
import json
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from enum import StrEnum
from threading import Barrier
from typing import Any

import pytest
from django.db import connections
from django.test.utils import CaptureQueriesContext
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from langgraph.store.base import (
    GetOp,
    InvalidNamespaceError,
    ListNamespacesOp,
    MatchCondition,
    PutOp,
    SearchOp,
    TTLConfig,
)
from langgraph.store.memory import InMemoryStore

from helix_store.contrib.langgraph import DjangoStore
from helix_store.contrib.langgraph.models import LangGraphMemory
from helix_store.exceptions import InvalidPayload, InvalidQuery, LimitExceeded
from tests.cells import for_each
from tests.databases import CommittedDatabase, fresh_tenant

USER = ("users", "alice")


def store_of(database: CommittedDatabase, ttl: TTLConfig | None = None) -> DjangoStore:
    return DjangoStore(using=database.alias, tenant=database.tenant, ttl=ttl)


def expire(database: CommittedDatabase, key: str) -> None:
    """Move the end of an item's term two hundred years back."""
    rows = LangGraphMemory.objects.using(database.alias).filter(tenant=database.tenant, key=key)
    assert rows.update(expires_at="1825-01-01T00:00:00Z") == 1


def term_of(database: CommittedDatabase, key: str) -> Any:
    rows = LangGraphMemory.objects.using(database.alias)
    return rows.values_list("expires_at", flat=True).get(tenant=database.tenant, key=key)


# --- Values -------------------------------------------------------------------------------------------


@for_each(
    "value",
    [
        {},
        {"b": 1, "a": 1.0, "nested": [None, True, {"x": 10**300}]},
        {"nul": "a\x00b", "lone": "\udc00", "pair": "\ud83d\ude00"},
    ],
)
def test_a_value_is_read_as_it_was_put(committed_db: CommittedDatabase, value: dict[str, Any]) -> None:
    store = store_of(committed_db)
    store.put(USER, "k", value)
    item = store.get(USER, "k")
    assert item is not None
    assert (item.value, list(item.value), item.key, item.namespace) == (value, list(value), "k", USER)


class Kind(StrEnum):
    DIET = "diet"


@for_each(
    "value",
    [{"at": (35.0, 135.7)}, {"kind": Kind.DIET}, {"years": {2024: "Kyoto"}}, OrderedDict(at=[(1, 2)])],
    ids=["tuple", "enumeration", "number as key", "subclass of dict"],
)
def test_a_value_that_json_has_in_another_form_is_stored_as_json_has_it(
    committed_db: CommittedDatabase, value: dict[str, Any]
) -> None:
    store = store_of(committed_db)
    store.put(USER, "k", value)
    item = store.get(USER, "k")
    assert item is not None
    assert repr(item.value) == repr(json.loads(json.dumps(value)))
    assert [found.key for found in store.search(USER, filter=value)] == ["k"]


def test_a_second_put_replaces_the_value_and_keeps_the_time_of_creation(
    committed_db: CommittedDatabase,
) -> None:
    store = store_of(committed_db)
    store.put(USER, "k", {"n": 1})
    first = store.get(USER, "k")
    store.put(USER, "k", {"n": 2})
    second = store.get(USER, "k")
    assert first is not None
    assert second is not None
    assert (second.value, second.created_at) == ({"n": 2}, first.created_at)
    assert second.updated_at > first.updated_at


def test_a_tenant_does_not_see_the_items_of_another_one(committed_db: CommittedDatabase) -> None:
    store_of(committed_db).put(USER, "k", {"n": 1})
    other = DjangoStore(using=committed_db.alias, tenant=fresh_tenant())
    assert other.get(USER, "k") is None
    assert other.search(()) == []
    assert other.list_namespaces() == []
    other.delete(USER, "k")
    assert store_of(committed_db).get(USER, "k") is not None


@for_each(
    ("call", "error", "path"),
    [
        (lambda store: store.put(USER, "k", {"when": object()}), InvalidPayload, "/value/when"),
        (lambda store: store.put(USER, "k", {"n": float("nan")}), InvalidPayload, "/value/n"),
        (lambda store: store.put(USER, "k", ["a"]), InvalidPayload, "/value"),
        (lambda store: store.put(USER, "a\x00b", {}), InvalidPayload, "/key"),
        (lambda store: store.put(("a\udc00",), "k", {}), InvalidPayload, "/namespace"),
        (lambda store: store.put(("n" * 1024,), "k", {}), LimitExceeded, None),
        (lambda store: store.put(USER, "k" * 766, {}), LimitExceeded, None),
        (lambda store: store.put(USER, "k", {"text": "x" * 9_000_000}), LimitExceeded, None),
        (lambda store: store.put(USER, "k", {}, ttl=-1), InvalidPayload, "/ttl"),
        (lambda store: store.put(USER, "k", {}, ttl=float("inf")), InvalidPayload, "/ttl"),
        (lambda store: store.put(USER, "k", {}, ttl=1e300), InvalidPayload, "/ttl"),
        (lambda store: store.batch([PutOp((), "k", {})]), InvalidPayload, "/namespace"),
        (lambda store: store.batch([GetOp(USER, "k"), "get"]), InvalidPayload, "/ops/1"),
        (lambda store: store.search(USER, limit=-1), InvalidQuery, "/limit"),
        (lambda store: store.search(USER, offset=2**63), InvalidQuery, "/offset"),
        (lambda store: store.search(USER, filter={"n": {"$near": 1}}), InvalidQuery, "/filter/$near"),
        (lambda store: store.search(USER, filter={"n": {1, 2}}), InvalidQuery, "/filter"),
        (lambda store: store.list_namespaces(max_depth=0), InvalidQuery, "/max_depth"),
    ],
)
def test_what_cannot_be_stored_or_asked_is_refused(
    committed_db: CommittedDatabase, call: Any, error: type[Exception], path: str | None
) -> None:
    store = store_of(committed_db)
    with CaptureQueriesContext(committed_db.connection) as queries, pytest.raises(error) as refused:
        call(store)
    assert len(queries) == 0
    assert getattr(refused.value, "path", None) == path


def test_without_an_index_a_query_changes_nothing_and_is_warned_of_once(
    committed_db: CommittedDatabase, caplog: pytest.LogCaptureFixture
) -> None:
    found = []
    for store in (store_of(committed_db), InMemoryStore()):
        for key, kind in (("a", "tea"), ("b", "coffee"), ("c", "tea")):
            store.put(USER, key, {"kind": kind})
        searches = ({"query": "tea"}, {"query": "tea", "filter": {"kind": "tea"}, "limit": 1}, {"query": ""})
        found.append(
            [sorted((each.key, each.score) for each in store.search(USER, **search)) for search in searches]
        )
    ours, theirs = found
    assert [len(each) for each in ours] == [3, 1, 3]
    assert (ours[0], ours[2]) == (theirs[0], theirs[2])
    assert [record.getMessage() for record in caplog.records] == [
        "This store has no index: a search ignores its query and uses only its filter."
    ]


@for_each("labels", [("a.b",), ("a", ""), ("a\x00",), ("a", 1)])
def test_a_label_that_would_name_another_namespace_is_refused(
    committed_db: CommittedDatabase, labels: Any
) -> None:
    store = store_of(committed_db)
    with pytest.raises(InvalidNamespaceError):
        store.batch([PutOp(USER, "k", {"n": 1}), GetOp(labels, "k")])
    assert store.get(USER, "k") is None


def test_the_largest_address_can_be_stored(committed_db: CommittedDatabase) -> None:
    # Three bytes each, and not compressible: PostgreSQL compresses long values in an index.
    text = "".join(chr(0x4E00 + 7919 * number % 20_000) for number in range(600))
    tenant, key = text[:255], text[:255]
    namespace = (text[255:596],)
    store = DjangoStore(using=committed_db.alias, tenant=tenant)
    store.put(namespace, key, {"n": 1})
    assert store.get(namespace, key) is not None
    store.delete(namespace, key)
    assert store.get(namespace, key) is None


# --- Namespaces ---------------------------------------------------------------------------------------

STRANGE = [
    "user_1",
    "userX1",
    "a%b",
    "axxb",
    'it"s',
    "it's",
    "a/b",
    "a-b",
    "{a}",
    "$1",
    "a\nb",
    "é",
    "日本",
    " ",
]


@pytest.mark.thorough
@for_each("label", STRANGE)
def test_a_label_means_itself_in_every_question(committed_db: CommittedDatabase, label: str) -> None:
    store = store_of(committed_db)
    for each in STRANGE:
        store.put((each,), "k", {"label": each})
        store.put((each, "under"), "k", {"label": each})
    assert {item.namespace for item in store.search((label,), limit=100)} == {(label,), (label, "under")}
    assert set(store.list_namespaces(prefix=(label,))) == {(label,), (label, "under")}
    assert store.list_namespaces(suffix=(label,)) == [(label,)]
    assert store.list_namespaces(prefix=(label, "*")) == [(label, "under")]
    assert [item.value for item in store.search((), filter={"label": label, "n": None}, limit=100)] == [
        {"label": label}
    ] * 2


def test_a_namespace_ends_at_the_end_of_a_label(committed_db: CommittedDatabase) -> None:
    store = store_of(committed_db)
    for labels in [("foo",), ("foo", "child"), ("foobar",), ("foo-bar",), ("foo/bar",), ("fo",)]:
        store.put(labels, "k", {})
    assert {item.namespace for item in store.search(("foo",))} == {("foo",), ("foo", "child")}
    assert store.list_namespaces(suffix=("bar",)) == []


def test_a_batch_reads_what_was_there_before_it(committed_db: CommittedDatabase) -> None:
    store = store_of(committed_db)
    store.put(USER, "old", {"n": 1})
    results: list[Any] = store.batch(
        [
            PutOp(USER, "new", {"n": 2}),
            GetOp(USER, "new"),
            GetOp(USER, "old"),
            SearchOp(("users",)),
            ListNamespacesOp((MatchCondition("prefix", ("users",)),)),
            PutOp(USER, "old", None),
            PutOp(USER, "new", {"n": 3}),
        ]
    )
    assert results[:2] == [None, None]
    assert results[2].value == {"n": 1}
    assert [item.key for item in results[3]] == ["old"]
    assert results[4] == [USER]
    assert [(item.key, item.value) for item in store.search(())] == [("new", {"n": 3})]


# --- Searches -----------------------------------------------------------------------------------------


def test_a_search_shows_the_last_written_first(committed_db: CommittedDatabase) -> None:
    store = store_of(committed_db)
    for key in ("a", "b", "c"):
        store.put(USER, key, {})
    store.put(USER, "a", {})
    assert [item.key for item in store.search(("users",))] == ["a", "c", "b"]
    assert [item.key for item in store.search(("users",), limit=1, offset=1)] == ["c"]


@for_each(
    ("condition", "keys"),
    [
        ({"n": 2}, {"int", "float"}),
        ({"n": {"$eq": "2"}}, {"text"}),
        ({"n": {"$ne": 2}}, {"text", "true", "null", "none", "deep", "~"}),
        ({"n": {"$gt": 1}}, {"int", "float"}),
        ({"n": {"$gte": 2, "$lt": 3}}, {"int", "float"}),
        ({"n": {"$lte": "2"}}, {"text"}),
        ({"n": True}, {"true"}),
        ({"n": None}, {"null", "none"}),
        ({"n": {"x": {"y": "2"}}}, {"deep"}),
        ({"n": {"x": {"$ne": 1}}}, {"deep"}),
        ({"n": [1, {"$gt": 1}]}, set()),
        ({"n": "\ud83d\ude00\udc00"}, set()),
        ({"n": "é", "more": "\ud83d\ude00"}, {"~"}),
        ({'n" OR 1=1 --': "2"}, set()),
    ],
)
def test_a_filter_compares_values_of_json(
    committed_db: CommittedDatabase, condition: dict[str, Any], keys: set[str]
) -> None:
    store = store_of(committed_db)
    values: dict[str, dict[str, Any]] = {
        "int": {"n": 2},
        "float": {"n": 2.0},
        "text": {"n": "2"},
        "true": {"n": True},
        "null": {"n": None},
        "none": {"m": 2},
        "deep": {"n": {"x": {"y": "2"}}},
        "~": {"n": "é", "more": "\ud83d\ude00"},
    }
    for key, value in values.items():
        store.put(USER, key, value)
    assert {item.key for item in store.search((), filter=condition)} == keys


KEYS = st.sampled_from(["a", "b", "c"])
NAMESPACES = st.lists(st.sampled_from(["x", "y", "x%", "y_"]), min_size=1, max_size=3).map(tuple)
SCALARS = st.sampled_from([0, 1, 2.5, -3, "a", "b%", 'c"', "\x00", "~", "\udc00", "\ud83d\ude00"])
VALUES = st.dictionaries(st.sampled_from(["n", "m"]), SCALARS)
CONDITIONS = st.dictionaries(
    st.sampled_from(["n", "m"]),
    SCALARS | st.dictionaries(st.sampled_from(["$eq", "$ne"]), SCALARS, min_size=1),
    max_size=1,
)
OPS = st.one_of(
    st.builds(PutOp, NAMESPACES, KEYS, st.none() | VALUES, st.none(), st.none()),
    st.builds(GetOp, NAMESPACES, KEYS),
    st.builds(
        lambda prefix, wanted: SearchOp(prefix, wanted, limit=1_000), NAMESPACES | st.just(()), CONDITIONS
    ),
    st.builds(
        lambda kind, path, depth: ListNamespacesOp((MatchCondition(kind, path),), depth, limit=1_000),
        st.sampled_from(["prefix", "suffix"]),
        st.lists(st.sampled_from(["x", "y", "x%", "*"]), max_size=2).map(tuple),
        st.none() | st.integers(1, 3),
    ),
)


def shown(result: Any) -> Any:
    """A result without times; the order of a list is not compared."""
    if isinstance(result, list):
        return sorted(repr(shown(each)) for each in result)
    return (result.namespace, result.key, result.value) if hasattr(result, "key") else result


def answers_in_memory(store: InMemoryStore, ops: list[Any]) -> list[Any]:
    """The results of a batch. A namespace without items is removed, since no database has one."""
    results: list[Any] = [None] * len(ops)
    for index, op in enumerate(ops):
        if not isinstance(op, PutOp):
            (results[index],) = store.batch([op])
            remove_empty(store)
    store.batch([op for op in ops if isinstance(op, PutOp)])
    remove_empty(store)
    return results


def remove_empty(store: InMemoryStore) -> None:
    for labels in [labels for labels, items in store._data.items() if not items]:
        del store._data[labels]


@pytest.mark.thorough
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(batches=st.lists(st.lists(OPS, max_size=8), max_size=6))
def test_it_answers_as_the_store_in_memory(committed_db: CommittedDatabase, batches: list[list[Any]]) -> None:
    ours = DjangoStore(using=committed_db.alias, tenant=fresh_tenant())
    theirs = InMemoryStore()
    for ops in batches:
        expected = answers_in_memory(theirs, ops)
        assert [shown(result) for result in ours.batch(ops)] == [shown(result) for result in expected]


# --- Terms --------------------------------------------------------------------------------------------


def test_an_expired_item_is_read_until_it_is_swept(committed_db: CommittedDatabase) -> None:
    store = store_of(committed_db, {"default_ttl": 5})
    store.put(USER, "gone", {})
    store.put(USER, "kept", {}, ttl=None)
    expire(committed_db, "gone")
    assert store.get(USER, "gone", refresh_ttl=False) is not None
    assert store.sweep_ttl() == 1
    assert [item.key for item in store.search(())] == ["kept"]
    assert store.sweep_ttl() == 0


def test_expired_items_are_omitted_everywhere_if_asked(committed_db: CommittedDatabase) -> None:
    store = store_of(committed_db, {"omit_expired": True, "refresh_on_read": True})
    store.put(USER, "gone", {"n": 1}, ttl=5)
    store.put(("other",), "kept", {"n": 1}, ttl=5)
    expire(committed_db, "gone")
    before = term_of(committed_db, "gone")
    assert store.get(USER, "gone") is None
    assert [item.key for item in store.search(())] == ["kept"]
    assert [item.key for item in store.search((), filter={"n": 1})] == ["kept"]
    assert store.list_namespaces() == [("other",)]
    assert store.list_namespaces(max_depth=1) == [("other",)]
    assert term_of(committed_db, "gone") == before


@pytest.mark.parametrize("search", [False, True])
def test_a_read_begins_the_term_again(committed_db: CommittedDatabase, search: bool) -> None:
    store = store_of(committed_db, {"default_ttl": 5})
    store.put(USER, "k", {})
    before = term_of(committed_db, "k")

    def read(*, refresh_ttl: bool | None) -> object:
        if search:
            return store.search(USER, refresh_ttl=refresh_ttl)
        return store.get(USER, "k", refresh_ttl=refresh_ttl)

    read(refresh_ttl=False)
    assert term_of(committed_db, "k") == before
    read(refresh_ttl=None)
    assert term_of(committed_db, "k") > before


def test_a_put_without_a_term_ends_the_term(committed_db: CommittedDatabase) -> None:
    store = store_of(committed_db)
    store.put(USER, "k", {}, ttl=5)
    store.put(USER, "k", {})
    assert term_of(committed_db, "k") is None


def test_the_configuration_of_postgres_store_is_accepted(
    committed_db: CommittedDatabase, caplog: pytest.LogCaptureFixture
) -> None:
    ttl: Any = {"default_ttl": 60, "refresh_on_read": True, "sweep_interval_minutes": 5}
    store = DjangoStore(using=committed_db.alias, tenant=committed_db.tenant, ttl=ttl)
    store.put(USER, "k", {})
    assert term_of(committed_db, "k") is not None
    assert "cleanup_expired_sessions" in caplog.text


@pytest.mark.parametrize("config", [{"default": 5}, {"default_ttl": -1}])
def test_a_configuration_without_effect_is_refused(config: Any) -> None:
    with pytest.raises(InvalidPayload):
        DjangoStore(ttl=config)


# --- Threads ------------------------------------------------------------------------------------------


def test_two_puts_of_one_key_leave_one_of_their_values(committed_db: CommittedDatabase) -> None:
    barrier, rounds = Barrier(4), 25

    def put(number: int) -> None:
        store = store_of(committed_db)
        keys = ["a", "b"] if number % 2 else ["b", "a"]
        try:
            for turn in range(rounds):
                barrier.wait()
                value = {"by": number, "turn": turn}
                store.batch([PutOp(USER, key, value if turn % 5 else None) for key in keys])
        finally:
            connections.close_all()

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(put, range(4)))
    items = store_of(committed_db).search(USER)
    assert {item.key for item in items} == {"a", "b"}
    assert {item.value["turn"] for item in items} == {rounds - 1}
    # A batch is one transaction: both keys have the value of the same writer.
    assert len({item.value["by"] for item in items}) == 1


async def test_it_is_called_from_coroutines(committed_db: CommittedDatabase) -> None:
    store = store_of(committed_db, {"default_ttl": 5})
    await asyncio.gather(*(store.aput(USER, f"{n}", {"n": n}) for n in range(20)))
    found = await store.asearch(("users",), filter={"n": {"$lt": 5}})
    assert {item.value["n"] for item in found} == set(range(5))
    assert await store.alist_namespaces() == [USER]
    await store.adelete(USER, "0")
    assert await store.aget(USER, "0") is None
    assert await store.asweep_ttl() == 0


@for_each(
    ("call", "count"),
    [
        (lambda store: store.get(USER, "k"), 1),
        (lambda store: store.batch([GetOp(USER, f"{n}") for n in range(200)]), 1),
        (lambda store: store.search(("users",), limit=1_000), 1),
        (lambda store: store.list_namespaces(limit=1_000), 1),
    ],
)
def test_a_read_is_one_statement(committed_db: CommittedDatabase, call: Any, count: int) -> None:
    store = store_of(committed_db)
    store.batch([PutOp(USER, f"{n}", {"n": n}) for n in range(300)])
    with CaptureQueriesContext(committed_db.connection) as queries:
        call(store)
    assert len(queries) == count


def test_a_put_is_one_statement(committed_db: CommittedDatabase) -> None:
    store = store_of(committed_db)
    with CaptureQueriesContext(committed_db.connection) as queries:
        store.batch([PutOp(USER, f"{n}", {"n": n}) for n in range(50)])
    statements = [query["sql"] for query in queries if query["sql"].startswith("INSERT")]
    assert len(statements) == 1


def test_the_size_of_a_row_is_that_of_its_text_in_bytes(committed_db: CommittedDatabase) -> None:
    store_of(committed_db).put(USER, "k", {"text": "日本"})
    row = LangGraphMemory.objects.using(committed_db.alias).get(tenant=committed_db.tenant)
    assert row.size_bytes == len('{"text":"日本"}'.encode()) == len(row.value.encode())
