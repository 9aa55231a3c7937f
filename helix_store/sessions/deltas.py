"""Applying a delta to the full payload that it builds on; `helix_store.sessions.state` writes deltas.

A delta is plain JSON, ``{"removed":[keys],"set":{entries}}``: remove the removed keys, then set each entry,
which keeps the place of an existing key and appends any other key. A key that moved is in both.

This module stands alone because a migration imports it.
"""

from __future__ import annotations

from typing import Any

from helix_store.core.limits import AS_STORED
from helix_store.core.payloads import decode, encode
from helix_store.exceptions import IntegrityFault, InvalidPayload, LimitExceeded


def decode_with_delta(full: str, delta: str) -> dict[str, Any]:
    """Return the object that results from a full payload and its delta.

    Raises `IntegrityFault` if they are unreadable or do not belong together.
    """
    # Call the decoder only once: for text as short as most deltas, the call takes longer than the decoding.
    parts = decode(f"[{full},{delta}]")
    if type(parts) is not list or len(parts) != 2 or type(parts[0]) is not dict:
        raise _misfit()
    document: dict[str, Any] = parts[0]
    removed, entries = _removed_and_set(parts[1])
    for key in removed:
        if type(key) is not str or key not in document:
            raise _misfit()
        del document[key]
    document.update(entries)
    return document


def require_delta(text: str) -> None:
    """Raise `IntegrityFault` if a payload has not the form of a delta. Its base is not known."""
    _removed_and_set(decode(text))


def _removed_and_set(delta: Any) -> tuple[list[Any], dict[str, Any]]:
    if type(delta) is not dict or delta.keys() != {"removed", "set"}:
        raise _misfit()
    removed, entries = delta["removed"], delta["set"]
    if type(removed) is not list or type(entries) is not dict:
        raise _misfit()
    return removed, entries


def apply_delta(full: str, delta: str) -> str:
    """Return the payload that results from a full payload and its delta.

    Raises `IntegrityFault` if they are unreadable or do not belong together.
    """
    document = decode_with_delta(full, delta)
    try:
        return encode(document, limit=AS_STORED.max_state_bytes)
    except (InvalidPayload, LimitExceeded):
        pass
    # Raise outside the handler: the gate's error has a path of the caller's keys and would be the context.
    raise _misfit()


def _misfit() -> IntegrityFault:
    return IntegrityFault("A stored delta does not fit its base state; other rows are not affected.")
