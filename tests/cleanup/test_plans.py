"""Finding the next sessions takes an index and a bounded number of rows, however many sessions there are.

``HELIX_TEST_SESSIONS`` is how many; the suite takes 100,000, and 1,000,000 prove the same in a minute or two.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from datetime import UTC, datetime

import pytest
from django.db import connections, transaction
from django.test.utils import CaptureQueriesContext

from helix_store.cleanup.expiry import DatabaseCleanup
from helix_store.models import Session
from helix_store.stores import DatabaseStateStore
from tests.cells import for_each
from tests.databases import CommittedDatabase

SESSIONS = int(os.environ.get("HELIX_TEST_SESSIONS", "100000"))
NOW = datetime(2030, 1, 1, tzinfo=UTC)
PAGE = 200

_NUMBERS = {
    "postgresql": "SELECT n FROM generate_series(1, %(sessions)s) AS n",
    "sqlite": """
        WITH RECURSIVE numbers(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM numbers WHERE n < %(sessions)s)
        SELECT n FROM numbers""",
}
_STATUS = """
    CASE n %% 10 WHEN 0 THEN 'active' WHEN 1 THEN 'paused' WHEN 2 THEN 'failed' ELSE 'completed' END"""
_MOMENT = {
    "postgresql": "timestamptz '2030-01-01 00:00:00+00' + (n %% 1000 - 500) * interval '1 minute'",
    "sqlite": "strftime('%%Y-%%m-%%d %%H:%%M:%%S', '2030-01-01', (n %% 1000 - 500) || ' minutes')",
}


@pytest.fixture
def many_sessions(committed_db: CommittedDatabase) -> Iterator[CommittedDatabase]:
    """One in five sessions has not ended, and one in ten ended because it expired; rolled back at the end."""
    quote = committed_db.connection.ops.quote_name
    columns = {
        "tenant": "%(tenant)s",
        "session_id": "'session-' || n",
        "agent_type": "'agent'",
        "status": _STATUS,
        "failure_reason": "CASE WHEN n %% 10 = 2 THEN 'session_expired' END",
        "expires_at": _MOMENT[committed_db.vendor],
        "pending_deadline": _MOMENT[committed_db.vendor],
        "pending_client_tool_calls": "'{}'",
        "created_at": "CURRENT_TIMESTAMP",
        "updated_at": "CURRENT_TIMESTAMP",
        "version": "1",
        "step_count": "0",
        "resume_count": "0",
        "message_count": "0",
        "tags": "'[]'",
        "metadata": "'{}'",
        "directory": "''",
        "current_is_checkpoint": "false",
    }
    sql = f"""
        INSERT INTO {quote(Session._meta.db_table)} ({", ".join(map(quote, columns))})
        SELECT {", ".join(columns.values())} FROM ({_NUMBERS[committed_db.vendor]}) AS numbers"""
    with transaction.atomic(using=committed_db.alias):
        with connections[committed_db.alias].cursor() as cursor:
            cursor.execute(sql, {"sessions": SESSIONS, "tenant": committed_db.tenant})
            cursor.execute(f"ANALYZE {quote(Session._meta.db_table)}")
        yield committed_db
        transaction.set_rollback(True, using=committed_db.alias)


@for_each(
    ("pages_of", "index"),
    [
        (DatabaseCleanup.expired, "helix_session_expiry_idx"),
        (DatabaseCleanup.overdue, "helix_session_pending_idx"),
        (DatabaseCleanup.deletable, "helix_session_expired_idx"),
    ],
)
def test_the_next_page_is_read_from_its_partial_index(
    many_sessions: CommittedDatabase, pages_of: Callable[..., Iterator[object]], index: str
) -> None:
    pages = pages_of(DatabaseCleanup(many_sessions.alias, None), NOW, PAGE)
    for _ in range(4):
        with CaptureQueriesContext(many_sessions.connection) as captured:
            next(pages)
        (query,) = [each["sql"] for each in captured.captured_queries if "SELECT" in each["sql"]]
        plan = explained(many_sessions, query)
        assert index in plan, plan
        assert rows_read(many_sessions, plan) <= 3 * PAGE, plan


def test_overdue_calls_are_found_by_the_index(many_sessions: CommittedDatabase) -> None:
    store = DatabaseStateStore(many_sessions.alias, tenant=many_sessions.tenant)
    with CaptureQueriesContext(many_sessions.connection) as captured:
        store.find_expired_pending(now=NOW)
    query = captured.captured_queries[-1]["sql"]
    plan = explained(many_sessions, query)
    assert "helix_session_pending_idx" in plan, plan
    assert rows_read(many_sessions, plan) <= 3 * PAGE, plan


def explained(database: CommittedDatabase, query: str) -> str:
    prefix = "EXPLAIN QUERY PLAN" if database.vendor == "sqlite" else "EXPLAIN (ANALYZE, TIMING OFF)"
    with database.connection.cursor() as cursor:
        cursor.execute(f"{prefix} {query}")
        return "\n".join(str(row[-1]) for row in cursor.fetchall())


def rows_read(database: CommittedDatabase, plan: str) -> int:
    """Rows that any node returned, or dropped after reading them; SQLite does not say, but stops at LIMIT."""
    if database.vendor == "sqlite":
        assert "TEMP B-TREE" not in plan, plan
        return 0
    counts = re.findall(r"actual rows=([\d.]+)|Rows Removed by Filter: (\d+)", plan)
    return int(sum(float(returned or removed) for returned, removed in counts))
