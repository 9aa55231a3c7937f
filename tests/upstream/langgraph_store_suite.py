"""All tests of ``test_store.py`` and ``test_async_store.py`` of langgraph-checkpoint-postgres but `LEFT_OUT`.

Their fixture ``store`` is our store. What reads a row of PostgresStore's table in them reads one of ours.
"""

from __future__ import annotations

import sys
from importlib.util import module_from_spec, spec_from_file_location
from types import ModuleType
from typing import Any

import pytest

from tests.databases import CommittedDatabase
from tests.upstream.langgraph_store import LEFT_OUT
from tests.upstream.sdists import unpacked


@pytest.fixture
def store(committed_db: CommittedDatabase) -> Any:
    from helix_store.contrib.langgraph import DjangoStore

    class Store(DjangoStore):
        def stop_ttl_sweeper(self) -> None:
            """There is none; upstream stops its own."""

    return Store(using=committed_db.alias, tenant=committed_db.tenant, ttl={"refresh_on_read": True})


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


def _upstream(name: str) -> ModuleType:
    """A module of upstream's tests. It imports names of its own ``tests``, which must not replace ours."""
    path = unpacked("langgraph-checkpoint-postgres") / "tests" / f"{name}.py"
    spec = spec_from_file_location(f"upstream_{name}", path)
    assert spec is not None
    assert spec.loader is not None
    module, ours = module_from_spec(spec), sys.modules["tests.conftest"]
    stub: Any = ModuleType("tests.conftest")
    stub.DEFAULT_URI, stub.VECTOR_TYPES, stub.CharacterEmbeddings = "", ["vector"], object
    sys.modules["tests.conftest"] = stub
    try:
        spec.loader.exec_module(module)
    finally:
        sys.modules["tests.conftest"] = ours
    for helper in (_expire_now, _row_exists, _stored_expires_at):
        setattr(module, helper.__name__, helper)
    return module


def _tests(name: str) -> dict[str, Any]:
    module = _upstream(name)
    tests = {test: value for test, value in vars(module).items() if test.startswith("test_")}
    missing = LEFT_OUT[name].keys() - tests.keys()
    assert not missing, f"upstream has no {missing} any more"
    return {f"{test}_of_{name}": tests[test] for test in tests if test not in LEFT_OUT[name]}


globals().update(_tests("test_store") | _tests("test_async_store"))
