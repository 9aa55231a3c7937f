"""Events of ADK as messages for people to read. It does not need ADK."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, Final

from helix_store.core.transcript import Fields, Part, parts_of, with_rest
from helix_store.engine.statement import Statement, table
from helix_store.models import Item, Session
from helix_store.reports import ItemConversation, Said

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
