"""The session of a thread, for all that creates it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final
from uuid import UUID

__all__ = ["AGENT_TYPE", "about_thread"]

AGENT_TYPE: Final = "langgraph"


def about_thread(given: Mapping[str, Any]) -> dict[str, Any]:
    """What the metadata of a config says about the session that is created for a thread.

    The id of a user may be a number or a UUID, which the keys of Django's users are.
    """
    user_id, title = given.get("user_id"), given.get("title")
    about = {
        "user_id": str(user_id) if type(user_id) is int or isinstance(user_id, UUID) else user_id,
        "title": title,
    }
    return {name: value for name, value in about.items() if isinstance(value, str) and value}
