"""Sub-session refs in memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from helix_store.core.payloads import decode
from helix_store.core.sub_sessions import check_same_ref
from helix_store.core.types import SubSessionRef
from helix_store.exceptions import NotFoundError
from helix_store.stores.backend import EncodedRef
from helix_store.stores.memory.scope import TenantScope

__all__ = ["MemorySubSessions"]


class MemorySubSessions:
    def __init__(self, scope: TenantScope) -> None:
        self._scope = scope

    def add(self, session_id: str, refs: Sequence[EncodedRef]) -> None:
        with self._scope.writing(session_id) as draft:
            for ref in refs:
                check_same_ref(draft.refs.setdefault(ref.sub_session_id, ref), ref)

    def update(self, session_id: str, sub_session_id: str, changes: Mapping[str, str]) -> SubSessionRef:
        with self._scope.writing(session_id) as draft:
            ref = draft.refs.get(sub_session_id)
            if ref is None:
                raise NotFoundError(
                    "The session has no ref to this sub-session.", sub_session_id=sub_session_id
                )
            updated = draft.refs[sub_session_id] = replace(ref, **changes)
            return _value(updated)

    def select(self, session_id: str) -> list[SubSessionRef]:
        return [_value(ref) for ref in self._scope.require(session_id).refs.values()]


def _value(ref: EncodedRef) -> SubSessionRef:
    return SubSessionRef(
        sub_session_id=ref.sub_session_id,
        agent_type=ref.agent_type,
        parent_tool_call_id=ref.parent_tool_call_id,
        status=ref.status,
        location="local" if ref.location == "local" else "remote",
        remote=_decoded(ref.remote),
        output=_decoded(ref.output),
        error=_decoded(ref.error),
    )


def _decoded(text: str | None) -> Any:
    return None if text is None else decode(text)
