"""A database with very many sessions, built by SQL in a few statements."""

from __future__ import annotations

from django.db import connections

from benchmarks.bench import Bench
from benchmarks.payloads import message
from benchmarks.reference import execute, reference_schema_in
from benchmarks.server import create_database
from benchmarks.sessions import copy_rows, create_sessions, sessions_of
from helix_store.core.types import SessionStatus, StepInfo
from helix_store.models import (
    Checkpoint,
    Message,
    Session,
)
from helix_store.stores import DatabaseStateStore

__all__ = ["LISTED_STATUS", "RETIRED_TYPE", "large_database"]

AGENT_TYPES = 5
RETIRED_TYPE = "retired"
SESSIONS_OF_A_USER = 100
SESSIONS_OF_A_WORKSPACE = 1_000
LISTED_STATUS = SessionStatus.ACTIVE

# Most sessions of a table that has grown have ended. Drawn independently of the time.
_STATUS = """
    (ARRAY['active', 'active', 'running', 'paused', 'interrupted', 'failed', 'failed', 'failed'])
    [1 + floor(random() * 32)::int]
"""


def large_database(bench: Bench) -> None:
    """As many sessions as the scale says, each with a message and a checkpoint, and 200 to work on."""
    create_database(bench.cluster, "large")
    sessions = bench.scale.sessions
    keys = _template()
    numbers = range(1, sessions + 1)
    session_key = f"{keys[Session]} + n"
    checkpoint_key = f"{keys[Checkpoint]} + n"
    copy_rows(
        "large",
        Session,
        "template",
        numbers,
        {**_session_columns(sessions), "id": session_key, "current_id": checkpoint_key},
    )
    copy_rows(
        "large",
        Checkpoint,
        "template",
        numbers,
        {"id": checkpoint_key, "session_id": session_key, "checkpoint_id": "'checkpoint-' || n"},
    )
    copy_rows("large", Message, "template", numbers, {"session_id": session_key})
    for model in keys:
        execute(
            "large",
            f"""SELECT setval(pg_get_serial_sequence('"{model._meta.db_table}"', 'id'),
                (SELECT max(id) FROM "{model._meta.db_table}"))""",
            [],
        )
    create_sessions("large", sessions_of(0))
    _fill_reference()
    with connections["large"].cursor() as cursor:
        cursor.execute("VACUUM (ANALYZE)")


def _session_columns(sessions: int) -> dict[str, str]:
    """SQL for what sessions differ in."""
    name, moment = "'many-' || n", "now() - n * interval '1 second'"
    return {
        "session_id": name,
        "root_session_id": name,
        "stream_id": name,
        # The oldest tenth is of a type that nobody uses any more: newest first, they come last.
        "agent_type": f"""
            CASE WHEN n > {sessions // 10 * 9} THEN '{RETIRED_TYPE}'
            ELSE 'agent-' || floor(random() * {AGENT_TYPES}) END""",
        "status": f"coalesce({_STATUS}, 'completed')",
        "user_id": f"'user-' || floor(random() * {sessions // SESSIONS_OF_A_USER})",
        "workspace_id": f"'workspace-' || floor(random() * {sessions // SESSIONS_OF_A_WORKSPACE})",
        "title": "'Session ' || n",
        # One in two hundred is pinned.
        "tags": "CASE WHEN mod(n, 200) = 0 THEN '[\"pinned\"]'::jsonb ELSE '[]'::jsonb END",
        "metadata": "jsonb_build_object('team', 'team-' || mod(n, 500))",
        "created_at": moment,
        "updated_at": f"{moment} + random() * interval '1 hour'",
    }


def _template() -> dict[type[Session] | type[Checkpoint], int]:
    """A session that our API wrote, to be copied; the keys from which copies count on."""
    store = DatabaseStateStore("large")
    session = store.create_session("template", agent_type="template", custom_state={"step": 1})
    store.save_state_and_promote_staging("template", session, [message(1)], StepInfo("step-0", 0))
    row = Session.objects.using("large").get(session_id="template")
    assert row.current_id is not None
    return {Session: row.pk, Checkpoint: row.current_id}


def _fill_reference() -> None:
    reference_schema_in("large")
    execute(
        "large",
        f"""
        INSERT INTO ref_head
        SELECT session_id, agent_type, status, version, message_count, title, user_id, created_at, updated_at
        FROM "{Session._meta.db_table}" """,
        [],
    )
