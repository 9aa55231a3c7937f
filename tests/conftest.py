"""Databases for the tests: the server, the migrated test databases, and committed access without a flush.

Most tests take ``committed_db``, which runs them once on SQLite and once on PostgreSQL. ``sqlite_db`` and
``postgres_db`` are for what only one of them can show, ``empty_db`` for code that looks at every tenant.
The marker ``django_db`` of pytest-django works too.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import pytest
import xdist
from django.conf import settings
from django.test.utils import teardown_databases
from django.urls import get_urlconf, set_urlconf
from hypothesis import HealthCheck
from hypothesis import settings as settings_of_hypothesis
from pytest_django import DjangoDbBlocker

from tests.databases import (
    ALIASES,
    CommittedDatabase,
    close_connections,
    delete_all_rows,
    end_other_connections,
    forget_statistics,
    fresh_tenant,
    stop_keep_alives,
)
from tests.postgres import NOT_DURABLE, PostgresCluster, folder_in_memory
from tests.selection import (
    pytest_addoption,
    pytest_collection_modifyitems,
    pytest_configure,
    pytest_configure_node,
    pytest_generate_tests,
    pytest_ignore_collect,
    pytest_pycollect_makeitem,
    pytest_terminal_summary,
    selection_header,
)
from tests.settings import postgres_database
from tests.standstill import machine, pytest_runtest_makereport
from tests.streams.background import wait_for_background_threads
from tests.templates import copied_databases, migrated_databases

__all__ = [
    "machine",
    "pytest_addoption",
    "pytest_collection_modifyitems",
    "pytest_configure",
    "pytest_configure_node",
    "pytest_generate_tests",
    "pytest_ignore_collect",
    "pytest_pycollect_makeitem",
    "pytest_runtest_makereport",
    "pytest_terminal_summary",
]

# The run starts hundreds of interpreters. Without the cache, each of them would compile the package again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# No test is about the time that it takes: machines are shared, and how fast examples are made is no property.
settings_of_hypothesis.register_profile(
    "shared machine", deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings_of_hypothesis.load_profile("shared machine")

_SHARING_FIXTURES: Final = (
    "tests/cleanup/test_plans.py",
    "tests/commands/test_databases_of_the_app.py",
    "tests/contract/test_the_suite.py",
    "tests/database/test_usage_statements.py",
    "tests/deployments/contracts/",
    "tests/docs/test_types.py",
    "tests/plans/",
    "tests/shards/",
)
"""Folders and files whose fixtures or caches take long: one worker makes them for all of their tests."""
_LEAVING_CONNECTIONS_AS_THEY_WERE: Final = (
    "tests/adapters/",
    "tests/admin/",
    "tests/checkpointers/",
    "tests/commands/",
    "tests/contract/",
    "tests/frameworks/",
    "tests/handles/",
    "tests/items/",
    "tests/usage/",
)
"""Folders whose tests create nothing that lasts as long as a connection, and change none of its settings."""
_CLUSTER = pytest.StashKey[PostgresCluster]()


def pytest_report_header(config: pytest.Config) -> list[str]:
    server = "server of DATABASE_URL" if settings.POSTGRES_URL else f"own server {PostgresCluster().major}"
    described = {"sqlite": "SQLite", "postgres": f"PostgreSQL ({server})"}
    databases = ", ".join(described[name] for name in ALIASES)
    return [f"databases: {databases}", selection_header(config)]


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Hide what is collected from the garbage collector: it stays, and a look through it takes a second."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(config: pytest.Config) -> None:
    """Start one server for all workers of pytest-xdist: they inherit its address from the environment."""
    _start_server(config)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Give each test to the next free worker, and those that share fixtures to one."""
    if config.getvalue("dist") != "load":
        return None
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):  # type: ignore[misc]  # xdist has no types
        def _split_scope(self, nodeid: str) -> str:
            return next((folder for folder in _SHARING_FIXTURES if nodeid.startswith(folder)), nodeid)

    return Scheduling(config, log)


def pytest_unconfigure(config: pytest.Config) -> None:
    cluster = config.stash.get(_CLUSTER, None)
    if cluster is not None:
        cluster.stop()


def _start_server(config: pytest.Config) -> str | None:
    """The URL of the PostgreSQL server, or ``None`` when no test runs on PostgreSQL."""
    if "postgres" not in ALIASES:
        return None
    if settings.POSTGRES_URL:
        return str(settings.POSTGRES_URL)
    if _CLUSTER not in config.stash:
        config.stash[_CLUSTER] = PostgresCluster(options=NOT_DURABLE).start()
        os.environ["HELIX_TEST_POSTGRES_URL"] = config.stash[_CLUSTER].url
    return config.stash[_CLUSTER].url


@pytest.fixture(scope="session")
def server_address(request: pytest.FixtureRequest) -> None:
    """The address of the PostgreSQL server is in the settings."""
    url = _start_server(request.config)
    for database in settings.DATABASES.values():
        if database["ENGINE"] == "django.db.backends.postgresql":
            database.update(postgres_database(url))


