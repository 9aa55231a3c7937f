"""The session of a thread, for all code that creates it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from helix_store.core import validation

AGENT_TYPE: Final = "langgraph"


def about_thread(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a new session for a thread from the metadata of a config. The id of a user may be
    a number or a UUID, like the key of a Django user. Raises `InvalidPayload` and `LimitExceeded`.
    """
    about = {"user_id": validation.user_id_text(given.get("user_id")), "title": given.get("title")}
    known = {name: value for name, value in about.items() if isinstance(value, str) and value}
    validation.user_id(known.get("user_id"))
    return known
