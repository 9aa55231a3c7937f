"""Items of sessions in lanes.

The SQL of items. Writes run under the lock of the session, whose key and version are parameters.

The order of a lane is that of the ids, because a row gets its id after the lock is taken.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from itertools import takewhile
from typing import Any, Final, NamedTuple

from helix_store import conf
from helix_store.catalogue import Table, copied_by
from helix_store.core import moments, validation
from helix_store.core.limits import MAX_BIGINT, MAX_LANE_BYTES, Limits
from helix_store.core.moments import as_utc
from helix_store.core.payloads import decode, encode, encode_all, join_path
from helix_store.core.types import UserId
from helix_store.core.validation import Guard, guard
from helix_store.engine.async_twins import async_twin
from helix_store.engine.database import Database, DatabaseOperations, writes
from helix_store.engine.expressions import list_parameter
from helix_store.engine.statement import Statement, table
from helix_store.exceptions import ConflictError, IntegrityFault, InvalidPayload, SessionNotFound
from helix_store.models import Item, Session
from helix_store.sessions.heads import lock_or_insert_session, name_user, user_columns
from helix_store.sessions.locking import lock_session
from helix_store.sessions.state import root_session
from helix_store.sessions.statements import SESSION_BY_ID

__all__ = ["ItemLog", "StoredItem"]


ITEMS_AGENT_TYPE: Final = "items"
"""The agent type of the session that the first item of an unknown session creates."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredItem:
    """An item as it is stored. Positions increase within a lane, with gaps."""

    position: int
    key: str | None
    payload: Any
    created_at: datetime


class EncodedItem(NamedTuple):
    key: str | None
    text: str


def lane_name(value: Any, name: str = "lane") -> str:
    """Check a string of at most 1,000 bytes; an empty string means the default lane."""
    return validation.text(value, name, limit=MAX_LANE_BYTES)


def item_key(value: Any, name: str = "key") -> str:
    """Check a string of 1 to 1,000 bytes."""
    if validation.text(value, name, limit=MAX_LANE_BYTES):
        return str(value)
    raise InvalidPayload(path=name, reason="a key needs at least one character")


def encode_item(payload: Any, limits: Limits) -> str:
    """Check and encode one payload. Raises `InvalidPayload` and `LimitExceeded`."""
    return encode(payload, limit=limits.max_state_bytes, path="/payload")


def encode_items(
    payloads: Iterable[Any], keys: Iterable[str | None] | None, limits: Limits
) -> list[EncodedItem]:
    """Check and encode payloads with their keys. Raises `InvalidPayload` and `LimitExceeded`."""
    values = validation.items(payloads, "payloads")
    texts = encode_all(values, limit=limits.max_state_bytes, name="max_state_bytes", path="/payloads")
    return [EncodedItem(key, text) for key, text in zip(_keys(keys, len(texts)), texts, strict=True)]


def _keys(keys: Iterable[str | None] | None, count: int) -> Sequence[str | None]:
    if keys is None:
        return [None] * count
    given = validation.items(keys, "keys")
    if len(given) != count:
        raise InvalidPayload(path="/keys", reason=f"expected a key or None for each of {count} payloads")
    return [
        None if key is None else item_key(key, join_path("/keys", index)) for index, key in enumerate(given)
    ]


_ITEM: Final = table(Item)
_SESSION: Final = table(Session)

_COLUMNS: Final = "id, key, payload, created_at"
_READ: Final = f"session_id = (SELECT id FROM {_SESSION} WHERE {SESSION_BY_ID})"
_LOCKED: Final = "session_id = %(session)s"
_LANE: Final = "lane = %(lane)s"
_INSERT: Final = f"INSERT INTO {_ITEM} (session_id, lane, key, payload, created_at, session_version)"
_HAS_KEY: Final = "ON CONFLICT (session_id, lane, key) WHERE key IS NOT NULL"

# --- Reads -----------------------------------------------------------------------------------------


def _newest(of_session: str) -> str:
    return f"""
        SELECT {_COLUMNS} FROM {_ITEM} WHERE {of_session} AND {_LANE} AND id < %(before)s
        ORDER BY id DESC LIMIT %(limit)s"""


