"""The tables and the conversation that the catalogue registers."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from datetime import datetime
from typing import Any, Final

from helix_store.adapters import session_id_for
from helix_store.catalogue import AppTable
from helix_store.contrib.claude_agent.models import ClaudeSession
from helix_store.core.transcript import Fields, Part, parts_of, role_of, with_rest
from helix_store.engine.database import Database
from helix_store.reports import ItemConversation, Said


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


def _says(entry: dict[str, Any]) -> Said:
    fields = Fields(entry)
    kind, at = str(entry.get("type", "entry")), _moment(entry.get("timestamp"))
    if isinstance(message := entry.get("message"), Mapping):
        role = role_of(message)
        fields.take(("message",), bool)
        fields.drop("type", (role,))
        return Said(role, with_rest(parts_of(message), fields.rest, name=kind), at)
    text = fields.text("content", "summary")
    if text is None:
        return Said(kind, with_rest([], fields.rest, name=kind), at)
    fields.drop("type", (kind,))
    return Said(kind, [Part(kind="text", text=text, rest=fields.rest)], at)


def _moment(timestamp: Any) -> datetime | None:
    try:
        at = datetime.fromisoformat(timestamp)
    except (TypeError, ValueError):
        return None
    return at if at.tzinfo is not None else None


CONVERSATION = ItemConversation("Claude Agent SDK", _says, lane="", of=ClaudeSession)
