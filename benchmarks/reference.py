"""The tables of the limit, filled like ours."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from django.db import connections

from benchmarks.bench import Bench
from benchmarks.payloads import state_of
from benchmarks.sessions import (
    AGENT_TYPE,
    FILLERS,
    PER_WORKER,
    READ_SESSIONS,
    STEPS_BEFORE_READING,
    WORKERS,
)

__all__ = [
    "execute",
    "fill_reference_sessions",
    "reference_schema",
    "reference_schema_in",
    "reference_sessions",
]

_SCHEMA = Path(__file__).parent / "reference_schema.sql"

_SESSIONS = """
INSERT INTO ref_session
SELECT %(prefix)s || n, %(agent_type)s, 'active', 1, 0, clock_timestamp(), %(state)s::jsonb
FROM generate_series(1, %(count)s) AS n
"""
_CHECKPOINTS = """
INSERT INTO ref_checkpoint
SELECT id, n, state, 0, clock_timestamp() FROM ref_session, generate_series(1, %(steps)s) AS n
WHERE id LIKE %(prefix)s || '%%'
"""


def reference_schema(bench: Bench) -> None:
    """The tables in the default database, empty."""
    reference_schema_in("default")


def reference_schema_in(alias: str) -> None:
    with connections[alias].cursor() as cursor:
        cursor.execute(_SCHEMA.read_text())


def reference_sessions(bench: Bench) -> None:
    """As many sessions as `live_sessions` makes, in the default database."""
    bench.once(reference_schema)
    fill_reference_sessions("default")


def fill_reference_sessions(alias: str) -> None:
    for prefix, count, steps in (
        ("s-", WORKERS * PER_WORKER, 1),
        ("r-", len(READ_SESSIONS), STEPS_BEFORE_READING),
        ("filler-", FILLERS, 0),
    ):
        parameters = {"prefix": prefix, "agent_type": AGENT_TYPE, "state": json.dumps(state_of(4))}
        execute(alias, _SESSIONS, {**parameters, "count": count})
        execute(alias, _CHECKPOINTS, {"prefix": prefix, "steps": steps})


def execute(alias: str, sql: str, parameters: dict[str, Any] | Sequence[Any]) -> None:
    with connections[alias].cursor() as cursor:
        cursor.execute(sql, parameters)
