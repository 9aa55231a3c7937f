"""Staged changes, and the atomic step that promotes them: the canonical write of every agent loop."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from itertools import chain
from typing import Any, Final, NamedTuple, TypeAlias

from django.db.models import (
    BigIntegerField,
    BooleanField,
    Exists,
    ExpressionWrapper,
    FilteredRelation,
    OuterRef,
    Q,
    Subquery,
    Value,
)
from django.db.models.expressions import RawSQL

from helix_store.core import moments, validation
from helix_store.core.dicts import AnyMessage
from helix_store.core.ids import CHECKPOINT_ID
from helix_store.core.limits import AS_STORED, Limits
from helix_store.core.patches import promote_staged, with_staged
from helix_store.core.types import (
    NOT_LOADED,
    TERMINAL_STATUSES,
    CheckpointSource,
    InterruptRequest,
    Loaded,
    Run,
    SessionState,
    SessionStatus,
    StagedChanges,
    StepCommit,
    StepInfo,
)
from helix_store.core.validation import Guard
from helix_store.engine.database import Call, Database, DatabaseOperations, refuse_moved, writes
from helix_store.engine.expressions import DatabaseNow, insert_row, list_parameter, update_row
from helix_store.engine.statement import recorded_value
from helix_store.exceptions import (
    ConflictError,
    HelixStoreError,
    IdempotencyConflict,
    OutcomeUnknown,
    RunNotFound,
    shown_id,
)
from helix_store.models import Checkpoint, CheckpointKind, Operation, Post, Session, StagedChange
from helix_store.models import Run as RunRow
from helix_store.sessions.heads import replace_custom_state
from helix_store.sessions.locking import (
    advance,
    changed_columns,
    check_guard,
    first_row,
    lock_session,
    missing_session,
    touch,
    touch_session,
)
from helix_store.sessions.messages import (
    decode_messages,
    has_open_calls,
    history_backwards,
    insert_messages,
    receive_due,
    received_at,
)
from helix_store.sessions.state import (
    WRITTEN_COLUMNS,
    EncodedMessage,
    EncodedState,
    StoredPayload,
    decode_staged,
    encode_messages,
    encode_state,
    keep_checkpoints,
    loaded_of,
    next_origin,
    read_current,
    set_loaded,
    stored_interrupt,
    stored_payload,
    stored_run,
    stored_state,
    with_custom_state,
    written_columns,
)
from helix_store.sessions.statements import (
    CURRENT_COLUMNS,
    INTERRUPT_COLUMNS,
    LOAD_CAPPED_STEP,
    LOAD_FOR_TURN,
    LOAD_STEP,
    MAX_SINGLE_MESSAGES,
    MAY_BE_STOPPED,
    RUN_COLUMNS,
    STAGE_CHANGE,
    STAGE_LOCKED,
    STAGED_CHANGES,
    STAGED_ROWS,
    TAKE_STAGED,
    USE_APPROVALS,
    step_statement,
)
from helix_store.sessions.tool_calls import without_used
from helix_store.sessions.waiting import decisions_of
from helix_store.signals import announce, signals_of_status


class StagedRow(NamedTuple):
    """A staged change as text, and the version of the row that stores it."""

    version: str
    payload: str


class TurnEntry(NamedTuple):
    """The data with which a turn begins."""

    state: SessionState
    is_at_rest: bool = False
    """True if nothing has arrived since the last turn, which `end_turn` ended, except perhaps answers."""
    newest_run: Run | None = None


class OpenedStep(NamedTuple):
    """The data with which a step begins; the interrupt request is bound to its run.

    ``may_be_stopped`` is false if no budget of the session has been reached and no amount is held.
    """

    state: SessionState
    has_staged: bool
    interrupt: InterruptRequest | None
    may_be_stopped: bool = True


CommittedStep: TypeAlias = tuple[StepCommit, dict[str, Any]]
"""A commit, and the fields of the state that it has stored in another form, with the custom state."""


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
    opened: Sequence[str] = ()
    """The ids of the calls that the step opens."""
    refusal: HelixStoreError | None = None
    """The error to raise unless an earlier step with the same operation id is found."""
    receives: bool = False
    """True if the commit receives due posts, if the store supports posts."""
    continued: SessionState | None = None
    """The state that a step which would finish the session stores instead if posts are due."""
    is_continued: bool = False
    """True if the commit has stored the state ``continued``."""
    is_capped: bool = False
    """True if the commit finds out whether a budget may stop a next step without an estimate."""
    may_be_stopped: bool | None = None
    """What it has found out; ``None`` if it has not."""
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
        return committed, {**self.encoded.converted, "custom_state": self.custom_state}

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

    def check_refusal(self) -> None:
        """Raise the error of a step that was only to be looked up."""
        if self.refusal is not None:
            raise self.refusal

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


class DatabaseSteps(DatabaseOperations):
    """Staged changes and steps. A write is one statement if the database supports that form; otherwise it
    locks, decides and writes.
    """

    def enter(self, session_id: str) -> TurnEntry | None:
        """Read the data with which a turn begins, in one statement."""
        for row in self.db.read(LOAD_FOR_TURN, {"tenant": self.db.tenant, "session_id": session_id}):
            current = row[: len(CURRENT_COLUMNS)]
            has_budgets, has_due_posts, is_at_rest, *run = row[len(CURRENT_COLUMNS) :]
            state = stored_state(CURRENT_COLUMNS, current)
            set_loaded(state, is_capped=bool(has_budgets), has_posts=bool(has_due_posts))
            return TurnEntry(
                state,
                bool(is_at_rest and state.status == SessionStatus.ACTIVE and not has_due_posts),
                None if run[0] is None else stored_run(session_id, RUN_COLUMNS, run),
            )
        refuse_moved(self.db)
        return None

    def open_step(
        self, session_id: str, step_id: str | None, run_id: str | None, *, is_capped: bool
    ) -> OpenedStep | None:
        """Read the data with which a step begins, in one statement."""
        step = {"tenant": self.db.tenant, "session_id": session_id, "step_id": step_id, "run_id": run_id}
        for row in self.db.read(LOAD_CAPPED_STEP if is_capped else LOAD_STEP, step):
            current = row[: len(CURRENT_COLUMNS)]
            has_staged, *interrupt, may_be_stopped = row[len(CURRENT_COLUMNS) :]
            is_interrupted = interrupt[0] is not None
            return OpenedStep(
                stored_state(CURRENT_COLUMNS, current),
                bool(has_staged),
                stored_interrupt(session_id, INTERRUPT_COLUMNS, interrupt) if is_interrupted else None,
                bool(may_be_stopped),
            )
        refuse_moved(self.db)
        return None

    def stage(self, session_id: str, step_id: str, tool_call_id: str, text: str) -> StagedRow | None:
        """Stage a change, and return its row if the step can promote the row without reading it."""
        parameters = {
            "tenant": self.db.tenant,
            "session_id": session_id,
            "step_id": step_id,
            "tool_call_id": tool_call_id,
            "payload": text,
            "at": moments.now(),
        }

        def look_first(call_id: str) -> None:
            # The call may have staged the change even if a step has promoted it since.
            key = lock_session(self.db, session_id).pk
            taken = Operation.objects.using(self.db.alias).filter(session_id=key, operation_id=call_id)
            staged = StagedChange.objects.using(self.db.alias).filter(
                session_id=key, step_id=step_id, tool_call_id=tool_call_id
            )
            call_ids = staged.values_list("call_ids", flat=True)
            if not taken.exists() and recorded_value(first_row(call_ids), call_id) is None:
                self._stage_locked(parameters, call_id)

        return self.db.write_once(
            STAGE_CHANGE,
            parameters,
            StagedRow._make,
            otherwise=partial(self._stage_locked, parameters),
            look_first=look_first,
            operation_id=tool_call_id,
        )

    @writes
    def _stage_locked(self, parameters: Mapping[str, Any], call_id: str) -> None:
        head = touch_session(self.db, parameters["session_id"])
        at = moments.now()
        self.db.execute(STAGE_LOCKED, {**parameters, "key": head.pk, "at": at, "call_id": call_id})

    def staged(self, session_id: str, step_id: str) -> list[StagedChanges]:
        step = {"tenant": self.db.tenant, "session_id": session_id, "step_id": step_id}
        rows = self.db.read(STAGED_CHANGES, step)
        if not rows:
            raise missing_session(self.db, session_id)
        return decode_staged([text for key, text in sorted(rows) if key is not None])

    @writes
    def promote(self, session_id: str, step_id: str, guard: Guard) -> int:
        head = lock_session(self.db, session_id, guard)
        staged = _take_staged(self.db, head, step_id, moments.now())
        if not staged:
            return head.version
        custom_state, envelope = read_current(self.db, head)
        promoted = promote_staged(custom_state, staged, limits=self.db.limits)
        return replace_custom_state(self.db, head, promoted, envelope)

    @writes
    def discard(self, session_id: str, step_id: str) -> int:
        head = lock_session(self.db, session_id)
        discarded = len(_take_staged(self.db, head, step_id, moments.now()))
        if discarded:
            touch(self.db, head)
        return discarded

    def commit(self, step: StepWrite) -> StepCommit:
        return self.db.committed_once(
            partial(self._commit, step),
            lambda _: self._commit_locked(step, is_repeat=True),
            operation_id=lambda: step.name,
        )

    def _commit(self, step: StepWrite, call: Call) -> StepCommit:
        commit = None
        is_simple = step.operation_id is None and not (step.uses or step.encoded.doubtful)
        if is_simple and call.has_fast_writes:
            commit = self._in_one_statement(step, call)
        if commit is None:
            commit = self.db.transaction(partial(self._commit_locked, step), call)
        return commit

    def _in_one_statement(self, step: StepWrite, call: Call) -> StepCommit | None:
        """Commit a step, or return ``None`` if it needs the portable form.

        Staged changes whose rows are unknown are read first if the handle staged something, or if the last
        step of this state promoted something; otherwise the statement returns them. A second statement then
        promotes them, if they have not changed.
        """
        staged = self._staged_rows(step, call)
        if not (staged or step.staged):
            commit, staged = self._try(step, call, step.encoded, ())
            if not staged:
                return commit
        try:
            encoded = step.promote_rows(staged)
        except HelixStoreError:
            # A change was deleted or cannot be applied. First check whether the session is gone or stale.
            return None
        return self._try(step, call, encoded, staged)[0]

    def _staged_rows(self, step: StepWrite, call: Call) -> list[StagedRow]:
        if step.staged_rows:
            return sorted(step.staged_rows, key=lambda row: int(row.version.split(":")[0]))
        origin = step.loaded.origin
        follows_promotion = origin is not None and origin.expects_staging
        if not (follows_promotion if step.staged is None else step.staged):
            return []
        named = {
            "tenant": self.db.tenant,
            "session_id": step.session_id,
            "step_id": step.info.step_id,
        }
        return [StagedRow(*row) for row in call.read(STAGED_ROWS, named)]

    def _try(
        self, step: StepWrite, call: Call, encoded: EncodedState, staged: Sequence[StagedRow]
    ) -> tuple[StepCommit | None, list[StagedRow]]:
        """Try to commit a step that promotes these rows; return its commit, or else the rows now staged."""
        at = moments.now()
        expected_version = step.guard.expected_version
        stored = stored_payload(
            step.loaded.origin,
            encoded.payload,
            encoded.entries,
            version=None if expected_version is None else expected_version + 1,
        )
        columns = _checkpoint_columns(step, encoded, stored, at)
        ends = encoded.columns["status"] in TERMINAL_STATUSES
        statement = step_statement(
            tuple(columns),
            messages=min(len(step.encoded_messages), MAX_SINGLE_MESSAGES + 1),
            merges=bool(staged),
            is_delta=stored.base_id is not None,
            is_expected=expected_version is not None,
            is_fenced=step.guard.fencing_token is not None,
            is_of_run=step.run_id is not None,
            prunes=step.keep is not None,
            ends=ends,
            receives=step.receives,
            is_capped=step.is_capped,
        )
        tags, metadata = encoded.columns["tags"], encoded.columns["metadata"]
        parameters = {
            **columns,
            **encoded.columns,
            "marks": json.dumps(encoded.marks) if encoded.marks else "{}",
            "tags": json.dumps(tags) if tags else "[]",
            "metadata": json.dumps(metadata) if metadata else "{}",
            "step_number": step.info.step_count,
            "base_key": stored.base_key,
            "tenant": self.db.tenant,
            "session_id": step.session_id,
            "expected_version": expected_version,
            "fencing_token": step.guard.fencing_token,
            "staged": [row.version for row in staged],
            "at": at,
            "added": len(step.encoded_messages),
            "keep": step.keep,
        }
        if len(step.encoded_messages) > MAX_SINGLE_MESSAGES:
            parameters["roles"] = [message.role for message in step.encoded_messages]
            parameters["texts"] = [message.text for message in step.encoded_messages]
        else:
            for number, message in enumerate(step.encoded_messages, 1):
                parameters[f"role_{number}"], parameters[f"text_{number}"] = message
        rows = call.try_write(statement, parameters)
        if not rows or rows[0][0] is None:
            return None, [StagedRow(version, payload) for _, _, _, _, version, payload in rows]
        new_version, row_id, earlier_status, step.may_be_stopped, _, _ = rows[0]
        if ends:
            status, failure_reason = encoded.columns["status"], encoded.columns["failure_reason"]
            announce(self.db, step.session_id, signals_of_status(earlier_status, status, failure_reason))
        _remember(step, stored, row_id, new_version, has_promoted=bool(staged))
        return StepCommit(step.checkpoint_id, new_version=new_version), []

    def _commit_locked(self, step: StepWrite, *, is_repeat: bool = False) -> StepCommit:
        """Lock the session, promote its staging, and write messages, checkpoint and head.

        The number of statements does not depend on the length of the history. A run or an operation id takes
        one more statement, recording the operation takes another, and pruning takes up to five.
        """
        head = lock_session(self.db, step.session_id, None, *WRITTEN_COLUMNS, "live_decisions")
        run_exists, earlier, has_due_posts = _read_claims(self.db, head, step, is_repeat=is_repeat)
        if earlier is not None:
            if is_repeat:
                # The status that the lost statement found is unknown, so a repeated end is announced again.
                status, reason = head.status, step.encoded.columns["failure_reason"]
                announce(self.db, step.session_id, signals_of_status("", status, reason))
                if step.receives:
                    step.is_continued = status not in TERMINAL_STATUSES
            return earlier
        if is_repeat and step.keep is not None and step.operation_id is None:
            expected_version = step.guard.expected_version
            before = step.state.version if expected_version is None else expected_version
            if head.version - before > step.keep:
                # So many later steps were stored that the checkpoint of the lost step may have been pruned.
                raise OutcomeUnknown(step.name)
        at = moments.now()
        is_staged = not step.uses or _use_approvals(self.db, head, step, at)
        staged = _take_staged(self.db, head, step.info.step_id, at) if is_staged else []
        if step.staged:
            # This comes before the guard: another worker may have staged the changes and made the step stale.
            step.require_staged(staged)
        check_guard(self.db, head, step.guard)
        step.check_refusal()
        if step.run_id is not None and not run_exists:
            raise RunNotFound(step.run_id)
        state, encoded = step.stored_state(has_due_posts=has_due_posts)
        written = written_columns(encoded, vars(head), partial(decisions_of, self.db, head.pk))
        encoded = step.promote(staged, state, encoded)
        received = self._received(head, step, at) if has_due_posts else []
        message_count = insert_messages(self.db, head, [*step.encoded_messages, *received], at=at)
        commit = StepCommit(
            step.checkpoint_id,
            new_version=head.version + 1,
            received=decode_messages([message.text for message in received]) if received else [],
        )
        stored = stored_payload(
            step.loaded.origin,
            encoded.payload,
            encoded.entries,
            version=commit.new_version,
            head_key=head.base_key,
        )
        checkpoint = _checkpoint_columns(step, encoded, stored, at)
        checkpoint |= {"session_id": head.pk, "version": commit.new_version, "message_count": message_count}
        # The state that was stored between checkpoints becomes this checkpoint.
        if head.current_id is not None and not head.current_is_checkpoint:
            row_id = head.current_id
            update_row(self.db, Checkpoint, row_id, checkpoint)
        else:
            row_id = insert_row(self.db, Checkpoint, checkpoint)
        columns = {
            **written,
            "current_id": row_id,
            "current_is_checkpoint": True,
            "base_key": stored.base_key,
            "message_count": message_count,
        }
        if step.uses:
            columns["live_decisions"] = without_used(columns.get("live_decisions"), step.uses)
        advance(self.db, head, at=at, **changed_columns(head, columns))
        if step.keep is not None:
            head.current_id, head.current_is_checkpoint = row_id, True
            keep_checkpoints(self.db, head, step.keep)
        if step.operation_id is not None:
            Operation.objects.using(self.db.alias).create(
                session_id=head.pk,
                operation_id=step.operation_id,
                digest=step.digest(),
                checkpoint_id=commit.checkpoint_id,
                version=commit.new_version,
                created_at=at,
            )
        _remember(step, stored, row_id, commit.new_version, has_promoted=bool(staged))
        return commit

    def _received(self, head: Session, step: StepWrite, at: datetime) -> list[EncodedMessage]:
        """Receive due posts and return their messages, unless calls are open after those of the step."""
        own = decode_messages([message.text for message in reversed(step.encoded_messages)])
        if has_open_calls(chain(own, history_backwards(self.db, head))):
            return []
        position = head.message_count + len(step.encoded_messages)
        return receive_due(self.db, head, position=position, at=at)


def _remember(
    step: StepWrite, stored: StoredPayload, row_id: int, version: int, *, has_promoted: bool
) -> None:
    origin = next_origin(step.loaded.origin, stored, row_id, version, has_promoted=has_promoted)
    step.loaded = step.loaded._replace(origin=origin)


def _use_approvals(db: Database, head: Session, step: StepWrite, at: datetime) -> bool:
    """Record that a step uses approvals, and return whether changes are staged for it, in one statement.

    The session must be locked; the caller checks its version. Raises `ConflictError` if an approval has been
    used.
    """
    used = {
        "key": head.pk,
        "askings": list_parameter(db, list(step.uses)),
        "step_id": step.info.step_id,
        "at": at,
    }
    rows = db.execute(USE_APPROVALS, used)
    if len(rows) < len(step.uses):
        check_guard(db, head, step.guard)
        raise ended_approval()
    return any(has_staged for (has_staged,) in rows)


def ended_approval() -> ConflictError:
    return ConflictError("An approval of this step was used or ended meanwhile; nothing was written.")


def _take_staged(db: Database, head: Session, step_id: str, at: datetime) -> list[StagedChanges]:
    """Remove and return a step's staged changes, in staging order. The session must be locked."""
    rows = db.execute(TAKE_STAGED, {"key": head.pk, "step_id": step_id, "at": at})
    return decode_staged([payload for _, payload in sorted(rows)])


