"""The tree below a session."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from helix_store.stores.memory.records import SessionRecord

__all__ = ["with_descendants"]


def with_descendants(sessions: Mapping[str, SessionRecord], session_id: str) -> list[str]:
    """The session and all that are reachable by parent id or by local sub-session refs, each one once.

    Parents come before their descendants; empty for an unknown session.
    """
    if session_id not in sessions:
        return []
    children: dict[str, list[str]] = defaultdict(list)
    for record in sessions.values():
        parent_id = record.columns["parent_session_id"]
        if parent_id is not None:
            children[parent_id].append(record.session_id)
        children[record.session_id].extend(
            ref.sub_session_id
            for ref in record.refs.values()
            if ref.location == "local" and ref.sub_session_id in sessions
        )
    found = {session_id: None}
    pending = [session_id]
    while pending:
        for child_id in children[pending.pop()]:
            if child_id not in found:
                found[child_id] = None
                pending.append(child_id)
    return list(found)
