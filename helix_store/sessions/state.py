"""The state of a session: its layout at rest, and the checked requests that change it.
`helix_store.sessions.reading` reads it back.

``custom_state`` is the payload, and the rest of the state is the envelope; both are exact JSON text in the
row that holds a state. Fields that lists, filters and single writes need are also columns of the session's
head. The columns are authoritative for the *current* state, and the envelope for a checkpoint. An envelope
omits fields that have the default value of `SessionState`.

A payload can be stored as the changes since an earlier full payload, entry by entry. An *entry* is one key of
a payload with its value (RFC 8259 calls it a member). This module works on stored text and never compares
values: Python considers ``1``, ``1.0`` and ``True`` equal, as well as ``0.0`` and ``-0.0``, and two dicts
that differ only in the order of their keys. The text of these values differs.
"""

from __future__ import annotations

import copy
import hashlib
import json
import marshal
import os
import secrets
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields, replace
from datetime import datetime
from functools import partial
from types import MappingProxyType
from typing import Any, Final, Literal, NamedTuple, TypeAlias

from helix_store.core import validation
from helix_store.core.dicts import AnyMessage
from helix_store.core.guards import Guard
from helix_store.core.ids import CHECKPOINT_ID
from helix_store.core.limits import AS_STORED, Limits
from helix_store.core.merging import with_staged
from helix_store.core.payloads import (
    check_value,
    decode_all,
    encode,
    encode_all,
    join_fields,
    size_of,
    write_json,
)
from helix_store.core.types import (
    NOT_LOADED,
    UNSET,
    InterruptRequest,
    Loaded,
    Message,
    Run,
    RunStatus,
    SessionHead,
    SessionMode,
    SessionState,
    SessionStatus,
    StagedChanges,
    StepCommit,
    StepInfo,
    Timestamp,
    Unset,
)
from helix_store.engine.expressions import read_cursor, write_cursor
from helix_store.exceptions import (
    ConflictError,
    IntegrityFault,
    InvalidPayload,
    InvalidQuery,
    LimitExceeded,
    shown_id,
)
from helix_store.sessions.tool_calls import (
    LiveDecisions,
    earliest_deadline,
    kept_ownership,
    marks_of,
)

MAX_DELTAS: Final = 20
"""The maximum number of versions after a full payload for which a delta may still build on it."""


_LEAST_SAVING: Final = 2
"""The factor by which a delta must be shorter than the full payload to be worth a second row."""


_WITHOUT_REFERENCES: Final = 2


_read_at: Final = json.JSONDecoder().raw_decode


class Entry(NamedTuple):
    """A key as written, ``"key":value,`` as written, and what no other value has.

    ``content`` is a text, an integer, a Boolean or ``None`` itself. For any other value it is what `marshal`
    writes in its form without references: the same bytes for the same value of JSON's types and for no other.
    The bytes stay in the process and are never read back. They are as long as the text of the value, even if
    a small graph of shared references represents a huge value. Use this only for values that have passed the
    gate.
    """

    key: str
    text: str
    content: Any


Entries: TypeAlias = Mapping[str, Entry]
"""Entries by key, in the order of the payload."""


NO_ENTRIES: Final[Entries] = MappingProxyType({})


_PLAIN: Final = frozenset({str, int, bool, type(None)})
"""The types of values that are the same if they are equal, unlike 0.0 and -0.0."""


def encode_reusing(
    known: Entries, value: dict[str, Any], *, limit: int, path: str
) -> tuple[str, dict[str, Entry] | None]:
    """Encode a dict as `encode` does and return the text with its entries; unchanged ones reuse ``known``.

    A plain value that is known has passed the gate. Detecting that a list, a dict or a float is unchanged
    takes a third of the time of writing it. The entries are ``None`` if the text is not stored as written.
    Raises the errors of `encode`.
    """
    entries: dict[str, Any] = {}
    others = {}
    for key, item in value.items():
        # Also those that are replaced below, in their order.
        entry = entries[key] = known.get(key)
        kind = type(item)
        if (
            entry is None
            or kind not in _PLAIN
            or kind is not type(entry.content)
            or item != entry.content
            or type(key) is not str
        ):
            others[key] = item
    check_value(others, limit=limit, path=path)
    size: int | None = None
    # NaN and infinity cannot be written, and surrogates are stored in another form.
    with suppress(ValueError):
        for key, item in others.items():
            entry, content = entries[key], _content(item)
            if entry is None or type(content) is not bytes or entry.content != content:
                written = write_json(key)
                entries[key] = Entry(written, f"{written}:{write_json(item)},", content)
        text = _joined(entries)
        size = size_of(text)
    if size is None:
        return encode(value, limit=limit, path=path), None
    if size > limit:
        raise LimitExceeded(name="max_state_bytes", limit=limit, actual=size)
    return text, entries