@pytest.fixture(scope="session")
def sqlite_file(django_db_keepdb: bool) -> Iterator[None]:
    """Each run and worker has an SQLite file of its own, unless ``--reuse-db`` wants to find it again."""
    database = settings.DATABASES["default"]
    if "sqlite" not in ALIASES or django_db_keepdb:
        yield
        return
    with TemporaryDirectory(prefix="helix-sqlite-", dir=folder_in_memory()) as folder:
        database["TEST"]["NAME"] = Path(folder) / "helix.sqlite3"
        yield


@pytest.fixture(scope="session")
def django_db_modify_db_settings(
    server_address: None, sqlite_file: None, django_db_modify_db_settings_parallel_suffix: None
) -> None:
    """Before the databases are created: where they are, and another name for each worker."""


@pytest.fixture(scope="session")
def django_db_setup(
    request: pytest.FixtureRequest,
    django_test_environment: None,
    django_db_blocker: DjangoDbBlocker,
    django_db_keepdb: bool,
    django_db_createdb: bool,
    django_db_modify_db_settings: None,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[None]:
    """All chosen databases: migrated, or copied from those that another worker has migrated.

    The fixture of pytest-django creates those that its marker names; ``committed_db`` works without it.
    """
    verbosity = request.config.get_verbosity()
    keeps = django_db_keepdb and not django_db_createdb
    with django_db_blocker.unblock():
        if xdist.is_xdist_worker(request) and not keeps and "DATABASE_URL" not in os.environ:
            created = copied_databases(tmp_path_factory.getbasetemp().parent)
        else:
            created = migrated_databases(verbosity=verbosity, keepdb=keeps)
    yield
    with django_db_blocker.unblock():
        for alias in ALIASES.values():
            # PostgreSQL drops no database that one of them is connected to.
            wait_for_background_threads(alias)
            end_other_connections(alias)
        close_connections()
        if not django_db_keepdb:
            teardown_databases(created, verbosity=verbosity)


@pytest.fixture(autouse=True)
def settings_as_before() -> Iterator[None]:
    """Every test leaves the settings and the addresses as they were.

    `override_settings` of two tasks or threads that overlap do not, nor does a response that is not closed.
    """
    before = vars(settings)["_wrapped"]
    yield
    assert vars(settings)["_wrapped"] is before, "the test has left settings that it had overridden"
    left = get_urlconf()
    set_urlconf(None)
    assert left is None, "the test has left addresses that only its requests should have"


@pytest.fixture(params=list(ALIASES))
def alias(request: pytest.FixtureRequest) -> str:
    """The alias of each chosen database in turn."""
    return ALIASES[request.param]


@pytest.fixture
def keeps_connections(request: pytest.FixtureRequest) -> bool:
    """Whether connections outlive the test."""
    return bool(request.node.nodeid.startswith(_LEAVING_CONNECTIONS_AS_THEY_WERE))


@contextmanager
def _committed(
    alias: str, blocker: DjangoDbBlocker, keeps_connections: bool = False
) -> Iterator[CommittedDatabase]:
    with blocker.unblock():
        try:
            yield CommittedDatabase(alias=alias, tenant=fresh_tenant())
        finally:
            stop_keep_alives()
            forget_statistics(alias)
            close_connections(only_unclean=keeps_connections)


@pytest.fixture
def committed_db(
    alias: str, keeps_connections: bool, django_db_setup: None, django_db_blocker: DjangoDbBlocker
) -> Iterator[CommittedDatabase]:
    """Committed access to each chosen database in turn, with a tenant that no other test has.

    Nothing is rolled back or flushed at the end: flushing costs more than most tests.
    """
    with _committed(alias, django_db_blocker, keeps_connections) as database:
        yield database


@pytest.fixture
def sqlite_db(
    keeps_connections: bool, django_db_setup: None, django_db_blocker: DjangoDbBlocker
) -> Iterator[CommittedDatabase]:
    """``committed_db`` on SQLite alone."""
    with _committed(_alias_of("sqlite"), django_db_blocker, keeps_connections) as database:
        yield database


@pytest.fixture
def postgres_db(
    keeps_connections: bool, django_db_setup: None, django_db_blocker: DjangoDbBlocker
) -> Iterator[CommittedDatabase]:
    """``committed_db`` on PostgreSQL alone."""
    with _committed(_alias_of("postgres"), django_db_blocker, keeps_connections) as database:
        yield database


@pytest.fixture
def empty_db(committed_db: CommittedDatabase) -> CommittedDatabase:
    """``committed_db`` with empty tables, for code that works across tenants or counts everything."""
    delete_all_rows(committed_db.alias)
    return committed_db


def _alias_of(vendor: str) -> str:
    if vendor not in ALIASES:
        pytest.skip(f"HELIX_TEST_DATABASES leaves {vendor} out of this run")
    return ALIASES[vendor]