def _checkpoint_columns(
    step: StepWrite, encoded: EncodedState, stored: StoredPayload, at: datetime
) -> dict[str, Any]:
    """Return the columns of a step's checkpoint, in one place; those with ``None`` come from the head."""
    return {
        "session_id": None,
        "kind": CheckpointKind.STEP.value,
        "namespace": "",
        "version": None,
        "checkpoint_id": step.checkpoint_id,
        "source": CheckpointSource.STEP.value,
        "run_id": step.run_id,
        "step_id": step.info.step_id,
        "step_count": step.info.step_count,
        "status": encoded.columns["status"],
        "message_count": None,
        "stream_sequence": step.info.stream_sequence,
        "payload": stored.text,
        "base_id": stored.base_id,
        "envelope": encoded.envelope,
        "size_bytes": encoded.size_bytes,
        "created_at": at,
    }


_SPENDER: Final = ("root_session_id", "user_id", "agent_type")


def _keeps_spender(head: Session, step: StepWrite) -> bool:
    """Return whether the budgets of the stored session are also those of the session after the step."""
    return all(step.encoded.columns[column] == getattr(head, column) for column in _SPENDER)


def _read_claims(
    db: Database, head: Session, step: StepWrite, *, is_repeat: bool
) -> tuple[bool, StepCommit | None, bool]:
    """Return whether the step's run exists, an earlier commit with its operation id, and whether the step
    has due posts to receive. If the step is capped, find out whether a budget may stop the next one.

    One statement after the lock looks up all of this: an earlier one could miss a duplicate's commit or a
    post. An operation id that the store made is the id of the checkpoint. Raises `IdempotencyConflict`.
    """
    name = step.name if is_repeat else step.operation_id
    if step.run_id is None and name is None and not step.receives:
        return False, None, False
    checkpoint = Checkpoint.objects.filter(
        session_id=OuterRef("pk"), checkpoint_id=name, kind=CheckpointKind.STEP, step_id=step.info.step_id
    )
    received = Post.objects.filter(session_id=OuterRef("pk"), received_version__isnull=False)
    may_be_stopped: RawSQL | Value = Value(None, BooleanField())
    if step.is_capped and db.is_postgresql and _keeps_spender(head, step):
        may_be_stopped = RawSQL(MAY_BE_STOPPED, ())  # noqa: S611  our own
    elif step.is_capped:
        # The budgets of another user may.
        may_be_stopped = Value(True, BooleanField())
    (
        run_exists,
        has_due_posts,
        digest,
        recorded_id,
        version,
        checkpoint_version,
        has_received,
        step.may_be_stopped,
    ) = (
        Session.objects.using(db.alias)
        .filter(pk=head.pk)
        .annotate(operation=FilteredRelation("operations", condition=Q(operations__operation_id=name)))
        .values_list(
            Exists(RunRow.objects.filter(session_id=OuterRef("pk"), run_id=step.run_id)),
            ExpressionWrapper(Q(next_post_at__lte=DatabaseNow()), BooleanField()),
            "operation__digest",
            "operation__checkpoint_id",
            "operation__version",
            Value(None, BigIntegerField()) if name is None else Subquery(checkpoint.values("version")[:1]),
            Exists(received),
            may_be_stopped,
        )
        .get()
    )

    def commit(checkpoint_id: str, version: int) -> StepCommit:
        received = received_at(db, head, version) if has_received else []
        return StepCommit(checkpoint_id, new_version=version, received=received)

    if name is not None and checkpoint_version is not None:
        return run_exists, commit(name, checkpoint_version), False
    if digest is None or step.operation_id is None:
        return run_exists, None, bool(has_due_posts) and step.receives
    if digest != step.digest():
        raise IdempotencyConflict(step.operation_id)
    return run_exists, commit(recorded_id, version), False
