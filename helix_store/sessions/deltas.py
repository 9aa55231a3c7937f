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
    if [*map(type, parts)] != [dict, dict] or parts[1].keys() != {"removed", "set"}:
        raise _misfit()
    document: dict[str, Any] = parts[0]
    removed, entries = parts[1]["removed"], parts[1]["set"]
    if type(removed) is not list or type(entries) is not dict:
        raise _misfit()
    for key in removed:
        if type(key) is not str or key not in document:
            raise _misfit()
        del document[key]
    document.update(entries)
    return document


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
