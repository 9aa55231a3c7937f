"""Pages of messages, and the latest checkpoint."""

from __future__ import annotations

from functools import cache
from typing import Final

from helix_store.core.types import Checkpoint
from helix_store.engine.statement import table
from helix_store.models import Checkpoint as CheckpointRow
from helix_store.models import Message, Session
from helix_store.sessions.database.checkpoints import DatabaseCheckpoints
from helix_store.sessions.database.keys import is_named
from helix_store.sessions.database.messages import DatabaseMessages
from helix_store.sessions.database.rows import CHECKPOINT_COLUMNS, checkpoint_from

__all__ = ["FastCheckpoints", "FastMessages"]

_CHECKPOINT_SQL: Final = {"session__created_at": "s.created_at", "base__payload": "b.payload"}


class FastMessages(DatabaseMessages):
    def page(
        self, session_id: str, *, offset: int, limit: int | None, descending: bool
    ) -> tuple[list[str], int]:
        if descending or not self.db.has_fast_reads:
            return super().page(session_id, offset=offset, limit=limit, descending=descending)
        parameters = {
            "tenant": self.db.tenant,
            "session_id": session_id,
            "offset": offset,
            "last": None if limit is None else offset + limit,
        }
        rows = self.db.read(_page_sql(), parameters)
        if not rows:
            return super().page(session_id, offset=offset, limit=limit, descending=descending)
        return [payload for payload, _ in rows], rows[0][1]


class FastCheckpoints(DatabaseCheckpoints):
    def latest(self, session_id: str) -> Checkpoint | None:
        if not self.db.has_fast_reads:
            return super().latest(session_id)
        rows = self.db.read(_latest_checkpoint_sql(), {"tenant": self.db.tenant, "session_id": session_id})
        if not rows:
            return None
        return checkpoint_from(dict(zip(CHECKPOINT_COLUMNS, rows[0], strict=True)), session_id)


@cache
def _page_sql() -> str:
    # A plan for a range that is known looks so much better than one for any range that the server would make
    # it anew for each call, which costs more than reading a page.
    return f"""
        WITH page AS MATERIALIZED (
            SELECT id, message_count, %(offset)s::bigint AS first,
                coalesce(%(last)s::bigint, message_count) AS last
            FROM {table(Session)} WHERE {is_named()}
        )
        SELECT m.payload, page.message_count FROM page, LATERAL (
            SELECT payload FROM {table(Message)}
            WHERE session_id = page.id AND sequence > page.first AND sequence <= page.last ORDER BY sequence
        ) AS m"""


@cache
def _latest_checkpoint_sql() -> str:
    columns = ", ".join(_CHECKPOINT_SQL.get(name, f"c.{name}") for name in CHECKPOINT_COLUMNS)
    # As a join it would sort all checkpoints of the session.
    return f"""
        SELECT {columns} FROM {table(Session)} AS s, LATERAL (
            SELECT * FROM {table(CheckpointRow)}
            WHERE session_id = s.id AND kind = 'step' AND namespace = '' ORDER BY version DESC LIMIT 1
        ) AS c LEFT JOIN {table(CheckpointRow)} AS b ON b.id = c.base_id
        WHERE {is_named("s")}"""
