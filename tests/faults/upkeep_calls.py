"""Cleanup, retention, erasure, export, import and the adapter of sessions, for faults in statements."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any, Final

from asgiref.sync import async_to_sync

from helix_store import schema
from helix_store.adapters import LockedSession, SessionAdapter
from helix_store.cleanup import (
    CleanupSummary,
    erase,
    expired_session_cleanup,
    expired_session_cleanup_batches,
)
from helix_store.core.types import RetentionPolicy, StepInfo
from helix_store.retention import apply_retention, prune_streams
from helix_store.stores import DatabaseStateStore, DatabaseStreamManager, DatabaseUsageStore
from helix_store.testing.usage.base import custom
from helix_store.transfer import DatabaseSource, ExportFile, import_units, write_export
from tests.adapters.third_party.notebook import Notebook
from tests.databases import CommittedDatabase

__all__ = ["ADAPTER", "FUNCTIONS", "TRANSFER"]

Call = Callable[[], object]
Prepare = Callable[[CommittedDatabase], Call]

_PAST: Final = datetime(2001, 1, 1, tzinfo=UTC)


def _filled(db: CommittedDatabase) -> DatabaseStateStore:
    """Two trees of one user, with steps, usage, a stream and rows of another app; one session has expired."""
    store = DatabaseStateStore(db.alias, tenant=db.tenant)
    for name in ("first", "second"):
        state = store.create_session(name, agent_type="t", user_id="ada")
        store.save_state_and_promote_staging(name, state, [{"role": "user"}], StepInfo("step", 1))
        store.save_state_and_promote_staging(name, state, [{"role": "user"}], StepInfo("next", 2))
    store.create_session("child", agent_type="t", parent_session_id="first")
    store.create_session("expired", agent_type="t", expires_at=_PAST)
    store.update_status("second", "completed")
    streams = DatabaseStreamManager(db.alias, tenant=db.tenant)
    async_to_sync(streams.create_writer)("first", "run", "t")
    streams.write_sync("first", [{"type": "text_delta", "delta": "word"}] * 4)
    DatabaseUsageStore(db.alias, tenant=db.tenant).record_entries([custom("first"), custom("second")])
    Notebook("project", "talk", db.alias, tenant=db.tenant).write("page", [1], b"attached")
    return store


def _ended(summary: CleanupSummary) -> CleanupSummary:
    """With one number for the sessions that have ended.

    After a COMMIT without an answer, SQLite does not know whose it was: a session that was marked by it may
    count as one that had ended before.
    """
    return replace(summary, marked=0, already_terminal=summary.marked + summary.already_terminal)


def _cleanup(db: CommittedDatabase) -> Call:
    store = _filled(db)
    return lambda: _ended(expired_session_cleanup(state_store=store))


def _cleanup_batches(db: CommittedDatabase) -> Call:
    store = _filled(db)
    store.create_session("overdue", agent_type="t")
    call = {"tool_name": "ask", "deadline": 1, "on_expiry": "fail"}
    store.add_pending_tool_calls("overdue", {"call": call})
    return lambda: [_ended(each) for each in expired_session_cleanup_batches(state_store=store, page_size=1)]


def _retention(db: CommittedDatabase) -> Call:
    _filled(db)
    policy = RetentionPolicy(
        sessions_idle_days={"completed": 0}, checkpoints_keep=1, usage_anonymise_days=0, usage_drop_days=1
    )
    later = datetime.now(UTC) + timedelta(hours=1)
    return partial(apply_retention, using=db.alias, tenant=db.tenant, policy=policy, now=later)


def _streams(db: CommittedDatabase) -> Call:
    _filled(db)
    return partial(prune_streams, using=db.alias, tenant=db.tenant, older_than=None, keep_chunks=1)


def _erase(db: CommittedDatabase, **whom: Any) -> Call:
    _filled(db)
    return partial(erase, using=db.alias, tenant=db.tenant, **whom)


FUNCTIONS: Final[dict[str, Prepare]] = {
    "expired_session_cleanup": _cleanup,
    "expired_session_cleanup_batches": _cleanup_batches,
    "apply_retention": _retention,
    "prune_streams": _streams,
    "erase of a user": partial(_erase, user_id="ada"),
    "erase of a session": partial(_erase, session_id="first"),
    "erase of a tenant": _erase,
    "current_version": lambda db: partial(schema.current_version, db.alias),
}


# --- Export and import -----------------------------------------------------------------------------


def _export_of(db: CommittedDatabase) -> bytes:
    file = io.BytesIO()
    write_export(DatabaseSource(db.alias, tenant=db.tenant), file)
    return file.getvalue()


def _export(db: CommittedDatabase) -> Call:
    _filled(db)
    return lambda: len(_export_of(db).splitlines())


def _import(db: CommittedDatabase, *, reads_back: bool = False) -> Call:
    """Of what was exported before it was erased."""
    _filled(db)
    exported = _export_of(db)
    erase(using=db.alias, tenant=db.tenant)

    def import_all() -> object:
        units = ExportFile(io.BytesIO(exported)).units()
        return import_units(units, db.alias, reads_back=reads_back).is_complete

    return import_all


TRANSFER: Final[dict[str, Prepare]] = {
    "write_export": _export,
    "import_units": _import,
    "import_units that reads back": partial(_import, reads_back=True),
}


# --- The adapter -----------------------------------------------------------------------------------


def _adapter(db: CommittedDatabase) -> SessionAdapter:
    return SessionAdapter("notebook", db.alias, tenant=db.tenant)


def _key(session: LockedSession) -> bool:
    return session.is_new


def _written(db: CommittedDatabase) -> Call:
    notebook = Notebook("project", "talk", db.alias, tenant=db.tenant)
    return partial(notebook.write, "page", [1], b"attached")


def _deleted(db: CommittedDatabase) -> Call:
    notebook = Notebook("project", "talk", db.alias, tenant=db.tenant)
    notebook.write("page", [1], b"attached")
    return notebook.delete


def _read(db: CommittedDatabase) -> Call:
    notebook = Notebook("project", "talk", db.alias, tenant=db.tenant)
    notebook.write("page", [1])
    return partial(notebook.read, "page")


ADAPTER: Final[dict[str, Prepare]] = {
    "ensure": lambda db: partial(_adapter(db).ensure, "s", user_id="ada"),
    "write": _written,
    "delete": _deleted,
    "read": _read,
}