def _content(value: Any) -> Any:
    return value if type(value) in _PLAIN else marshal.dumps(value, _WITHOUT_REFERENCES)


def encode_payload(
    state: SessionState, *, limit: int, path: str, origin: Origin | None
) -> tuple[str, Entries | None]:
    """Encode a state's payload as `encode` does, or with an origin as `encode_reusing` does."""
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
            content = _content(value)
        except (ValueError, RecursionError):
            return None
        if (text[start], text[colon], text[end]) != ('"', ":", ","):
            return None
        entries[key] = Entry(text[start:colon], text[start : end + 1], content)
        start = end + 1
    return entries


def _joined(entries: Entries) -> str:
    return f"{{{''.join([entry.text for entry in entries.values()])[:-1]}}}"


class Origin:
    """The full payload that a state was read from or stored as, so that its next step can be a delta.

    A state keeps its origin in its `Loaded`. Correctness never depends on it: a delta is written only while
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


def loaded_of(state: SessionState) -> Loaded:
    """Return the record of a state; it says nothing of a state that no store has returned."""
    return getattr(state, "_loaded", NOT_LOADED)


def set_loaded(state: SessionState, **values: Any) -> None:
    """Set fields of the record of a state."""
    state._loaded = loaded_of(state)._replace(**values)  # type: ignore[misc]  # a slot of the base class


def remember_full(state: SessionState, key: int, row_id: int, version: int, text: str) -> None:
    """Store in the record of a state the full payload from which it was read."""
    origin = Origin(key, row_id, version, text)
    origin.latest_version = state.version
    set_loaded(state, origin=origin)


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
    origin: Origin | None,
    payload: str,
    entries: Entries | None,
    *,
    version: int | None,
    head_key: object = _ANY_KEY,
) -> StoredPayload:
    """Return a step's payload as a delta from its origin if that is worth it, otherwise in full.

    ``version`` is the version of the step, if known, and ``head_key`` the key in the locked head.
    """
    if origin is not None and head_key in (_ANY_KEY, origin.key):
        version = origin.latest_version + 1 if version is None else version
        new = split(payload) if entries is None else entries
        if new is not None and version - origin.version <= MAX_DELTAS:
            delta = delta_between(origin.entries, new)
            if delta is not None:
                return StoredPayload(delta, origin.row_id, origin.key, payload, entries)
    # 63 random bits form a key that no other content has or will get.
    return StoredPayload(payload, None, secrets.randbits(63), payload, entries)


def next_origin(
    origin: Origin | None, stored: StoredPayload, row_id: int, version: int, *, has_promoted: bool
) -> Origin:
    """Return the origin of the step that follows a step, which has this payload and this version."""
    if stored.base_id is None or origin is None:
        origin = Origin(stored.base_key, row_id, version, stored.full, stored.entries)
    origin.latest_version = version
    origin.expects_staging = has_promoted
    return origin


def delta_between(base: Entries, new: Entries) -> str | None:
    """Return the delta that turns one payload into exactly the other; both are given by their entries.

    Return ``None`` if it is better to store the full payload.
    """
    removed, changed = [], []
    if list(base) == list(new):
        pairs = zip(base.values(), new.values(), strict=True)
        changed = [entry.text for known, entry in pairs if entry is not known and entry.text != known.text]
    else:
        removed = [entry.key for key, entry in base.items() if key not in new]
        kept = iter(base)
        for key, entry in new.items():
            # The search continues after the last key found. Once a key is not found, no later key is: all
            # keys after an appended key must also be appended.
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


STORE_OWNED: Final = frozenset({"session_id", "version", "message_count", "created_at", "updated_at"})

HEAD_FIELDS: Final = tuple(field.name for field in fields(SessionHead))
"""The fields of a listed session; each is a column of the head."""

JSON_COLUMNS: Final = (
    "pending_client_tool_calls",
    "completed_client_tool_calls",
    "client_tool_call_ownership",
    "suspension_context",
    "suspended_awaiting_children",
    "tracing_context",
)
"""Payload text in columns of the head, because single writes for pending calls change only that."""

STATE_COLUMNS: Final = HEAD_FIELDS + JSON_COLUMNS

_CONTINUATION: Final = ("suspension_context", "suspended_awaiting_children", "suspended_step_id")

SUSPENSION_FIELDS: Final = ("suspension_kind", *_CONTINUATION, "tracing_context")
"""The fields that a suspension stores and a resume clears."""

WRITTEN_COLUMNS: Final = (
    *(name for name in STATE_COLUMNS if name not in STORE_OWNED),
    "pending_deadline",
)
"""The columns that are written when a state is saved."""

_CUSTOM_STATE_PATH: Final = "/custom_state"

_NEVER_NONE: Final = frozenset(
    {
        "pending_client_tool_calls",
        "completed_client_tool_calls",
        "client_tool_call_ownership",
        "workspace_refs",
    }
)
KEPT_IN_ENVELOPE_ONLY: Final = ("output", "error", "workspace_refs")
_TEXT_FIELDS: Final = (*JSON_COLUMNS, *KEPT_IN_ENVELOPE_ONLY)
_DEFAULT_TEXTS: Final = {name: "{}" if name in _NEVER_NONE else "null" for name in _TEXT_FIELDS}
_EMPTY_TEXTS: Final[dict[type, str]] = {dict: "{}", list: "[]"}
_SHAPES: Final[dict[str, type]] = {
    **dict.fromkeys((*JSON_COLUMNS, "workspace_refs"), dict),
    "suspended_awaiting_children": list,
}


ENVELOPE: Final = tuple(name for name in (*HEAD_FIELDS, *_TEXT_FIELDS) if name not in STORE_OWNED)
_ALWAYS_IN_ENVELOPE: Final = frozenset({"agent_type", "status"})
_DEFAULTS: Final = SessionState(session_id="any", agent_type="any")
_HEAD_DEFAULTS: Final = {
    name: getattr(_DEFAULTS, name) for name in HEAD_FIELDS if name not in STORE_OWNED | _ALWAYS_IN_ENVELOPE
}


@dataclass(frozen=True, slots=True)
class EncodedState:
    """A state that has passed the gate, ready to be written: its text, and values by head column."""

    payload: str
    envelope: str
    columns: dict[str, Any]
    size_bytes: int
    entries: Entries | None = None
    """The payload's entries, if they were needed to write it."""
    marks: Mapping[str, str] = field(default_factory=dict)
    """The marks of the state's calls, without which decisions about them end."""


