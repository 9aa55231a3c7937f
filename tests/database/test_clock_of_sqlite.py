"""SQLite compares moments as texts, so its clock writes them exactly as the fields do."""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any, Final

import pytest
from django.db import connections
from django.db.models import Subquery

from helix_store.core.moments import as_sqlite_text
from helix_store.engine.database import Database
from helix_store.engine.expressions import DatabaseNow
from helix_store.engine.statement import SQLITE, Statement
from helix_store.models import Session
from helix_store.sessions.effects import SETTLE
from helix_store.stores import DatabaseStateStore
from tests.cells import for_each
from tests.databases import CommittedDatabase

MOMENTS: Final = {
    "with a fraction": datetime(2026, 11, 29, 5, 10, 59, 123_000, UTC),
    "a whole second": datetime(2026, 11, 29, 5, 10, 59, 0, UTC),
    "the end of a year": datetime(2026, 12, 31, 23, 59, 59, 999_000, UTC),
}
ASK: Final[dict[str, Any]] = {"tool_name": "ask"}


@pytest.fixture
def local_time(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The process is in New York, as that of a project with this ``TIME_ZONE``."""
    with monkeypatch.context() as changed:
        changed.setenv("TZ", "America/New_York")
        time.tzset()
        yield
    time.tzset()


def at(expression: str, moment: datetime) -> str:
    """What an expression of the clock writes at a moment."""
    fixed = expression.replace("'now'", f"'{moment:%Y-%m-%d %H:%M:%S}.{moment.microsecond // 1000:03d}'")
    with connections["default"].cursor() as cursor:
        cursor.execute(f"SELECT {fixed}", {"ms": 0})
        return str(cursor.fetchone()[0])


@for_each("name", MOMENTS)
def test_the_clock_writes_what_a_field_stores(sqlite_db: CommittedDatabase, name: str) -> None:
    moment = MOMENTS[name]
    assert at(SQLITE.now, moment) == at(SQLITE.after("ms"), moment) == as_sqlite_text(moment)


@for_each("name", MOMENTS)
def test_what_a_row_returned_is_the_same_parameter_at_any_place(
    local_time: None, sqlite_db: CommittedDatabase, name: str
) -> None:
    """A page continues after such a moment: as local time, it would skip the sessions of some hours."""
    moment = MOMENTS[name]
    found = Database(sqlite_db.alias, "").read(
        Statement("SELECT %(moment)s, %(naive)s"), {"moment": moment, "naive": moment.replace(tzinfo=None)}
    )
    assert found == [(as_sqlite_text(moment), as_sqlite_text(moment))]


@for_each("name", MOMENTS)
def test_what_is_settled_at_once_is_later_than_the_end_of_the_turn(
    sqlite_db: CommittedDatabase, name: str
) -> None:
    """Otherwise, a session is at rest although an effect was settled in the millisecond of its run's end."""
    moment = MOMENTS[name]
    assert at(SQLITE.next, moment) == as_sqlite_text(moment + timedelta(milliseconds=1))
    assert f"ended_at = {SQLITE.next}" in str(SETTLE.sqlite)


def test_the_orm_reads_the_same_clock(sqlite_db: CommittedDatabase) -> None:
    store = DatabaseStateStore(sqlite_db.alias, tenant=sqlite_db.tenant)
    store.create_session("s", agent_type="a")
    rows = Session.objects.using(sqlite_db.alias).filter(tenant=sqlite_db.tenant)
    rows.update(stopped_at=DatabaseNow())
    stopped_at = rows.get().stopped_at
    with sqlite_db.connection.cursor() as cursor:
        cursor.execute("SELECT stopped_at || '' FROM helix_store_session WHERE id = %s", [rows.get().pk])
        assert cursor.fetchone() == (as_sqlite_text(stopped_at),)


def test_sessions_that_are_due_at_the_same_time_hide_each_other_on_no_page(
    committed_db: CommittedDatabase,
) -> None:
    store = DatabaseStateStore(committed_db.alias, tenant=committed_db.tenant)
    for name in ("first", "second", "third"):
        store.create_session(name, agent_type="a")
        store.post_message(name, {"role": "user", "content": "x"})
        if name != "third":
            calls = {"open": ASK, "answered": ASK}
            store.suspend(name, kind="suspended_client_tool", context={}, pending=calls)
            store.submit_tool_result(name, "answered", result="yes")
    sessions = Session.objects.using(committed_db.alias).filter(tenant=committed_db.tenant)
    # As stored: a value that was read would be written in another form.
    sessions.update(next_post_at=Subquery(sessions.filter(session_id="first").values("next_post_at")[:1]))
    assert [due.session_id for due in store.find_due_posts(limit=1)] == ["third"]
