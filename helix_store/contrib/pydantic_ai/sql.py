"""The SQL that reads and writes one conversation. `reachability` has the SQL for whole families."""

from __future__ import annotations

from typing import Final

from helix_store.contrib.pydantic_ai.models import Conversation, ConversationEntry, ConversationFamily
from helix_store.engine.expressions import is_in_list, looked_up
from helix_store.engine.statement import Statement, table
from helix_store.models import Session
from helix_store.sessions.sql import SESSION_BY_ID

_FAMILY: Final = table(ConversationFamily)
_CONVERSATION: Final = table(Conversation)
_ENTRY: Final = table(ConversationEntry)

_OF_TENANT: Final = "tenant = (SELECT %(tenant)s)"

# --- Reads -------------------------------------------------------------------------------------------

CONVERSATION_OF_SESSION: Final = Statement(
    f"""
    SELECT document FROM {_CONVERSATION}
    WHERE session_id = (SELECT id FROM {table(Session)} WHERE {SESSION_BY_ID})"""
)

_LISTED: Final = f"SELECT document, session_id FROM {_CONVERSATION} WHERE {_OF_TENANT}"
_NEWEST: Final = "ORDER BY updated_at DESC, id LIMIT %(limit)s"
CONVERSATIONS: Final = Statement(f"{_LISTED} {_NEWEST}")
SCOPED_CONVERSATIONS: Final = Statement(f"{_LISTED} AND scope = %(scope)s {_NEWEST}")

_COLUMNS: Final = "entry_id, parent_id, kind, payload"

ENTRY: Final = Statement(f"SELECT {_COLUMNS} FROM {_ENTRY} WHERE {_OF_TENANT} AND entry_id = %(entry_id)s")


def _history(before: str) -> str:
    return f"""
        WITH RECURSIVE history AS (
            SELECT {_COLUMNS}, CAST(1 AS bigint) AS depth FROM {_ENTRY}
            WHERE {_OF_TENANT} AND entry_id = %(head_id)s
            UNION ALL
            SELECT e.entry_id, e.parent_id, e.kind, e.payload, history.depth + 1 FROM history {before}
            WHERE history.depth < %(limit)s
        )
        SELECT {_COLUMNS} FROM history ORDER BY depth DESC"""


HISTORY: Final = Statement(
    *map(
        _history,
        looked_up(ConversationEntry, "e", f"e.{_OF_TENANT} AND e.entry_id = history.parent_id"),
    )
)
"""The entries up to ``head_id``, oldest first, at most ``limit``."""

# --- Writes ------------------------------------------------------------------------------------------

CONVERSATION_TO_WRITE: Final = Statement(
    f"""
    SELECT id, family, revision, head_id, branches, document FROM {_CONVERSATION}
    WHERE session_id = %(session)s"""
)

_ONE_FAMILY: Final = f"SELECT id FROM {_FAMILY} WHERE tenant = %(tenant)s AND family = %(family)s"
HOLD_FAMILY: Final = Statement(postgresql=f"{_ONE_FAMILY} FOR SHARE", sqlite=_ONE_FAMILY)
"""Nobody can delete entries of the family until the commit. Its holders do not block each other."""

FAMILIES_OF_ENTRIES: Final = Statement(
    *(
        f"SELECT entry_id, family FROM {_ENTRY} WHERE tenant = %(tenant)s AND {of_ids}"
        for of_ids in is_in_list("entry_id", "entry_ids", "varchar")
    )
)
