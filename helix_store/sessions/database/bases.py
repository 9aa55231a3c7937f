"""The full payloads that this process knows, so that it can store a step as a delta from one of them.

What is known here decides nothing: a delta may be written only while the head of its session, under its lock,
has the key that the base is known under. A key is random, so no rollback and no restored backup gives it to
other content; whatever is out of date here costs a full payload and nothing else.
"""

from __future__ import annotations

import secrets
from itertools import chain
from sys import getsizeof
from typing import Final, NamedTuple

from helix_store.engine.database import Database
from helix_store.sessions.database.recent import Recent
from helix_store.sessions.deltas import MAX_DELTAS, delta_between
from helix_store.sessions.layout import EncodedState
from helix_store.sessions.members import Members, members_of

__all__ = ["Base", "Bases", "Delta", "StoredPayload", "bases", "new_base_key", "stored_payload"]

_MOST_BYTES: Final = 32 * 1024 * 1024
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

    def __init__(self, key: int, row_id: int, text: str, members: Members | None = None) -> None:
        self.key = key
        self.row_id = row_id
        self.text = text
        self.members: Members | None = None
        self.size = getsizeof(text) + _BYTES_PER_BASE
        self.uses = 0
        if members is not None:
            self.take_apart(members)

    def take_apart(self, members: Members) -> None:
        """Keep the members in place of the text that they make up."""
        self.members, self.text = members, ""
        parts = chain(members, members.values(), *members.values())
        self.size = getsizeof(members) + sum(map(getsizeof, parts)) + _BYTES_PER_BASE

    def delta_to(self, payload: str, members: Members | None = None) -> Delta | None:
        """A payload, and its members where they are known, as a delta.

        Returns ``None`` when it had better be stored in full.
        """
        if self.members is None or self.uses >= MAX_DELTAS:
            return None
        if members is None:
            members = members_of(payload)
        text = None if members is None else delta_between(self.members, members)
        if text is None:
            return None
        self.uses += 1
        return Delta(text, self.row_id, self.key)


class Bases:
    """The base of each session by alias, tenant and id, those used last; safe to use from any thread."""

    def __init__(self, most_bytes: int = _MOST_BYTES) -> None:
        self._known: Recent[Base] = Recent(most_bytes)

    @property
    def size(self) -> int:
        return self._known.size

    def get(self, db: Database, session_id: str) -> Base | None:
        """What is known of a session that is about to make a step."""
        place = (db.alias, db.tenant, session_id)
        base = self._known.get(place)
        # Most bases that are loaded are never used, so they are taken apart here.
        if base is not None and base.members is None:
            self._take_apart(place, base)
        return base

    def keep(
        self,
        db: Database,
        session_id: str,
        key: int,
        row_id: int,
        payload: str,
        members: Members | None = None,
    ) -> None:
        """Remember a full payload that was written or read, in place of what was known of its session."""
        place = (db.alias, db.tenant, session_id)
        with self._known.lock:
            known = self._known.get(place)
            if known is None or known.key != key:
                base = Base(key, row_id, payload, members)
                self._known.put(place, base, base.size)

    def reset(self) -> None:
        """Forget every session."""
        self._known.reset()

    def forget(self, db: Database, session_id: str) -> None:
        self._known.take((db.alias, db.tenant, session_id))

    def _take_apart(self, place: _Place, base: Base) -> None:
        members = members_of(base.text)
        with self._known.lock:
            if base.members is not None:  # by another thread, which left no text
                return
            is_known = self._known.get(place) is base
            if is_known:
                self._known.take(place)
            if members is not None:
                base.take_apart(members)
                if is_known:
                    self._known.put(place, base, base.size)


def stored_payload(encoded: EncodedState, base: Base | None) -> StoredPayload:
    """A payload as a delta from a base if that is worth it, else in full, to be built on."""
    delta = None if base is None else base.delta_to(encoded.payload, encoded.members)
    return StoredPayload(encoded.payload, None, new_base_key()) if delta is None else StoredPayload(*delta)


def new_base_key() -> int:
    """A name that no other content has or gets: 63 random bits."""
    return secrets.randbits(63)


bases: Final = Bases()
