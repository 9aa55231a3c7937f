"""Payloads stored as the changes since an earlier full payload, entry by entry.

An *entry* is one key of a payload with its value (RFC 8259 calls it a member). This module works on stored
text and never compares values: Python considers ``1``, ``1.0`` and ``True`` equal, as well as ``0.0`` and
``-0.0``, and two dicts that differ only in the order of their keys. The text of these values differs.

A delta is plain JSON, ``{"removed":[keys],"set":{entries}}``: remove the removed keys, then set each entry,
which keeps the place of an existing key and appends any other key. A key that moved is in both.
"""

from __future__ import annotations

import json
import marshal
import secrets
from collections.abc import Mapping
from contextlib import suppress
from types import MappingProxyType
from typing import Any, Final, NamedTuple, TypeAlias

from helix_store.core.limits import AS_STORED
from helix_store.core.payloads import check_value, decode, encode, size_of, write_json
from helix_store.core.types import SessionState
from helix_store.exceptions import IntegrityFault, InvalidPayload, LimitExceeded

MAX_DELTAS: Final = 20
"""The maximum number of versions after a full payload for which a delta may still build on it."""

_LEAST_SAVING: Final = 2
"""The factor by which a delta must be shorter than the full payload to be worth a second row."""

_WITHOUT_REFERENCES: Final = 2

_read_at: Final = json.JSONDecoder().raw_decode


# --- Entries ---------------------------------------------------------------------------------------


class Entry(NamedTuple):
    """A key as written, ``"key":value,`` as written, and a fingerprint that no other value has.

    `marshal`, in its form without references, writes the same bytes for the same value of JSON's types and
    for no other. The bytes stay in the process and are never read back. They are as long as the text of the
    value, even if a small graph of shared references represents a huge value. Use this only for values that
    have passed the gate.
    """

    key: str
    text: str
    fingerprint: bytes


Entries: TypeAlias = Mapping[str, Entry]
"""Entries by key, in the order of the payload."""

NO_ENTRIES: Final[Entries] = MappingProxyType({})


def encode_reusing(
    known: Entries, value: dict[str, Any], *, limit: int, path: str
) -> tuple[str, dict[str, Entry] | None]:
    """Encode a dict as `encode` does and return the text with its entries; unchanged ones reuse ``known``.

    Detecting an unchanged value takes a third of the time of writing it. The entries are ``None`` if the text
    is not stored as written. Raises the errors of `encode`.
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
    """Encode a state's payload as `encode` does, or with ``reuse_texts`` as `encode_reusing` does."""
    origin = origin_of(state) if reuse_texts else None
    if origin is None or not origin.entries:
        return encode(state.custom_state, limit=limit, path=path), None
    return encode_reusing(origin.entries, state.custom_state, limit=limit, path=path)


def encode_changed(
    known: Entries, before: Mapping[str, Any], value: dict[str, Any], *, limit: int, path: str
) -> tuple[str, dict[str, Entry] | None]:
    """Encode a dict that shares values with a dict that was just encoded, like `encode_reusing`.

    ``known`` holds the entries of all of ``before``. A value that is the same object as in ``before`` has
    already been checked.
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
    """Return the entries of a stored object.

    Return ``None`` for text in the form for adjacent surrogates, and for any other text that is not a compact
    JSON object.
    """
    if text[:1] != "{" or text[-1:] != "}":
        return None
    # With a comma after the last entry, all entries end in the same way.
    text = "" if text == "{}" else f"{text[1:-1]},"
    entries = {}
    start = 0
    while start < len(text):
        try:
            key, colon = _read_at(text, start)
            value, end = _read_at(text, colon + 1)
            fingerprint = marshal.dumps(value, _WITHOUT_REFERENCES)
        except (ValueError, RecursionError):
            return None
        if (text[start], text[colon], text[end]) != ('"', ":", ","):
            return None
        entries[key] = Entry(text[start:colon], text[start : end + 1], fingerprint)
        start = end + 1
    return entries


def _joined(entries: Entries) -> str:
    return f"{{{''.join([entry.text for entry in entries.values()])[:-1]}}}"


# --- Origins ---------------------------------------------------------------------------------------


class Origin:
    """The full payload that a state was read from or stored as, so that its next step can be a delta.

    A loaded state keeps its origin privately. Correctness never depends on it: a delta is written only while
    the head of the session, under its lock, has this ``key``. A key is random, so neither a rollback nor a
    restored backup can assign it to different content; an outdated origin only costs a full payload.
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
        # The version of the state that was loaded or saved last.
        self.latest_version = version
        # True if the last step promoted staged changes: the next step then reads them before its statement.
        self.expects_staging = False
        self._text = text
        self._entries = entries

    @property
    def entries(self) -> Entries:
        """The entries of the payload; empty if the payload cannot be split."""
        if self._entries is None:
            # Most loaded states are never saved, so the text is split only on demand.
            self._entries = split(self._text) or NO_ENTRIES
            self._text = ""
        return self._entries

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        """Replace the origin with ``None`` when its state is pickled or deep-copied."""
        return type(None), ()


def origin_of(state: SessionState) -> Origin | None:
    return getattr(state, "_origin", None)


def remember_full(state: SessionState, key: int, row_id: int, version: int, text: str) -> None:
    """Store in a loaded state the full payload from which it was read."""
    state._origin = origin = Origin(key, row_id, version, text)
    origin.latest_version = state.version


class StoredPayload(NamedTuple):
    """The stored form of a step's payload, and the key that the head stores with it."""

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
    """Return a step's payload as a delta from the state's origin if that is worth it, otherwise in full.

    ``version`` is the version of the step, if known, and ``head_key`` the key in the locked head.
    """
    origin = origin_of(state)
    if origin is not None and head_key in (_ANY_KEY, origin.key):
        version = origin.latest_version + 1 if version is None else version
        new = split(payload) if entries is None else entries
        if new is not None and version - origin.version <= MAX_DELTAS:
            delta = delta_between(origin.entries, new)
            if delta is not None:
                return StoredPayload(delta, origin.row_id, origin.key, payload, entries)
    # 63 random bits form a key that no other content has or will get.
    return StoredPayload(payload, None, secrets.randbits(63), payload, entries)


def remember_step(
    state: SessionState, stored: StoredPayload, row_id: int, version: int, *, has_promoted: bool
) -> None:
    """Store in the caller's state the payload from which its next step can be a delta."""
    origin = origin_of(state)
    if stored.base_id is None or origin is None:
        origin = Origin(stored.base_key, row_id, version, stored.full, stored.entries)
        state._origin = origin
    origin.latest_version = version
    origin.expects_staging = has_promoted


# --- Deltas ----------------------------------------------------------------------------------------


def delta_between(base: Entries, new: Entries) -> str | None:
    """Return the delta that turns one payload into exactly the other; both are given by their entries.

    Return ``None`` if it is better to store the full payload.
    """
    removed = [entry.key for key, entry in base.items() if key not in new]
    changed = []
    kept = iter(base)
    for key, entry in new.items():
        # The search continues after the last key found. Once a key is not found, no later key is: all keys
        # after an appended key must also be appended.
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
