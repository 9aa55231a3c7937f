"""Checked requests, which the public calls pass to a back end."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any, Final, Literal, NamedTuple, TypeAlias

from helix_store.core import validation
from helix_store.core.approvals import ApprovedCall
from helix_store.core.dicts import AnyMessage
from helix_store.core.guards import Guard
from helix_store.core.limits import AS_STORED, Limits
from helix_store.core.merging import with_staged
from helix_store.core.payloads import decode_all, encode_all
from helix_store.core.types import (
    UNSET,
    InterruptRequest,
    Message,
    RunStatus,
    SessionState,
    SessionStatus,
    StagedChanges,
    StepCommit,
    StepInfo,
    Unset,
)
from helix_store.exceptions import ConflictError, IntegrityFault, shown_id
from helix_store.sessions.layout import EncodedState, encode_state, with_custom_state
from helix_store.sessions.rules import DEFAULT_STEP

_THINKING_PARTS: Final = frozenset({"thinking", "reasoning"})


class EncodedMessage(NamedTuple):
    role: str
    text: str


class StagedRow(NamedTuple):
    """A staged change as text, and the version of the row that stores it."""

    version: str
    payload: str


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


@dataclass(slots=True)
class Reception:
    """The request of a turn's step to receive due posts.

    If posts are due, a step that would finish the session stores the state ``continued`` instead. The commit
    sets ``is_continued``.
    """

    continued: SessionState | None = None
    is_continued: bool = False


CommittedStep: TypeAlias = tuple[StepCommit, dict[str, Any]]
"""A commit, and the custom state stored with it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepWrite:
    """A step to commit, and the calls of a handle that belong to the step.

    ``staged`` holds the step's own staged changes and ``uses`` the approvals that it uses, both by tool call
    id; ``staged_rows`` are the rows of these changes, if all of them are known. ``after`` is called once the
    step is written, unless an earlier step with the same operation id was found; ``record`` is called last in
    either case, and records the usage of the step. With a ``reception``, the commit receives due posts, if
    the store supports posts.
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
    uses: Mapping[str, ApprovedCall] = field(default_factory=dict)
    staged_rows: Sequence[StagedRow] = ()
    after: Sequence[Callable[[], object]] = ()
    record: Callable[[], object] | None = None
    reception: Reception | None = None

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
            self.record()
        return committed


@dataclass(slots=True)
class StepRequest:
    """A step to commit; afterwards, the session has at most ``keep`` step checkpoints.

    For a step of a handle, ``staged`` contains the changes that the step staged itself, by tool call id, and
    ``staged_rows`` contains their rows, if all of them are known.
    """

    session_id: str
    checkpoint_id: str
    state: SessionState
    encoded: EncodedState
    custom_state: dict[str, Any]
    """The custom state of ``state``; after `promote`, it also includes the staged changes."""
    messages: Sequence[EncodedMessage]
    step: StepInfo
    guard: Guard
    limits: Limits
    run_id: str | None = None
    operation_id: str | None = None
    keep: int | None = None
    staged: Mapping[str, StagedChanges] | None = None
    uses: Mapping[str, ApprovedCall] = field(default_factory=dict)
    """The approvals that the step uses, by tool call id."""
    reception: Reception | None = None
    staged_rows: Sequence[StagedRow] = ()

    @property
    def name(self) -> str:
        """The key by which a repeat is found: the operation id, or otherwise the id of the checkpoint."""
        return self.operation_id or self.checkpoint_id

    def digest(self) -> str:
        """Return a digest of the payload, which a repeat with the same operation id must match.

        If the state has an intent, the digest covers the intent and the messages instead.
        """
        digest = hashlib.sha256()
        intent = getattr(self.state, "_intent", None)
        payload = (
            self.encoded.payload,
            self.encoded.envelope,
            self.step.step_id,
            str(self.step.step_count),
            str(self.step.stream_sequence),
            self.run_id or "",
        )
        parts = payload if intent is None else (intent,)
        for part in (*parts, *(message.text for message in self.messages)):
            data = part.encode()
            digest.update(len(data).to_bytes(8, "big") + data)
        return digest.hexdigest()

    def continued(self, reception: Reception, *, has_due_posts: bool) -> StepRequest:
        """Return the request to commit; if posts are due, it is one that does not finish the session."""
        state = reception.continued
        reception.is_continued = has_due_posts and state is not None
        if state is None or not has_due_posts:
            return self
        encoded = encode_state(state, self.limits, self.session_id, step_count=self.step.step_count)
        return replace(self, state=state, encoded=encoded)

    def require_staged(self, stored: Iterable[StagedChanges]) -> None:
        """Raise `ConflictError` unless all changes that the step staged itself are stored unchanged."""
        if not are_stored(self.staged or {}, stored):
            raise dropped_staging(self.step.step_id)

    def promote(self, staged: Sequence[StagedChanges]) -> EncodedState:
        """Return the encoded state with staged changes applied. Raises `PatchError` and `LimitExceeded`."""
        before = self.custom_state = self.state.custom_state
        if not staged:
            return self.encoded
        self.custom_state = with_staged(before, staged, limits=self.limits)
        return with_custom_state(self.encoded, before, self.custom_state, self.limits)

    def promote_rows(self, rows: Sequence[StagedRow]) -> EncodedState:
        """Return the encoded state with the changes in stored rows applied.

        Raises `IntegrityFault`, and the errors of `require_staged` and `promote`.
        """
        changes = decode_staged([row.payload for row in rows])
        self.require_staged(changes)
        return self.promote(changes)


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


Counter: TypeAlias = Literal["step_count", "resume_count"]


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
