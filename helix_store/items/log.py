"""The items of one lane of a session."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from helix_store import conf
from helix_store.core import validation
from helix_store.core.guards import guard
from helix_store.core.types import UserId
from helix_store.engine.async_twins import async_twin
from helix_store.engine.database import Database
from helix_store.items.database import DatabaseItems, item_of, readable
from helix_store.items.rules import (
    ITEMS_AGENT_TYPE,
    EncodedItem,
    StoredItem,
    encode_item,
    encode_items,
    item_key,
    lane_name,
)

__all__ = ["ItemLog"]


class ItemLog:
    """Ordered JSON values of a session, each with or without a key that is unique in its lane.

    A lane is a name of at most 1,000 bytes; a session can have any number of lanes. Every write is one
    transaction under the lock of the session's row. It takes a ``fencing_token``, and raises `FencedOutError`
    if the session's lock has a larger one. The first item of an unknown session creates the session with
    ``agent_type``. A write sets ``user_id`` as the user of a session without one, and raises `ConflictError`
    if the session belongs to another user. If an async write is cancelled, it raises `CancelledError` only
    after its transaction has ended.
    """

    def __init__(
        self,
        session_id: str,
        lane: str = "",
        *,
        using: str | None = None,
        tenant: str = "",
        agent_type: str = ITEMS_AGENT_TYPE,
        user_id: UserId | None = None,
    ) -> None:
        self.session_id = validation.identifier(session_id, "session_id")
        self.lane = lane_name(lane)
        self.tenant = validation.tenant(tenant)
        self.agent_type = validation.identifier(agent_type, "agent_type")
        self.user_id = validation.user_id(user_id)
        self._items = DatabaseItems(Database(using, tenant), self.agent_type, self.user_id)

    def __repr__(self) -> str:
        return f"<ItemLog {self.session_id!r} lane={self.lane!r}>"

    # --- Writes ------------------------------------------------------------------------------------

    def append(
        self,
        payloads: Iterable[Any],
        *,
        keys: Iterable[str | None] | None = None,
        fencing_token: int | None = None,
    ) -> int:
        """Add items at the end of the lane, all or none, and return how many were new.

        An item is skipped if its key is already in the lane, so a repeat is safe. Raises `InvalidPayload`,
        and `LimitExceeded` for an item of more than ``max_state_bytes``.
        """
        held = guard(fencing_token=fencing_token)
        items = encode_items(payloads, keys, conf.limits())
        return self._items.append(self.session_id, self.lane, items, held)

    def put(self, key: str, payload: Any, *, fencing_token: int | None = None) -> None:
        """Store the item of a key: replace the item with this key, or add it at the end. Safe to repeat.

        Raises `InvalidPayload` and `LimitExceeded`.
        """
        held = guard(fencing_token=fencing_token)
        item = EncodedItem(item_key(key), encode_item(payload, conf.limits()))
        self._items.put(self.session_id, self.lane, item, held)

    def pop(
        self, validate: Callable[[Any], Any] | None = None, *, fencing_token: int | None = None
    ) -> StoredItem | None:
        """Delete the newest item and return it; ``None`` for an empty lane. No two callers get the same one.

        Newer items are also deleted if they cannot be read, or if ``validate`` returns a false value for
        their payload. ``validate`` runs under the session's lock; if it raises an error, nothing is deleted.
        """
        held = guard(fencing_token=fencing_token)
        return self._items.pop(self.session_id, self.lane, validate or _any, held)

    def replace_suffix(
        self,
        expected: Sequence[Any],
        new: Iterable[Any],
        *,
        prune: Callable[[Any], Any] | None = None,
        fencing_token: int | None = None,
    ) -> bool:
        """Replace the newest items with ``new`` if they are ``expected``, and return whether they were.
        Otherwise nothing changes. Payloads are compared as stored, with the order of their keys. If they are
        replaced, the oldest items are deleted as long as ``prune`` returns a true value for their payloads.
        Raises `InvalidPayload` and `LimitExceeded`.
        """
        held = guard(fencing_token=fencing_token)
        limits = conf.limits()
        texts = [item.text for item in encode_items(expected, None, limits)]
        items = encode_items(new, None, limits)
        return self._items.replace_suffix(self.session_id, self.lane, texts, items, prune, held)

    def copy_to(self, lane: str, *, before: int | None = None, fencing_token: int | None = None) -> int:
        """Copy the items of this lane, up to the position ``before``, to another lane; return their number.

        Copies have new positions, and the keys and times of the originals. Raises `ConflictError` if the
        other lane has items.
        """
        held = guard(fencing_token=fencing_token)
        target = lane_name(lane)
        if before is not None:
            validation.query_number(before, "before")
        return self._items.copy(self.session_id, self.lane, target, before, held)

    def clear(self, *, fencing_token: int | None = None) -> int:
        """Delete all items of the lane and return their number. Safe to repeat."""
        return self._items.clear(self.session_id, self.lane, guard(fencing_token=fencing_token))

    def delete_lane(self, lane: str, *, fencing_token: int | None = None) -> int:
        """Call `clear` for another lane of the session."""
        return self._items.clear(self.session_id, lane_name(lane), guard(fencing_token=fencing_token))

    def clear_all(self, *, fencing_token: int | None = None) -> int:
        """Delete all items of all lanes of the session and return their number. Safe to repeat."""
        return self._items.clear(self.session_id, None, guard(fencing_token=fencing_token))

    # --- Reads -------------------------------------------------------------------------------------

    def tail(
        self, limit: int | None = None, *, before: int | None = None, skip_unreadable: bool = False
    ) -> list[StoredItem]:
        """Return the newest items in the order in which they were added: one query.

        ``before`` is the position of the first item of the following page. Raises `InvalidQuery`, and
        `IntegrityFault` for an item that cannot be read. With ``skip_unreadable`` such an item is left out,
        and ``limit`` counts the others.
        """
        if limit is not None:
            validation.query_number(limit, "limit")
        if before is not None:
            validation.query_number(before, "before")
        rows = self._items.newest(self.session_id, self.lane, limit=limit, before=before)
        if not skip_unreadable:
            return [item_of(row) for row in reversed(rows)]
        found = list(readable(rows))
        while limit is not None and rows and len(found) < limit:
            missing = limit - len(found)
            rows = self._items.newest(self.session_id, self.lane, limit=missing, before=rows[-1][0])
            found += readable(rows)
        return found[::-1]

    def get(self, key: str) -> StoredItem | None:
        """Return the item of a key, or ``None``."""
        return self._items.by_key(self.session_id, self.lane, item_key(key))

    def count(self) -> int:
        """Return the number of items of the lane."""
        return self._items.count(self.session_id, self.lane)

    def lanes(self) -> dict[str, int]:
        """Return the number of items of each lane of the session, by name in order."""
        return self._items.count_lanes(self.session_id)

    aappend = async_twin(append)
    aput = async_twin(put)
    apop = async_twin(pop)
    areplace_suffix = async_twin(replace_suffix)
    acopy_to = async_twin(copy_to)
    aclear = async_twin(clear)
    aclear_all = async_twin(clear_all)
    adelete_lane = async_twin(delete_lane)
    atail = async_twin(tail)
    aget = async_twin(get)
    acount = async_twin(count)
    alanes = async_twin(lanes)


def _any(_payload: Any) -> bool:
    return True
