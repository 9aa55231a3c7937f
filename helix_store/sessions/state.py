"""The state of a session: its layout at rest, the deltas between two layouts, and how it is read back.

``custom_state`` is the payload, and the rest of the state is the envelope; both are exact JSON text in the
row that holds a state. Fields that lists, filters and single writes need are also columns of the session's
head. The columns are authoritative for the *current* state, and the envelope for a checkpoint. An envelope
omits fields that have the default value of `SessionState`.

A payload can be stored as the changes since an earlier full payload, entry by entry. An *entry* is one key of
a payload with its value (RFC 8259 calls it a member). A delta is made from stored texts, and values are never
compared: Python considers ``1``, ``1.0`` and ``True`` equal, as well as ``0.0`` and ``-0.0``, and two dicts
that differ only in the order of their keys. The text of these values differs.
"""

from __future__ import annotations

import copy
import json
import marshal
import secrets
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from datetime import UTC, datetime
from functools import partial
from types import MappingProxyType, SimpleNamespace, UnionType
from typing import Any, Final, Literal, NamedTuple, TypeAlias, get_args, get_origin, get_type_hints

from django.db.models import Exists, OuterRef, QuerySet, Subquery

from helix_store.core import validation
from helix_store.core.dicts import AnyMessage
from helix_store.core.limits import AS_STORED, MAX_BIGINT, Limits
from helix_store.core.moments import as_utc
from helix_store.core.payloads import (
    check_value,
    decode,
    decode_all,
    decode_object,
    decode_optional,
    encode,
    encode_all,
    join_fields,
    size_of,
    write_json,
)
from helix_store.core.typed_json import loads_object
from helix_store.core.types import (
    NOT_LOADED,
    CheckpointSource,
    InterruptKind,
    InterruptRequest,
    Loaded,
    Run,
    RunStatus,
    SessionHead,
    SessionMode,
    SessionState,
    SessionStatus,
    StagedChanges,
    SubSessionRef,
)
from helix_store.engine.database import Database
from helix_store.exceptions import ConflictError, IntegrityFault, InvalidPayload, LimitExceeded
from helix_store.models import Checkpoint, CheckpointKind, Session
from helix_store.sessions.deltas import apply_delta, decode_with_delta, require_delta
from helix_store.sessions.tool_calls import (
    LiveDecisions,
    StoredDecision,
    ToolCalls,
    current_calls,
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
    converted: Mapping[str, Any] = field(default_factory=dict)
    """The head's fields that a load returns in another form than the state, with their values."""
    doubtful: Mapping[str, dict[str, Any]] = field(default_factory=dict)
    """The calls with an answer in the state whose deadline comes first, unless somebody has answered them."""


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
        converted_fields(state),
        ToolCalls(calls[0], {}).doubtful if calls[0] else {},
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
    columns["pending_deadline"] = earliest_deadline(ToolCalls(pending, {}).unanswered) if pending else None
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


_LOADED_FORMS: Final[dict[str, tuple[type, Callable[[Any], Any]]]] = {
    "status": (SessionStatus, SessionStatus),
    "mode": (SessionMode, SessionMode),
    "suspension_kind": (RunStatus, RunStatus),
    "user_id": (str, validation.user_id_text),
    "tags": (list, list),
    "expires_at": (int, partial(validation.epoch_milliseconds, name="expires_at")),
}
"""The fields that `_HEAD_RULES` accept in several types: the type that a load returns, and how to get it."""


def converted_fields(state: SessionState) -> dict[str, Any]:
    """Return the fields of a checked state that a load would return in another form, with their values."""
    converted = {}
    for name, (form, convert) in _LOADED_FORMS.items():
        value = getattr(state, name)
        if value is not None and type(value) is not form:
            converted[name] = convert(value)
    if state.failure_reason is not None:
        converted["failure_reason"] = validation.failure_reason(state.failure_reason)
    return converted


default_step_id: Final = "step-{}".format
"""Return the id of a step that has no other id, given its number."""
SUPERSEDED: Final = "superseded"
"""The completion reason of a run that another run replaced."""


def written_columns(
    encoded: EncodedState,
    stored: Mapping[str, Any],
    decisions: Callable[[Collection[str]], Iterable[StoredDecision]],
) -> dict[str, Any]:
    """Return the head's columns for a whole state that is written over a session with ``stored`` columns.

    The mode is set only once; a write without a mode keeps it. Decisions about calls that the state does not
    have end. ``decisions`` reads those about calls; it is only called if an answer in the state may be the
    agent's own, so that the deadline of the call still counts. Raises `ConflictError` if the mode differs.
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
    if encoded.doubtful:
        doubtful = ToolCalls(encoded.doubtful, {}, written.get("live_decisions"))
        if doubtful.claimed:
            deadline = earliest_deadline(doubtful.open(decisions(doubtful.claimed)))
            written["pending_deadline"] = deadline or written["pending_deadline"]
    return written


def next_step_count(state: SessionState) -> int:
    """Return the number of a session's next step. Raises `LimitExceeded`."""
    number = state.step_count
    return number + 1 if number < MAX_BIGINT else validation.next_number(number, "step_count")


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


def _stored_types(hint: Any) -> tuple[type, ...]:
    """Return the types of a stored field, in which enumeration members are text."""
    options = get_args(hint) if isinstance(hint, UnionType) else (hint,)
    types = [get_origin(option) or option for option in options]
    return tuple(str if issubclass(kind, str) else kind for kind in types)


# These are not the rules for writing, because those rules may change, but stored rows do not.
_STORED_TYPES: Final = {
    name: _stored_types(hint) for name, hint in get_type_hints(SessionState).items() if hint is not Any
}


_MOMENTS: Final = (
    "created_at",
    "updated_at",
    "expires_at",
    "started_at",
    "ended_at",
    "requested_at",
    "session__created_at",
)


def current_state(
    columns: Mapping[str, Any], payload: str, envelope: str, base: str | None = None
) -> SessionState:
    """Return the current state; ``columns`` holds every name of `STATE_COLUMNS` as stored.

    With a ``base``, the payload is a delta from that full payload.
    """
    kept = decode_object(envelope)
    fields: dict[str, Any] = {name: kept[name] for name in KEPT_IN_ENVELOPE_ONLY if name in kept}
    fields |= {name: decode(columns[name]) for name in JSON_COLUMNS if columns[name] is not None}
    _require_shapes({**fields, "tags": columns["tags"], "metadata": columns["metadata"]})
    claimed = frozenset[str]()
    if "pending_client_tool_calls" in fields:
        calls = ToolCalls(fields["pending_client_tool_calls"], {}, columns.get("live_decisions"))
        fields["pending_client_tool_calls"] = current_calls(calls.pending, calls.live)
        claimed = frozenset(calls.claimed)
    state = SessionState(custom_state=custom_state_of(payload, base), **fields, **head_values(columns))
    has_posts = columns.get("next_post_at") is not None
    set_loaded(state, has_posts=has_posts, has_waiting_posts=has_posts, claimed=claimed)
    return state


def require_readable(columns: Mapping[str, Any]) -> None:
    """Raise `IntegrityFault` unless the columns of a head have values that `current_state` can read."""
    fields = {name: decode(columns[name]) for name in JSON_COLUMNS if columns.get(name) is not None}
    _require_shapes(fields)
    if "pending_client_tool_calls" in fields:
        current_calls(fields["pending_client_tool_calls"], LiveDecisions(columns.get("live_decisions")))
    if columns.get("typed_metadata") is not None:
        loads_object(columns["typed_metadata"])


def by_column(names: Sequence[str], values: Sequence[Any]) -> dict[str, Any]:
    """Return a statement's row by column. Moments, which SQLite returns as naive or as text, are aware."""
    row = dict(zip(names, values, strict=True))
    for name in _MOMENTS:
        value = row.get(name)
        if value is not None and getattr(value, "tzinfo", None) is None:
            row[name] = as_utc(value)
    return row


def base_of(base_id: int | None, payload: str | None) -> str | None:
    """Return the payload under a delta: unreadable text if it was deleted, ``None`` without a base."""
    return None if base_id is None else payload or ""


def current_from(row: Mapping[str, Any]) -> SessionState:
    """Return the state in a row of `CURRENT_COLUMNS`; it remembers the base for its next step's delta."""
    base_id, payload = row["current__base_id"], row["current__payload"]
    base = base_of(base_id, row["current__base__payload"])
    state = current_state(row, payload, row["current__envelope"], base)
    if row["base_key"] is not None:
        if base is None:
            remember_full(state, row["base_key"], row["current_id"], row["current__version"], payload)
        else:
            remember_full(state, row["base_key"], base_id, row["current__base__version"], base)
    return state


def stored_state(names: Sequence[str], values: Sequence[Any]) -> SessionState:
    """Return the state in the columns of a row, in which tags and metadata are text."""
    return current_from(stored_columns(names, values))


def stored_columns(names: Sequence[str], values: Sequence[Any]) -> dict[str, Any]:
    """Return the columns of a row, in which tags and metadata are text, as Django's ``values()`` would."""
    row = by_column(names, values)
    row["tags"], row["metadata"] = _from_jsonb(row["tags"]), _from_jsonb(row["metadata"])
    return row


def _from_jsonb(text: str) -> Any:
    # Most values are empty, and starting the decoder takes longer than decoding.
    return [] if text == "[]" else {} if text == "{}" else json.loads(text)


def _require_shapes(fields: Mapping[str, Any]) -> None:
    """Raise `IntegrityFault` unless each stored field has a type that a state may have."""
    for name, value in fields.items():
        types = _STORED_TYPES.get(name)
        if types is not None and type(value) not in types:
            raise IntegrityFault(
                f"The stored {name} of a session has another type; other rows are unaffected."
            )
    if not _has_texts(fields.get("tags", ())) or not _has_texts(fields.get("metadata", {}).values()):
        raise IntegrityFault("Stored tags or metadata are not text; other rows are not affected.")


def _has_texts(values: Iterable[Any]) -> bool:
    return all(type(value) is str for value in values)


def listed_head(columns: Mapping[str, Any]) -> SessionHead:
    """Return the session for a list, which must not fail: omit tags and metadata if their shape is wrong."""
    values = head_values(columns)
    try:
        _require_shapes({"tags": values["tags"], "metadata": values["metadata"]})
    except IntegrityFault:
        values |= {"tags": [], "metadata": {}}
    return SessionHead(**values)


def head_values(columns: Mapping[str, Any]) -> dict[str, Any]:
    """Return head columns as values of `SessionHead` and `SessionState`."""
    values = {name: columns[name] for name in HEAD_FIELDS}
    values["status"] = SessionStatus(values["status"])
    values["mode"] = None if values["mode"] is None else SessionMode(values["mode"])
    kind = values["suspension_kind"]
    values["suspension_kind"] = None if kind is None else RunStatus(kind)
    if values["expires_at"] is not None:
        values["expires_at"] = validation.datetime_to_milliseconds(values["expires_at"])
    return values


def checkpoint_state(
    payload: str,
    envelope: str,
    base: str | None = None,
    *,
    session_id: str,
    version: int,
    message_count: int,
    created_at: datetime,
    updated_at: datetime,
) -> SessionState:
    """Return the state that a checkpoint recorded; with a ``base``, the payload is a delta from it."""
    fields = decode_object(envelope)
    _require_shapes(fields)
    try:
        return SessionState(
            session_id=session_id,
            version=version,
            message_count=message_count,
            created_at=created_at,
            updated_at=updated_at,
            custom_state=custom_state_of(payload, base),
            **_with_enums({name: fields[name] for name in ENVELOPE if name in fields}),
        )
    except (KeyError, TypeError, ValueError, InvalidPayload) as exc:
        raise IntegrityFault("A stored checkpoint does not hold a session state.") from exc


def _with_enums(fields: dict[str, Any]) -> dict[str, Any]:
    fields["status"] = SessionStatus(fields["status"])
    fields["mode"] = None if fields.get("mode") is None else SessionMode(fields["mode"])
    kind = fields.get("suspension_kind")
    fields["suspension_kind"] = None if kind is None else RunStatus(suspension_kind(kind))
    return fields


_ANY_MOMENT: Final = datetime(2000, 1, 1, tzinfo=UTC)


def require_readable_envelope(envelope: str) -> None:
    """Raise `IntegrityFault` unless `checkpoint_state` can read the envelope, given a sound payload."""
    checkpoint_state(
        "{}",
        envelope,
        session_id="any",
        version=1,
        message_count=0,
        created_at=_ANY_MOMENT,
        updated_at=_ANY_MOMENT,
    )


def require_readable_checkpoint(columns: Mapping[str, Any], *, is_delta: bool) -> None:
    """Raise `IntegrityFault` unless the columns of a checkpoint have values that the calls of its kind can
    read.
    """
    kind, payload, envelope = columns["kind"], columns["payload"], columns["envelope"]
    if kind == CheckpointKind.GRAPH:
        graph_values(payload)
    elif is_delta:
        require_delta(payload)
    else:
        decode_object(payload)
    if kind in (CheckpointKind.STEP, CheckpointKind.STATE):
        require_readable_envelope(envelope)
    else:
        decode_object(envelope)
    # Only the status of a step is read.
    words = [status.value for status in SessionStatus] + [""] * (kind != CheckpointKind.STEP)
    if columns["status"] not in words:
        raise IntegrityFault("A stored checkpoint has an unknown status; other rows are not affected.")


GRAPH_FIELDS: Final = ("node_results", "pending_nodes", "cycle_state")


def graph_values(payload: str) -> dict[str, Any]:
    """Return the typed values of a graph's checkpoint. Raises `IntegrityFault`."""
    values = loads_object(payload)
    try:
        return {name: values[name] for name in GRAPH_FIELDS}
    except KeyError as exc:
        raise IntegrityFault(f"A stored checkpoint has no {exc.args[0]}.") from exc


def custom_state_of(payload: str, base: str | None = None) -> dict[str, Any]:
    """Return the custom state in a payload, or in a payload that is a delta from a base."""
    return decode_object(payload) if base is None else decode_with_delta(base, payload)


def sub_session_ref_from(stored: Any) -> SubSessionRef:
    """Return the value object for a row or an `EncodedRef`."""
    return SubSessionRef(
        sub_session_id=stored.sub_session_id,
        agent_type=stored.agent_type,
        parent_tool_call_id=stored.parent_tool_call_id,
        status=stored.status,
        location="remote" if stored.location == "remote" else "local",
        remote=decode_optional(stored.remote),
        output=decode_optional(stored.output),
        error=decode_optional(stored.error),
    )


def run_from(row: Any, session_id: str) -> Run:
    return Run(
        run_id=row.run_id,
        session_id=session_id,
        turn=row.turn,
        status=RunStatus(row.status),
        step_count=row.step_count,
        start_sequence=row.start_sequence,
        started_at=row.started_at,
        ended_at=row.ended_at,
        completion_reason=row.completion_reason,
        error=None if row.error is None else decode(row.error),
        build=row.build,
    )


def stored_run(session_id: str, names: Sequence[str], values: Sequence[Any]) -> Run:
    """Return the run in the columns of a row."""
    return run_from(SimpleNamespace(**by_column(names, values)), session_id)


def stored_interrupt(session_id: str, names: Sequence[str], values: Sequence[Any]) -> InterruptRequest:
    """Return the interrupt request in the columns of a row."""
    return interrupt_from(SimpleNamespace(**by_column(names, values)), session_id)


def interrupt_from(row: Any, session_id: str) -> InterruptRequest:
    return InterruptRequest(
        session_id=session_id,
        kind=InterruptKind(row.kind),
        reason=row.reason,
        run_id=row.run_id,
        requested_at=row.requested_at,
    )


def step_checkpoints(db: Database, key: int | Subquery) -> QuerySet[Checkpoint]:
    """Return the checkpoints that a session's steps have made; ``key`` is the session's key."""
    return Checkpoint.objects.using(db.alias).filter(session_id=key, kind=CheckpointKind.STEP, namespace="")


def current_key(head: Session) -> int:
    """Return the key of the row that holds a locked session's current state."""
    if head.current_id is None:
        raise IntegrityFault("A session has no current state.")
    return head.current_id


def read_current(db: Database, head: Session) -> tuple[dict[str, Any], str]:
    """Return the custom state and envelope of a locked session's current state."""
    payload, envelope, base_id, base = (
        Checkpoint.objects.using(db.alias)
        .filter(session_id=head.pk)
        .values_list("payload", "envelope", "base_id", "base__payload")
        .get(pk=current_key(head))
    )
    return custom_state_of(payload, base_of(base_id, base)), envelope


def write_current(
    db: Database, head: Session, *, payload: str, envelope: str, version: int, at: datetime
) -> dict[str, object]:
    """Store a state that no checkpoint records, and return the head columns that point to it.

    A checkpoint is never overwritten. A row of kind ``state`` is overwritten, so it must not be the base of a
    delta.
    """
    rows = Checkpoint.objects.using(db.alias).filter(session_id=head.pk)
    columns = {
        "version": version,
        "payload": payload,
        "base_id": None,
        "envelope": envelope,
        "size_bytes": size_of(payload) + size_of(envelope),
        "created_at": at,
    }
    if head.current_id is not None and not head.current_is_checkpoint:
        rows.filter(pk=head.current_id).update(**columns)
        return {}
    row = rows.create(
        session_id=head.pk, kind=CheckpointKind.STATE, source=CheckpointSource.INPUT.value, **columns
    )
    return {"current_id": row.pk, "current_is_checkpoint": False, "base_key": None}


def drop_checkpoints(db: Database, head: Session, doomed: QuerySet[Checkpoint]) -> int:
    """Delete step checkpoints of a locked session and return their number; the current state is kept.

    If the newest checkpoint holds the current state, it is converted from a checkpoint to a plain state
    stored in full. This state still says with which step of which run the history ends, so that a session at
    rest stays at rest; `stand_for_no_step` ends that. Bases that remaining checkpoints need for their deltas
    are kept as bases.
    """
    demoted = 0
    if head.current_is_checkpoint:
        demoted = doomed.filter(pk=current_key(head)).update(kind=CheckpointKind.STATE, checkpoint_id=None)
    else:
        _stand_for_newest_step(db, head, doomed)
    if demoted:
        row = Checkpoint.objects.using(db.alias).filter(session_id=head.pk, pk=current_key(head))
        payload, base_id, base = row.values_list("payload", "base_id", "base__payload").get()
        if base_id is not None:
            row.update(payload=apply_delta(base_of(base_id, base) or "", payload), base_id=None)
        Session.objects.using(db.alias).filter(pk=head.pk).update(current_is_checkpoint=False, base_key=None)
        head.current_is_checkpoint, head.base_key = False, None
    # This includes bases that only the deleted checkpoints need; `drop_unneeded_bases` removes them.
    deltas = Checkpoint.objects.using(db.alias).filter(session_id=head.pk, base__isnull=False)
    needed = doomed.filter(pk__in=deltas.values("base_id"))
    demoted += needed.update(kind=CheckpointKind.BASE, checkpoint_id=None)
    deleted, _ = doomed.delete()
    drop_unneeded_bases(db, head)
    return demoted + deleted


_OF_STEP: Final = ("source", "run_id", "step_id", "step_count", "message_count")


def _current_row(db: Database, head: Session) -> QuerySet[Checkpoint]:
    keys = [] if head.current_id is None else [head.current_id]
    return Checkpoint.objects.using(db.alias).filter(session_id=head.pk, pk__in=keys)


def _stand_for_newest_step(db: Database, head: Session, doomed: QuerySet[Checkpoint]) -> None:
    """Give a state that no checkpoint records the place of the newest step, if its checkpoint is deleted."""
    newest = step_checkpoints(db, head.pk).order_by("-version").values("pk")[:1]
    place = next(iter(doomed.filter(pk__in=newest).values(*_OF_STEP)), None)
    if place is not None:
        current = _current_row(db, head)
        # It may stand for a later step.
        current.exclude(source=CheckpointSource.STEP.value).update(**place)


def stand_for_no_step(db: Database, head: Session, message_count: int) -> None:
    """Let the plain state of a locked session stand for no step whose messages were cut off."""
    if not head.current_is_checkpoint:
        current = _current_row(db, head)
        current.filter(message_count__gt=message_count).update(source=CheckpointSource.INPUT.value)


def keep_checkpoints(db: Database, head: Session, keep: int, before: datetime | None = None) -> int:
    """Delete the step checkpoints beyond the newest ``keep``, or of these only those made before a time.

    Return their number.
    """
    checkpoints = step_checkpoints(db, head.pk)
    versions = checkpoints.order_by("-version").values_list("version", flat=True)
    newest_to_go = next(iter(versions[keep : keep + 1]), None)
    if newest_to_go is None:
        return 0
    doomed = checkpoints.filter(version__lte=newest_to_go)
    if before is not None:
        doomed = doomed.filter(created_at__lt=before)
    return drop_checkpoints(db, head, doomed)


def drop_unneeded_bases(db: Database, head: Session) -> None:
    """Delete the bases of a locked session that no remaining delta refers to."""
    rows = Checkpoint.objects.using(db.alias).filter(session_id=head.pk)
    needed = rows.filter(base_id=OuterRef("pk"))
    rows.filter(~Exists(needed), kind=CheckpointKind.BASE).delete()


class EncodedMessage(NamedTuple):
    role: str
    text: str


def encode_messages(messages: Sequence[AnyMessage], limits: Limits) -> list[EncodedMessage]:
    """Check and encode messages in order. Raises `InvalidPayload` and `LimitExceeded` with their path."""
    roles = validation.messages(messages)
    texts = encode_all(messages, limit=limits.max_message_bytes, name="max_message_bytes", path="/messages")
    return [EncodedMessage(role, text) for role, text in zip(roles, texts, strict=True)]
