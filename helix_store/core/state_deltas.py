"""A payload as what changed since an earlier one, by top-level member.

All of it works on the texts of the payload gate and never compares values: Python takes ``1``, ``1.0`` and
``True`` for equal, and ``0.0`` and ``-0.0``, and two dicts in another order of keys. Their texts differ.

A delta is plain JSON, ``{"removed":[keys],"set":{members}}``: take out the removed keys, then set each
member, which keeps the place of a key that is there and puts any other at the end. A key that moved is in
both.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from itertools import chain, repeat
from typing import Any, Final

from helix_store.core.limits import AS_STORED
from helix_store.core.payloads import decode, encode
from helix_store.exceptions import IntegrityFault, InvalidPayload, LimitExceeded

__all__ = ["MAX_DELTAS", "apply_deltas", "decode_with_deltas", "delta_between", "members_of"]

MAX_DELTAS: Final = 20
"""How many deltas may follow a full payload: a reader needs them all."""

_LEAST_SAVING: Final = 2
"""How many times shorter than the full payload a delta has to be to be worth reading on top of another."""

_NO_MEMBER: Final = "\0"
"""Stands nowhere in a stored text."""

_read_at: Final = json.JSONDecoder().raw_decode


def members_of(text: str, like: Mapping[str, str] | None = None) -> dict[str, str] | None:
    """The members of a stored object in their order, each as ``"key":value,`` under its key as written.

    ``like`` holds the members of an earlier payload: those that the text has unchanged are shared and not
    read again. Returns ``None`` for a text in the form for adjacent surrogates, and for any other text that
    is no compact JSON object.
    """
    if text[:1] != "{" or text[-1:] != "}":
        return None
    earlier = {} if like is None else like
    # With a comma after the last member too, one comparison finds both that a member is there and its end.
    text = "" if text == "{}" else f"{text[1:-1]},"
    members = {}
    start = 0
    for key, member in chain(earlier.items(), repeat(("", _NO_MEMBER))):
        if not text.startswith(member, start):
            if start == len(text):
                break
            try:
                key, member = _member_at(text, start, key, earlier)
            except (ValueError, RecursionError):
                return None
        members[key] = member
        start += len(member)
    return members


def delta_between(base: Mapping[str, str], new: Mapping[str, str]) -> str | None:
    """The delta that turns one payload into exactly another, both given as `members_of` gives them.

    Returns ``None`` when the full payload is the better thing to store.
    """
    removed = [key for key in base if key not in new]
    changed = []
    kept = iter(base)
    for key, member in new.items():
        # The search goes on where the last one stopped. Once a key is not found, the ones after it are not
        # either: whatever follows a key that is put at the end has to be put at the end as well.
        if key in kept:
            if member != base[key]:
                changed.append(member)
        else:
            changed.append(member)
            if key in base:
                removed.append(key)
    delta = f'{{"removed":[{",".join(removed)}],"set":{{{"".join(changed)[:-1]}}}}}'
    return delta if len(delta) * _LEAST_SAVING <= sum(map(len, new.values())) else None


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


def _member_at(text: str, start: int, expected: str, earlier: Mapping[str, str]) -> tuple[str, str]:
    """The key that begins at ``start``, most often the expected one, and its member.

    Raises ``ValueError`` where there is none.
    """
    if expected and text.startswith(expected, start):
        key, end = expected, start + len(expected)
    else:
        if text[start] != '"':
            raise ValueError
        _, end = _read_at(text, start)
        key = text[start:end]
        member = earlier.get(key, _NO_MEMBER)
        if text.startswith(member, start):
            return key, member
    if text[end] != ":":
        raise ValueError
    _, end = _read_at(text, end + 1)
    if text[end] != ",":
        raise ValueError
    return key, text[start : end + 1]


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