def encode_state(
    state: SessionState,
    limits: Limits,
    session_id: str | None = None,
    *,
    step_count: int | None = None,
    origin: Origin | None = None,
) -> EncodedState:
    """Check every field of a state and lay it out; ``step_count`` replaces that of the state.

    With an ``origin``, unchanged entries of the payload take their text from it.
    Raises `InvalidPayload`, also if the state belongs to a session other than ``session_id``, and
    `LimitExceeded`: ``max_state_bytes`` counts payload and envelope together.
    """
    if not isinstance(state, SessionState):
        raise InvalidPayload(path="", reason=f"expected a SessionState, got {type(state).__name__}")
    state = _without_cleared(state)
    head = validation.fields(state, _STORED_HEAD_RULES if limits is AS_STORED else _HEAD_RULES)
    if step_count is not None:
        head["step_count"] = step_count
    if type(state.custom_state) is not dict:
        raise InvalidPayload(path=_CUSTOM_STATE_PATH, reason="expected a dict")
    payload, entries = encode_payload(
        state, limit=limits.max_state_bytes, path=_CUSTOM_STATE_PATH, origin=origin
    )
    texts = {}
    for name in _TEXT_FIELDS:
        text = _encoded_field(state, name, limits)
        if text != _DEFAULT_TEXTS[name]:
            texts[name] = text
    envelope = _envelope(head, texts)
    if session_id is not None and state.session_id != session_id:
        raise InvalidPayload(path="/session_id", reason="the state belongs to another session")
    calls = state.pending_client_tool_calls, state.completed_client_tool_calls
    return EncodedState(
        payload,
        envelope,
        _columns(head, texts, state),
        _checked_size(payload, envelope, limits),
        entries,
        marks_of(*calls) if any(calls) else {},
    )


def _without_cleared(state: SessionState) -> SessionState:
    """Return the state to store, without fields that a resume cleared and that nobody has assigned since.

    Fields are compared by identity, because a reader may modify the returned context.
    """
    cleared = loaded_of(state).cleared
    if cleared is None:
        return state
    stored = copy.copy(state)
    for name, value in cleared.items():
        if getattr(state, name) is value:
            setattr(stored, name, None)
    # There are few kinds, so assigning a kind may leave it unchanged: compare the other fields instead.
    if any(getattr(stored, name) is not None for name in _CONTINUATION):
        stored.suspension_kind = state.suspension_kind
    return stored


