"""The session of OpenAI Agents SDK in the project's database."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, Final

from agents import RunContextWrapper, SessionSettings, TResponseInputItem
from agents.memory.session_settings import coerce_session_settings, resolve_session_limit

from helix_store.adapters import session_id_for
from helix_store.contrib.openai_agents.branches import Branches
from helix_store.core import validation
from helix_store.core.guards import guard
from helix_store.core.limits import MAX_BIGINT
from helix_store.core.payloads import copy_json
from helix_store.core.types import UserId
from helix_store.exceptions import IntegrityFault, InvalidPayload
from helix_store.items import ItemLog
from helix_store.items.rules import item_key

__all__ = ["DjangoSession"]

AGENT_TYPE: Final = "openai_agents"


class DjangoSession(Branches):
    """A session for ``Runner.run(agent, input, session=DjangoSession("chat-1"))``.

    ``session_id`` may be any text: if it is not a valid session id, it gets a readable form with a digest.
    The first item creates the session, unless it exists; admin, usage, retention and erasure find it there.
    Every write is one transaction; if it is cancelled, the caller is told after it has ended. A write sets
    ``user_id`` as the user of a session without one, and raises `ConflictError` if the session belongs to
    another user. With a ``fencing_token``, a write raises `FencedOutError` if the session's lock has a larger
    one.

    ``limit`` of the settings is the number of newest items that a run reads; a negative one means all.
    ``branch`` is the branch to begin with.
    """

    def __init__(
        self,
        session_id: str,
        *,
        using: str | None = None,
        tenant: str = "",
        session_settings: SessionSettings | dict[str, Any] | None = None,
        branch: str = "main",
        user_id: UserId | None = None,
        fencing_token: int | None = None,
    ) -> None:
        self.session_id = session_id
        self.session_settings: SessionSettings | None = coerce_session_settings(session_settings or {})
        self.fencing_token = guard(fencing_token=fencing_token).fencing_token
        first = item_key(branch, "branch")
        log = ItemLog(
            session_id_for(session_id),
            first,
            using=using,
            tenant=tenant,
            agent_type=AGENT_TYPE,
            user_id=user_id,
        )
        super().__init__(log, using=using)

    async def get_items(
        self,
        limit: int | None = None,
        *,
        branch_id: str | None = None,
        wrapper: RunContextWrapper[Any] | None = None,
    ) -> list[TResponseInputItem]:
        """Return the newest ``limit`` items of the branch in the order in which they were added.

        The default ``limit`` comes from the settings. A negative one means all. An item that cannot be read
        is left out, and does not count.
        """
        if limit is not None:
            validation.query_number(limit, "limit", minimum=-MAX_BIGINT)
        wanted = resolve_session_limit(limit, self.session_settings)
        if wanted is not None and wanted < 0:
            wanted = None
        items = await self._log_of(branch_id).atail(wanted, skip_unreadable=True)
        return [item.payload for item in items]

    async def add_items(
        self, items: list[TResponseInputItem], *, wrapper: RunContextWrapper[Any] | None = None
    ) -> None:
        """Add items at the end of the branch, all or none. Raises `InvalidPayload` and `LimitExceeded`."""
        if not items:
            return
        try:
            await self._log.aappend(items, fencing_token=self.fencing_token)
        except InvalidPayload:
            plain = _plain(items)
            if plain is None:
                raise
            await self._log.aappend(plain, fencing_token=self.fencing_token)

    async def pop_item(self, *, wrapper: RunContextWrapper[Any] | None = None) -> TResponseInputItem | None:
        """Delete the newest item of the branch and return it. No two callers get the same one. Newer items
        that cannot be read are also deleted.
        """
        return await self._pop_item_with_validation()

    async def clear_session(self, *, wrapper: RunContextWrapper[Any] | None = None) -> None:
        """Delete all items of all branches, and switch to the branch ``main``.

        The session stays, with its usage and its metadata.
        """
        await self._log.aclear_all(fencing_token=self.fencing_token)
        self._go_to_main()

    # --- Optional methods that wrappers of the SDK use -----------------------------------------

    async def _pop_item_with_validation(
        self, validate: Callable[[TResponseInputItem], None] | None = None
    ) -> TResponseInputItem | None:
        """Call `pop_item`, but delete nothing if ``validate`` raises an error."""

        def is_valid(payload: Any) -> bool:
            if validate is not None:
                validate(payload)
            return True

        item = await self._log.apop(is_valid, fencing_token=self.fencing_token)
        return None if item is None else item.payload

    async def _get_compaction_snapshot(
        self, limit: int, *, prune_prefix: Callable[[TResponseInputItem], bool] | None = None
    ) -> Any:
        """Return the newest items and their compare-and-swap, for ``OpenAIResponsesCompactionSession``.

        Return ``None`` if the SDK has no class for them, or if an item cannot be read. The compaction then
        reads all items, clears the session and adds the new ones, which is not atomic.
        """
        try:
            # Not public, but third-party sessions of the SDK work without it.
            from agents.memory.session import _CompactionSnapshot

            found = [item.payload for item in await self._log.atail(limit + 1)]
        except (ImportError, IntegrityFault):
            return None
        log, stored = self._log, found[-limit:]

        async def replace_suffix(start: int, output: list[Any]) -> bool:
            expected = stored[start:]
            return bool(expected) and await log.areplace_suffix(
                expected, output, prune=prune_prefix, fencing_token=self.fencing_token
            )

        return _CompactionSnapshot(copy_json(stored), len(found) <= limit, replace_suffix)


def _plain(items: list[Any]) -> list[Any] | None:
    """Return items with tuples, enumerations and similar values converted to JSON, or ``None``."""
    try:
        plain: list[Any] = json.loads(json.dumps(items, allow_nan=False))
    except (TypeError, ValueError, RecursionError):
        return None
    return plain
