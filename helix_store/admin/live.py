"""Marks by which an open page learns that it is out of date. Each takes one statement, which uses indexes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from hashlib import sha256
from typing import Any, Final

from django.db.models import Model, OuterRef, QuerySet, Subquery

from helix_store.core import moments
from helix_store.core.types import NON_TERMINAL_STATUSES, RunStatus
from helix_store.engine.database import Database
from helix_store.engine.expressions import list_parameter
from helix_store.engine.statement import Statement, table
from helix_store.models import Checkpoint, Effect, Lock, Message, Run, Session

SESSION_SECONDS: Final = 3
"""The time between two questions of the page of a session."""

START_SECONDS: Final = 10
LIST_SECONDS: Final = 10

_SESSION: Final = ("status", "version", "message_count", "step_count", "updated_at", "next_post_at")
_MOST_RUNNING: Final = 1_000
_MOST_TENANTS: Final = 200

_RUNNING: Final = f"""(SELECT count(*) FROM (SELECT id FROM {table(Run)}
        WHERE status = '{RunStatus.RUNNING.value}' LIMIT {_MOST_RUNNING}) AS running)"""


def _newest(*models: type[Model]) -> Statement:
    """Return a statement that reads the newest key of each table, and the number of running runs."""
    keys = (f"(SELECT max(id) FROM {table(model)})" for model in models)
    return Statement(f"SELECT {', '.join(keys)}, {_RUNNING}")


_START: Final = _newest(Session, Run, Effect)
_LISTS: Final = _newest(Session, Run, Effect, Checkpoint, Message)


_NEWEST_OF_TENANT: Final = f"""(SELECT max(s.updated_at) FROM {table(Session)} AS s
            WHERE s.tenant = tenants.value)"""
_START_OF_TENANTS: Final = Statement(
    f"SELECT max({_NEWEST_OF_TENANT}) FROM unnest(%(tenants)s::text[]) AS tenants(value)",
    f"SELECT max({_NEWEST_OF_TENANT}) FROM json_each(%(tenants)s) AS tenants",
)


def mark_of_session(sessions: QuerySet[Any], key: int) -> dict[str, Any] | None:
    """Return a mark that changes with a session, its runs, its newest effect and its lock.

    It is ``None`` if the session is gone. While a run is running, it also changes every minute, because
    nothing is written when a worker dies.
    """
    run = Run.objects.filter(session=OuterRef("pk")).order_by("-turn")
    effect = Effect.objects.filter(session=OuterRef("pk")).order_by("-sequence")
    lock = Lock.objects.filter(tenant=OuterRef("tenant"), name=OuterRef("session_id"))
    columns = (
        *(Subquery(run.values(name)[:1]) for name in ("status", "turn")),
        *(Subquery(effect.values(name)[:1]) for name in ("sequence", "state", "attempt")),
        Subquery(lock.values("token")[:1]),
    )
    row = sessions.filter(pk=key).values_list(*_SESSION, *columns).first()
    if row is None:
        return None
    is_running = row[len(_SESSION)] == RunStatus.RUNNING
    return {"mark": _mark(row, is_running=is_running), "is_over": row[0] not in NON_TERMINAL_STATUSES}


def mark_of_start(using: str, tenants: Sequence[str] | None) -> dict[str, Any]:
    """Return a mark that changes when a session or an effect is created, and when a run starts or ends.

    For some of the tenants, it changes when one of their sessions changes, and every minute: no index finds
    their newest runs and effects. ``None`` means all tenants.
    """
    return _mark_of(_START, using, tenants)


def mark_of_lists(using: str, tenants: Sequence[str] | None) -> dict[str, Any]:
    """Return a mark that also changes with each step and message, for the lists."""
    return _mark_of(_LISTS, using, tenants)


def _mark_of(statement: Statement, using: str, tenants: Sequence[str] | None) -> dict[str, Any]:
    db = Database(using, "")
    if tenants is not None:
        given = list_parameter(db, list(tenants[:_MOST_TENANTS]))
        (newest,) = db.read(_START_OF_TENANTS, {"tenants": given})
        return {"mark": _mark(newest, is_running=True), "is_over": False}
    (row,) = db.read(statement, {})
    return {"mark": _mark(row, is_running=bool(row[-1])), "is_over": False}


def _mark(values: Iterable[Any], *, is_running: bool) -> str:
    minute = f"{moments.now():%H:%M}" if is_running else ""
    return sha256("|".join([minute, *map(str, values)]).encode()).hexdigest()[:16]