def encode_custom_state(custom_state: dict[str, Any], envelope: str, limits: Limits) -> str:
    """Encode a changed custom state for an envelope; ``max_state_bytes`` limits both together."""
    payload = encode(custom_state, limit=limits.max_state_bytes, path=_CUSTOM_STATE_PATH)
    _checked_size(payload, envelope, limits)
    return payload


def with_custom_state(
    encoded: EncodedState, before: dict[str, Any], custom_state: dict[str, Any], limits: Limits
) -> EncodedState:
    """Return an encoded state with a different custom state, which may share values with the previous one.

    Raises the errors of `encode_state`.
    """
    limit = limits.max_state_bytes
    entries: Entries | None = None
    if encoded.entries is None:
        payload = encode(custom_state, limit=limit, path=_CUSTOM_STATE_PATH)
    else:
        payload, entries = encode_changed(
            encoded.entries, before, custom_state, limit=limit, path=_CUSTOM_STATE_PATH
        )
    size_bytes = _checked_size(payload, encoded.envelope, limits)
    return replace(encoded, payload=payload, size_bytes=size_bytes, entries=entries)


def _checked_size(payload: str, envelope: str, limits: Limits) -> int:
    """Return the size of both together in bytes. Raises `LimitExceeded`."""
    size_bytes = size_of(payload, envelope)
    if size_bytes > limits.max_state_bytes:
        raise LimitExceeded(name="max_state_bytes", limit=limits.max_state_bytes, actual=size_bytes)
    return size_bytes


def _columns(head: dict[str, Any], texts: Mapping[str, str], state: SessionState) -> dict[str, Any]:
    """Return the values of the head's columns."""
    columns = dict(head)
    if head["expires_at"] is not None:
        columns["expires_at"] = validation.milliseconds_to_datetime(head["expires_at"])
    for name in JSON_COLUMNS:
        columns[name] = texts.get(name)
    pending = state.pending_client_tool_calls
    columns["pending_deadline"] = earliest_deadline(pending) if pending else None
    return columns


def _encoded_field(state: SessionState, name: str, limits: Limits) -> str:
    value = getattr(state, name)
    if value is None and name not in _NEVER_NONE:
        return "null"
    shape = _SHAPES.get(name)
    if shape is not None and type(value) is not shape:
        raise InvalidPayload(path=f"/{name}", reason=f"expected a {shape.__name__}")
    if type(value) in _EMPTY_TEXTS and not value:
        return _EMPTY_TEXTS[type(value)]
    return encode(value, limit=limits.max_state_bytes, path=f"/{name}")


def _envelope(head: dict[str, Any], texts: Mapping[str, str]) -> str:
    """Return the JSON object of the fields that differ from their default.

    It is joined from strings, because each of them may be nested as deeply as a whole document.
    """
    head = {
        name: value
        for name, value in head.items()
        if name in _ALWAYS_IN_ENVELOPE or value != _HEAD_DEFAULTS[name]
    }
    # The values in the head have been checked and hold no surrogates.
    return join_fields(write_json(head), texts)


def suspension_kind(value: Any, path: str = "suspension_kind") -> str:
    """Return the status of a waiting run, as text."""
    kind = validation.enum(RunStatus, value, path)
    if not kind.is_suspended:
        raise InvalidPayload(path=path, reason="expected one of the suspended statuses of a run")
    return kind.value


# The fields of the head that a caller may write; ``expires_at`` stays in milliseconds.
_HEAD_RULES: Final[dict[str, validation.Rule]] = {
    "agent_type": validation.identifier,
    "status": validation.enum_text(SessionStatus),
    "step_count": validation.whole_number,
    "resume_count": validation.whole_number,
    "mode": validation.optional(validation.enum_text(SessionMode)),
    "failure_reason": validation.failure_reason,
    "user_id": validation.user_id,
    "tags": validation.tags,
    "metadata": validation.metadata,
    "title": validation.title,
    "workspace_id": partial(validation.optional_identifier, empty=True),
    "directory": validation.directory,
    "parent_session_id": validation.optional_identifier,
    "root_session_id": validation.optional_identifier,
    "stream_id": validation.optional_identifier,
    "suspension_kind": validation.optional(suspension_kind),
    "suspended_step_id": validation.optional_identifier,
    "expires_at": validation.optional(validation.epoch_milliseconds),
}
_STORED_HEAD_RULES: Final[dict[str, validation.Rule]] = {
    **_HEAD_RULES,
    # The session is already stored, and the length of text was not always limited.
    **dict.fromkeys(("title", "directory", "tags", "metadata"), lambda value, _: value),
}


