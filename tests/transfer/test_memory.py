"""Memory does not grow with the number of sessions, nor with the length of one."""

from __future__ import annotations

import resource
from datetime import datetime
from pathlib import Path
from typing import Any

from django.db.models import OuterRef, Subquery

from helix_store.core import moments
from helix_store.core.types import CheckpointSource
from helix_store.models import Checkpoint, CheckpointKind, Lock, Message, Session
from helix_store.sessions.state import root_session
from helix_store.transfer import DatabaseSource, ExportFile, ExportSummary, import_units, write_export
from tests.databases import CommittedDatabase, fresh_tenant
from tests.processes import WorkerProcess

MEGABYTE = 1_000_000
GROWTH = 20 * MEGABYTE


def _message(characters: int) -> str:
    return f'{{"role":"user","content":"{"x" * characters}"}}'


def export_and_measure(alias: str, tenant: str, path: str) -> tuple[ExportSummary, int]:
    with Path(path).open("wb") as file:
        summary = write_export(DatabaseSource(alias, tenant=tenant), file)
    return summary, _peak()


def import_and_measure(alias: str, path: str) -> tuple[dict[str, Any], int]:
    with Path(path).open("rb") as file:
        summary = import_units(ExportFile(file).units(), alias)
    return summary.to_dict(), _peak()


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _add_sessions(alias: str, tenant: str, first: int, last: int) -> None:
    """Sessions with a state, two messages and a lock."""
    at = moments.now()
    for start in range(first, last, 1_000):
        sessions = Session.objects.using(alias).bulk_create(
            _session(tenant, f"session-{number:06}", message_count=2, at=at)
            for number in range(start, min(start + 1_000, last))
        )
        _add_states(alias, sessions)
        Message.objects.using(alias).bulk_create(
            Message(session=each, sequence=number, role="user", payload=_message(500), created_at=at)
            for each in sessions
            for number in (1, 2)
        )
        Lock.objects.using(alias).bulk_create(
            Lock(tenant=tenant, name=each.session_id, token=1) for each in sessions
        )


def _session(tenant: str, session_id: str, *, message_count: int, at: datetime) -> Session:
    columns = root_session(session_id, "agent").encoded.columns
    columns |= {"root_session_id": session_id, "message_count": message_count}
    return Session(tenant=tenant, session_id=session_id, created_at=at, updated_at=at, **columns)


def _add_states(alias: str, sessions: list[Session]) -> None:
    """The states of new sessions, as the store writes them."""
    Checkpoint.objects.using(alias).bulk_create(_state(each) for each in sessions)
    state = Checkpoint.objects.using(alias).filter(session=OuterRef("pk")).values("pk")[:1]
    Session.objects.using(alias).filter(pk__in=[each.pk for each in sessions]).update(current=Subquery(state))


def _state(session: Session) -> Checkpoint:
    encoded = root_session(session.session_id, session.agent_type).encoded
    return Checkpoint(
        session=session,
        kind=CheckpointKind.STATE,
        version=1,
        source=CheckpointSource.INPUT.value,
        payload=encoded.payload,
        envelope=encoded.envelope,
        size_bytes=encoded.size_bytes,
        created_at=session.created_at,
    )


def _long_session(alias: str, tenant: str, messages: int) -> None:
    at = moments.now()
    session = _session(tenant, "long", message_count=messages, at=at)
    session.save(using=alias, force_insert=True)
    _add_states(alias, [session])
    for start in range(0, messages, 1_000):
        Message.objects.using(alias).bulk_create(
            Message(
                session=session,
                sequence=number,
                role="user",
                payload=_message(10_000),
                created_at=at,
            )
            for number in range(start + 1, min(start + 1_000, messages) + 1)
        )


def test_20_000_sessions_take_no_more_memory_than_2_000(
    committed_db: CommittedDatabase, tmp_path: Path
) -> None:
    alias, tenant = committed_db.alias, committed_db.tenant
    peaks = []
    for first, last in ((0, 2_000), (2_000, 20_000)):
        _add_sessions(alias, tenant, first, last)
        worker = WorkerProcess(export_and_measure, alias, tenant, str(tmp_path / "export.jsonl"))
        summary, peak = worker.outcome(timeout=300).unwrap()
        assert (summary.sessions, summary.problems) == (last, [])
        peaks.append(peak)
    assert peaks[1] - peaks[0] < GROWTH


def test_a_long_session_takes_no_more_memory_than_a_short_one(
    committed_db: CommittedDatabase, tmp_path: Path
) -> None:
    alias = committed_db.alias
    exports, imports = [], []
    for messages in (500, 8_000):
        tenant, path = fresh_tenant(), str(tmp_path / f"{messages}.jsonl")
        _long_session(alias, tenant, messages)
        summary, peak = WorkerProcess(export_and_measure, alias, tenant, path).outcome(timeout=300).unwrap()
        assert summary.counts["message"] == messages
        exports.append(peak)
        Message.objects.using(alias).filter(session__tenant=tenant).delete()
        Session.objects.using(alias).filter(tenant=tenant).delete()
        found, peak = WorkerProcess(import_and_measure, alias, path).outcome(timeout=300).unwrap()
        assert found["problems"] == []
        assert found["records"]["message"] == messages
        imports.append(peak)
    assert exports[1] - exports[0] < GROWTH
    assert imports[1] - imports[0] < GROWTH
