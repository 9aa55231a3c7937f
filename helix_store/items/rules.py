"""The item, and the rules for the values that an item log accepts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final, NamedTuple

from helix_store.core import validation
from helix_store.core.limits import MAX_LANE_BYTES, Limits
from helix_store.core.payload_faults import join_path
from helix_store.core.payloads import encode, encode_all
from helix_store.exceptions import InvalidPayload

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