DEFAULT_STEP: Final = "step-"
"""The prefix of the id of a step that has no other id; its number follows."""
SUPERSEDED: Final = "superseded"
"""The completion reason of a run that another run replaced."""


def written_columns(encoded: EncodedState, stored: Mapping[str, Any]) -> dict[str, Any]:
    """Return the head's columns for a whole state that is written over a session with ``stored`` columns.

    The mode is set only once; a write without a mode keeps it. Decisions about calls that the state does not
    have end. Raises `ConflictError` if the mode differs.
    """
    columns, mode = encoded.columns, stored["mode"]
    if mode is not None and columns["mode"] not in (None, mode):
        raise ConflictError("The mode of a session is written once and cannot change.")
    ownership = kept_ownership(
        columns["client_tool_call_ownership"], stored["client_tool_call_ownership"], stored["session_id"]
    )
    written = {**columns, "mode": mode or columns["mode"], "client_tool_call_ownership": ownership}
    if stored["live_decisions"] is not None:
        live = LiveDecisions(stored["live_decisions"])
        live.keep(encoded.marks)
        written["live_decisions"] = live.column()
    return written


_THINKING_PARTS: Final = frozenset({"thinking", "reasoning"})


class EncodedMessage(NamedTuple):
    role: str
    text: str


class StagedRow(NamedTuple):
    """A staged change as text, and the version of the row that stores it."""

    version: str
    payload: str


class TurnEntry(NamedTuple):
    """The data with which a turn begins."""

    state: SessionState
    is_at_rest: bool = False
    """True if nothing has arrived since the last turn, which `end_turn` ended."""
    newest_run: Run | None = None


class OpenedStep(NamedTuple):
    """The data with which a step begins; the interrupt request is bound to its run.

    ``may_be_stopped`` is false if no budget of the session has been reached and no amount is held.
    """

    state: SessionState
    has_staged: bool
    interrupt: InterruptRequest | None
    may_be_stopped: bool = True


def default_step_id(state: SessionState) -> str:
    """Return the default id of a session's next step."""
    return f"{DEFAULT_STEP}{state.step_count + 1}"


def encode_messages(messages: Sequence[AnyMessage], limits: Limits) -> list[EncodedMessage]:
    """Check and encode messages in order. Raises `InvalidPayload` and `LimitExceeded` with their path."""
    roles = validation.messages(messages)
    texts = encode_all(messages, limit=limits.max_message_bytes, name="max_message_bytes", path="/messages")
    return [EncodedMessage(role, text) for role, text in zip(roles, texts, strict=True)]


def decode_messages(texts: Sequence[str]) -> list[Message]:
    """Read stored messages. Raises `IntegrityFault`."""
    messages: list[Message] = decode_all(texts)
    for message in messages:
        if type(message) is not dict:
            raise IntegrityFault("A stored message is not a JSON object; other rows are not affected.")
    return messages


def decode_staged(texts: Iterable[str]) -> list[StagedChanges]:
    """Read stored staged changes. Raises `IntegrityFault`."""
    return [_staged(document) for document in decode_all(list(texts))]


def _staged(document: Any) -> StagedChanges:
    try:
        staged = StagedChanges(**document)
        is_sound = (
            type(staged.tool_call_id) is str
            and type(staged.patches) is list
            and type(staged.merge_changes) in (dict, type(None))
            and type(staged.timestamp) in (int, type(None))
        )
    except TypeError:
        is_sound = False
    if not is_sound:
        raise IntegrityFault("Stored staged changes cannot be read; other rows are not affected.")
    return staged


def without_thinking(message: Message) -> Message:
    """Return the message without its ``thinking`` key and content parts of type thinking or reasoning."""
    kept = {key: value for key, value in message.items() if key != "thinking"}
    if isinstance(kept.get("content"), list):
        kept["content"] = [part for part in kept["content"] if not _is_thinking(part)]
    return kept


def _is_thinking(part: Any) -> bool:
    kind = part.get("type") if isinstance(part, dict) else None
    return isinstance(kind, str) and kind in _THINKING_PARTS


