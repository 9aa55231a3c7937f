"""What the planners of both databases say of a statement, and what it reads when it runs."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from struct import pack, unpack_from
from typing import Any

from django.db import transaction

from tests.databases import CommittedDatabase

__all__ = ["Plan", "plans_of"]

_EXPLAIN = "EXPLAIN (ANALYZE, TIMING OFF, BUFFERS OFF, FORMAT JSON)"
_EXPLAINABLE = ("SELECT", "(SELECT", "WITH", "INSERT", "UPDATE", "DELETE")
_NOT_A_TABLE = (
    "CONSTANT",
    "json_each",
    "tree",
    "copied",
    "parent",
    "grouped",
    "highest",
    "known",
    "page",
    "running",
    "subquery",
    "entries",
    "moment",
    "given",
    "k",
    "(",
)
_OPERATIONS_A_ROW = 20
"""What SQLite's virtual machine does for a row that it passes over; one that it returns costs up to 100."""


@dataclass
class Plan:
    """Rows count where they are read, also those that a filter drops; on SQLite by the work they cost."""

    text: str
    rows_read: int = 0
    sorted_rows: int = 0
    read_whole: list[str] = field(default_factory=list)
    indexes: set[str] = field(default_factory=set)


def plans_of(database: CommittedDatabase, call: Callable[[], object], *, undone: bool = True) -> list[Plan]:
    """The plans of a call's statements, each looked at just before it runs.

    Undone, the call runs in a transaction that is rolled back.
    """
    plans: list[Plan] = []
    is_explaining = False

    def explain(execute: Any, sql: str, parameters: Any, many: bool, context: Any) -> Any:
        nonlocal is_explaining
        if not is_explaining and sql.lstrip().startswith(_EXPLAINABLE):
            is_explaining = True
            plans.append(_explained(database, sql.strip(), parameters))
            is_explaining = False
        return execute(sql, parameters, many, context)

    with transaction.atomic(using=database.alias) if undone else nullcontext():
        with database.connection.execute_wrapper(explain):
            call()
        if undone:
            transaction.set_rollback(True, using=database.alias)
    return plans


def _explained(database: CommittedDatabase, sql: str, parameters: Any) -> Plan:
    """Run a statement, and undo what it did."""
    explain = _in_sqlite if database.vendor == "sqlite" else _in_postgres
    with transaction.atomic(using=database.alias):
        try:
            return explain(database, sql, parameters)
        finally:
            transaction.set_rollback(True, using=database.alias)


def _with_arrays(value: Any) -> Any:
    """Return the list of a ``bytea[]`` that is sent in binary form; ``EXECUTE`` takes no such argument."""
    if not isinstance(value, bytes) or not value.startswith(_BYTE_ARRAY):
        return value
    (count,) = unpack_from("!i", value, len(_BYTE_ARRAY))
    elements, at = [], len(_BYTE_ARRAY) + 8
    for _ in range(count):
        (length,) = unpack_from("!i", value, at)
        at += 4 + length
        elements.append(value[at - length : at])
    return elements


_BYTE_ARRAY = pack("!3i", 1, 0, 17)
"""How an array of one dimension without nulls begins, whose elements are of type ``bytea``."""


def _in_postgres(database: CommittedDatabase, sql: str, parameters: Any) -> Plan:
    with database.connection.cursor() as cursor:
        if "$1" in sql:
            # Prepared: the server may settle on a plan that does not look at the values.
            cursor.execute("SET LOCAL plan_cache_mode = force_generic_plan")
            cursor.execute(f"PREPARE explained AS {sql}")
            cursor.execute(
                f"{_EXPLAIN} EXECUTE explained ({', '.join(['%s'] * len(parameters))})",
                list(map(_with_arrays, parameters)),
            )
        else:
            cursor.execute(f"{_EXPLAIN} {sql}", parameters)
        (found,) = cursor.fetchone()
        if "$1" in sql:
            cursor.execute("DEALLOCATE explained")
    (answer,) = json.loads(found) if isinstance(found, str) else found
    plan = Plan(sql)
    for depth, node in _nodes(answer["Plan"]):
        _add(plan, node)
        names = [node[key] for key in ("Node Type", "Relation Name", "Index Name") if key in node]
        plan.text += (
            f"\n{' ' * depth}{' '.join(names)}: {node['Actual Rows']} rows {node['Actual Loops']} times"
        )
    return plan


def _nodes(node: dict[str, Any], depth: int = 0) -> Iterator[tuple[int, dict[str, Any]]]:
    yield depth, node
    for child in node.get("Plans", ()):
        yield from _nodes(child, depth + 1)


def _add(plan: Plan, node: dict[str, Any]) -> None:
    plan.indexes.update(node.get("Conflict Arbiter Indexes", ()))
    loops = node["Actual Loops"]
    if not loops:
        return
    kind = node["Node Type"]
    plan.indexes.update({node["Index Name"]} if "Index Name" in node else ())
    if kind.endswith("Scan") and "Relation Name" in node:
        dropped = node.get("Rows Removed by Filter", 0) + node.get("Rows Removed by Index Recheck", 0)
        rows = node["Actual Rows"] + dropped
        # An empty table, as those of other apps are here, is scanned whatever its indexes are. So is a
        # catalog of the server while it is small; it does not grow with the stored rows.
        if kind == "Seq Scan" and rows and not node["Relation Name"].startswith("pg_"):
            plan.read_whole.append(node["Relation Name"])
        plan.rows_read += round(rows * loops)
    if kind.endswith("Sort"):
        (sorted_node,) = [each for each in node["Plans"] if each["Parent Relationship"] == "Outer"]
        plan.sorted_rows += round(sorted_node["Actual Rows"] * sorted_node["Actual Loops"])


def _in_sqlite(database: CommittedDatabase, sql: str, parameters: Any) -> Plan:
    operations = 0

    def count() -> int:
        nonlocal operations
        operations += 1
        return 0

    with database.connection.cursor() as cursor:
        cursor.execute(f"EXPLAIN QUERY PLAN {sql}", parameters)
        lines = [str(row[3]) for row in cursor.fetchall()]
        native: Any = database.connection.connection
        native.set_progress_handler(count, _OPERATIONS_A_ROW)
        try:
            cursor.execute(sql, parameters)
            rows = cursor.fetchall()
        finally:
            native.set_progress_handler(None, 0)
    plan = Plan("\n".join([sql, *lines]), rows_read=operations)
    # A table is in the order of its key: what is read before the limit is in the operations.
    is_in_order = re.search(
        r'ORDER BY ("\w+"\."id"|1) DESC LIMIT \d+$|^SELECT M(?:AX|IN)\("\w+"\."id"\)|\(SELECT max\(id\)', sql
    )
    for line in lines:
        found = re.match(r"(?:SCAN|SEARCH) (?:\d+ (?=CONSTANT))?(\S+)", line)
        # A virtual table is a parameter of JSON, and no table of ours.
        is_indexed = ("USING" in line and "AUTOMATIC" not in line) or "VIRTUAL TABLE" in line
        if found and not is_in_order and not is_indexed and not found[1].startswith(_NOT_A_TABLE):
            plan.read_whole.append(line)
        if line.startswith("BLOOM FILTER"):
            plan.read_whole.append(line)
        if "TEMP B-TREE FOR" in line and "ORDER BY" in line:
            plan.sorted_rows += len(rows)
        plan.indexes.update(re.findall(r"USING (?:COVERING )?INDEX (\S+)", line))
    return plan
