"""Payloads as what changed since an earlier full one, entry by entry.

An *entry* is one key of a payload with its value (RFC 8259 calls it a member). All of this works on stored
texts and never compares values: Python takes ``1``, ``1.0`` and ``True`` for equal, and ``0.0`` and ``-0.0``,
and two dicts in another order of keys. Their texts differ.

A delta is plain JSON, ``{"removed":[keys],"set":{entries}}``: take out the removed keys, then set each entry,
which keeps the place of a key that is there and puts any other at the end. A key that moved is in both.
"""

from __future__ import annotations

import json
import marshal
import secrets
from collections.abc import Iterable, Mapping
from contextlib import suppress
from types import MappingProxyType
from typing import Any, Final, NamedTuple, TypeAlias

from helix_store.core.limits import AS_STORED
from helix_store.core.payloads import check_value, decode, encode, size_of, write_json
from helix_store.core.types import SessionState
from helix_store.exceptions import IntegrityFault, InvalidPayload, LimitExceeded

__all__ = [
    "MAX_DELTAS",
    "NO_ENTRIES",
    "Entries",
    "Entry",
    "Origin",
    "StoredPayload",
    "apply_deltas",
    "decode_with_deltas",
    "delta_between",
    "encode_changed",
    "encode_payload",
    "encode_reusing",
    "origin_of",
    "remember_origin",
    "remember_step",
    "split",
    "stored_payload",
]

MAX_DELTAS: Final = 20
"""How many versions after a full payload a delta may still build on it."""

_LEAST_SAVING: Final = 2
"""How many times shorter than the full payload a delta has to be to be worth reading on top of another."""

_WITHOUT_REFERENCES: Final = 2

_read_at: Final = json.JSONDecoder().raw_decode


# --- Entries ---------------------------------------------------------------------------------------


class Entry(NamedTuple):
    """A key as written, ``"key":value,`` as written, and a fingerprint that no other value has.

    `marshal`, in its form without references, writes the same bytes for the same value of JSON's types and
    for no other. They stay in the process and are never read back, and are as long as the value's text also
    where a small graph of shared references stands for a huge one. Only for values that passed the gate.
    """

    key: str
    text: str
    fingerprint: bytes


Entries: TypeAlias = Mapping[str, Entry]
"""By key, in the order of the payload."""

NO_ENTRIES: Final[Entries] = MappingProxyType({})


def encode_reusing(
    known: Entries, value: dict[str, Any], *, limit: int, path: str
) -> tuple[str, dict[str, Entry] | None]:
    """`encode` a dict, and return the text with its entries; unchanged entries take theirs from ``known``.

    To find out that a value is unchanged takes a third of the time of writing it. The entries are ``None``
    where the text is not stored as written. Raises what `encode` raises.
    """
    check_value(value, limit=limit, path=path)
    size: int | None = None
    # NaN and infinity cannot be written, and surrogates are stored in another form.
    with suppress(ValueError):
        entries = {}
        for key, item in value.items():
            entry, fingerprint = known.get(key), marshal.dumps(item, _WITHOUT_REFERENCES)
            if entry is None or entry.fingerprint != fingerprint:
                written = write_json(key)
                entry = Entry(written, f"{written}:{write_json(item)},", fingerprint)
            entries[key] = entry
        text = _joined(entries)
        size = size_of(text)
    if size is None:
        return encode(value, limit=limit, path=path), None
    if size > limit:
        raise LimitExceeded(name="max_state_bytes", limit=limit, actual=size)
    return text, entries


def encode_payload(
    state: SessionState, *, limit: int, path: str, reuse_texts: bool
) -> tuple[str, Entries | None]:
    """The payload of a state; with ``reuse_texts``, `encode_reusing` the entries of its origin."""
    origin = origin_of(state) if reuse_texts else None
    if origin is None or not origin.entries:
        return encode(state.custom_state, limit=limit, path=path), None
    return encode_reusing(origin.entries, state.custom_state, limit=limit, path=path)


def encode_changed(
    known: Entries, before: Mapping[str, Any], value: dict[str, Any], *, limit: int, path: str
) -> tuple[str, dict[str, Entry] | None]:
    """`encode_reusing` for a dict that shares values with another one, which was just encoded.

    ``known`` are the entries of all of ``before``. A value that is the same object was checked there.
    """
    changed = {key: item for key, item in value.items() if key not in before or before[key] is not item}
    _, written = encode_reusing(known, changed, limit=limit, path=path)
    if written is not None:
        entries = {key: written[key] if key in written else known[key] for key in value}
        text = _joined(entries)
        if size_of(text) <= limit:
            return text, entries
    return encode_reusing(known, value, limit=limit, path=path)


def split(text: str) -> dict[str, Entry] | None:
    """The entries of a stored object.

    ``None`` for a text in the form for adjacent surrogates, and for any other text that is not a compact JSON
    object.
    """
    if text[:1] != "{" or text[-1:] != "}":
        return None
    # With a comma after the last entry too, all of them end alike.
    text = "" if text == "{}" else f"{text[1:-1]},"
    entries = {}
    start = 0
    while start < len(text):
        try:
            key, entry = _entry_at(text, start)
        except (ValueError, RecursionError):
            return None
        entries[key] = entry
        start += len(entry.text)
    return entries


