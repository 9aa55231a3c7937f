"""The SQL that reads sessions of ADK. A session is read in one statement, so its parts are consistent."""

from __future__ import annotations

from typing import Final

from helix_store.engine.statement import Statement, table
from helix_store.models import Item, Session

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
