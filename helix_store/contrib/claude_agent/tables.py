"""The table of Claude sessions, for the catalogue."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Final

from helix_store.adapters import session_id_for
from helix_store.catalogue import AppTable
from helix_store.contrib.claude_agent.models import ClaudeSession
from helix_store.engine.database import Database


def _faults(db: Database, keys: Collection[int]) -> Iterator[tuple[int, str]]:
    """Yield rows that a lookup by the SDK's key cannot find, for the doctor."""
    rows = ClaudeSession.objects.using(db.alias).filter(session_id__in=keys).select_related("session")
    for row in rows.only(
        "session__tenant", "session__session_id", "tenant", "project_key", "claude_session_id"
    ):
        if row.tenant != row.session.tenant:
            yield row.session_id, "its Claude session has another tenant"
        if session_id_for(row.project_key, row.claude_session_id) != row.session.session_id:
            yield row.session_id, "its id is not the one derived from its Claude session's key"


TABLES: Final = (AppTable(ClaudeSession, record="claude_session", check=_faults),)
