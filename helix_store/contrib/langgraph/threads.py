"""The session of a thread, for all that creates it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

__all__ = ["AGENT_TYPE", "about_thread"]

AGENT_TYPE: Final = "langgraph"


def about_thread(given: Mapping[str, Any]) -> dict[str, Any]:
    """What the metadata of a config says about the session that is created for a thread."""
    return {
        name: given[name] for name in ("user_id", "title") if isinstance(given.get(name), str) and given[name]
    }
