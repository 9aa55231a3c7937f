"""The tables of the limit, filled like ours."""

from __future__ import annotations

import json
from pathlib import Path

from django.db import connection

from benchmarks.paths import FILLERS, HISTORY, LIVE_SESSIONS
from benchmarks.payloads import message, state_of

__all__ = ["prepare_reference"]

_SCHEMA = Path(__file__).parent / "reference_schema.sql"

_SESSIONS = """
INSERT INTO ref_session
SELECT (CASE WHEN n <= %s THEN 's-' ELSE 'filler-' END) || n, 'bench', 'active', 1, 0, clock_timestamp(),
    %s::jsonb
FROM generate_series(1, %s) AS n
"""
_MESSAGES = """
INSERT INTO ref_message
SELECT 'history', n, 'user', %s::jsonb, clock_timestamp() FROM generate_series(1, %s) AS n
"""
_CHECKPOINTS = """
INSERT INTO ref_checkpoint
SELECT id, 1, state, 0, clock_timestamp() FROM ref_session WHERE id LIKE 's-%'
"""
_LOCKS = "INSERT INTO ref_lock SELECT 'lock-' || n, 0, NULL FROM generate_series(1, 200) AS n"


def prepare_reference() -> None:
    with connection.cursor() as cursor:
        cursor.execute(_SCHEMA.read_text())
        cursor.execute(_SESSIONS, [LIVE_SESSIONS, json.dumps(state_of(4)), LIVE_SESSIONS + FILLERS])
        cursor.execute(_MESSAGES, [json.dumps(message(1)), HISTORY])
        cursor.execute(_CHECKPOINTS)
        cursor.execute(_LOCKS)
        cursor.execute("ANALYZE")
