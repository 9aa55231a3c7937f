"""``helix_usage`` is one long statement, which the first signal ends."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from django.db import connections

from helix_store.models import UsageEntry
from helix_store.stores import DatabaseStateStore, DatabaseUsageStore
from helix_store.testing.usage.base import tokens
from tests.commands.running import run
from tests.databases import CommittedDatabase

LONGEST_WAIT = 30.0
TABLE = UsageEntry._meta.db_table


@contextmanager
def endless_usage(database: CommittedDatabase) -> Iterator[Callable[[], object]]:
    """A ledger that no statement finishes to read, and how to end a statement that reads it all the same."""
    connection = connections[database.alias]
    if database.vendor == "sqlite":
        with connection.cursor() as cursor:
            cursor.execute(
                f"""CREATE TEMP VIEW {TABLE} AS
                    WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n)
                    SELECT u.* FROM n CROSS JOIN main.{TABLE} AS u"""
            )
        native: Any = connection.connection
        try:
            yield native.interrupt
        finally:
            with connection.cursor() as cursor:
                cursor.execute(f"DROP VIEW temp.{TABLE}")
        return
    with database.second_connection() as other, other.cursor() as cursor:
        cursor.execute("BEGIN")
        cursor.execute(f"LOCK TABLE {TABLE} IN ACCESS EXCLUSIVE MODE")
        native = other.connection
        yield native.close


@contextmanager
def signalled(database: CommittedDatabase, number: signal.Signals) -> Iterator[None]:
    """Send the signal when the first statement that reads the ledger has begun."""
    main, began = threading.get_ident(), threading.Event()
    timer = threading.Timer(0.2, signal.pthread_kill, [main, number])

    def begin(execute: Any, sql: str, params: Any, many: bool, context: Any) -> Any:
        if TABLE in sql and not began.is_set():
            began.set()
            timer.start()
        return execute(sql, params, many, context)

    with connections[database.alias].execute_wrapper(begin):
        yield
    assert began.is_set()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda number: number.name)
def test_a_signal_ends_the_statement(empty_db: CommittedDatabase, number: signal.Signals) -> None:
    DatabaseStateStore(empty_db.alias).create_session("session", agent_type="agent")
    DatabaseUsageStore(empty_db.alias).record_entry(tokens("session"))
    before = signal.getsignal(number)
    with endless_usage(empty_db) as end_it:
        too_late = threading.Timer(LONGEST_WAIT, end_it)
        too_late.start()
        with signalled(empty_db, number):
            ended = run(empty_db.alias, "helix_usage", "--by", "model")
        assert too_late.is_alive()
        too_late.cancel()
    assert (ended.out, ended.code) == ("", 1)
    assert "Stopped before the usage was added up" in ended.err
    assert signal.getsignal(number) == before
    assert run(empty_db.alias, "helix_usage", "--by", "model").code == 0
