"""Events of ADK as messages for people to read, and the tables of its ``DatabaseSessionService`` and
``SqliteSessionService`` as sessions of this store. Neither needs ADK.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from functools import partial
from typing import Any, ClassVar, Final

from helix_store.adapters import session_id_for
from helix_store.contrib.item_storage import Document, encode_document
from helix_store.core.transcript import Fields, Part, parts_of, with_rest
from helix_store.engine.statement import Statement, table
from helix_store.exceptions import InvalidPayload, InvalidQuery
from helix_store.items import item_key, lane_name
from helix_store.models import Item, Session
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
    SourceUnreadable,
    SqliteReader,
    iso_moment,
    parsed,
    session_of,
)

# Each of these lanes has one item, whose key is the name of the app.
SESSION: Final = "google_adk/session"
USER: Final = "google_adk/user_state"
APP: Final = "google_adk/app_state"

_ITEM: Final = table(Item)
_SESSION: Final = table(Session)


def _items(parameter: str) -> str:
    """Return the items of the session whose id is this parameter."""
    session = f"SELECT id FROM {_SESSION} WHERE tenant = %(tenant)s AND session_id = %({parameter})s"
    return f"SELECT lane, id, payload FROM {_ITEM} WHERE session_id = ({session})"


def _state(parameter: str, lane: str) -> str:
    return f"{_items(parameter)} AND lane = '{lane}' AND key = %(app)s"


SESSION_WITH_EVENTS: Final = Statement(
    f"""
    {_state("session", SESSION)}
    UNION ALL {_state("user_state", USER)}
    UNION ALL {_state("app_state", APP)}
    UNION ALL SELECT * FROM (
        {_items("session")} AND lane = %(events)s ORDER BY id DESC LIMIT %(limit)s
    ) AS newest"""
)


def _listed(condition: str) -> Statement:
    return Statement(
        f"""
        SELECT s.updated_at, s.session_id, s.user_id, i.lane, i.payload
        FROM {_SESSION} AS s JOIN {_ITEM} AS i ON i.session_id = s.id
        WHERE s.tenant = %(tenant)s AND s.agent_type = %(agent_type)s {condition}
            AND (s.updated_at, s.session_id) > (%(at)s, %(after)s)
            AND i.lane IN ('{SESSION}', '{USER}', '{APP}') AND i.key = %(app)s
        ORDER BY s.updated_at, s.session_id LIMIT %(limit)s"""
    )


LISTED: Final = _listed("")
LISTED_OF_USER: Final = _listed("AND s.user_id = %(user)s")
"""Pages of the sessions and states of an app or user.

A session that is written between two pages may appear twice.
"""


EVENTS: Final = "google_adk/events/"
"""The prefix of the lane of events, which ends with the name of the app."""


def _says(event: dict[str, Any]) -> Said:
    """Return the content of an event. The role is the event's author: the user, or the name of an agent."""
    fields = Fields(event)
    author = fields.text("author")
    content = fields.take(("content",), lambda content: isinstance(content, dict))
    parts = [] if content is None else parts_of({**content, "role": _role_of(content)})
    if (error := fields.text("error_message")) is not None:
        parts.append(Part(kind="other", text=error, name="error", is_error=True))
    parts = with_rest(parts, fields.rest, name="event")
    return Said(author or "?", parts, _time(event.get("timestamp")))


def _role_of(content: Mapping[str, Any]) -> Any:
    """Return the role of the content, which says no more than the author, or else ``None``."""
    role = content.get("role")
    return role if role in ("user", "model") else None


def _time(timestamp: Any) -> datetime | None:
    try:
        return datetime.fromtimestamp(timestamp, UTC)
    except (TypeError, ValueError, OverflowError, OSError):
        return None


CONVERSATION: Final = ItemConversation("Google ADK", _says, lane=EVENTS)


_AGENT_TYPE: Final = "google_adk"
_MARKER: Final = "imported"
"""The marker of an imported session. The first event that is appended here replaces it."""

_TABLES: Final = {SESSION: "sessions", USER: "user_states", APP: "app_states"}


def _sessions(time: str) -> str:
    """Return the query for sessions and states; ``time`` is the form in which it reads a time."""
    created, updated = time.format("create_time"), time.format("update_time")
    return f"""
        SELECT id, '{SESSION}', app_name, user_id, CAST(state AS text), {created}, {updated} FROM sessions
        UNION ALL SELECT user_id, '{USER}', app_name, user_id, CAST(state AS text), {updated}, {updated}
            FROM user_states
        UNION ALL SELECT app_name, '{APP}', app_name, NULL, CAST(state AS text), {updated}, {updated}
            FROM app_states
        ORDER BY 2, 3, 4, 1"""


def _events(time: str, placeholder: str) -> str:
    return f"""
        SELECT id, invocation_id, {time.format("events.timestamp")}, CAST(event_data AS text) FROM events
        WHERE app_name = {placeholder} AND user_id = {placeholder} AND session_id = {placeholder}
        ORDER BY events.timestamp, id"""


