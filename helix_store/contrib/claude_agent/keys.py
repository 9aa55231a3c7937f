"""Keys of the SDK, and the sessions that they identify."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, Self

from helix_store.adapters import session_id_for
from helix_store.contrib.claude_agent.models import ClaudeSession
from helix_store.engine.database import Database
from helix_store.exceptions import InvalidPayload
from helix_store.items.rules import item_key

MAIN: Final = ""
"""The lane of the main transcript. The lane of a sub-agent is its ``subpath``."""


@dataclass(frozen=True, slots=True)
class TranscriptKey:
    """A key of the SDK, checked. Each part can have up to 1,000 bytes."""

    project_key: str
    session_id: str
    lane: str

    @classmethod
    def of(cls, key: Mapping[str, Any]) -> Self:
        """Check a key of the SDK. Raises `InvalidPayload` and `LimitExceeded`."""
        if not isinstance(key, Mapping):
            raise InvalidPayload(path="key", reason=f"expected a session key, got {type(key).__name__}")
        subpath = key.get("subpath")
        return cls(
            item_key(key.get("project_key"), "project_key"),
            item_key(key.get("session_id"), "session_id"),
            MAIN if subpath is None or subpath == "" else item_key(subpath, "subpath"),
        )

    @property
    def stored_id(self) -> str:
        """The id of the session in this store."""
        return session_id_for(self.project_key, self.session_id)


def faults(db: Database, keys: Collection[int]) -> Iterator[tuple[int, str]]:
    """Yield rows that a look-up by the SDK's key does not find, for the doctor."""
    rows = ClaudeSession.objects.using(db.alias).filter(session_id__in=keys).select_related("session")
    for row in rows.only(
        "session__tenant", "session__session_id", "tenant", "project_key", "claude_session_id"
    ):
        if row.tenant != row.session.tenant:
            yield row.session_id, "its Claude session has another tenant"
        if session_id_for(row.project_key, row.claude_session_id) != row.session.session_id:
            yield row.session_id, "its id is not that of its Claude session's key"
