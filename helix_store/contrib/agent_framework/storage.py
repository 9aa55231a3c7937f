"""The items of one adapter class, in the sessions of one tenant."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from helix_store.adapters import LockedSession, SessionAdapter
from helix_store.core import validation
from helix_store.core.guards import guard
from helix_store.core.types import UserId
from helix_store.items import ItemLog

__all__ = ["Storage"]

R = TypeVar("R")


class Storage:
    """Reads and writes items of sessions that belong to the user ``user_id``.

    All ids are this store's ids.
    """

    def __init__(
        self,
        using: str | None,
        tenant: str,
        agent_type: str,
        user_id: UserId | None,
        fencing_token: int | None,
    ) -> None:
        self.fencing_token = guard(fencing_token=fencing_token).fencing_token
        self.adapter = SessionAdapter(agent_type, using, tenant=tenant)
        self._user_id = validation.user_id(user_id)

    def log(self, session_id: str, lane: str) -> ItemLog:
        return ItemLog(session_id, lane, using=self.adapter.db.alias, tenant=self.adapter.tenant)

    async def write(self, session_id: str, call: Callable[[LockedSession], R], *, create: bool = True) -> R:
        """Run ``call`` in one transaction in which the session is locked."""
        user_id, token = self._user_id, self.fencing_token
        return await self.adapter.awrite(
            session_id, call, create=create, user_id=user_id, fencing_token=token
        )
