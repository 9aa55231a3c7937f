"""With an index, `DjangoStore` finds the values whose texts are nearest to a query."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from django.apps import apps
from django.core.exceptions import ImproperlyConfigured
from django.db import connections
from django.test.utils import CaptureQueriesContext
from langchain_core.embeddings import Embeddings

if not apps.is_installed("helix_store.contrib.langgraph.vectors"):
    pytest.skip("the server of DATABASE_URL has no pgvector", allow_module_level=True)

from helix_store.catalogue import declared
from helix_store.cleanup import erase
from helix_store.contrib.langgraph import DjangoStore
from helix_store.contrib.langgraph.models import LangGraphMemory
from helix_store.contrib.langgraph.vectors.models import LangGraphVector
from helix_store.exceptions import InvalidPayload, NotSupportedOnBackend
from tests.cells import for_each
from tests.databases import CommittedDatabase, delete_all_rows, fresh_tenant
from tests.transfer.files import exported, imported

USER = ("users", "ada")
PLACES = {"kyoto": [1.0, 0.0, 0.0], "osaka": [0.8, 0.6, 0.0], "paris": [0.0, 0.0, 1.0]}


class Atlas(Embeddings):
    """Embeds the names of three cities, and asks where they are in another way than it answers."""

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        return [PLACES[text] for text in texts]

    def embed_query(self, text: str) -> list[float]:
        return PLACES[text.removeprefix("where is ")]


def store_of(database: CommittedDatabase, **index: Any) -> DjangoStore:
    given: Any = {"dims": 3, "embed": Atlas(), "fields": ["city"], **index}
    return DjangoStore(using=database.alias, tenant=database.tenant, index=given)


def without_index(database: CommittedDatabase) -> DjangoStore:
    return DjangoStore(using=database.alias, tenant=database.tenant)


def put_cities(store: DjangoStore) -> None:
    for number, city in enumerate(PLACES):
        store.put(USER, city, {"city": city, "number": number})


def vectors(database: CommittedDatabase) -> list[str]:
    rows = LangGraphVector.objects.using(database.alias).filter(tenant=database.tenant)
    return list(rows.order_by("key", "path").values_list("key", flat=True))


# --- Search -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("distance", "scores"),
    [("cosine", [1, 0.8, 0]), ("inner_product", [1, 0.8, 0]), ("l2", [0, -(0.4**0.5), -(2**0.5)])],
)
def test_the_nearest_come_first_with_their_scores(
    postgres_db: CommittedDatabase, distance: str, scores: list[float]
) -> None:
    store = store_of(postgres_db, distance_type=distance)
    put_cities(store)
    found = store.search(("users",), query="where is kyoto")
    assert [item.key for item in found] == ["kyoto", "osaka", "paris"]
    assert [item.score for item in found] == pytest.approx(scores, abs=1e-6)


def test_async_calls_embed_with_the_async_calls_of_the_model(postgres_db: CommittedDatabase) -> None:
    class Busy(Atlas):
        async def aembed_documents(self, texts: list[str]) -> list[list[float]]:
            return [PLACES["paris"] for _ in texts]

        async def aembed_query(self, text: str) -> list[float]:
            return PLACES["paris"]

    store = store_of(postgres_db, embed=Busy())

    async def found() -> list[Any]:
        await store.aput(USER, "k", {"city": "kyoto"})
        return await store.asearch(USER, query="anything")

    (item,) = asyncio.run(found())
    assert (item.key, item.score) == ("k", pytest.approx(1))


def test_pages_and_filters_go_by_distance(postgres_db: CommittedDatabase) -> None:
    store = store_of(postgres_db)
    put_cities(store)

    def keys(**given: Any) -> list[str]:
        return [item.key for item in store.search(USER, query="osaka", **given)]

    assert keys(limit=1, offset=1) == ["kyoto"]
    assert keys(filter={"number": {"$ne": 1}}) == ["kyoto", "paris"]
    assert keys(filter={"number": {"$ne": 1}}, limit=1, offset=1) == ["paris"]
    assert keys(filter={"city": "paris"}) == ["paris"]


def test_each_text_of_a_value_counts_and_the_value_is_found_once(postgres_db: CommittedDatabase) -> None:
    store = store_of(postgres_db, fields=["stops[*]"])
    store.put(USER, "trip", {"stops": ["paris", "kyoto"]})
    store.put(USER, "short trip", {"stops": ["osaka"]})
    assert vectors(postgres_db) == ["short trip", "trip", "trip"]
    found = store.search(USER, query="kyoto")
    assert [item.key for item in found] == ["trip", "short trip"]
    assert [item.score for item in found] == pytest.approx([1, 0.8])


def test_a_search_without_a_query_finds_all_values_without_scores(postgres_db: CommittedDatabase) -> None:
    store = store_of(postgres_db)
    put_cities(store)
    store.put(USER, "plain", {"city": "nowhere"}, index=False)
    assert [item.score for item in store.search(USER)] == [None] * 4
    assert len(store.search(USER, query="kyoto")) == 3


def test_values_of_other_tenants_are_not_found(postgres_db: CommittedDatabase) -> None:
    put_cities(store_of(postgres_db))
    other = CommittedDatabase(alias=postgres_db.alias, tenant=fresh_tenant())
    assert store_of(other).search((), query="kyoto") == []


def test_a_search_takes_two_statements(postgres_db: CommittedDatabase) -> None:
    store = store_of(postgres_db)
    put_cities(store)
    with CaptureQueriesContext(connections[postgres_db.alias]) as captured:
        assert len(store.search(USER, query="kyoto")) == 3
    assert len(captured) == 2


# --- Vectors follow their values ----------------------------------------------------------------------


def test_a_put_replaces_the_vectors(postgres_db: CommittedDatabase) -> None:
    store = store_of(postgres_db, fields=["stops[*]"])
    store.put(USER, "trip", {"stops": ["paris", "kyoto"]})
    store.put(USER, "trip", {"stops": ["paris"]})
    (item,) = store.search(USER, query="kyoto")
    assert (item.score, vectors(postgres_db)) == (0, ["trip"])
    store.put(USER, "trip", {"stops": ["paris"]}, index=False)
    assert (store.search(USER, query="kyoto"), vectors(postgres_db)) == ([], [])


def test_vectors_do_not_count_after_a_put_without_an_index(postgres_db: CommittedDatabase) -> None:
    store = store_of(postgres_db)
    store.put(USER, "k", {"city": "kyoto"})
    without_index(postgres_db).put(USER, "k", {"city": "paris"})
    assert store.search(USER, query="kyoto") == []


def test_vectors_of_an_earlier_model_do_not_count(postgres_db: CommittedDatabase) -> None:
    earlier = store_of(postgres_db, dims=2, embed=lambda texts: [[1.0, 0.0] for _ in texts])
    earlier.put(USER, "old", {"city": "kyoto"})
    store = store_of(postgres_db)
    put_cities(store)
    assert len(store.search(USER, query="kyoto")) == 3
    assert [item.key for item in earlier.search(USER, query="kyoto")] == ["old"]


@for_each("way", ["delete", "delete_namespace", "sweep_ttl", "erase"])
def test_vectors_are_deleted_with_their_value(committed_db: CommittedDatabase, way: str) -> None:
    """On SQLite only an import stores vectors."""
    store = without_index(committed_db)
    store.put(USER, "k", {"city": "kyoto"}, ttl=0)
    memory = LangGraphMemory.objects.using(committed_db.alias).get(tenant=committed_db.tenant)
    LangGraphVector.objects.using(committed_db.alias).create(
        tenant=memory.tenant,
        namespace=memory.namespace,
        key=memory.key,
        path="city",
        written_at=memory.updated_at,
        embedding="[1,0,0]",
    )
    assert vectors(committed_db) == ["k"]
    if way == "delete":
        store.delete(USER, "k")
    elif way == "delete_namespace":
        assert store.delete_namespace(USER) == 1
    elif way == "sweep_ttl":
        assert store.sweep_ttl() == 1
    else:
        receipt = erase(using=committed_db.alias, tenant=committed_db.tenant)
        assert receipt.deleted["lg_memory"] == 1, receipt
    assert vectors(committed_db) == []


def test_the_receipt_of_a_tenant_counts_vectors(postgres_db: CommittedDatabase) -> None:
    put_cities(store_of(postgres_db))

    foreseen, receipt = (
        erase(using=postgres_db.alias, tenant=postgres_db.tenant, dry_run=dry_run)
        for dry_run in (True, False)
    )

    counted = {"lg_memory": len(PLACES), "lg_vector": len(PLACES)}
    assert receipt.deleted == counted
    assert foreseen.deleted == counted


def test_vectors_are_exported_and_imported(
    empty_db: CommittedDatabase, postgres_db: CommittedDatabase
) -> None:
    """Also into SQLite, where they stay for the way back."""
    source = CommittedDatabase(alias=postgres_db.alias, tenant=empty_db.tenant)
    put_cities(store_of(source))
    data = exported(source)
    delete_all_rows(source.alias)
    imported(empty_db, data)
    assert (vectors(empty_db), exported(empty_db)) == (["kyoto", "osaka", "paris"], data)
    if empty_db.alias == source.alias:
        assert len(store_of(source).search(USER, query="osaka")) == 3


def test_an_import_refuses_a_vector_that_postgresql_could_not_read() -> None:
    check = declared(LangGraphVector).check_import
    assert check is not None
    check({"embedding": "[1,-0.5,2.5e-07]"})
    for text in ("", "[]", "[1,]", "[NaN]", "{1}", "[1,2]; DROP"):
        with pytest.raises(InvalidPayload):
            check({"embedding": text})


# --- What is refused ----------------------------------------------------------------------------------


def test_sqlite_has_no_vectors(sqlite_db: CommittedDatabase) -> None:
    with pytest.raises(NotSupportedOnBackend, match="needs PostgreSQL"):
        store_of(sqlite_db)


def test_without_the_app_the_error_names_it(
    postgres_db: CommittedDatabase, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(apps.app_configs, LangGraphVector._meta.app_label)
    with pytest.raises(ImproperlyConfigured, match=r'"helix_store\.contrib\.langgraph\.vectors"'):
        store_of(postgres_db)


@for_each(
    ("path", "wrong"),
    [
        ("/index/dims", {"dims": 0}),
        ("/index/dims", {"dims": 16_001}),
        ("/index/dims", {"dims": None}),
        ("/index/embed", {"embed": None}),
        ("/index/fields", {"fields": 1}),
        ("/index/fields", {"fields": [1]}),
        ("/index/distance_type", {"distance_type": "hamming"}),
        ("/index/dimensions", {"dimensions": 3}),
    ],
)
def test_a_wrong_configuration_is_refused(
    postgres_db: CommittedDatabase, path: str, wrong: dict[str, Any]
) -> None:
    with pytest.raises(InvalidPayload) as raised:
        store_of(postgres_db, **wrong)
    assert raised.value.path == path


@pytest.mark.parametrize("vector", [[1.0, 0.0], [1.0, 0.0, float("nan")]])
def test_nothing_is_stored_if_the_model_returns_another_vector(
    postgres_db: CommittedDatabase, vector: list[float]
) -> None:
    store = store_of(postgres_db, embed=lambda texts: [vector for _ in texts])
    with pytest.raises(InvalidPayload, match="3 finite numbers"):
        store.put(USER, "k", {"city": "kyoto"})
    assert store.get(USER, "k") is None