@dataclass(frozen=True, slots=True)
class NewSession:
    """A session to create. The back end looks up the root, which is stored only as a column."""

    session_id: str
    encoded: EncodedState


def root_session(
    session_id: str, agent_type: str, *, limits: Limits = AS_STORED, **fields: Any
) -> NewSession:
    """Return a session without a parent whose state has these fields; its first write creates it."""
    state = SessionState(
        session_id=session_id,
        agent_type=agent_type,
        root_session_id=session_id,
        stream_id=session_id,
        **fields,
    )
    return NewSession(session_id, encode_state(state, limits))


CommittedStep: TypeAlias = tuple[StepCommit, dict[str, Any]]
"""A commit, and the custom state stored with it."""


STEP_RULES: Final[dict[str, validation.Rule]] = {
    "session_id": validation.identifier,
    "step_id": validation.identifier,
    "step_count": validation.whole_number,
    "stream_sequence": validation.whole_number,
    "expected_version": validation.optional(validation.whole_number),
    "fencing_token": validation.optional(validation.whole_number),
    "run_id": validation.optional_identifier,
    "operation_id": validation.optional_identifier,
}


@dataclass(slots=True, kw_only=True, repr=False)
class StepWrite:
    """A step to commit, from the handle to the statement, and the calls of a handle that belong to it.

    ``staged`` holds the step's own staged changes by tool call id, and ``staged_rows`` the rows of these
    changes, if all of them are known; ``uses`` are the askings whose approvals it uses. ``after`` is called
    once the step is written, unless an earlier step with the same operation id was found; ``record`` is
    called last in either case, with the commit, and records the usage of the step. `encode` checks the step
    and fills in the fields after ``limits``.
    """

    session_id: str
    state: SessionState
    messages: Sequence[AnyMessage]
    info: StepInfo
    expected_version: int | None
    fencing_token: int | None
    operation_id: str | None
    run_id: str | None
    staged: Mapping[str, StagedChanges] | None = None
    uses: Sequence[int] = ()
    staged_rows: Sequence[StagedRow] = ()
    after: Sequence[Callable[[], object]] = ()
    record: Callable[[StepCommit | None], object] | None = None
    asked: Sequence[str] = ()
    """The ids of the calls that the step opens."""
    receives: bool = False
    """True if the commit receives due posts, if the store supports posts."""
    continued: SessionState | None = None
    """The state that a step which would finish the session stores instead if posts are due."""
    is_continued: bool = False
    """True if the commit has stored the state ``continued``."""
    loaded: Loaded = NOT_LOADED
    """The record of the state, which the commit replaces by that of the state that it has stored."""
    limits: Limits = AS_STORED
    guard: Guard = field(init=False)
    checkpoint_id: str = field(init=False)
    encoded: EncodedState = field(init=False)
    encoded_messages: Sequence[EncodedMessage] = field(init=False)
    custom_state: dict[str, Any] = field(init=False)
    """The custom state of ``state``; after `promote`, it also includes the staged changes."""
    keep: int | None = field(init=False)
    """The maximum number of step checkpoints of the session after the commit."""

    def encode(self, limits: Limits, *, keep: int | None) -> None:
        """Check the step and encode it. Raises `InvalidPayload` and `LimitExceeded`."""
        info, state = self.info, self.state
        validation.arguments(
            STEP_RULES,
            session_id=self.session_id,
            step_id=info.step_id,
            step_count=info.step_count,
            stream_sequence=info.stream_sequence,
            expected_version=self.expected_version,
            fencing_token=self.fencing_token,
            run_id=self.run_id,
            operation_id=self.operation_id,
        )
        self.loaded = loaded_of(state)
        # This refuses anything but a state, so the parts of the state are read only afterwards.
        self.encoded = encode_state(
            state,
            limits,
            self.session_id,
            step_count=info.step_count,
            # The digest of an operation needs the same text that any process would write.
            origin=self.loaded.origin if self.operation_id is None else None,
        )
        self.checkpoint_id = CHECKPOINT_ID.format(
            session_id=self.session_id,
            step_count=info.step_count,
            epoch_ms=time.time_ns() // 1_000_000,
            random=os.urandom(3).hex(),
        )
        self.encoded_messages = encode_messages(self.messages, limits)
        self.custom_state = state.custom_state
        self.guard = Guard(self.expected_version, self.fencing_token)
        self.limits, self.keep = limits, keep

    def committed_by(
        self, commit: Callable[[StepWrite], StepCommit], limits: Limits, *, keep: int | None
    ) -> CommittedStep:
        """Check and encode the step, call ``commit``, and update the record of the state it has stored."""
        self.encode(limits, keep=keep)
        committed = commit(self)
        state = self.state if self.continued is None or not self.is_continued else self.continued
        set_loaded(state, origin=self.loaded.origin)
        return committed, self.custom_state

    def is_earlier(self, commit: StepCommit) -> bool:
        """Return whether a commit is the result of an earlier step with the same operation id."""
        return self.expected_version is not None and commit.new_version <= self.expected_version

    def written_by(self, save: Callable[[StepWrite], CommittedStep]) -> CommittedStep:
        """Call ``save``, followed by the calls that come after it."""
        committed = save(self)
        if not self.is_earlier(committed[0]):
            for call in self.after:
                call()
        if self.record is not None:
            # Counters of budgets are locked after all sessions, including one that ``after`` locks.
            self.record(committed[0])
        return committed

    @property
    def name(self) -> str:
        """The key by which a repeat is found: the operation id, or otherwise the id of the checkpoint."""
        return self.operation_id or self.checkpoint_id

    def digest(self) -> str:
        """Return a digest of the payload, which a repeat with the same operation id must match.

        If the state has an intent, the digest covers the intent and the messages instead.
        """
        digest = hashlib.sha256()
        payload = (
            self.encoded.payload,
            self.encoded.envelope,
            self.info.step_id,
            str(self.info.step_count),
            str(self.info.stream_sequence),
            self.run_id or "",
        )
        intent = self.loaded.intent
        parts = payload if intent is None else (intent,)
        for part in (*parts, *(message.text for message in self.encoded_messages)):
            data = part.encode()
            digest.update(len(data).to_bytes(8, "big") + data)
        return digest.hexdigest()

    def stored_state(self, *, has_due_posts: bool) -> tuple[SessionState, EncodedState]:
        """Return the state to store; if posts are due, it is one that does not finish the session."""
        self.is_continued = has_due_posts and self.continued is not None
        if self.continued is None or not has_due_posts:
            return self.state, self.encoded
        step_count = self.info.step_count
        encoded = encode_state(self.continued, self.limits, self.session_id, step_count=step_count)
        return self.continued, encoded

    def require_staged(self, stored: Iterable[StagedChanges]) -> None:
        """Raise `ConflictError` unless all changes that the step staged itself are stored unchanged."""
        if not are_stored(self.staged or {}, stored):
            raise dropped_staging(self.info.step_id)

    def promote(
        self, staged: Sequence[StagedChanges], state: SessionState, encoded: EncodedState
    ) -> EncodedState:
        """Return an encoded state with staged changes applied. Raises `PatchError` and `LimitExceeded`."""
        before = self.custom_state = state.custom_state
        if not staged:
            return encoded
        self.custom_state = with_staged(before, staged, limits=self.limits)
        return with_custom_state(encoded, before, self.custom_state, self.limits)

    def promote_rows(self, rows: Sequence[StagedRow]) -> EncodedState:
        """Return the encoded state with the changes in stored rows applied.

        Raises `IntegrityFault`, and the errors of `require_staged` and `promote`.
        """
        changes = decode_staged([row.payload for row in rows])
        self.require_staged(changes)
        return self.promote(changes, self.state, self.encoded)


