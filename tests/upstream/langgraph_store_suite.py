"""All tests of ``test_store.py`` and ``test_async_store.py`` of langgraph-checkpoint-postgres but `LEFT_OUT`.

Their fixture ``store`` is our store. What reads a row of PostgresStore's table in them reads one of ours.
"""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import cache
from importlib.util import module_from_spec, spec_from_file_location
from inspect import signature
from types import ModuleType
from typing import Any, Final

import pytest
from django.conf import settings

from tests.databases import CommittedDatabase
from tests.upstream.langgraph_store import LEFT_OUT
from tests.upstream.sdists import unpacked

_OF_VECTORS: Final = frozenset({"vector_store", "fake_embeddings"})
"""The fixtures of the tests that need PostgreSQL."""
_VECTOR_TYPES: Final = ("vector", "halfvec")


@pytest.fixture
def store(committed_db: CommittedDatabase) -> Any:
    from helix_store.contrib.langgraph import DjangoStore

    return DjangoStore(using=committed_db.alias, tenant=committed_db.tenant, ttl={"refresh_on_read": True})


@pytest.fixture
def fake_embeddings() -> Any:
    return _character_embeddings()(dims=500)


@pytest.fixture(
    params=[(kind, distance) for kind in _VECTOR_TYPES for distance in ("l2", "inner_product", "cosine")],
    ids="_".join,
)
def vector_store(
    request: pytest.FixtureRequest, committed_db: CommittedDatabase, fake_embeddings: Any
) -> Any:
    kind, distance = request.param
    return _vector_store(committed_db, kind, distance, fake_embeddings)


def _vector_store(
    database: CommittedDatabase, kind: str, distance: str, embeddings: Any, fields: Any = None
) -> Any:
    from helix_store.contrib.langgraph import DjangoStore

    index: Any = {
        "dims": embeddings.dims,
        "embed": embeddings,
        "fields": fields,
        "distance_type": distance,
        "ann_index_config": {"vector_type": kind},
    }
    return DjangoStore(using=database.alias, tenant=database.tenant, ttl={"default_ttl": 2}, index=index)


@pytest.fixture(autouse=True)
def _database(committed_db: CommittedDatabase, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let ``_create_vector_store`` of both modules return our store."""

    @contextmanager
    def create(kind: str, distance: str, embeddings: Any, text_fields: Any = None) -> Iterator[Any]:
        yield _vector_store(committed_db, kind, distance, embeddings, text_fields)

    @asynccontextmanager
    async def acreate(
        kind: str, distance: str, embeddings: Any, text_fields: Any = None
    ) -> AsyncIterator[Any]:
        yield _vector_store(committed_db, kind, distance, embeddings, text_fields)

    monkeypatch.setattr(_MODULES["test_store"], "_create_vector_store", create)
    monkeypatch.setattr(_MODULES["test_async_store"], "_create_vector_store", acreate)


def _rows(store: Any, namespace: tuple[str, ...], key: str) -> Any:
    from helix_store.contrib.langgraph.models import LangGraphMemory

    text = "".join(f"{label}." for label in namespace)
    rows = LangGraphMemory.objects.using(store._db.alias)
    return rows.filter(tenant=store._db.tenant, namespace=text, key=key)


def _expire_now(store: Any, namespace: tuple[str, ...], key: str) -> None:
    assert _rows(store, namespace, key).update(expires_at="2001-01-01T00:00:00Z") == 1


def _row_exists(store: Any, namespace: tuple[str, ...], key: str) -> bool:
    return bool(_rows(store, namespace, key).exists())


def _stored_expires_at(store: Any, namespace: tuple[str, ...], key: str) -> Any:
    return _rows(store, namespace, key).values_list("expires_at", flat=True).get()


def _loaded(name: str) -> ModuleType:
    path = unpacked("langgraph-checkpoint-postgres") / "tests" / f"{name}.py"
    spec = spec_from_file_location(f"upstream_{name}", path)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@cache
def _character_embeddings() -> Any:
    return _loaded("embed_test_utils").CharacterEmbeddings


def _upstream(name: str) -> ModuleType:
    """A module of upstream's tests. It imports names of its own ``tests``, which must not replace ours."""
    ours = sys.modules["tests.conftest"]
    stub: Any = ModuleType("tests.conftest")
    stub.DEFAULT_URI, stub.VECTOR_TYPES, stub.CharacterEmbeddings = "", _VECTOR_TYPES, _character_embeddings()
    sys.modules["tests.conftest"] = stub
    try:
        module = _loaded(name)
    finally:
        sys.modules["tests.conftest"] = ours
    for helper in (_expire_now, _row_exists, _stored_expires_at):
        setattr(module, helper.__name__, helper)
    return module


_MODULES: Final = {name: _upstream(name) for name in LEFT_OUT}


def _tests(name: str) -> dict[str, Any]:
    module = _MODULES[name]
    tests = {test: value for test, value in vars(module).items() if test.startswith("test_")}
    missing = LEFT_OUT[name].keys() - tests.keys()
    assert not missing, f"upstream has no {missing} any more"
    chosen = (test for test in tests if test not in LEFT_OUT[name])
    return {f"{test}_of_{name}": tests[test] for test in chosen if _can_run(tests[test])}


def _can_run(test: Any) -> bool:
    has_vectors = "helix_store.contrib.langgraph.vectors" in settings.INSTALLED_APPS
    can_search = has_vectors and "postgres" in settings.TEST_DATABASES
    return can_search or not _OF_VECTORS & signature(test).parameters.keys()


for _name in _MODULES:
    globals().update(_tests(_name))
