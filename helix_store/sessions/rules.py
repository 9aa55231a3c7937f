"""What may happen to a session: runs, interrupts, sub-session refs and branches."""

from __future__ import annotations

from datetime import datetime
from typing import Final, Protocol

from helix_store.core.payloads import copy_json
from helix_store.core.types import InterruptKind, InterruptRequest, RunStatus, SessionState
from helix_store.exceptions import ConflictError

__all__ = [
    "SUPERSEDED",
    "RefIdentity",
    "branched_state",
    "check_no_other_runs",
    "check_same_ref",
    "check_supersedes",
    "end_of_run",
    "is_bound_to",
    "standing_request",
]

SUPERSEDED: Final = "superseded"
"""Why a run ended that another one took the place of."""


def check_supersedes(running_token: int | None, *, supersede: bool, fencing_token: int | None) -> None:
    """Raise `ConflictError` unless a new run may take the place of the one that is running.

    It may when asked to, or with a newer token than the running run was started with: that run's worker has
    lost the lock. A run started without a token counts as one with token 0.
    """
    if not supersede and (fencing_token is None or fencing_token <= (running_token or 0)):
        raise ConflictError(
            "A run of this session is running; let it end, or start this one with supersede=True."
        )


def check_no_other_runs(running_run_id: str | None, run_id: str) -> None:
    """Raise `ConflictError` when a run is to be set running beside another one."""
    if running_run_id is not None and running_run_id != run_id:
        raise ConflictError("Another run of this session is running; end it before this one goes on.")


def end_of_run(status: RunStatus, ended_at: datetime | None, now: datetime) -> datetime | None:
    """When a run with this status ended: the first time counts, and a run that is running has not ended."""
    if status is RunStatus.RUNNING:
        return None
    return now if ended_at is None else ended_at


def standing_request(pending: InterruptRequest | None, wanted: InterruptRequest) -> InterruptRequest:
    """The request to keep: an abort replaces an interrupt, never the other way round; else the newer one."""
    if pending is not None and pending.kind == InterruptKind.ABORT and wanted.kind != InterruptKind.ABORT:
        return pending
    return wanted


def is_bound_to(request: InterruptRequest, run_id: str | None) -> bool:
    """Whether a check on behalf of ``run_id`` sees the request; ``None`` sees every request."""
    return run_id is None or request.run_id == run_id


class RefIdentity(Protocol):
    """What of a sub-session ref never changes."""

    @property
    def agent_type(self) -> str: ...

    @property
    def parent_tool_call_id(self) -> str | None: ...

    @property
    def location(self) -> str: ...


def check_same_ref(stored: RefIdentity, given: RefIdentity) -> None:
    """Raise `ConflictError` when a ref is added again with another agent type, tool call or location."""
    if (stored.agent_type, stored.parent_tool_call_id, stored.location) != (
        given.agent_type,
        given.parent_tool_call_id,
        given.location,
    ):
        raise ConflictError(
            "This sub-session is recorded with another agent type, tool call or location; those never change."
        )


def branched_state(source: SessionState, *, new_session_id: str, title: str | None = None) -> SessionState:
    """The state a branch starts with, sharing nothing with ``source``.

    The branch is active and at the top of a tree of its own. It keeps who and what the session is, its custom
    state and the client tool calls that were answered; a result, a failure, calls still open, a suspension,
    an expiry and workspace refs belong to the source alone. The store sets versions, counts and times.
    """
    return SessionState(
        session_id=new_session_id,
        agent_type=source.agent_type,
        step_count=source.step_count,
        mode=source.mode,
        custom_state=copy_json(source.custom_state),
        user_id=source.user_id,
        tags=list(source.tags),
        metadata={**source.metadata, "branched_from": source.session_id},
        title=source.title if title is None else title,
        workspace_id=source.workspace_id,
        directory=source.directory,
        root_session_id=new_session_id,
        stream_id=new_session_id,
        completed_client_tool_calls=copy_json(source.completed_client_tool_calls),
    )