def are_stored(staged: Mapping[str, StagedChanges], stored: Iterable[StagedChanges]) -> bool:
    """Return whether all changes that a step staged are stored exactly as they were staged."""
    found = {change.tool_call_id: change for change in stored}
    return all(found.get(tool_call_id) == change for tool_call_id, change in staged.items())


def dropped_staging(step_id: str) -> ConflictError:
    return ConflictError(
        f"Another worker began the step {shown_id(step_id)} and dropped this worker's staged changes; let "
        "only one worker drive the session: take its lock, or use turn()."
    )


@dataclass(frozen=True, slots=True)
class BranchRequest:
    session_id: str
    new_session_id: str
    checkpoint_id: str | None = None
    message_index: int | None = None
    title: str | None = None


@dataclass(frozen=True, slots=True)
class RunUpdate:
    """An update of a run. ``None`` leaves ``step_count``, ``completion_reason`` or ``error`` unchanged."""

    status: RunStatus
    step_count: int | None = None
    completion_reason: str | None = None
    error: str | None = None
    refused_usd: int | None = None
    """What a budget refused, in the smallest unit of dollars."""
    refused_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class EncodedRef:
    """A sub-session ref whose payload fields are stored as text."""

    sub_session_id: str
    agent_type: str
    parent_tool_call_id: str | None
    status: str
    location: str
    remote: str | None
    output: str | None
    error: str | None


