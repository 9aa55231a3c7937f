"""Every statement in the form for Citus keeps to what its planner takes. PostgreSQL itself reads them.

No cluster takes part: the rules are the refusals that were seen on one.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from itertools import product
from pathlib import Path
from typing import Any, Final

import pytest

import helix_store
from helix_store.cleanup.erasure import row_counts_statement
from helix_store.core.usage import UsageReportGrouping
from helix_store.counters import deletion
from helix_store.engine.statement import Statement, table
from helix_store.models import UsageEntry
from helix_store.sessions.statements import step_statement
from helix_store.usage.ledger import (
    COLUMNS,
    REPORT_FILTERS,
    SESSION_COLUMNS,
    insert_entries,
    insert_entry,
    report_statement,
)
from tests.cells import for_each
from tests.database.citus_rules import refusals
from tests.databases import CommittedDatabase

PACKAGE: Final = Path(helix_store.__file__).parent

IN_ONE_STATEMENT: Final = {
    "helix_store.checkpointers.snapshots.PUT",
    "helix_store.checkpointers.snapshots.PUT_AND_TRIM",
    "helix_store.contrib.langgraph.statements.PUT",
    "helix_store.contrib.langgraph.statements.PUT_WRITES",
    "helix_store.sessions.effects.BEGIN_APPROVED",
    "helix_store.sessions.effects.BEGIN_FREE",
    "helix_store.sessions.effects.END",
    "helix_store.sessions.statements.STAGE_CHANGE",
    "helix_store.streams.chunks.APPEND",
}
"""Sent where `Database.has_fast_writes` only, as are those of `fast_statements`."""

NEVER_ON_CITUS: Final = {"helix_store.transfer.fences": "moves are refused there; it has no such tables"}

NO_QUERY: Final = ("SET ", "BEGIN", "ROLLBACK", "LOCK TABLE ")


def named_statements() -> Iterator[tuple[str, Statement]]:
    """The statements of every module, by their names, and some of those that functions make."""
    for path in sorted(PACKAGE.rglob("*.py")):
        if "Statement" in path.read_text():
            name = ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)
            if name in NEVER_ON_CITUS:
                continue
            for key, value in vars(import_module(name)).items():
                yield from ((f"{name}.{key}", each) for each in _statements_in(value, 2))
    entry = tuple(name for name in COLUMNS if name not in SESSION_COLUMNS)
    yield "insert_entry", insert_entry(entry, counts=False)
    yield "insert_entries", insert_entries(2)
    yield "row_counts", row_counts_statement()
    yield "deletion", deletion(f"DELETE FROM {table(UsageEntry)} WHERE session_id = 1")
    for by, filters in product(UsageReportGrouping, ((), tuple(REPORT_FILTERS))):
        yield f"report {by} {filters}", report_statement(by, filters)


def _statements_in(value: Any, depth: int) -> Iterator[Statement]:
    if isinstance(value, Statement):
        if not value.postgresql.startswith(NO_QUERY):
            yield value
    elif depth and isinstance(value, list | tuple | dict):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _statements_in(each, depth - 1)


def fast_statements() -> Iterator[tuple[str, Statement]]:
    columns = ("session_id", "version", "message_count", "step_count", "payload", "created_at", "kind")
    for prunes, merges in product((False, True), repeat=2):
        flags = {"is_expected": True, "is_fenced": True, "is_of_run": True, "is_delta": False, "ends": True}
        yield "step", step_statement(columns, messages=5, merges=merges, prunes=prunes, **flags)


@pytest.fixture(scope="module")
def statements() -> dict[str, list[Statement]]:
    found: dict[str, list[Statement]] = {}
    for name, statement in named_statements():
        found.setdefault(name, []).append(statement)
    return found


@pytest.mark.thorough
def test_every_statement_in_the_form_for_citus_keeps_to_its_rules(
    postgres_db: CommittedDatabase, statements: dict[str, list[Statement]]
) -> None:
    # Modules also import statements from each other.
    in_one = {id(each) for name in IN_ONE_STATEMENT for each in statements[name]}
    refused = {
        (name, text): found
        for name, known in statements.items()
        for statement in known
        for text in statement.citus or [statement.postgresql]
        if id(statement) not in in_one and (found := refusals(postgres_db.connection, text))
    }
    assert refused == {}


@pytest.mark.thorough
def test_each_form_for_citus_stands_in_for_a_statement_that_breaks_a_rule(
    postgres_db: CommittedDatabase, statements: dict[str, list[Statement]]
) -> None:
    forms = {name: known for name, known in statements.items() if any(each.citus for each in known)}
    needless = [
        name
        for name, known in forms.items()
        for each in known
        if each.citus and not refusals(postgres_db.connection, each.postgresql)
    ]
    assert needless == []
    assert len(forms) > 20


def test_the_writes_in_one_statement_are_what_citus_refuses(
    postgres_db: CommittedDatabase, statements: dict[str, list[Statement]]
) -> None:
    known = [*fast_statements(), *((name, each) for name in IN_ONE_STATEMENT for each in statements[name])]
    assert [name for name, each in known if not refusals(postgres_db.connection, each.postgresql)] == []


LOCK: Final = "helix_store_lock"
SET: Final = f"UPDATE {LOCK} SET"


@for_each(
    ("text", "refusal"),
    [
        (f"{SET} expires_at = clock_timestamp()", "volatile: clock_timestamp"),
        (f"{SET} token = nextval('{LOCK}_id_seq')", "volatile: nextval"),
        (f"{SET} owner = gen_random_uuid()::text", "volatile: gen_random_uuid"),
        (f"{SET} token = 1 RETURNING pg_notify('c', owner)", "volatile: pg_notify"),
        (f"{SET} token = 1 WHERE pg_try_advisory_lock(1)", "volatile: pg_try_advisory_lock"),
        (f"DELETE FROM {LOCK} WHERE random() < 0.5", "volatile: random"),
        (f"SELECT 1 FROM {LOCK} WHERE expires_at > clock_timestamp()", "volatile: clock_timestamp"),
        (f"{SET} expires_at = CASE WHEN token = 1 THEN now() END", "not immutable: now"),
        (f"{SET} expires_at = COALESCE(expires_at, CURRENT_TIMESTAMP)", "not immutable: CURRENT_TIMESTAMP"),
        (f"{SET} token = 1 RETURNING now()", "not immutable: now"),
        (f"{SET} expires_at = COALESCE(expires_at, now())", "not immutable: now"),
        (f"{SET} expires_at = expires_at + interval '1 s'", "not immutable: timestamptz_pl_interval"),
        (f"{SET} expires_at = owner::timestamptz", "not immutable: timestamptz_in"),
        (f"INSERT INTO {LOCK} (token) SELECT 1 FROM {LOCK} FOR KEY SHARE", "row lock in an INSERT"),
        (
            f"INSERT INTO {LOCK} (token) SELECT 1 RETURNING (SELECT max(token) FROM {LOCK})",
            "query in the RETURNING of an INSERT",
        ),
        (f"WITH gone AS (DELETE FROM {LOCK} RETURNING id) {SET} token = 1", "several writes"),
        (f"WITH gone AS (DELETE FROM {LOCK} RETURNING id) SELECT id FROM gone", "several writes"),
    ],
)
def test_a_statement_that_breaks_a_rule_is_found(
    postgres_db: CommittedDatabase, text: str, refusal: str
) -> None:
    assert refusal in refusals(postgres_db.connection, text)


@for_each(
    "text",
    [
        "SELECT clock_timestamp()",
        "SELECT 1 WHERE pg_try_advisory_xact_lock(1)",
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE false",
        f"SELECT id FROM {LOCK} WHERE tenant = (SELECT %(tenant)s) FOR NO KEY UPDATE",
        f"{SET} expires_at = COALESCE(expires_at, %(clock)s::timestamptz), owner = id::text",
        f"{SET} expires_at = now() + interval '1 s' WHERE expires_at < now()",
        f"{SET} token = 1 WHERE id IN (SELECT id FROM {LOCK} FOR UPDATE SKIP LOCKED)",
    ],
)
def test_a_statement_that_keeps_to_the_rules_is_not(postgres_db: CommittedDatabase, text: str) -> None:
    assert refusals(postgres_db.connection, text) == set()
