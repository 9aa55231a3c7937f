"""Sessions to work on: made by our API, and copied by SQL where there have to be very many."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from django.db import connections
from django.db.models import Model

from benchmarks.bench import Bench
from benchmarks.payloads import state_of
from helix_store.core.types import StepInfo
from helix_store.models import Session
from helix_store.stores import DatabaseStateStore

__all__ = [
    "AGENT_TYPE",
    "FILLERS",
    "PER_WORKER",
    "READ_SESSIONS",
    "STEPS_BEFORE_READING",
    "WORKERS",
    "column_names",
    "copy_rows",
    "create_sessions",
    "live_sessions",
    "sessions_of",
]

AGENT_TYPE = "bench"
WORKERS = 8
PER_WORKER = 200
READ_SESSIONS = [f"r-{number}" for number in range(1, 201)]
"""Sessions that are only read: they keep a state of 4 KB."""
STEPS_BEFORE_READING = 10
FILLERS = 10_200 - WORKERS * PER_WORKER - len(READ_SESSIONS)
"""Sessions that nobody works on, so that the table is not a toy."""


def sessions_of(worker: int, *, per_worker: int = PER_WORKER, prefix: str = "s") -> list[str]:
    """Workers keep to sessions of their own, as the agents of a real system do."""
    return [f"{prefix}-{worker * per_worker + number}" for number in range(1, per_worker + 1)]


def create_sessions(alias: str, session_ids: Sequence[str], *, steps: int = 1) -> None:
    """Sessions with a state of 4 KB that have made so many steps."""
    store = DatabaseStateStore(alias)
    states = [state_of(4, step) for step in range(steps)]
    for session_id in session_ids:
        session = store.create_session(session_id, agent_type=AGENT_TYPE)
        for step, state in enumerate(states):
            session.custom_state = state
            store.save_state_and_promote_staging(session_id, session, [], StepInfo(f"step-{step}", step))


def live_sessions(bench: Bench) -> None:
    """The sessions of all workers, and some more, in the default database."""
    for worker in range(WORKERS):
        create_sessions("default", sessions_of(worker))
    create_sessions("default", READ_SESSIONS, steps=STEPS_BEFORE_READING)
    store = DatabaseStateStore()
    template = store.create_session("filler-0", agent_type=AGENT_TYPE)
    names = dict.fromkeys(("session_id", "root_session_id", "stream_id"), "'filler-' || n")
    copied = {"current_id": "NULL", "current_is_checkpoint": "false", **names}
    copy_rows("default", Session, template.session_id, range(1, FILLERS), copied)


def column_names(model: type[Model]) -> list[str]:
    """All columns but the surrogate key."""
    return [str(field.column) for field in model._meta.concrete_fields if field.column != "id"]


def copy_rows(
    alias: str, model: type[Model], session_id: str, numbers: range, columns: Mapping[str, str]
) -> None:
    """Copy the one row of a session for each number ``n``; ``columns`` are SQL for what differs.

    The other columns are as in that row, whatever columns there are, so that copies are what our API writes.
    """
    names = column_names(model) if "id" not in columns else ["id", *column_names(model)]
    table = f'"{model._meta.db_table}"'
    session = f'"{Session._meta.db_table}"'
    own_key = "id" if model is Session else "session_id"
    values = ", ".join(columns.get(name, f'template."{name}"') for name in names)
    with connections[alias].cursor() as cursor:
        cursor.execute(
            f"""
            INSERT INTO {table} ({", ".join(f'"{name}"' for name in names)})
            SELECT {values} FROM {table} AS template, generate_series(%s::bigint, %s::bigint) AS n
            WHERE template.{own_key} = (SELECT id FROM {session} WHERE session_id = %s)""",
            [numbers.start, numbers.stop - 1, session_id],
        )
        assert cursor.rowcount == len(numbers), f"{session_id}: {cursor.rowcount} rows copied"
