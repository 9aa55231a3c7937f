"""The tables of the limit, filled like ours."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from django.db import connections

from benchmarks.bench import Bench
from benchmarks.payloads import state_of
from benchmarks.sessions import AGENT_TYPE, FILLERS, PER_WORKER, WORKERS

__all__ = ["execute", "reference_schema", "reference_sessions"]

_SCHEMA = Path(__file__).parent / "reference_schema.sql"

_SESSIONS = """
INSERT INTO ref_session
SELECT (CASE WHEN n <= %(live)s THEN 's-' ELSE 'filler-' END) || n, %(agent_type)s, 'active', 1, 0,
    clock_timestamp(), %(state)s::jsonb
FROM generate_series(1, %(all)s) AS n
"""
_CHECKPOINTS = """
INSERT INTO ref_checkpoint
SELECT id, 1, state, 0, clock_timestamp() FROM ref_session WHERE id LIKE 's-%%'
"""


def reference_schema(bench: Bench) -> None:
    """The tables in the default database, empty."""
    execute("default", _SCHEMA.read_text().replace("%", "%%"), {})


def reference_sessions(bench: Bench) -> None:
    """As many sessions as `live_sessions` makes."""
    bench.once(reference_schema)
    live = WORKERS * PER_WORKER
    parameters = {"agent_type": AGENT_TYPE, "live": live, "all": live + FILLERS}
    execute("default", _SESSIONS, {**parameters, "state": json.dumps(state_of(4))})
    execute("default", _CHECKPOINTS, {})


def execute(alias: str, sql: str, parameters: dict[str, Any] | Sequence[Any]) -> None:
    with connections[alias].cursor() as cursor:
        cursor.execute(sql, parameters)
