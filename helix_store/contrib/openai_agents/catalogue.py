"""The tables and the conversation that the catalogue registers, and the tables of the SDK's SQLite sessions
and of its ``SQLAlchemySession`` as items of sessions.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any, ClassVar, Final

from helix_store.adapters import session_id_for
from helix_store.catalogue import AppTable
from helix_store.contrib.openai_agents.models import OpenAIRunState
from helix_store.core.payloads import encode
from helix_store.core.transcript import parts_of
from helix_store.exceptions import InvalidQuery
from helix_store.items import lane_name
from helix_store.models import Item
from helix_store.reports import ItemConversation, Said
from helix_store.sessions.state import root_session
from helix_store.transfer.records import Counts, Problem
from helix_store.transfer.sources import (
    ForeignSession,
    ForeignSource,
    Head,
    Origin,
    PostgresReader,
    Reader,
    SqliteReader,
    iso_moment,
    parsed,
    session_of,
)

_NOT_HERE: Final = "The claim belongs to a process that works on the other database."

TABLES: Final = (
    AppTable(
        OpenAIRunState,
        record="openai_run_state",
        order=("state_id",),
        not_exported=dict.fromkeys(("claim_owner", "claim_expires_at"), _NOT_HERE),
    ),
)


def _says(item: dict[str, Any]) -> Said:
    kind = str(item.get("type", "message"))
    role = item.get("role")
    if not isinstance(role, str):
        role = "tool" if kind.endswith("_output") else "assistant"
    return Said(role, parts_of({**item, "role": role}))


CONVERSATION = ItemConversation("OpenAI Agents SDK", _says, lane="main")
"""Branches of a session are lanes. Every session of the SDK begins with ``main``."""


_AGENT_TYPE: Final = "openai_agents"

_OF_ONE_BRANCH: Final = """
    SELECT id, session_id, 'main' AS branch, message_data, created_at FROM agent_messages"""
# The order is that of the ids, in which the items were added. `sequence_number` has the same order within a
# branch, but items that `SQLiteSession` added to the same file have none, so the two cannot be mixed.
_OF_BRANCHES: Final = """
    SELECT m.id, m.session_id, coalesce(s.branch_id, 'main') AS branch,
        m.message_data, m.created_at
    FROM agent_messages m
    LEFT JOIN message_structure s ON s.message_id = m.id AND s.session_id = m.session_id"""


# Text, because the driver's own times would have a time zone that depends on the connection.
_OF_SQLALCHEMY: Final = """
    SELECT id, session_id, 'main' AS branch, message_data, CAST(created_at AS text) AS created_at,
        created_at AS added_at
    FROM agent_messages"""


class _ItemsSource(ForeignSource):
    """A source of sessions with their items, in a lane for each branch. Usage of turns is not imported."""

    kind: ClassVar = "session"
    session_count_query: ClassVar = """
        SELECT count(*) FROM
        (SELECT session_id FROM agent_sessions UNION SELECT session_id FROM agent_messages) AS ids"""
    sessions_query: ClassVar = """
        SELECT session_id, CAST(min(created_at) AS text), CAST(max(updated_at) AS text) FROM
        (SELECT session_id, created_at, updated_at FROM agent_sessions
            UNION ALL SELECT session_id, created_at, created_at FROM agent_messages) AS written
        GROUP BY session_id ORDER BY session_id"""
    order: ClassVar = "branch, id"
    placeholder: ClassVar = "?"

    def __init__(self, origin: Origin, reader: Reader) -> None:
        if origin.table is not None:
            raise InvalidQuery("The tables have their default names, agent_sessions and agent_messages.")
        super().__init__(origin, reader)

    def left_out(self, exported: Counts) -> Iterator[Problem]:
        """Yield the usage of turns, unless the origin allows it to be left out."""
        (count,) = self._reader.one(f"SELECT count(*) FROM ({self._items}) AS items")
        yield from self.tally.compare({"items": count})
        yield from self._without_table_here("turn_usage")

    @property
    def _items(self) -> str:
        return _OF_BRANCHES if self._reader.has_table("message_structure") else _OF_ONE_BRANCH

    def _session(self, row: tuple[Any, ...]) -> ForeignSession:
        return session_of(self.kind, row[0])

    def _head(self, session: ForeignSession, row: tuple[Any, ...]) -> Head:
        session.tally.found["agent_sessions"] += 1
        session_id, created_at, updated_at = row
        new = root_session(session_id_for(session_id), _AGENT_TYPE)
        return Head(new, iso_moment(created_at, "created_at"), iso_moment(updated_at, "updated_at"))

    def _read_parts(self, session: ForeignSession) -> None:
        query = f"""SELECT id, branch, message_data, created_at FROM ({self._items}) AS items
            WHERE session_id = {self.placeholder} ORDER BY {self.order}"""
        for row in self._reader.rows(query, session.source_id):
            session.take("items", row, partial(self._add, session))

    def _add(self, session: ForeignSession, _: str, row: tuple[Any, ...]) -> None:
        _, branch, text, created_at = row
        value = parsed(text, "message_data")
        payload = encode(value, limit=self._limits.max_state_bytes, path="message_data")
        item = Item(lane=lane_name(branch), payload=payload, created_at=iso_moment(created_at, "created_at"))
        session.add(item)


class SQLiteSessionSource(_ItemsSource):
    """The file of ``SQLiteSession`` and ``AdvancedSQLiteSession``, and of ``SQLAlchemySession`` on SQLite."""

    def __init__(self, origin: Origin) -> None:
        if origin.schema is not None:
            raise InvalidQuery("An SQLite file has no schema.")
        super().__init__(origin, SqliteReader(origin.dsn))


class SQLAlchemySessionSource(_ItemsSource):
    """The tables of ``SQLAlchemySession`` on PostgreSQL. Items are in the order in which it reads them."""

    order: ClassVar = "added_at, id"
    placeholder: ClassVar = "%s"

    def __init__(self, origin: Origin) -> None:
        super().__init__(origin, PostgresReader(origin.dsn, schema=origin.schema))

    @property
    def _items(self) -> str:
        return _OF_SQLALCHEMY
