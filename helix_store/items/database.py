"""Items in the database."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from itertools import takewhile
from typing import Any, Final

from helix_store.core import moments
from helix_store.core.guards import Guard
from helix_store.core.limits import MAX_BIGINT
from helix_store.core.moments import as_utc
from helix_store.core.payloads import decode
from helix_store.engine.database import Database, DatabaseOperations, writes
from helix_store.engine.expressions import list_parameter
from helix_store.exceptions import ConflictError, IntegrityFault, SessionNotFound
from helix_store.items import sql
from helix_store.items.rules import EncodedItem, StoredItem, new_session
from helix_store.models import Session
from helix_store.sessions.database.locking import lock_session
from helix_store.sessions.database.sessions import lock_or_insert_session, name_user, user_columns

__all__ = ["DatabaseItems", "item_of", "readable"]

Row = tuple[Any, ...]
"""Id, key, payload as text, and time."""

_ROWS_PER_STATEMENT: Final = 1_000
_ROWS_PER_LOOK: Final = 100
"""The number of items that a pop examines at once after the newest was refused."""


class DatabaseItems(DatabaseOperations):
    """The lanes of sessions. Every write locks the row of the session first, and names its user.

    The first item of an unknown session creates the session with ``agent_type``.
    """

    def __init__(self, db: Database, agent_type: str, user_id: str | None) -> None:
        super().__init__(db)
        self._agent_type = agent_type
        self._user_id = user_id

    def newest(self, session_id: str, lane: str, *, limit: int | None, before: int | None) -> list[Row]:
        parameters = {
            **self._lane(session_id, lane),
            "limit": MAX_BIGINT if limit is None else limit,
            "before": MAX_BIGINT if before is None else before,
        }
        return self.db.read(sql.NEWEST, parameters)

    def by_key(self, session_id: str, lane: str, key: str) -> StoredItem | None:
        rows = self.db.read(sql.BY_KEY, {**self._lane(session_id, lane), "key": key})
        return item_of(rows[0]) if rows else None

    def count(self, session_id: str, lane: str) -> int:
        ((count,),) = self.db.read(sql.COUNT, self._lane(session_id, lane))
        return int(count)

    def count_lanes(self, session_id: str) -> dict[str, int]:
        return dict(self.db.read(sql.COUNT_LANES, {"tenant": self.db.tenant, "session_id": session_id}))

    @writes
    def append(self, session_id: str, lane: str, items: Sequence[EncodedItem], guard: Guard) -> int:
        head = self._locked_for(items, session_id, guard)
        if head is None:
            return 0
        if added := self._add(head, lane, items):
            self._mark_written(head.pk)
        return added

    @writes
    def put(self, session_id: str, lane: str, item: EncodedItem, guard: Guard) -> None:
        head = self._locked_or_new(session_id, guard)
        columns = {"key": item.key, "payload": item.text, "at": moments.now(), "version": head.version}
        self.db.execute(sql.PUT, {**_lane(head.pk, lane), **columns})
        self._mark_written(head.pk)

    @writes
    def pop(
        self, session_id: str, lane: str, validate: Callable[[Any], Any], guard: Guard
    ) -> StoredItem | None:
        head = self._locked(session_id, guard)
        if head is None:
            return None
        session = head.pk
        of_lane = _lane(session, lane)
        popped = self.db.execute(sql.POP, of_lane)
        if not popped:
            return None
        self._mark_written(session)
        for item in readable(popped):
            if validate(item.payload):
                return item
        before = popped[0][0]
        while rows := self.db.execute(
            sql.NEWEST_LOCKED, {**of_lane, "before": before, "limit": _ROWS_PER_LOOK}
        ):
            found = next((item for item in readable(rows) if validate(item.payload)), None)
            before = rows[-1][0] if found is None else found.position
            self.db.execute(sql.DELETE_FROM, {**of_lane, "first": before})
            if found is not None:
                return found
        return None

    @writes
    def replace_suffix(
        self,
        session_id: str,
        lane: str,
        expected: Sequence[str],
        items: Sequence[EncodedItem],
        prune: Callable[[Any], Any] | None,
        guard: Guard,
    ) -> bool:
        head = self._locked_for([] if expected else items, session_id, guard)
        if head is None:
            return not expected
        session = head.pk
        of_lane = _lane(session, lane)
        if expected:
            newest = {**of_lane, "before": MAX_BIGINT, "limit": len(expected)}
            suffix = self.db.execute(sql.NEWEST_LOCKED, newest)
            if [text for _, _, text, _ in reversed(suffix)] != list(expected):
                return False
            self.db.execute(sql.DELETE_FROM, {**of_lane, "first": suffix[-1][0]})
        self._prune(session, lane, prune)
        self._add(head, lane, items)
        self._mark_written(session)
        return True

    @writes
    def copy(self, session_id: str, lane: str, target: str, before: int | None, guard: Guard) -> int:
        head = self._locked(session_id, guard)
        if head is None:
            return 0
        session = head.pk
        if self.db.execute(sql.NEWEST_LOCKED, {**_lane(session, target), "before": MAX_BIGINT, "limit": 1}):
            raise ConflictError("The lane already has items.")
        last = MAX_BIGINT if before is None else before
        columns = {"target": target, "before": last, "version": head.version}
        copied = len(self.db.execute(sql.COPY, {**_lane(session, lane), **columns}))
        if copied:
            self._mark_written(session)
        return copied

    @writes
    def clear(self, session_id: str, lane: str | None, guard: Guard) -> int:
        """Return the items of a lane, or of all lanes."""
        head = self._locked(session_id, guard)
        if head is None:
            return 0
        session = head.pk
        statement = sql.CLEAR_ALL if lane is None else sql.CLEAR
        deleted = len(self.db.execute(statement, _lane(session, lane)))
        if deleted:
            self._mark_written(session)
        return deleted

    def _prune(self, session: int, lane: str, prune: Callable[[Any], Any] | None) -> None:
        """Delete the oldest items, up to the first one that ``prune`` keeps or that cannot be read."""
        if prune is None:
            return
        after = 0
        while rows := self.db.execute(
            sql.OLDEST_LOCKED, {**_lane(session, lane), "after": after, "limit": _ROWS_PER_LOOK}
        ):
            gone = list(takewhile(lambda row: _is_pruned(row, prune), rows))
            if gone:
                after = gone[-1][0]
                self.db.execute(sql.DELETE_TO, {**_lane(session, lane), "last": after})
            if len(gone) < len(rows):
                return

    def _add(self, head: Session, lane: str, items: Sequence[EncodedItem]) -> int:
        added = 0
        for start in range(0, len(items), _ROWS_PER_STATEMENT):
            rows = items[start : start + _ROWS_PER_STATEMENT]
            parameters = {
                **_lane(head.pk, lane),
                "version": head.version,
                "keys": list_parameter(self.db, [item.key for item in rows]),
                "payloads": list_parameter(self.db, [item.text for item in rows]),
                "at": moments.now(),
            }
            added += len(self.db.execute(sql.ADD, parameters))
        return added

    def _locked_for(self, items: Sequence[EncodedItem], session_id: str, guard: Guard) -> Session | None:
        """Return the session, which the first item creates."""
        if items:
            return self._locked_or_new(session_id, guard)
        return self._locked(session_id, guard)

    def _locked(self, session_id: str, guard: Guard) -> Session | None:
        with suppress(SessionNotFound):
            return self._named(lock_session(self.db, session_id, guard, *user_columns(self._user_id)))
        return None

    def _locked_or_new(self, session_id: str, guard: Guard) -> Session:
        new = partial(new_session, session_id, self._agent_type, self._user_id)
        columns = user_columns(self._user_id)
        return self._named(lock_or_insert_session(self.db, session_id, new, guard, *columns)[0])

    def _named(self, head: Session) -> Session:
        name_user(self.db, head, self._user_id)
        return head

    def _mark_written(self, session: int) -> None:
        self.db.execute(sql.MARK_WRITTEN, {"session": session, "at": moments.now()})

    def _lane(self, session_id: str, lane: str) -> dict[str, Any]:
        return {"tenant": self.db.tenant, "session_id": session_id, "lane": lane}


def _lane(session: int, lane: str | None) -> dict[str, Any]:
    return {"session": session, "lane": lane}


def _is_pruned(row: Row, prune: Callable[[Any], Any]) -> bool:
    return any(prune(item.payload) for item in readable([row]))


def item_of(row: Row) -> StoredItem:
    """Build the item. Raises `IntegrityFault`."""
    position, key, text, created_at = row
    return StoredItem(position=position, key=key, payload=decode(text), created_at=as_utc(created_at))


def readable(rows: Sequence[Row]) -> Iterator[StoredItem]:
    """Yield the items of rows, except unreadable ones."""
    for row in rows:
        with suppress(IntegrityFault):
            yield item_of(row)
