"""The members of a payload, and writing a payload of which an earlier one's members are known.

A member that is still the same keeps its text: to find that out takes a third of the time of writing it.
Values cannot be compared for it. Python takes ``1``, ``1.0`` and ``True`` for equal, and ``0.0`` and
``-0.0``, and two dicts in another order of keys. What `marshal` makes of a value, in its form without
references, are the same bytes for the same value of JSON's types and for no other. They stay in the process
and are never read back.
"""

from __future__ import annotations

import json
import marshal
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final, NamedTuple, TypeAlias

from helix_store.core.payloads import (
    encode,
    size_of,
    write_json,
)

__all__ = ["NO_MEMBERS", "Member", "Members", "encode_again", "encode_like", "members_of"]

_WITHOUT_REFERENCES: Final = 2

_read_at: Final = json.JSONDecoder().raw_decode


class Member(NamedTuple):
    """A key as written, ``"key":value,`` as written, and the mark that tells this value from all others."""

    key: str
    text: str
    mark: bytes


Members: TypeAlias = Mapping[str, Member]
"""By their keys, in their order."""

NO_MEMBERS: Final[Members] = MappingProxyType({})


def encode_like(
    earlier: Members, value: dict[str, Any], *, limit: int, path: str
) -> tuple[str, dict[str, Member] | None]:
    """What `encode` makes of a dict, and its members; ``None`` where the text is not stored as written.

    Members that it has in common with the earlier ones are shared.
    """
    members: dict[str, Member] = {}
    joined = ""

    def write(document: dict[str, Any]) -> str:
        nonlocal joined
        for key, item in document.items():
            member, mark = earlier.get(key), _mark(item)
            if member is None or member.mark != mark:
                written = write_json(key)
                member = Member(written, f"{written}:{write_json(item)},", mark)
            members[key] = member
        joined = _joined(members)
        return joined

    text = encode(value, limit=limit, path=path, write=write)
    if text is not joined:
        # Shared texts may hold surrogates as escapes, and others not: one payload has one text.
        return encode(value, limit=limit, path=path), None
    return text, members


def encode_again(
    earlier: Members, before: Mapping[str, Any], value: dict[str, Any], *, limit: int, path: str
) -> tuple[str, dict[str, Member] | None]:
    """What `encode_like` makes of a dict that shares values with another one, which was written just now.

    ``earlier`` are the members of all of ``before``. A value that is the very same object was checked then.
    """
    changed = {key: item for key, item in value.items() if key not in before or before[key] is not item}
    _, written = encode_like(earlier, changed, limit=limit, path=path)
    if written is not None:
        members = {key: written[key] if key in written else earlier[key] for key in value}
        text = _joined(members)
        if size_of(text) <= limit:
            return text, members
    return encode_like(earlier, value, limit=limit, path=path)


def _joined(members: Members) -> str:
    return f"{{{''.join([member.text for member in members.values()])[:-1]}}}"


def members_of(text: str) -> dict[str, Member] | None:
    """The members of a stored object.

    Returns ``None`` for a text in the form for adjacent surrogates, and for any other text that is no compact
    JSON object.
    """
    if text[:1] != "{" or text[-1:] != "}":
        return None
    # With a comma after the last member too, all of them end alike.
    text = "" if text == "{}" else f"{text[1:-1]},"
    members = {}
    start = 0
    while start < len(text):
        try:
            key, member = _member_at(text, start)
        except (ValueError, RecursionError):
            return None
        members[key] = member
        start += len(member.text)
    return members


def _member_at(text: str, start: int) -> tuple[str, Member]:
    """The member that begins at ``start``. Raises ``ValueError`` where there is none."""
    if text[start] != '"':
        raise ValueError
    key, colon = _read_at(text, start)
    if text[colon] != ":":
        raise ValueError
    value, end = _read_at(text, colon + 1)
    if text[end] != ",":
        raise ValueError
    return key, Member(text[start:colon], text[start : end + 1], _mark(value))


def _mark(value: Any) -> bytes:
    """What tells a value from all others of JSON's types. Only for values that have passed the gate.

    It is as long as the value's text also where a small graph of shared references stands for a huge one.
    """
    return marshal.dumps(value, _WITHOUT_REFERENCES)
