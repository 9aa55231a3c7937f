"""The tables of ``SQLiteSession`` and ``AdvancedSQLiteSession`` of OpenAI Agents, as items of sessions."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any, ClassVar, Final

from helix_store.adapters import session_id_for
from helix_store.core.payloads import encode
from helix_store.exceptions import InvalidQuery
from helix_store.items.rules import lane_name
from helix_store.models import Item
from helix_store.sessions.requests import root_session
from helix_store.transfer.records import Counts, Problem
from helix_store.transfer.sources import ForeignSource, Origin
from helix_store.transfer.sources.readers import SqliteReader
from helix_store.transfer.sources.sessions import ForeignSession, Head, iso_moment, parsed, session_of

_AGENT_TYPE: Final = "openai_agents"

_OF_ONE_BRANCH: Final = """
    SELECT id, session_id, 'main' AS branch, id AS place, message_data, created_at FROM agent_messages"""
_OF_BRANCHES: Final = """
    SELECT m.id, m.session_id, coalesce(s.branch_id, 'main') AS branch,
        coalesce(s.sequence_number, m.id) AS place, m.message_data, m.created_at
    FROM agent_messages m
    LEFT JOIN message_structure s ON s.message_id = m.id AND s.session_id = m.session_id"""


class SQLiteSessionSource(ForeignSource):
    """A source of sessions with their items, in a lane for each branch. Usage of turns is not imported."""

    kind: ClassVar = "session"
    session_count_query: ClassVar = """
        SELECT count(*) FROM
        (SELECT session_id FROM agent_sessions UNION SELECT session_id FROM agent_messages)"""
    sessions_query: ClassVar = """
        SELECT session_id, min(created_at), max(updated_at) FROM
        (SELECT session_id, created_at, updated_at FROM agent_sessions
            UNION ALL SELECT session_id, created_at, created_at FROM agent_messages)
        GROUP BY session_id ORDER BY session_id"""

    def __init__(self, origin: Origin) -> None:
        if origin.table is not None or origin.schema is not None:
            raise InvalidQuery("The tables have their default names, agent_sessions and agent_messages.")
        self._file = SqliteReader(origin.dsn)
        super().__init__(origin, self._file)

    def left_out(self, exported: Counts) -> Iterator[Problem]:
        """Yield the usage of turns, unless the origin allows it to be left out."""
        yield from self.tally.compare({"items": self._reader.one(f"SELECT count(*) FROM ({self._items})")[0]})
        yield from self._without_table_here("turn_usage")

    @property
    def _items(self) -> str:
        return _OF_BRANCHES if self._file.has_table("message_structure") else _OF_ONE_BRANCH

    def _session(self, row: tuple[Any, ...]) -> ForeignSession:
        return session_of(self.kind, row[0])

    def _head(self, session: ForeignSession, row: tuple[Any, ...]) -> Head:
        session.tally.found["agent_sessions"] += 1
        session_id, created_at, updated_at = row
        new = root_session(session_id_for(session_id), _AGENT_TYPE)
        return Head(new, iso_moment(created_at, "created_at"), iso_moment(updated_at, "updated_at"))

    def _read_parts(self, session: ForeignSession) -> None:
        query = f"SELECT * FROM ({self._items}) WHERE session_id = ? ORDER BY branch, place, id"
        for row in self._reader.rows(query, session.source_id):
            session.take("items", row, partial(self._add, session))

    def _add(self, session: ForeignSession, _: str, row: tuple[Any, ...]) -> None:
        _, _, branch, _, text, created_at = row
        value = parsed(text, "message_data")
        payload = encode(value, limit=self._limits.max_state_bytes, path="message_data")
        item = Item(lane=lane_name(branch), payload=payload, created_at=iso_moment(created_at, "created_at"))
        session.add(item)
