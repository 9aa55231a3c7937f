"""Everything about one session that an operator asks for, read through the stores."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from helix_store.core.types import (
    CheckpointPage,
    InterruptRequest,
    Message,
    Run,
    SessionState,
    SubSessionRef,
)
from helix_store.core.usage import UsageRollup
from helix_store.exceptions import IntegrityFault, SessionNotFound
from helix_store.stores import DatabaseStateStore, DatabaseUsageStore

__all__ = ["SessionReport", "session_report"]

T = TypeVar("T")


@dataclass(slots=True, kw_only=True)
class SessionReport:
    """A part that cannot be read is ``None``, and ``problems`` says why. ``messages`` have their sequence."""

    tenant: str
    session_id: str
    state: SessionState | None = None
    interrupt: InterruptRequest | None = None
    runs: list[Run] | None = None
    sub_sessions: list[SubSessionRef] | None = None
    checkpoints: CheckpointPage | None = None
    usage: UsageRollup | None = None
    messages: list[tuple[int, Message]] | None = None
    problems: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        page, messages = self.checkpoints, self.messages
        return {
            "tenant": self.tenant,
            "session_id": self.session_id,
            "state": None if self.state is None else self.state.to_dict(),
            "interrupt": None if self.interrupt is None else self.interrupt.to_dict(),
            "runs": None if self.runs is None else [run.to_dict() for run in self.runs],
            "sub_sessions": (
                None if self.sub_sessions is None else [ref.to_dict() for ref in self.sub_sessions]
            ),
            "checkpoints": None if page is None else page.to_dict(),
            "usage": None if self.usage is None else self.usage.to_dict(),
            "messages": (
                None
                if messages is None
                else [{"sequence": sequence, "message": message} for sequence, message in messages]
            ),
            "problems": self.problems,
        }


def session_report(
    store: DatabaseStateStore, session_id: str, *, limit: int = 10, messages: int | None = None
) -> SessionReport:
    """The newest ``limit`` runs and checkpoints, the newest ``messages``, and the rest of a session.

    A damaged part does not hide the others. Raises `SessionNotFound`. Each part is a read of its own: a
    session that is written meanwhile may show an older part beside a newer one.
    """
    report = SessionReport(tenant=store.tenant, session_id=session_id)

    def read(name: str, body: Callable[[], T]) -> T | None:
        try:
            return body()
        except IntegrityFault as exc:
            report.problems.append(f"{name}: {exc}")
            return None

    if not store.session_exists(session_id):
        raise SessionNotFound(session_id)
    usage = DatabaseUsageStore(store.alias, tenant=store.tenant)
    report.state = read("state", lambda: store.load_state(session_id))
    report.interrupt = read("interrupt", lambda: store.check_interrupt(session_id))
    report.runs = read("runs", lambda: store.list_runs(session_id, limit=limit))
    report.sub_sessions = read("sub_sessions", lambda: store.get_sub_session_refs(session_id))
    report.checkpoints = read("checkpoints", lambda: store.list_checkpoints(session_id, limit=limit))
    report.usage = read("usage", lambda: usage.get_rollup(session_id))
    if messages is not None:
        report.messages = read("messages", lambda: _newest(store, session_id, messages))
    return report


def _newest(store: DatabaseStateStore, session_id: str, count: int) -> list[tuple[int, Message]]:
    page = store.get_messages(session_id, limit=count, order="desc")
    return [(page.total - index, message) for index, message in enumerate(page.messages)][::-1]
