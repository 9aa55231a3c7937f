"""The sessions and lanes that hold a session of ADK, and the state that several of its sessions share."""

from __future__ import annotations

from typing import Final

from helix_store.adapters import session_id_for

EVENTS: Final = "google_adk/events/"
"""The beginning of the lane of events, which ends with the name of the app."""

# Each of these lanes has one item, whose key is the name of the app.
SESSION: Final = "google_adk/session"
USER: Final = "google_adk/user_state"
APP: Final = "google_adk/app_state"


def session_id_of(app_name: str, user_id: str, session_id: str) -> str:
    return session_id_for("google_adk", app_name, user_id, session_id)


def shared_id_of(app_name: str, *user_id: str) -> str:
    """Return the id of the session that holds the state of an app, or of one of its users."""
    return session_id_for("google_adk", app_name, *user_id)