NEWEST: Final = Statement(_newest(_READ))
NEWEST_LOCKED: Final = Statement(_newest(_LOCKED))
OLDEST_LOCKED: Final = Statement(
    f"""SELECT {_COLUMNS} FROM {_ITEM} WHERE {_LOCKED} AND {_LANE} AND id > %(after)s
        ORDER BY id LIMIT %(limit)s"""
)
# This is a range of a single key, because only the key index has this order; otherwise PostgreSQL might use
# the lane index.
BY_KEY: Final = Statement(
    f"""SELECT {_COLUMNS} FROM {_ITEM}
        WHERE {_READ} AND {_LANE} AND key >= %(key)s AND key <= %(key)s ORDER BY key LIMIT 1"""
)
COUNT: Final = Statement(f"SELECT count(*) FROM {_ITEM} WHERE {_READ} AND {_LANE}")
COUNT_LANES: Final = Statement(
    f"SELECT lane, count(*) FROM {_ITEM} WHERE {_READ} GROUP BY lane ORDER BY lane"
)

# --- Writes ----------------------------------------------------------------------------------------

ADD: Final = Statement(
    f"""{_INSERT}
        SELECT %(session)s, %(lane)s, given.key, given.payload, %(at)s, %(version)s
        FROM unnest(%(keys)s::varchar[], %(payloads)s::text[]) WITH ORDINALITY AS given(key, payload, place)
        ORDER BY given.place {_HAS_KEY} DO NOTHING RETURNING id""",
    f"""{_INSERT}
        SELECT %(session)s, %(lane)s, keys.value, payloads.value, %(at)s, %(version)s
        FROM json_each(%(keys)s) AS keys JOIN json_each(%(payloads)s) AS payloads ON payloads.key = keys.key
        WHERE true ORDER BY keys.key {_HAS_KEY} DO NOTHING RETURNING id""",
)
PUT: Final = Statement(
    f"""{_INSERT} VALUES (%(session)s, %(lane)s, %(key)s, %(payload)s, %(at)s, %(version)s)
        {_HAS_KEY} DO UPDATE SET payload = excluded.payload RETURNING id"""
)
POP: Final = Statement(
    f"""DELETE FROM {_ITEM} WHERE id = (
            SELECT id FROM {_ITEM} WHERE {_LOCKED} AND {_LANE} ORDER BY id DESC LIMIT 1
        ) RETURNING {_COLUMNS}"""
)
DELETE_FROM: Final = Statement(
    f"DELETE FROM {_ITEM} WHERE {_LOCKED} AND {_LANE} AND id >= %(first)s RETURNING id"
)
DELETE_TO: Final = Statement(f"DELETE FROM {_ITEM} WHERE {_LOCKED} AND {_LANE} AND id <= %(last)s")
COPY: Final = Statement(
    f"""{_INSERT}
        SELECT session_id, %(target)s, key, payload, created_at, %(version)s FROM {_ITEM}
        WHERE {_LOCKED} AND {_LANE} AND id < %(before)s ORDER BY id RETURNING id"""
)
CLEAR_ALL: Final = Statement(f"DELETE FROM {_ITEM} WHERE {_LOCKED} RETURNING 1")
CLEAR: Final = Statement(f"DELETE FROM {_ITEM} WHERE {_LOCKED} AND {_LANE} RETURNING 1")
MARK_WRITTEN: Final = Statement(
    f"UPDATE {_SESSION} SET updated_at = %(at)s WHERE id = %(session)s RETURNING 1"
)

COPY_TO_BRANCH: Final = Statement(
    f"""
        INSERT INTO {_ITEM} (session_id, lane, key, payload, created_at, session_version)
        SELECT %(target)s, lane, key, payload, created_at, 0 FROM {_ITEM}
        WHERE session_id = %(source)s
            AND (session_version < %(version)s OR session_version IS NULL AND created_at <= %(until)s)
        ORDER BY lane, id"""
)
"""Copies the items that were added before the session reached a version.

Rows of earlier releases have no version. For these rows only, the worker's clock decides.
"""


