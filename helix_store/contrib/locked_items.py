"""Documents in a lane of a session that an adapter has locked, so that no statement locks it again."""

from __future__ import annotations

from typing import Any, Final

from helix_store import conf
from helix_store.adapters import LockedSession
from helix_store.contrib.numbers import from_payload, with_numbers_as_text
from helix_store.core import moments
from helix_store.core.payloads import decode
from helix_store.engine.statement import Statement, table
from helix_store.exceptions import IntegrityFault, InvalidPayload
from helix_store.items.rules import encode_item, item_key
from helix_store.models import Item, Session

__all__ = ["Document", "LockedItems", "document_of"]

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


class LockedItems:
    """The documents of one lane, by key. Each call is one statement of the transaction that has the lock."""

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
        try:
            text = encode_item(document, conf.limits())
        except InvalidPayload:
            text = encode_item(with_numbers_as_text(document), conf.limits())
        return {**self._lane, "key": item_key(key), "payload": text, "at": moments.now()}


def document_of(payload: Any) -> Document:
    """Return the document of a stored payload. Raises `IntegrityFault`."""
    document = from_payload(payload)
    if type(document) is not dict:
        raise IntegrityFault("A stored document is not an object; other rows are not affected.")
    return document