class _ADKSource(ForeignSource):
    """A source of sessions with their events, and of the states of users and apps, which are sessions here.

    Times are text, or seconds since 1970 in the file of ``SqliteSessionService``. The usage of the events is
    not imported.
    """

    kind: ClassVar = "session"
    session_count_query: ClassVar = """
        SELECT (SELECT count(*) FROM sessions) + (SELECT count(*) FROM user_states)
            + (SELECT count(*) FROM app_states)"""
    events_query: ClassVar[str]

    def __init__(self, origin: Origin, reader: Reader) -> None:
        if origin.table is not None:
            raise InvalidQuery("The tables have the names that ADK gives them.")
        super().__init__(origin, reader)
        # The session that is being read.
        self._row: tuple[Any, ...] = ()
        self._document: Document = {}
        self._last_event: str | None = None

    def units(self) -> Iterator[Any]:
        """Yield the sessions. Raises `SourceUnreadable` for the tables of older versions of ADK."""
        try:
            self._reader.one("SELECT count(event_data) FROM events")
        except SourceUnreadable as exc:
            raise SourceUnreadable(
                "The table events has no column event_data. Older versions of ADK stored pickles: migrate "
                "their tables with the command `adk migrate session`."
            ) from exc
        yield from super().units()

    def left_out(self, exported: Counts) -> Iterator[Problem]:
        """Report events that belong to no session."""
        yield from self.tally.compare({"events": self._reader.one("SELECT count(*) FROM events")[0]})

    def _session(self, row: tuple[Any, ...]) -> ForeignSession:
        return session_of("session", row[0], *_id_parts(row))

    def _head(self, session: ForeignSession, row: tuple[Any, ...]) -> Head:
        _, lane, app, user, state, created_at, updated_at = row
        session.tally.found[_TABLES[lane]] += 1
        owner = None if lane == APP else user
        title = None
        if lane != SESSION:
            title = f"State of {'a user of the app' if lane == USER else 'the app'} {app}"
        new = root_session(session_id_for(*_id_parts(row)), _AGENT_TYPE, user_id=owner, title=title)
        self._document = {"state": parsed(state, "state")}
        return Head(new, _moment(created_at, "create_time"), _moment(updated_at, "update_time"))

    def _completed(self, head: Head, session: ForeignSession) -> Head:
        """Add the session's own item, which comes after its events in the order of an export."""
        _, lane, app, *_ = self._row
        if lane == SESSION:
            self._document |= {
                "id": session.source_id,
                "last_update_time": head.updated_at.timestamp(),
                "last_event": self._last_event,
                "marker": _MARKER,
            }
        self._add_item(session, lane, app, self._document, head.created_at)
        return head

    def _read(self, session: ForeignSession, row: tuple[Any, ...]) -> Head | None:
        self._row, self._document, self._last_event = row, {}, None
        return super()._read(session, row)

    def _read_parts(self, session: ForeignSession) -> None:
        name, lane, app, user = self._row[:4]
        if lane != SESSION:
            return
        for row in self._reader.rows(self.events_query, app, user, name):
            session.take("events", row, partial(self._add_event, session, app))

    def _add_event(self, session: ForeignSession, app: str, _: str, row: tuple[Any, ...]) -> None:
        event_id, invocation_id, at, data = row
        event = parsed(data, "event_data")
        if type(event) is not dict:
            raise InvalidPayload(path="event_data", reason="it is not a JSON object")
        moment = _moment(at, "timestamp")
        document = {"timestamp": moment.timestamp(), **event, "id": event_id, "invocation_id": invocation_id}
        self._add_item(session, f"{EVENTS}{app}", event_id, document, moment)
        self._last_event = event_id

    def _add_item(
        self, session: ForeignSession, lane: str, key: str, document: Document, at: datetime
    ) -> None:
        payload = encode_document(document, self._limits)
        session.add(Item(lane=lane_name(lane), key=item_key(key), payload=payload, created_at=at))


class PostgresADKSource(_ADKSource):
    """The tables of ``DatabaseSessionService`` on PostgreSQL."""

    # Text, because the driver's own times would have a time zone that depends on the connection.
    sessions_query: ClassVar = _sessions("CAST({} AS text)")
    events_query: ClassVar = _events("CAST({} AS text)", "%s")

    def __init__(self, origin: Origin) -> None:
        super().__init__(origin, PostgresReader(origin.dsn, schema=origin.schema))


class SqliteADKSource(_ADKSource):
    """The file of ``DatabaseSessionService`` on SQLite, or of ``SqliteSessionService``."""

    sessions_query: ClassVar = _sessions("{}")
    events_query: ClassVar = _events("{}", "?")

    def __init__(self, origin: Origin) -> None:
        if origin.schema is not None:
            raise InvalidQuery("An SQLite file has no schema.")
        super().__init__(origin, SqliteReader(origin.dsn))


def _id_parts(row: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the parts of the id that a session, or a state, has here."""
    name, lane, app, user = row[:4]
    return ("google_adk", *{SESSION: (app, user, name), USER: (app, user), APP: (app,)}[lane])


def _moment(value: Any, path: str) -> datetime:
    """Return the time in text or in seconds since 1970. Raises `InvalidPayload`."""
    try:
        return datetime.fromtimestamp(value, UTC)
    except (TypeError, ValueError, OverflowError, OSError):
        return iso_moment(value, path)
