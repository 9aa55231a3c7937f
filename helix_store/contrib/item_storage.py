"""Documents that an adapter keeps in lanes of sessions, each under its key."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from decimal import Decimal
from typing import Any, Final, TypeVar

from helix_store import conf
from helix_store.adapters import LockedSession, SessionAdapter
from helix_store.core import moments, validation
from helix_store.core.limits import Limits
from helix_store.core.payloads import decode
from helix_store.core.types import UsageKind
from helix_store.core.usage import TokenCounts, UsageEntry, UsageSource
from helix_store.engine.async_twins import async_twin
from helix_store.engine.statement import Statement, table
from helix_store.exceptions import IntegrityFault, InvalidPayload
from helix_store.items import ItemLog, encode_item, item_key
from helix_store.models import Item, Session
from helix_store.usage.ledger import token_cost
from helix_store.usage.store import DatabaseUsageStore


def count_of(value: Any) -> int:
    """Return a number of tokens, or 0 for a value that cannot be one."""
    return value if type(value) is int and 0 < value < 2**40 else 0


def response_entry(
    session_id: str,
    entry_id: str | None,
    *,
    source: str,
    model: str,
    prompt: int,
    completion: int,
    reasoning: int = 0,
    cached: int = 0,
    cache_write: int = 0,
    cache_write_1h: int = 0,
    audio_prompt: int = 0,
    audio_completion: int = 0,
    timestamp: int | None = None,
) -> UsageEntry | None:
    """Return the entry for a response of a model, or ``None`` for a response without tokens.

    ``cache_write_1h`` is the part of ``cache_write`` that is kept for an hour. See `TokenCounts` for the
    other counts.
    """
    if not prompt + completion:
        return None
    tokens = TokenCounts(
        prompt=prompt,
        completion=completion,
        reasoning=reasoning,
        cached=cached,
        cache_write=cache_write,
        audio_prompt=audio_prompt,
        audio_completion=audio_completion,
        total=prompt + completion,
    )
    now = time.time_ns() // 1_000_000 if timestamp is None else timestamp
    return UsageEntry(
        kind=UsageKind.TOKENS,
        id=entry_id,
        session_id=session_id,
        step_count=0,
        timestamp=now,
        source=UsageSource(type="agent", name=source),
        model=model,
        tokens=tokens,
        cost_usd=hour_long_cost(model, tokens, now, cache_write_1h),
    )


def hour_long_cost(model: str, tokens: TokenCounts, timestamp: int, cache_write_1h: int) -> Decimal | None:
    """Return the cost if tokens were written to a cache for an hour, or ``None`` to let the store price the
    entry: the ledger does not record for how long they are kept.
    """
    if not cache_write_1h:
        return None
    at = validation.milliseconds_to_datetime(timestamp)
    return token_cost(model, tokens, at, cache_write_1h=cache_write_1h)


def record_usage(session: LockedSession, entries: Iterable[UsageEntry | None]) -> None:
    """Record the entries that are not ``None`` in the transaction that has locked the session."""
    if known := [entry for entry in entries if entry is not None]:
        DatabaseUsageStore(session.alias, tenant=session.tenant).record_entries(known)


R = TypeVar("R")
Document = dict[str, Any]

_ITEM: Final = table(Item)
_KEY: Final = "session_id, lane, key"
_GET: Final = Statement(
    f"SELECT payload FROM {_ITEM} WHERE session_id = %(session)s AND lane = %(lane)s AND key = %(key)s"
)
_INSERT: Final = f"""
    INSERT INTO {_ITEM} ({_KEY}, payload, created_at, session_version)
    SELECT id, %(lane)s, %(key)s, %(payload)s, %(at)s, version FROM {table(Session)} WHERE id = %(session)s
    ON CONFLICT ({_KEY}) WHERE key IS NOT NULL"""
_ADD: Final = Statement(f"{_INSERT} DO NOTHING RETURNING id")
_PUT: Final = Statement(f"{_INSERT} DO UPDATE SET payload = excluded.payload RETURNING id")
_AS_TEXT: Final = "~json"
"""The only field of a payload that stores its document as text."""


class ItemStorage(SessionAdapter):
    """The sessions whose items an adapter reads and writes."""

    def log(self, session_id: str, lane: str) -> ItemLog:
        return ItemLog(session_id, lane, using=self.db.alias, tenant=self.tenant, recreate=self.recreate)

    def get(self, session_id: str, lane: str, key: str) -> Document | None:
        """Return the document of a key, or ``None``. One query. Raises `IntegrityFault`."""
        item = self.log(session_id, lane).get(key)
        return None if item is None else document_of(item.payload)

    aget = async_twin(get)


class LockedItems:
    """The documents in one lane of a locked session, so that no statement needs to lock it again.

    Each call is one statement in the transaction that holds the lock.
    """

    def __init__(self, locked: LockedSession, lane: str) -> None:
        self._db = locked.db
        self._lane = {"session": locked.key, "lane": lane}

    def get(self, key: str) -> Document | None:
        """Return the document of a key, or ``None``. Raises `IntegrityFault`."""
        rows = self._db.execute(_GET, {**self._lane, "key": item_key(key)})
        return document_of(decode(rows[0][0])) if rows else None

    def put(self, key: str, document: Document) -> None:
        """Store the document of a key. Raises `InvalidPayload` and `LimitExceeded`."""
        self._db.execute(_PUT, self._row(key, document))

    def add(self, key: str, document: Document) -> bool:
        """Store a document unless the lane has one with its key, and return whether it was stored."""
        return bool(self._db.execute(_ADD, self._row(key, document)))

    def _row(self, key: str, document: Document) -> dict[str, Any]:
        text = encode_document(document, conf.limits())
        return {**self._lane, "key": item_key(key), "payload": text, "at": moments.now()}


# --- Requests that wait for a person ---------------------------------------------------------------

_REQUEST: Final = "request"
_SOURCE_DIGITS: Final = 4
_REQUEST_DIGITS: Final = 8
_DIGITS: Final = _SOURCE_DIGITS + _REQUEST_DIGITS
_MOST_NOTED: Final = 20
"""A mark has 255 characters. Of more open requests, the oldest are noted, so that none is noted twice."""


class OpenRequests:
    """The requests of one ``source`` that a locked session waits for.

    The session's mark contains digests of the sources and ids, so that no statement has to read them.
    """

    def __init__(self, locked: LockedSession, source: str) -> None:
        self._locked = locked
        self._source = _digits(source, _SOURCE_DIGITS)
        word, _, digits = (locked.waiting_kind or "").partition(":")
        noted = digits if word == _REQUEST else ""
        self._before = [noted[start : start + _DIGITS] for start in range(0, len(noted), _DIGITS)]
        self._noted = list(self._before)
        self._opened: dict[str, str] = {}

    def open(self, request_id: str) -> None:
        """Wait for an answer to this request."""
        note = self._note(request_id)
        if note in self._noted or len(self._noted) == _MOST_NOTED:
            return
        # The same request may come from another source.
        if all(each[_SOURCE_DIGITS:] != note[_SOURCE_DIGITS:] for each in self._noted):
            self._opened[note] = request_id
        self._noted.append(note)

    def answer(self, request_id: str) -> None:
        """Stop waiting for this request. Unknown ids are ignored."""
        note = self._note(request_id)
        self._opened.pop(note, None)
        if note in self._noted:
            self._noted.remove(note)

    def replace(self, request_ids: Collection[str]) -> None:
        """Wait for exactly these requests of the source."""
        kept = {self._note(each) for each in request_ids}
        self._noted = [each for each in self._noted if each in kept or not each.startswith(self._source)]
        for each in request_ids:
            self.open(each)

    def write(self) -> None:
        """Change the session's mark, unless it is unchanged or belongs to another adapter."""
        if self._noted != self._before:
            mark = f"{_REQUEST}:{''.join(self._noted)}" if self._noted else None
            self._locked.wait_for(mark, opened=self._opened.values())

    def _note(self, request_id: str) -> str:
        return self._source + _digits(request_id, _REQUEST_DIGITS)


