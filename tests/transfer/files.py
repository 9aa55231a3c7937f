"""Exports as bytes, and sessions with something in every table."""

from __future__ import annotations

import hashlib
import io
import json
import re
from typing import Any

from helix_store.cleanup import erase
from helix_store.core.types import StepInfo
from helix_store.items import ItemLog
from helix_store.models import Checkpoint
from helix_store.stores import DatabaseLockManager, DatabaseStateStore, DatabaseUsageStore
from helix_store.testing.usage.base import tokens
from helix_store.transfer import DatabaseSource, ExportFile, ImportSummary, import_units, write_export
from helix_store.transfer.records import line_of
from tests.databases import CommittedDatabase
from tests.security.tenant_worlds import DatabaseTenants

__all__ = ["exported", "fill", "imported", "lines_of", "rehashed", "simple_session", "written"]


def fill(database: CommittedDatabase) -> None:
    """Rows in every table: two sessions, deltas, graph and snapshot checkpoints, kept usage, a stream."""
    DatabaseTenants(database.alias).fill(database.tenant, "own")
    store = DatabaseStateStore(database.alias, tenant=database.tenant)
    store.create_session("decided", agent_type="agent")
    store.add_pending_tool_calls(
        "decided", {"call": {"tool_name": "pay", "approval_id": "a", "approvals": 2}}
    )
    store.submit_tool_result("decided", "call", approved=True, approval_id="a", actor="ann")
    state = store.create_session("deltas é\u2028", agent_type="agent", metadata={"zz": "1", "a": "2"})
    state.custom_state = {"ballast": "x" * 5_000, "one": 1.0}
    for number in range(1, 6):
        state.custom_state["step"] = number
        state.step_count = number
        commit = store.save_state_and_promote_staging(
            state.session_id,
            state,
            [{"role": "user", "content": f"é {number} \ud800\udc00 \ud800"}],
            StepInfo(f"step-{number}", number),
            expected_version=state.version,
        )
        state.version = commit.new_version
    deltas = Checkpoint.objects.using(database.alias).filter(
        session__tenant=database.tenant, base__isnull=False
    )
    assert deltas.exists()
    for lane in ("", "lane é"):
        log = ItemLog(state.session_id, lane, using=database.alias, tenant=database.tenant)
        log.append([{"role": "user", "content": "é \x00 \ud800"}, 1.0, None], keys=["key é", None, None])
    usage = DatabaseUsageStore(database.alias, tenant=database.tenant)
    store.create_session("gone", agent_type="agent")
    usage.record_entry(tokens("gone", prompt=3, cost_usd="0.000000000001"))
    store.delete_session("gone", keep_usage=True)
    store.create_session("erased", agent_type="agent")
    erase(using=database.alias, session_id="erased", tenant=database.tenant)


def simple_session(database: CommittedDatabase, session_id: str, messages: int = 2) -> None:
    store = DatabaseStateStore(database.alias, tenant=database.tenant)
    store.create_session(session_id, agent_type="agent")
    store.append_messages(session_id, [{"role": "user", "content": str(n)} for n in range(messages)])
    locks = DatabaseLockManager(database.alias, tenant=database.tenant)
    lock = locks.acquire(session_id)
    assert lock is not None
    lock.release()


def exported(database: CommittedDatabase, **options: Any) -> bytes:
    file = io.BytesIO()
    source = DatabaseSource(database.alias, tenant=database.tenant, **options)
    summary = write_export(source, file)
    assert summary.problems == []
    return file.getvalue()


def imported(database: CommittedDatabase, data: bytes) -> tuple[ImportSummary, ExportFile]:
    file = ExportFile(io.BytesIO(data))
    return import_units(file.units(), database.alias), file


def lines_of(data: bytes) -> list[dict[str, Any]]:
    return [json.loads(line) for line in data.splitlines()]


def rehashed(data: bytes) -> bytes:
    """The file that a program would write that hashes these lines itself."""
    lines: list[bytes] = []
    start = 0
    for line in data.splitlines(keepends=True):
        name = line.split(b'"')[3]
        if name in {b"session", b"stream", b"locks", b"tenant_rows", b"kept_usage"}:
            start = len(lines)
        if name in {b"end", b"trailer"}:
            hashed = hashlib.sha256(b"".join(lines[start if name == b"end" else 0 :])).hexdigest()
            line = re.sub(rb'"sha256":"\w+"', f'"sha256":"{hashed}"'.encode(), line)
        lines.append(line)
    return b"".join(lines)


def written(records: list[dict[str, Any]]) -> bytes:
    """Records as a file with their hashes."""
    return rehashed(b"".join(map(line_of, records)))
