"""Messages and checkpoints in tables that are partitioned by the hash of their session."""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from django.core.management import call_command
from django.db import connections, transaction
from django.test.utils import CaptureQueriesContext
from pytest_django import DjangoDbBlocker

from helix_store.core.limits import Limits
from helix_store.engine.statement import Statement
from helix_store.models import Checkpoint, Message
from helix_store.sessions.statements import LATEST_CHECKPOINT, LOAD_STATE, MESSAGES
from helix_store.stores import DatabaseLockManager, DatabaseStateStore
from helix_store.testing import StateStoreContract
from helix_store.testing.state_store.samples import commit_step, full_session, messages
from tests.databases import ALIASES, close_connections, fresh_tenant
from tests.selection import Variant

ALIAS = "partitioned"
PARTS = 16


@pytest.fixture(scope="module")
def partitioned(django_db_setup: None, django_db_blocker: DjangoDbBlocker) -> Iterator[str]:
    """A database of its own on the suite's server."""
    if "postgres" not in ALIASES:
        pytest.skip("HELIX_TEST_DATABASES leaves postgres out of this run")
    with django_db_blocker.unblock():
        server = connections[ALIASES["postgres"]]
        name = f"parts_{uuid.uuid4().hex[:8]}"
        with server.cursor() as cursor:
            cursor.execute(f"CREATE DATABASE {name}")
        connections.settings[ALIAS] = {**server.settings_dict, "NAME": name}
        try:
            call_command("migrate", database=ALIAS, verbosity=0)
            for model in (Message, Checkpoint):
                partition(model._meta.db_table)
            yield ALIAS
        finally:
            close_connections()
            del connections[ALIAS]
            del connections.settings[ALIAS]
            with server.cursor() as cursor:
                cursor.execute(f"DROP DATABASE {name} WITH (FORCE)")
            close_connections()


def partition(table: str) -> None:
    """What an operator does to an empty table. Its primary key becomes the session and the id."""
    with transaction.atomic(using=ALIAS), connections[ALIAS].cursor() as cursor:
        cursor.execute("SELECT indexdef FROM pg_indexes WHERE tablename = %s", [table])
        indexes = [definition for (definition,) in cursor.fetchall() if not re.search(r"\(id\)$", definition)]
        cursor.execute(f"ALTER TABLE {table} RENAME TO {table}_whole")
        cursor.execute(f"ALTER TABLE {table}_whole ALTER id DROP IDENTITY")
        cursor.execute(f"""
            CREATE TABLE {table} (LIKE {table}_whole INCLUDING DEFAULTS INCLUDING CONSTRAINTS)
            PARTITION BY HASH (session_id)""")
        cursor.execute(f"DROP TABLE {table}_whole CASCADE")
        cursor.execute(f"CREATE SEQUENCE {table}_id_seq OWNED BY {table}.id")
        cursor.execute(f"ALTER TABLE {table} ALTER id SET DEFAULT nextval('{table}_id_seq')")
        for part in range(PARTS):
            cursor.execute(f"""
                CREATE TABLE {table}_{part} PARTITION OF {table}
                FOR VALUES WITH (MODULUS {PARTS}, REMAINDER {part})""")
        cursor.execute(f"ALTER TABLE {table} ADD PRIMARY KEY (session_id, id)")
        for definition in indexes:
            cursor.execute(definition)


@pytest.fixture
def alias(partitioned: str, django_db_blocker: DjangoDbBlocker) -> Iterator[str]:
    with django_db_blocker.unblock():
        try:
            yield partitioned
        finally:
            close_connections()


class TestStateStore(StateStoreContract):
    """Partitions change how two tables are read, and the tests of plans look at that."""

    variant = Variant(one_in=100)

    @pytest.fixture(autouse=True)
    def _partitions(self, alias: str) -> None:
        self.prefix = fresh_tenant()

    def make_store(self, *, tenant: str = "", limits: Limits | None = None) -> DatabaseStateStore:
        return DatabaseStateStore(ALIAS, tenant=self.prefix + tenant, limits=limits)

    def make_lock_manager(self, *, tenant: str = "") -> DatabaseLockManager:
        return DatabaseLockManager(ALIAS, tenant=self.prefix + tenant)

    @contextmanager
    def storage_untouched(self) -> Iterator[None]:
        with CaptureQueriesContext(connections[ALIAS]) as watched:
            yield
        assert watched.captured_queries == []

    def leave_thread(self) -> None:
        connections.close_all()


def parts_read(statement: Statement, parameters: dict[str, Any]) -> dict[str, int]:
    """How many parts of each table, under each of its names, a statement looks into."""
    with transaction.atomic(using=ALIAS), connections[ALIAS].cursor() as cursor:
        # In tables of a few rows it is as cheap to read them all.
        cursor.execute("SET LOCAL enable_seqscan = off; SET LOCAL enable_hashjoin = off")
        cursor.execute("SET LOCAL enable_mergejoin = off")
        cursor.execute(f"EXPLAIN (ANALYZE, TIMING OFF) {statement.postgresql}", parameters)
        plan = [line for (line,) in cursor.fetchall()]
    read: dict[str, set[str]] = {}
    for line in plan:
        scan = re.search(r" on (helix_store_(?:message|checkpoint)_\d+) (\w+?)(?:_\d+)? ", line)
        if scan and "never executed" not in line:
            read.setdefault(scan[2], set()).add(scan[1])
    return {name: len(parts) for name, parts in read.items()}


@pytest.mark.parametrize(
    ("statement", "more"),
    [(LOAD_STATE, {}), (LATEST_CHECKPOINT, {}), (MESSAGES, {"offset": 0, "limit": 3})],
    ids=["load_state", "get_latest_checkpoint", "get_messages"],
)
def test_a_look_up_reads_one_part(alias: str, statement: Statement, more: dict[str, Any]) -> None:
    store = DatabaseStateStore(alias, tenant=fresh_tenant())
    full_session(store, "session")
    for number in range(3):
        commit_step(
            store, "session", number, append=messages(2), custom_state={"kept": "x" * 5000, "n": number}
        )
    read = parts_read(statement, {"tenant": store.tenant, "session_id": "session", **more})
    assert read
    assert set(read.values()) == {1}
