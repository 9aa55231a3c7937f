"""Sessions to look at, written through the store."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from helix_store.core.payloads import encode
from helix_store.core.types import SessionState, StepInfo
from helix_store.models import (
    Budget,
    Checkpoint,
    Item,
    Lock,
    Message,
    Run,
    Session,
    Stream,
    UsageEntry,
)
from helix_store.stores import DatabaseStateStore
from tests.databases import CommittedDatabase

MODELS = (Session, Message, Item, Checkpoint, Run, Lock, UsageEntry, Stream, Budget)
"""The models with pages of their own."""


def store_of(database: CommittedDatabase) -> DatabaseStateStore:
    return DatabaseStateStore(database.alias, tenant=database.tenant)


def write_session(
    database: CommittedDatabase, text: str = "hello", *, session_id: str | None = None, **fields: Any
) -> Session:
    """A session with a row of each kind, whose every free text is ``text``."""
    store = store_of(database)
    state = store.create_session(
        session_id, **{"agent_type": text, "user_id": text, "title": text, "tags": [text], **fields}
    )
    session_id = state.session_id
    run = store.start_run(session_id)
    fill(state, text)
    store.save_state_and_promote_staging(
        session_id, state, [{"role": text, "content": text}], StepInfo("step-1", 1), run_id=run.run_id
    )
    store.update_run(session_id, run.run_id, status="failed", completion_reason=text, error={text: text})
    Run.objects.using(database.alias).filter(run_id=run.run_id).update(build=text)
    store.stage_changes(session_id, text, {"tool_call_id": text, "merge_changes": {text: text}})
    store.add_sub_session_refs(
        session_id, [{"sub_session_id": text, "agent_type": text, "status": text, "output": {text: text}}]
    )
    store.request_interrupt(session_id, reason=text)
    session = Session.objects.using(database.alias).get(tenant=database.tenant, session_id=session_id)
    write_rows_beside(session, text)
    return session


def fill(state: SessionState, text: str) -> None:
    state.custom_state = {text: [text, {"n": 1.0}]}
    state.output = {text: text}
    state.error = [text]
    state.failure_reason = text
    state.metadata = {text: text}
    state.directory = text
    state.pending_client_tool_calls = {text: {"tool_name": text}}
    state.completed_client_tool_calls = {text: {"result": text}}
    state.client_tool_call_ownership = {text: text}
    state.suspension_context = {text: text}
    state.suspended_awaiting_children = [text]
    state.suspended_step_id = text
    state.tracing_context = {text: text}


def write_rows_beside(session: Session, text: str) -> None:
    """Rows of tables that no store writes yet."""
    alias = session._state.db
    now = datetime.now(UTC)
    Stream.objects.using(alias).create(
        tenant=session.tenant,
        stream_id=f"{session.session_id} {text}"[:255],
        status="failed",
        run_id=text,
        agent_name=text,
        output=encode({text: text}),
        error=encode([text]),
        created_at=now,
        updated_at=now,
        ended_at=now,
    )
    Item.objects.using(alias).create(
        session=session, lane=text[:1_000], key=text[:1_000], payload=encode([text]), created_at=now
    )
    Lock.objects.using(alias).create(tenant=session.tenant, name=f"{session.session_id} {text}", owner=text)
    Budget.objects.using(alias).create(
        tenant=session.tenant,
        name=f"{session.session_id} {text}"[:255],
        scope="user",
        value=text[:255],
        period="day",
        limit_usd=1,
        created_at=now,
        updated_at=now,
    )
    UsageEntry.objects.using(alias).create(
        tenant=session.tenant,
        entry_id=session.session_id,
        session=session,
        recorded_for=text,
        session_agent_type=text,
        kind="custom",
        timestamp=datetime.now(UTC),
        source_type=text,
        source_name=text,
        custom_type=text,
        custom_name=text,
    )


def rows_of(session: Session) -> list[Any]:
    """One row per model with a page of its own; only their keys, since payloads may be damaged."""
    alias = session._state.db
    return [
        session,
        Message.objects.using(alias).filter(session=session).only("pk").latest("sequence"),
        Item.objects.using(alias).filter(session=session).only("pk").latest("pk"),
        Checkpoint.objects.using(alias).filter(session=session).only("pk").latest("version"),
        Run.objects.using(alias).filter(session=session).only("pk").latest("turn"),
        Lock.objects.using(alias).filter(tenant=session.tenant).latest("pk"),
        UsageEntry.objects.using(alias).get(session=session),
        Stream.objects.using(alias)
        .filter(tenant=session.tenant, stream_id__startswith=session.session_id)
        .only("pk")
        .latest("pk"),
        Budget.objects.using(alias).get(
            tenant=session.tenant, name__startswith=f"{session.session_id} "[:255]
        ),
    ]