CounterName: TypeAlias = Literal["step_count", "resume_count"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionQuery:
    """Filters, joined by AND. ``None`` sets none; for ``parent_session_id``: None = roots, UNSET = any."""

    agent_type: str | None = None
    statuses: frozenset[SessionStatus] | None = None
    user_id: str | None = None
    parent_session_id: str | Unset | None = UNSET
    root_session_id: str | None = None
    workspace_id: str | None = None
    tags: list[str] = field(default_factory=list)
    metadata: dict[str, str] = field(default_factory=dict)
    created_from: datetime | None = None
    created_to: datetime | None = None
    order_by: Literal["created_at", "updated_at"] = "updated_at"
    descending: bool = True
    limit: int = 50
    offset: int = 0
    after: tuple[Any, ...] | None = None
    """The time, the id and in a list of all tenants the tenant of the last session before the page."""
    count: bool = True


def checked_query(filters: Mapping[str, Any]) -> SessionQuery:
    """Return a query from the parameters of ``list_sessions``. Raises `InvalidQuery` and `InvalidPayload`."""
    parent_session_id, tags, metadata = (filters[name] for name in ("parent_session_id", "tags", "metadata"))
    return SessionQuery(
        agent_type=validation.optional_identifier(filters["agent_type"], "agent_type"),
        statuses=_status_filter(filters["status"]),
        user_id=validation.user_id(filters["user_id"]),
        parent_session_id=(
            parent_session_id
            if isinstance(parent_session_id, Unset)
            else validation.optional_identifier(parent_session_id, "parent_session_id")
        ),
        root_session_id=validation.optional_identifier(filters["root_session_id"], "root_session_id"),
        workspace_id=validation.optional_identifier(filters["workspace_id"], "workspace_id", empty=True),
        tags=[] if tags is None else validation.tags(tags if isinstance(tags, str) else list(tags)),
        metadata={} if metadata is None else validation.metadata(metadata),
        created_from=_timestamp(filters["created_from"], "created_from"),
        created_to=_timestamp(filters["created_to"], "created_to"),
        order_by=_one_of(filters["order_by"], ("created_at", "updated_at"), "order_by"),  # type: ignore[arg-type]
        descending=_one_of(filters["direction"], ("asc", "desc"), "direction") == "desc",
        limit=validation.page_limit(filters["limit"]),
        offset=validation.page_offset(filters["offset"]),
        count=bool(filters["count"]),
    )


def after_cursor(query: SessionQuery, cursor: str | None, *, tenant: str | None) -> SessionQuery:
    """Return the query for the page at a cursor. Raises `InvalidCursor` and `InvalidQuery`."""
    if cursor is None:
        return query
    if query.offset:
        raise InvalidQuery("Pass a cursor or an offset, not both.", path="cursor")
    time, *ids = read_cursor(cursor, query=_cursor_binding(query, tenant))
    return replace(query, after=(datetime.fromisoformat(time), *ids))


def next_cursor(query: SessionQuery, last: SessionHead, *last_tenant: str, tenant: str | None) -> str:
    """Return the cursor of the page after a session, with its tenant in a list of all tenants."""
    position = [getattr(last, query.order_by).isoformat(), last.session_id, *last_tenant]
    return write_cursor(position, query=_cursor_binding(query, tenant))


def _cursor_binding(query: SessionQuery, tenant: str | None) -> dict[str, Any]:
    """Return the values that the next page must repeat: the tenant (``None`` for all) and the query."""
    binding = {"tenant": tenant, **asdict(query)}
    binding["statuses"] = None if query.statuses is None else sorted(query.statuses)
    for paging in ("limit", "offset", "after", "count"):
        del binding[paging]
    return binding


def _status_filter(
    status: SessionStatus | str | Collection[SessionStatus | str] | None,
) -> frozenset[SessionStatus] | None:
    if status is None:
        return None
    try:
        return validation.statuses([status] if isinstance(status, str) else status, "status")
    except InvalidPayload as exc:
        raise InvalidQuery(f"status: {exc.reason}.", path="status") from exc


def _timestamp(value: Timestamp | None, name: str) -> datetime | None:
    return None if value is None else validation.aware_datetime(value, name)


def _one_of(value: str, allowed: tuple[str, ...], name: str) -> str:
    if value not in allowed:
        raise InvalidQuery(f"{name} must be one of {', '.join(allowed)}.", path=name)
    return value
