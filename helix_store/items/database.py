"""Items in the database."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Final

from helix_store.core import moments
from helix_store.core.guards import Guard
from helix_store.core.limits import MAX_BIGINT
from helix_store.core.payloads import decode
from helix_store.engine.clocks import as_utc
from helix_store.engine.database import DatabaseOperations, writes
from helix_store.engine.expressions import list_parameter
from helix_store.exceptions import IntegrityFault, SessionNotFound
from helix_store.items import sql
from helix_store.items.rules import EncodedItem, Item, new_session
from helix_store.sessions.database.locking import lock_session
from helix_store.sessions.database.sessions import lock_or_insert_session

__all__ = ["DatabaseItems", "item_of", "readable"]

Row = tuple[Any, ...]
"""Id, key, payload as text, and time."""

_ROWS_PER_STATEMENT: Final = 1_000
_ROWS_PER_LOOK: Final = 100
"""How many items a pop looks at together, after the newest was refused."""


class DatabaseItems(DatabaseOperations):
    """The lanes of sessions. Every write locks the row of the session first."""

    def newest(self, session_id: str, lane: str, *, limit: int | None, before: int | None) -> list[Row]:
        parameters = {
            **self._lane(session_id, lane),
            "limit": MAX_BIGINT if limit is None else limit,
            "before": MAX_BIGINT if before is None else before,
        }
        return self.db.read(sql.NEWEST, parameters)

    def by_key(self, session_id: str, lane: str, key: str) -> Item | None:
        rows = self.db.read(sql.BY_KEY, {**self._lane(session_id, lane), "key": key})
        return item_of(rows[0]) if rows else None

    def count(self, session_id: str, lane: str) -> int:
        ((count,),) = self.db.read(sql.COUNT, self._lane(session_id, lane))
        return int(count)

    def count_lanes(self, session_id: str) -> dict[str, int]:
        return dict(self.db.read(sql.COUNT_LANES, {"tenant": self.db.tenant, "session_id": session_id}))

    @writes
    def append(
        self, session_id: str, lane: str, items: Sequence[EncodedItem], guard: Guard, agent_type: str
    ) -> int:
        key = self._locked_or_new(session_id, guard, agent_type)
        return self._add(key, lane, items)

    @writes
    def put(self, session_id: str, lane: str, item: EncodedItem, guard: Guard, agent_type: str) -> None:
        session = self._locked_or_new(session_id, guard, agent_type)
        at = moments.now()
        columns = {"key": item.key, "payload": item.text, "at": at}
        self.db.execute(sql.PUT, {"session": session, "lane": lane, **columns})
        self._mark_written(session)

    @writes
    def pop(self, session_id: str, lane: str, validate: Callable[[Any], Any], guard: Guard) -> Item | None:
        session = self._locked(session_id, guard)
        if session is None:
            return None
        of_lane = {"session": session, "lane": lane}
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
        guard: Guard,
        agent_type: str,
    ) -> bool:
        session = (
            self._locked_or_new(session_id, guard, agent_type)
            if not expected
            else self._locked(session_id, guard)
        )
        if session is None:
            return False
        of_lane = {"session": session, "lane": lane}
        if expected:
            suffix = self.db.execute(
                sql.NEWEST_LOCKED, {**of_lane, "before": MAX_BIGINT, "limit": len(expected)}
            )
            if [text for _, _, text, _ in reversed(suffix)] != list(expected):
                return False
            self.db.execute(sql.DELETE_FROM, {**of_lane, "first": suffix[-1][0]})
        self._add(session, lane, items)
        return True

    @writes
    def clear(self, session_id: str, lane: str, guard: Guard) -> int:
        session = self._locked(session_id, guard)
        if session is None:
            return 0
        deleted = len(self.db.execute(sql.CLEAR, {"session": session, "lane": lane}))
        if deleted:
            self._mark_written(session)
        return deleted

    def _add(self, session: int, lane: str, items: Sequence[EncodedItem]) -> int:
        added = 0
        for start in range(0, len(items), _ROWS_PER_STATEMENT):
            rows = items[start : start + _ROWS_PER_STATEMENT]
            parameters = {
                "session": session,
                "lane": lane,
                "keys": list_parameter(self.db, [item.key for item in rows]),
                "payloads": list_parameter(self.db, [item.text for item in rows]),
                "at": moments.now(),
            }
            added += len(self.db.execute(sql.ADD, parameters))
        if added:
            self._mark_written(session)
        return added

    def _locked(self, session_id: str, guard: Guard) -> int | None:
        with suppress(SessionNotFound):
            return lock_session(self.db, session_id, guard).pk
        return None

    def _locked_or_new(self, session_id: str, guard: Guard, agent_type: str) -> int:
        new = partial(new_session, session_id, agent_type)
        return lock_or_insert_session(self.db, session_id, new, guard)[0].pk

    def _mark_written(self, session: int) -> None:
        self.db.execute(sql.MARK_WRITTEN, {"session": session, "at": moments.now()})

    def _lane(self, session_id: str, lane: str) -> dict[str, Any]:
        return {"tenant": self.db.tenant, "session_id": session_id, "lane": lane}


def item_of(row: Row) -> Item:
    """Raises `IntegrityFault`."""
    position, key, text, created_at = row
    return Item(position=position, key=key, payload=decode(text), created_at=as_utc(created_at))


def readable(rows: Sequence[Row]) -> Iterator[Item]:
    """The items of rows, without those that cannot be read."""
    for row in rows:
        with suppress(IntegrityFault):
            yield item_of(row)
