"""The session store of Microsoft Agent Framework in the project's database."""

from __future__ import annotations

from typing import Final

from agent_framework import AgentSession, SessionStore

from helix_store.adapters import LockedSession, session_id_for
from helix_store.contrib.item_storage import (
    Document,
    ItemStorage,
    LockedItems,
    built,
    refuse_unreadable,
)
from helix_store.core.ids import new_id
from helix_store.core.types import UserId
from helix_store.exceptions import ConflictError, InvalidPayload
from helix_store.models import Item

_SESSION: Final = "agent_framework/session"
"""The lane of the snapshot, and its key."""

_MARKER: Final = "_helix_store_marker"
"""The attribute of an `AgentSession` that identifies the stored snapshot from which it was read."""


class DjangoAgentSessions(SessionStore):
    """Snapshots of agents' sessions as items of sessions, in the database ``using`` and one tenant.

    The snapshot of an id is an item of the session with this id, which `DjangoHistoryProvider` may share.
    Every write is one transaction under the session's lock. Saving a session that was read from this store
    raises `ConflictError` if the stored one has been changed or deleted since then. Any other session
    replaces the stored one. ``user_id`` is the user of the sessions; a session of another user raises
    `ConflictError`. With a ``fencing_token``, a write raises `FencedOutError` if the session's lock has a
    larger one. An erased session is not created again, which raises `SessionErased`, unless ``recreate`` is
    True.

    Example::

        sessions = DjangoAgentSessions(user_id="ada")
        await sessions.set("lisbon", AgentSession(session_id="lisbon"))
        session = await sessions.get("lisbon")
    """

    def __init__(
        self,
        using: str | None = None,
        *,
        tenant: str = "",
        agent_type: str = "agent_framework",
        user_id: UserId | None = None,
        fencing_token: int | None = None,
        recreate: bool = False,
    ) -> None:
        self._storage = ItemStorage(
            agent_type,
            using,
            tenant=tenant,
            user_id=user_id,
            fencing_token=fencing_token,
            recreate=recreate,
        )

    async def get(self, session_id: str) -> AgentSession | None:
        """Return the stored session, or ``None``. One query. Raises `IntegrityFault`."""
        document = await self._storage.aget(self._stored_id(session_id), _SESSION, _SESSION)
        if document is None:
            return None
        return built(_session, document, "agent-framework-core", "session")

    async def set(self, session_id: str, session: AgentSession) -> None:
        """Store a session. Raises `ConflictError`, `InvalidPayload` and `LimitExceeded`."""
        stored_id = self._stored_id(session_id)
        if type(session) is not AgentSession:
            raise InvalidPayload(
                path="session", reason=f"expected AgentSession, got {type(session).__name__}"
            )
        known, marker = getattr(session, _MARKER, None), new_id()
        document = {"marker": marker, "session": session.to_dict()}
        refuse_unreadable(_session, document, "agent-framework-core", "session")

        def replace(locked: LockedSession) -> None:
            items = LockedItems(locked, _SESSION)
            if known is not None:
                stored = items.get(_SESSION)
                if stored is None or stored.get("marker") != known:
                    raise ConflictError(
                        "The session was changed after it was read; get it again and redo the change."
                    )
            items.put(_SESSION, document)

        await self._storage.awrite(stored_id, replace)
        setattr(session, _MARKER, marker)

    async def delete(self, session_id: str) -> None:
        """Delete the session with its history, its checkpoints and its usage. Safe to repeat.

        If the application created the session, only the items are deleted.
        """
        await self._storage.adelete(self._stored_id(session_id), Item)

    def _stored_id(self, session_id: str) -> str:
        self.validate_session_id(session_id)
        return session_id_for(session_id)


DjangoSessionStore = DjangoAgentSessions
"""The name before `DjangoAgentSessions`; code that imports it goes on working."""


def _session(document: Document) -> AgentSession:
    session = AgentSession.from_dict(document["session"])
    setattr(session, _MARKER, document["marker"])
    return session
