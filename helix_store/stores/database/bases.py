"""The full payloads that this process knows, so that it can store a step as a delta from one of them.

What is known here decides nothing: a delta may be written only while the head of its session, under its lock,
has the key that the base is known under. A key is random, so no rollback and no restored backup gives it to
other content; whatever is out of date here costs a full payload and nothing else.
"""

from __future__ import annotations

import os
import secrets
import threading
from collections import OrderedDict
from sys import getsizeof
from typing import Final, NamedTuple

from helix_store.core.state_deltas import MAX_DELTAS, delta_between, members_of
from helix_store.stores.database.scope import Scope

__all__ = ["Base", "Bases", "Delta", "StoredPayload", "bases", "new_base_key", "stored_payload"]

_MOST_BYTES: Final = 32 * 1024 * 1024
_LARGEST_SHARE: Final = 2
"""One base may take half of the room."""

_BYTES_PER_BASE: Final = 600
"""What a base takes beside its texts."""

_Place = tuple[str, str, str]


class Delta(NamedTuple):
    """A payload as the delta from a base: the row to name, and the key that the head must still have."""

    text: str
    base_id: int
    base_key: int


class StoredPayload(NamedTuple):
    """What a step's row holds for a payload, and the key that the head has with it."""

    text: str
    base_id: int | None
    base_key: int

    @property
    def is_delta(self) -> bool:
        return self.base_id is not None


class Base:
    """A full payload, the row that holds it, and the key that the head of its session had."""

    __slots__ = ("key", "members", "row_id", "size", "text", "uses")

    def __init__(self, key: int, row_id: int, text: str) -> None:
        self.key = key
        self.row_id = row_id
        self.text = text
        self.members: dict[str, str] | None = None
        self.size = getsizeof(text) + _BYTES_PER_BASE
        self.uses = 0

    def delta_to(self, payload: str) -> Delta | None:
        """A payload as a delta, or ``None`` when it had better be stored in full."""
        if self.members is None or self.uses >= MAX_DELTAS:
            return None
        members = members_of(payload, self.members)
        text = None if members is None else delta_between(self.members, members)
        if text is None:
            return None
        self.uses += 1
        return Delta(text, self.row_id, self.key)


class Bases:
    """The base of each session by alias, tenant and id, those used last; safe to use from any thread."""

    def __init__(self, most_bytes: int = _MOST_BYTES) -> None:
        self._most_bytes = most_bytes
        self.reset()

    def reset(self) -> None:
        """Forget everything and the lock, as a forked child must: its parent may have held it."""
        self._mutex = threading.Lock()
        self._known: OrderedDict[_Place, Base] = OrderedDict()
        self.size = 0

    def get(self, scope: Scope, session_id: str) -> Base | None:
        """What is known of a session that is about to make a step."""
        place = (scope.alias, scope.tenant, session_id)
        with self._mutex:
            base = self._known.get(place)
            if base is None:
                return None
            self._known.move_to_end(place)
        # Most bases that are loaded are never used, so they are taken apart here.
        if base.members is None:
            self._take_apart(place, base)
        return base

    def keep(self, scope: Scope, session_id: str, key: int, row_id: int, payload: str) -> None:
        """Remember a full payload that was written or read, in place of what was known of its session."""
        place = (scope.alias, scope.tenant, session_id)
        with self._mutex:
            known = self._known.get(place)
            if known is not None and known.key == key:
                self._known.move_to_end(place)
                return
            self._put(place, Base(key, row_id, payload))

    def forget(self, scope: Scope, session_id: str) -> None:
        with self._mutex:
            self._remove((scope.alias, scope.tenant, session_id))

    def _take_apart(self, place: _Place, base: Base) -> None:
        members = members_of(base.text)
        with self._mutex:
            if base.members is not None:
                return
            is_known = self._known.get(place) is base
            if is_known:
                self._remove(place)
            if members is None:
                return
            base.members, base.text = members, ""
            texts = (*members, *members.values())
            base.size = getsizeof(members) + sum(map(getsizeof, texts)) + _BYTES_PER_BASE
            if is_known:
                self._put(place, base)

    def _put(self, place: _Place, base: Base) -> None:
        self._remove(place)
        if base.size * _LARGEST_SHARE > self._most_bytes:
            return
        self._known[place] = base
        self.size += base.size
        while self.size > self._most_bytes:
            _, oldest = self._known.popitem(last=False)
            self.size -= oldest.size

    def _remove(self, place: _Place) -> None:
        base = self._known.pop(place, None)
        if base is not None:
            self.size -= base.size


def stored_payload(payload: str, base: Base | None) -> StoredPayload:
    """A payload as a delta from a base if that is worth it, else in full, to be built on."""
    delta = None if base is None else base.delta_to(payload)
    return StoredPayload(payload, None, new_base_key()) if delta is None else StoredPayload(*delta)


def new_base_key() -> int:
    """A name that no other content has or gets: 63 random bits."""
    return secrets.randbits(63)


bases: Final = Bases()
if hasattr(os, "register_at_fork"):  # not on Windows, which cannot fork
    os.register_at_fork(after_in_child=bases.reset)