def _entry_at(text: str, start: int) -> tuple[str, Entry]:
    """The entry that begins at ``start``. Raises ``ValueError`` for any other text."""
    if text[start] != '"':
        raise ValueError
    key, colon = _read_at(text, start)
    if text[colon] != ":":
        raise ValueError
    value, end = _read_at(text, colon + 1)
    if text[end] != ",":
        raise ValueError
    return key, Entry(text[start:colon], text[start : end + 1], marshal.dumps(value, _WITHOUT_REFERENCES))


def _joined(entries: Entries) -> str:
    return f"{{{''.join([entry.text for entry in entries.values()])[:-1]}}}"


# --- Origins ---------------------------------------------------------------------------------------


class Origin:
    """The full payload that a state was read from or stored as, so that its next step can be a delta.

    A loaded state keeps it privately. No decision rests on it: a delta is written only while the head of the
    session, under its lock, has this ``key``. A key is random, so no rollback and no restored backup gives it
    to other content; an outdated origin costs a full payload and nothing else.
    """

    __slots__ = ("_entries", "_text", "expects_staging", "key", "latest_version", "row_id", "version")

    def __init__(
        self,
        key: int,
        row_id: int,
        version: int,
        text: str,
        entries: Entries | None = None,
    ) -> None:
        self.key = key
        self.row_id = row_id
        self.version = version
        # That of the state which was loaded or saved last.
        self.latest_version = version
        # Whether the last step promoted staged changes: then the next one reads them before it is tried.
        self.expects_staging = False
        self._text = text
        self._entries = entries

    @property
    def entries(self) -> Entries:
        """The entries of the payload; none for a payload that cannot be split."""
        if self._entries is None:
            # Most states that are loaded are never saved, so they are split here.
            self._entries = split(self._text) or NO_ENTRIES
            self._text = ""
        return self._entries

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        """Replaced by ``None`` when its state is pickled or copied deeply."""
        return type(None), ()


def origin_of(state: SessionState) -> Origin | None:
    return getattr(state, "_origin", None)


def remember_origin(state: SessionState, origin: Origin) -> None:
    state._origin = origin


class StoredPayload(NamedTuple):
    """What a step's row holds for a payload, and the key that the head has with it."""

    text: str
    base_id: int | None
    base_key: int
    full: str
    entries: Entries | None

    @property
    def is_delta(self) -> bool:
        return self.base_id is not None


_ANY_KEY: Final = object()


def stored_payload(
    state: SessionState,
    payload: str,
    entries: Entries | None,
    *,
    version: int | None,
    head_key: object = _ANY_KEY,
) -> StoredPayload:
    """The payload of a step: a delta from the state's origin if that is worth it, else in full.

    ``version`` is that of the step, where it is known, and ``head_key`` the key that the locked head has.
    """
    origin = origin_of(state)
    if origin is not None and head_key in (_ANY_KEY, origin.key):
        version = origin.latest_version + 1 if version is None else version
        new = split(payload) if entries is None else entries
        if new is not None and version - origin.version <= MAX_DELTAS:
            delta = delta_between(origin.entries, new)
            if delta is not None:
                return StoredPayload(delta, origin.row_id, origin.key, payload, entries)
    # 63 random bits: a name that no other content has or gets.
    return StoredPayload(payload, None, secrets.randbits(63), payload, entries)


def remember_step(
    state: SessionState, stored: StoredPayload, row_id: int, version: int, *, has_promoted: bool
) -> None:
    """Keep with the caller's state what its next step can be a delta from."""
    origin = origin_of(state)
    if stored.base_id is None or origin is None:
        origin = Origin(stored.base_key, row_id, version, stored.full, stored.entries)
        remember_origin(state, origin)
    origin.latest_version = version
    origin.expects_staging = has_promoted


# --- Deltas ----------------------------------------------------------------------------------------


def delta_between(base: Entries, new: Entries) -> str | None:
    """The delta that turns one payload into exactly another, both given by their entries.

    Returns ``None`` when the full payload is the better thing to store.
    """
    removed = [entry.key for key, entry in base.items() if key not in new]
    changed = []
    kept = iter(base)
    for key, entry in new.items():
        # The search continues after the last key found. Once a key is not found, no later one is: every key
        # after one that is put at the end has to be put at the end as well.
        if key in kept:
            if entry is not base[key] and entry.text != base[key].text:
                changed.append(entry.text)
        else:
            changed.append(entry.text)
            if key in base:
                removed.append(entry.key)
    delta = f'{{"removed":[{",".join(removed)}],"set":{{{"".join(changed)[:-1]}}}}}'
    whole = sum([len(entry.text) for entry in new.values()])
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
    removed, entries = change["removed"], change["set"]
    if type(removed) is not list or type(entries) is not dict:
        raise _misfit()
    for key in removed:
        if type(key) is not str or key not in document:
            raise _misfit()
        del document[key]
    document.update(entries)


def _misfit() -> IntegrityFault:
    return IntegrityFault("A stored delta does not fit the state it follows; other rows are not affected.")