TABLES: Final = (
    Table(Item, record="item", order=("lane", "id"), branch=copied_by(COPY_TO_BRANCH), follows="message"),
)


Row = tuple[Any, ...]
"""The id, the key, the payload as text, and the time."""

_ROWS_PER_STATEMENT: Final = 1_000
_ROWS_PER_LOOK: Final = 100
"""The number of items that a pop examines at once after the newest was refused."""


class ItemLog(DatabaseOperations):
    """Ordered JSON values of a session, each with or without a key that is unique in its lane.

    A lane has a name of at most 1,000 bytes, and a session can have any number of lanes. Every write is one
    transaction under the lock of the session's row. Each write accepts a ``fencing_token``, and raises
    `FencedOutError` if the session's lock has a larger one. The first item of an unknown session creates the
    session with ``agent_type``; if it was erased, that raises `SessionErased`, unless ``recreate`` is True. A
    write sets ``user_id`` as the user of a session without one, and raises
    `ConflictError` if the session belongs to another user. If an async write is cancelled, it raises
    `CancelledError` only after its transaction has ended.
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
        recreate: bool = False,
    ) -> None:
        self.session_id = validation.identifier(session_id, "session_id")
        self.lane = lane_name(lane)
        self.tenant = validation.tenant(tenant)
        self.agent_type = validation.identifier(agent_type, "agent_type")
        self.user_id = validation.user_id(user_id)
        self.recreate = validation.flag(recreate, "recreate")
        super().__init__(Database(using, self.tenant))

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
        return self._append(held, encode_items(payloads, keys, conf.limits()))

    @writes
    def _append(self, guard: Guard, items: Sequence[EncodedItem]) -> int:
        head = self._locked_or_new(guard) if items else self._locked(guard)
        if head is None:
            return 0
        if added := self._add(head, items):
            self._mark_written(head.pk)
        return added

    def put(self, key: str, payload: Any, *, fencing_token: int | None = None) -> None:
        """Store the item of a key: replace the item with this key, or add it at the end. Safe to repeat.

        Raises `InvalidPayload` and `LimitExceeded`.
        """
        held = guard(fencing_token=fencing_token)
        self._put(held, item_key(key), encode_item(payload, conf.limits()))

    @writes
    def _put(self, guard: Guard, key: str, text: str) -> None:
        head = self._locked_or_new(guard)
        columns = {"key": key, "payload": text, "at": moments.now(), "version": head.version}
        self.db.execute(PUT, {**self._locked_lane(head.pk), **columns})
        self._mark_written(head.pk)

    def pop(
        self, validate: Callable[[Any], Any] | None = None, *, fencing_token: int | None = None
    ) -> StoredItem | None:
        """Delete the newest item and return it, or ``None`` if there is none. No two callers get the same
        one.

        Newer items are also deleted if they cannot be read, or if ``validate`` returns a false value for
        their payload. ``validate`` runs under the session's lock; if it raises an error, nothing is deleted.
        """
        return self._pop(guard(fencing_token=fencing_token), validate or (lambda _: True))

    @writes
    def _pop(self, guard: Guard, validate: Callable[[Any], Any]) -> StoredItem | None:
        head = self._locked(guard)
        if head is None:
            return None
        session = head.pk
        of_lane = self._locked_lane(session)
        popped = self.db.execute(POP, of_lane)
        if not popped:
            return None
        self._mark_written(session)
        for item in _readable(popped):
            if validate(item.payload):
                return item
        before = popped[0][0]
        while rows := self.db.execute(NEWEST_LOCKED, {**of_lane, "before": before, "limit": _ROWS_PER_LOOK}):
            found = next((item for item in _readable(rows) if validate(item.payload)), None)
            before = rows[-1][0] if found is None else found.position
            self.db.execute(DELETE_FROM, {**of_lane, "first": before})
            if found is not None:
                return found
        return None

    def replace_suffix(
        self,
        expected: Sequence[Any] | None,
        new: Iterable[Any],
        *,
        prune: Callable[[Any], Any] | None = None,
        fencing_token: int | None = None,
    ) -> bool:
        """Replace the newest items with ``new`` if they are ``expected``, and return whether they were.
        Otherwise nothing changes. Payloads are compared in their stored form, including the order of their
        keys. ``None`` stands for all items of the lane, whatever they are. If items are replaced, the oldest
        ones are deleted as long as ``prune`` returns a true value for their payloads. Raises `InvalidPayload`
        and `LimitExceeded`.
        """
        held = guard(fencing_token=fencing_token)
        limits = conf.limits()
        texts = [item.text for item in encode_items(expected or (), None, limits)]
        items = encode_items(new, None, limits)

        def replace() -> bool:
            head = self._locked(held) if texts or not items else self._locked_or_new(held)
            if head is None:
                return not texts
            session = head.pk
            of_lane = self._locked_lane(session)
            if expected is None:
                self.db.execute(CLEAR, of_lane)
            elif texts:
                newest = {**of_lane, "before": MAX_BIGINT, "limit": len(texts)}
                suffix = self.db.execute(NEWEST_LOCKED, newest)
                if [text for _, _, text, _ in reversed(suffix)] != texts:
                    return False
                self.db.execute(DELETE_FROM, {**of_lane, "first": suffix[-1][0]})
            self._prune(session, prune)
            self._add(head, items)
            self._mark_written(session)
            return True

        return self.db.transaction(replace)

    def copy_to(self, lane: str, *, before: int | None = None, fencing_token: int | None = None) -> int:
        """Copy the items of this lane, up to the position ``before``, to another lane; return their number.

        The copies get new positions, and keep the keys and times of the originals. Raises `ConflictError` if
        the other lane has items.
        """
        held = guard(fencing_token=fencing_token)
        target = lane_name(lane)
        if before is not None:
            validation.query_number(before, "before")
        return self._copy(target, before, held)

    @writes
    def _copy(self, target: str, before: int | None, guard: Guard) -> int:
        head = self._locked(guard)
        if head is None:
            return 0
        session = head.pk
        of_target = self._locked_lane(session, target)
        if self.db.execute(NEWEST_LOCKED, {**of_target, "before": MAX_BIGINT, "limit": 1}):
            raise ConflictError("The lane already has items.")
        last = MAX_BIGINT if before is None else before
        columns = {"target": target, "before": last, "version": head.version}
        copied = len(self.db.execute(COPY, {**self._locked_lane(session), **columns}))
        if copied:
            self._mark_written(session)
        return copied

    def clear(self, *, fencing_token: int | None = None) -> int:
        """Delete all items in the lane and return their number. Safe to repeat."""
        return self._clear(self.lane, guard(fencing_token=fencing_token))

    def delete_lane(self, lane: str, *, fencing_token: int | None = None) -> int:
        """Call `clear` for another lane of the session."""
        return self._clear(lane_name(lane), guard(fencing_token=fencing_token))

    def clear_all(self, *, fencing_token: int | None = None) -> int:
        """Delete all items of all lanes of the session and return their number. Safe to repeat."""
        return self._clear(None, guard(fencing_token=fencing_token))

    @writes
    def _clear(self, lane: str | None, guard: Guard) -> int:
        """Delete the items in a lane, or in all lanes."""
        head = self._locked(guard)
        if head is None:
            return 0
        session = head.pk
        statement = CLEAR_ALL if lane is None else CLEAR
        deleted = len(self.db.execute(statement, self._locked_lane(session, lane)))
        if deleted:
            self._mark_written(session)
        return deleted

    def _prune(self, session: int, prune: Callable[[Any], Any] | None) -> None:
        """Delete the oldest items, up to the first one that ``prune`` keeps or that cannot be read."""
        if prune is None:
            return
        after = 0
        while rows := self.db.execute(
            OLDEST_LOCKED, {**self._locked_lane(session), "after": after, "limit": _ROWS_PER_LOOK}
        ):
            gone = list(takewhile(lambda row: any(prune(item.payload) for item in _readable([row])), rows))
            if gone:
                after = gone[-1][0]
                self.db.execute(DELETE_TO, {**self._locked_lane(session), "last": after})
            if len(gone) < len(rows):
                return

    def _add(self, head: Session, items: Sequence[EncodedItem]) -> int:
        added = 0
        for start in range(0, len(items), _ROWS_PER_STATEMENT):
            rows = items[start : start + _ROWS_PER_STATEMENT]
            parameters = {
                **self._locked_lane(head.pk),
                "version": head.version,
                "keys": list_parameter(self.db, [item.key for item in rows]),
                "payloads": list_parameter(self.db, [item.text for item in rows]),
                "at": moments.now(),
            }
            added += len(self.db.execute(ADD, parameters))
        return added

    def _locked(self, guard: Guard) -> Session | None:
        with suppress(SessionNotFound):
            head = lock_session(self.db, self.session_id, guard, *user_columns(self.user_id))
            name_user(self.db, head, self.user_id)
            return head
        return None

    def _locked_or_new(self, guard: Guard) -> Session:
        """Return the session, which its first item creates."""
        new = partial(root_session, self.session_id, self.agent_type, user_id=self.user_id)
        columns = user_columns(self.user_id)
        head, _ = lock_or_insert_session(
            self.db, self.session_id, new, guard, *columns, recreate=self.recreate
        )
        name_user(self.db, head, self.user_id)
        return head

    def _mark_written(self, session: int) -> None:
        self.db.execute(MARK_WRITTEN, {"session": session, "at": moments.now()})

    def _locked_lane(self, session: int, lane: str | None = None) -> dict[str, Any]:
        return {"session": session, "lane": self.lane if lane is None else lane}

    # --- Reads -------------------------------------------------------------------------------------

    def tail(
        self, limit: int | None = None, *, before: int | None = None, skip_unreadable: bool = False
    ) -> list[StoredItem]:
        """Return the newest items in the order in which they were added: one query.

        For the next page, pass the position of the first item of this one as ``before``. Raises
        `InvalidQuery`, and `IntegrityFault` for an item that cannot be read. With ``skip_unreadable``, such
        an item is left out, and ``limit`` counts only the others.
        """
        if limit is not None:
            validation.query_number(limit, "limit")
        if before is not None:
            validation.query_number(before, "before")
        validation.flag(skip_unreadable, "skip_unreadable")
        rows = self._newest(limit, before)
        if not skip_unreadable:
            return [_item_of(row) for row in reversed(rows)]
        found = list(_readable(rows))
        while limit is not None and rows and len(found) < limit:
            missing = limit - len(found)
            rows = self._newest(missing, rows[-1][0])
            found += _readable(rows)
        return found[::-1]

    @property
    def _lane(self) -> dict[str, Any]:
        return {"tenant": self.tenant, "session_id": self.session_id, "lane": self.lane}

    def _newest(self, limit: int | None, before: int | None) -> list[Row]:
        parameters = {
            **self._lane,
            "limit": MAX_BIGINT if limit is None else limit,
            "before": MAX_BIGINT if before is None else before,
        }
        return self.db.read(NEWEST, parameters)

    def get(self, key: str) -> StoredItem | None:
        """Return the item with a key, or ``None``."""
        rows = self.db.read(BY_KEY, {**self._lane, "key": item_key(key)})
        return _item_of(rows[0]) if rows else None

    def count(self) -> int:
        """Return the number of items in the lane."""
        ((count,),) = self.db.read(COUNT, self._lane)
        return int(count)

    def lanes(self) -> dict[str, int]:
        """Return the number of items of each lane of the session, ordered by name."""
        return dict(self.db.read(COUNT_LANES, {"tenant": self.tenant, "session_id": self.session_id}))

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


def _item_of(row: Row) -> StoredItem:
    """Build the item. Raises `IntegrityFault`."""
    position, key, text, created_at = row
    return StoredItem(position=position, key=key, payload=decode(text), created_at=as_utc(created_at))


def _readable(rows: Sequence[Row]) -> Iterator[StoredItem]:
    """Yield the items of the rows, except unreadable ones."""
    for row in rows:
        with suppress(IntegrityFault):
            yield _item_of(row)
