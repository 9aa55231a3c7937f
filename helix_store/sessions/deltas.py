"""A payload as what changed since an earlier one, by top-level member.

All of it works on the texts of the payload gate and never compares values: Python takes ``1``, ``1.0`` and
``True`` for equal, and ``0.0`` and ``-0.0``, and two dicts in another order of keys. Their texts differ.

A delta is plain JSON, ``{"removed":[keys],"set":{members}}``: take out the removed keys, then set each
member, which keeps the place of a key that is there and puts any other at the end. A key that moved is in
both.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

from helix_store.core.limits import AS_STORED
from helix_store.core.payloads import decode, encode
from helix_store.exceptions import (
    IntegrityFault,
    InvalidPayload,
    LimitExceeded,
)
from helix_store.sessions.members import Members

__all__ = ["MAX_DELTAS", "apply_deltas", "decode_with_deltas", "delta_between"]

MAX_DELTAS: Final = 20
"""How many deltas may build on a full payload before another one is stored."""

_LEAST_SAVING: Final = 2
"""How many times shorter than the full payload a delta has to be to be worth reading on top of another."""


def delta_between(base: Members, new: Members) -> str | None:
    """The delta that turns one payload into exactly another, both given by their members.

    Returns ``None`` when the full payload is the better thing to store.
    """
    removed = [member.key for key, member in base.items() if key not in new]
    changed = []
    kept = iter(base)
    for key, member in new.items():
        # The search goes on where the last one stopped. Once a key is not found, the ones after it are not
        # either: whatever follows a key that is put at the end has to be put at the end as well.
        if key in kept:
            if member is not base[key] and member.text != base[key].text:
                changed.append(member.text)
        else:
            changed.append(member.text)
            if key in base:
                removed.append(member.key)
    delta = f'{{"removed":[{",".join(removed)}],"set":{{{"".join(changed)[:-1]}}}}}'
    whole = sum(len(member.text) for member in new.values())
    return delta if len(delta) * _LEAST_SAVING <= whole else None


def decode_with_deltas(full: str, deltas: Iterable[str]) -> dict[str, Any]:
    """The object that a full payload and the deltas that follow it, oldest first, stand for.

    Raises `IntegrityFault` for texts that are unreadable or do not belong together.
    """
    following = list(deltas)
    if not following:
        return _object(decode(full))
    # One call to the decoder: for texts as short as most deltas, calling it takes longer than the reading.
    first, *changes = decode(f"[{','.join([full, *following])}]")
    if len(changes) != len(following):
        raise _misfit()
    document = _object(first)
    for change in changes:
        _apply(document, change)
    return document


def apply_deltas(full: str, deltas: Iterable[str]) -> str:
    """The payload that a full one and the deltas that follow it, oldest first, stand for.

    Raises `IntegrityFault` for texts that are unreadable or do not belong together.
    """
    document = decode_with_deltas(full, deltas)
    try:
        return encode(document, limit=AS_STORED.max_state_bytes)
    except (InvalidPayload, LimitExceeded):
        pass
    # Raised out here since the gate's error has a path of the caller's keys and would become its context.
    raise _misfit()


def _object(value: Any) -> dict[str, Any]:
    if type(value) is not dict:
        raise IntegrityFault("A stored state is not a JSON object.")
    return value


def _apply(document: dict[str, Any], change: Any) -> None:
    if type(change) is not dict or change.keys() != {"removed", "set"}:
        raise _misfit()
    removed, members = change["removed"], change["set"]
    if type(removed) is not list or type(members) is not dict:
        raise _misfit()
    for key in removed:
        if type(key) is not str or key not in document:
            raise _misfit()
        del document[key]
    document.update(members)


def _misfit() -> IntegrityFault:
    return IntegrityFault("A stored delta does not fit the state it follows; other rows are not affected.")
