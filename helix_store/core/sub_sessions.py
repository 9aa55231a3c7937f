"""When two records speak of the same sub-session."""

from __future__ import annotations

from typing import Protocol

from helix_store.exceptions import ConflictError

__all__ = ["RefIdentity", "check_same_ref"]


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