def _digits(text: str, count: int) -> str:
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()[:count]


def encode_document(document: Document, limits: Limits) -> str:
    """Return the stored text of a document. Raises `InvalidPayload` and `LimitExceeded`."""
    try:
        return encode_item(document, limits)
    except InvalidPayload:
        return encode_item(as_payload(document), limits)


def document_of(payload: Any) -> Document:
    """Return the document of a stored payload. Raises `IntegrityFault`."""
    document = from_payload(payload)
    if type(document) is not dict:
        raise IntegrityFault("A stored document is not an object; other rows are not affected.")
    return document


def built(build: Callable[[Document], R], document: Document, library: str, name: str) -> R:
    """Build a framework's object from a stored document. Raises `IntegrityFault`."""
    try:
        return build(document)
    except (TypeError, ValueError, LookupError, AttributeError, RecursionError) as exc:
        reason = type(exc).__name__
    # Raised here, because the framework's error may contain the document and would become the context.
    raise IntegrityFault(
        f"The installed {library} cannot read a stored {name} ({reason}); was it stored by another version, "
        "or with types that are not registered?"
    )


def refuse_unreadable(
    build: Callable[[Document], object], document: Document, library: str, name: str
) -> None:
    """Raise `InvalidPayload` if `built` could not read a document after it is stored."""
    try:
        built(build, document, library, name)
        return
    except IntegrityFault:
        pass
    reason = f"the installed {library} could not read this {name} again"
    raise InvalidPayload(path=name, reason=reason)


def plain_json(value: Any) -> Any:
    """Return a value as JSON has it, with tuples as lists and enumerations as their values, or ``None`` if
    Python cannot write it as JSON.
    """
    try:
        return json.loads(json.dumps(value, allow_nan=False))
    except (TypeError, ValueError, RecursionError):
        return None


def is_same(one: Any, other: Any) -> bool:
    """Return whether two documents are equal, NaN included."""
    return bool(one == other) or json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True)


# --- Numbers that JSON cannot represent: Python reads 1e400 as infinity, and writes NaN --------------


def store_exactly(store: Callable[[list[Any]], object], documents: Sequence[Any]) -> None:
    """Store documents as payloads: unchanged, or all of them as text if one contains such a number.

    A document that would be mistaken for the text of another is also stored as text.
    """
    try:
        store([as_payload(each) if _is_text(each) else each for each in documents])
    except InvalidPayload:
        store([as_payload(each) for each in documents])


def as_payload(document: Any) -> Any:
    """Return a payload with the document as text if JSON would change it, otherwise the document itself."""
    try:
        text = json.dumps(document)
        return {_AS_TEXT: text} if repr(json.loads(text)) == repr(document) else document
    except (TypeError, ValueError, RecursionError):
        return document


def from_payload(payload: Any) -> Any:
    """Return the document of a payload. Raises `IntegrityFault` for text that cannot be read."""
    if not _is_text(payload):
        return payload
    try:
        return json.loads(payload[_AS_TEXT])
    except (TypeError, ValueError, RecursionError):
        pass
    # This is raised here because the parser's error contains the whole text, and would become the context.
    raise IntegrityFault("A stored document is not readable JSON; other rows are not affected.")


def _is_text(payload: Any) -> bool:
    return isinstance(payload, dict) and payload.keys() == {_AS_TEXT}
