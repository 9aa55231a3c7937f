"""The operations of the state store in the memory of one process."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from itertools import islice
from operator import attrgetter
from typing import Any

from helix_store import conf
from helix_store.core import moments, validation
from helix_store.core.approvals import ApprovedCall
from helix_store.core.effects import Effect
from helix_store.core.limits import AS_STORED
from helix_store.core.patches import merge_checked, promote_staged
from helix_store.core.payloads import decode
from helix_store.core.posts import DuePost, Post, PostState
from helix_store.core.types import (
    STORED_ANSWERS,
    TERMINAL_STATUSES,
    Checkpoint,
    CheckpointHead,
    InterruptKind,
    InterruptRequest,
    PendingToolCall,
    Run,
    RunStatus,
    SessionHead,
    SessionState,
    SessionStatus,
    StagedChanges,
    StatusChange,
    StatusConflict,
    StepCommit,
    Submission,
    SubmissionOutcome,
    SubSessionRef,
    Unset,
)
from helix_store.core.validation import Guard, datetime_to_milliseconds
from helix_store.exceptions import (
    CheckpointNotFound,
    ConflictError,
    IdempotencyConflict,
    InvalidQuery,
    LimitExceeded,
    RunNotFound,
    SessionExists,
)
from helix_store.sessions.checkpoints import BranchRequest, branched_state
from helix_store.sessions.effects import (
    End,
    Entered,
    Intent,
    Outcome,
    Settlement,
    StoredEffect,
    approved_text,
    can_go_on,
    ending,
    entered_known,
    new_effect,
    not_current,
    require_attempt,
    require_no_approval,
    started_again,
    too_many,
    unknown_effect,
)
from helix_store.sessions.lists import SessionQuery
from helix_store.sessions.messages import (
    NewPost,
    decode_messages,
    has_open_calls,
    received_message,
    require_not_ended,
    waits_for_answer,
)
from helix_store.sessions.records import (
    MemoryOperations,
    SessionRecord,
    StoredCheckpoint,
    StoredOperation,
    StoredPost,
    StoredRun,
    TenantScope,
    stored_messages,
)
from helix_store.sessions.runs import (
    RunUpdate,
    check_interruptible,
    check_may_run,
    check_no_other_runs,
    check_not_superseded,
    check_same_ref,
    check_supersedes,
    end_of_run,
    is_bound_to,
    request_to_keep,
    taken_run,
    unknown_ref,
)
from helix_store.sessions.state import (
    SUPERSEDED,
    CounterName,
    EncodedMessage,
    EncodedRef,
    EncodedState,
    NewSession,
    decode_staged,
    encode_custom_state,
    encode_state,
    sub_session_ref_from,
)
from helix_store.sessions.steps import StepWrite, TurnEntry, ended_approval
from helix_store.sessions.tool_calls import (
    Answer,
    StoredDecision,
    ToolCalls,
    approvals_in_branch,
    claimed_ownership,
    due_calls,
    may_be_own,
    opened_calls,
    overdue_in,
    owner_of,
    readable_overdue,
    waiting_calls,
    without_used,
)
from helix_store.sessions.waiting import RESUMED_COLUMNS, Suspension, require_suspended, resumed_state
from helix_store.signals import session_answered, session_posted


def select_records(
    records: Iterable[SessionRecord], query: SessionQuery
) -> tuple[list[SessionRecord], int, bool]:
    """Return the page, the number of sessions that match the filters, and whether more sessions follow."""

    def position(record: SessionRecord) -> tuple[datetime, str]:
        return record.columns[query.order_by], record.session_id

    found = [record for record in records if _matches(record.columns, query)]
    total = len(found)
    found.sort(key=position, reverse=query.descending)
    if query.after is not None:
        seen = query.after
        found = [
            record
            for record in found
            if (position(record) < seen if query.descending else position(record) > seen)
        ]
    end = query.offset + query.limit
    return found[query.offset : end], total, end < len(found)


def _matches(columns: Mapping[str, Any], query: SessionQuery) -> bool:
    for name in ("agent_type", "user_id", "root_session_id", "workspace_id"):
        wanted = getattr(query, name)
        if wanted is not None and columns[name] != wanted:
            return False
    if (
        not isinstance(query.parent_session_id, Unset)
        and columns["parent_session_id"] != query.parent_session_id
    ):
        return False
    if query.statuses is not None and columns["status"] not in query.statuses:
        return False
    if query.created_from is not None and columns["created_at"] < query.created_from:
        return False
    if query.created_to is not None and columns["created_at"] >= query.created_to:
        return False
    return set(query.tags) <= set(columns["tags"]) and query.metadata.items() <= columns["metadata"].items()


def with_descendants(sessions: Mapping[str, SessionRecord], session_id: str) -> list[str]:
    """Return the session and its descendants, by parent id and by local sub-session refs, each once.

    Parents precede their descendants; the list is empty if the session is unknown.
    """
    if session_id not in sessions:
        return []
    children: dict[str, list[str]] = defaultdict(list)
    for record in sessions.values():
        parent_id = record.columns["parent_session_id"]
        if parent_id is not None:
            children[parent_id].append(record.session_id)
        children[record.session_id].extend(
            ref.sub_session_id
            for ref in record.refs.values()
            if ref.location == "local" and ref.sub_session_id in sessions
        )
    found = {session_id: None}
    pending = [session_id]
    while pending:
        for child_id in children[pending.pop()]:
            if child_id not in found:
                found[child_id] = None
                pending.append(child_id)
    return list(found)


class MemorySessions(MemoryOperations):
    def create(self, new: NewSession) -> SessionState:
        with self._scope.lock:
            record = SessionRecord.new(new.session_id, new.encoded)
            record.columns["root_session_id"] = self._root_of(record)
            if self.exists(new.session_id):
                raise SessionExists(new.session_id)
            self._scope.sessions[new.session_id] = record
        return record.state()

    def _root_of(self, record: SessionRecord) -> str:
        parent_id = record.columns["parent_session_id"]
        if parent_id is None:
            return record.session_id
        return str(self._scope.require(parent_id).columns["root_session_id"] or parent_id)

    def exists(self, session_id: str) -> bool:
        return self._scope.find(session_id) is not None

    def load(self, session_id: str) -> SessionState | None:
        record = self._scope.find(session_id)
        return None if record is None else record.state()

    def save(self, session_id: str, encoded: EncodedState, guard: Guard) -> int:
        with self._scope.writing(session_id, guard) as draft:
            return draft.write_state(encoded)

    def delete(self, session_id: str, *, keep_usage: bool) -> int:
        with self._scope.lock:
            doomed = with_descendants(self._scope.sessions, session_id)
            for doomed_id in doomed:
                self._scope.forget(doomed_id, keep_usage=keep_usage)
        return len(doomed)

    def update_status(self, session_id: str, status: SessionStatus, failure_reason: str | None) -> int:
        with self._scope.writing(session_id) as draft:
            return draft.write(status=status.value, failure_reason=failure_reason)

    def compare_and_set_status(
        self,
        session_id: str,
        expected: frozenset[SessionStatus],
        status: SessionStatus,
        failure_reason: str | None,
        guard: Guard,
    ) -> StatusChange | StatusConflict:
        with self._scope.writing(session_id, guard) as draft:
            current = SessionStatus(draft.columns["status"])
            if current not in expected:
                return StatusConflict(current_status=current, current_version=draft.version)
            return StatusChange(new_version=draft.write(status=status.value, failure_reason=failure_reason))

    def increment(self, session_id: str, counter: CounterName) -> int:
        with self._scope.writing(session_id) as draft:
            count = validation.next_number(int(draft.columns[counter]), counter)
            draft.write(**{counter: count})
            return count

    def merge_custom_state(
        self, session_id: str, changes: Mapping[str, Any], array_replacements: frozenset[str], guard: Guard
    ) -> list[str]:
        with self._scope.writing(session_id, guard) as draft:
            if not changes:
                return []
            merged, warnings = merge_checked(decode(draft.payload), dict(changes), array_replacements)
            draft.payload = encode_custom_state(merged, draft.envelope, self._scope.limits)
            draft.write()
            return warnings

    def select(self, query: SessionQuery) -> tuple[list[SessionHead], int | None, bool]:
        with self._scope.lock:
            records = list(self._scope.sessions.values())
        page, total, has_more = select_records(records, query)
        return [record.head() for record in page], total if query.count else None, has_more


class MemoryPosts(MemoryOperations):
    def post(self, session_id: str, new: NewPost, most: int) -> Post:
        with self._scope.writing(session_id) as draft:
            earlier = _with_key(draft, new.key)
            if earlier is not None:
                if earlier.digest != new.digest:
                    raise IdempotencyConflict(str(new.key))
                return earlier.value()
            require_not_ended(session_id, draft.columns["status"])
            if len(_waiting(draft)) >= most:
                raise LimitExceeded(name="max_waiting_posts", limit=most, actual=most + 1)
            post = new.waiting(session_id, len(draft.posts) + 1, moments.now())
            stored = draft.posts[post.post_id] = StoredPost(post, new.text, new.digest)
            _set_next(draft)
        if stored.due_at <= post.posted_at:
            self._scope.announce(session_id, [session_posted], post_id=post.post_id, author=post.author)
        return stored.value()

    def select(self, session_id: str, *, states: Sequence[PostState], after: int, limit: int) -> list[Post]:
        posts = self._scope.require(session_id).posts.values()
        found = (each for each in posts if each.post.state in states and each.post.sequence > after)
        return [each.value() for each in islice(found, limit)]

    def withdraw(self, session_id: str, post_id: str) -> bool:
        with self._scope.writing(session_id) as draft:
            stored = draft.posts.get(post_id)
            if stored is None or stored.post.state != "waiting":
                return False
            draft.posts[post_id] = replace(stored, post=replace(stored.post, state="withdrawn"), text=None)
            _set_next(draft)
            return True

    def receive(self, session_id: str, limit: int | None, guard: Guard) -> list[str]:
        with self._scope.writing(session_id, guard) as draft:
            require_not_ended(session_id, draft.columns["status"])
            received = receive_due(draft, limit=limit)
            if received:
                draft.write()
            return [message.text for message in received]

    def due(self, limit: int) -> list[DuePost]:
        now = moments.now()
        found = []
        with self._scope.lock:
            for record in self._scope.sessions.values():
                due = [each for each in _waiting(record) if each.due_at <= now]
                if due and not self._is_busy(record):
                    found.append(DuePost(session_id=record.session_id, due_at=due[0].due_at, count=len(due)))
        return sorted(found, key=attrgetter("due_at", "session_id"))[:limit]

    def _is_busy(self, record: SessionRecord) -> bool:
        columns = record.columns
        return (
            columns["status"] in TERMINAL_STATUSES
            or waits_for_answer(columns["status"], columns["suspension_kind"], record.open_calls)
            or self._scope.is_locked(record.session_id)
        )


def receive_due(draft: SessionRecord, *, limit: int | None = None) -> list[EncodedMessage]:
    """Append the messages of due posts to a draft, mark these as received, and return the messages."""
    now = moments.now()
    due = [each for each in _waiting(draft) if each.due_at <= now][:limit]
    for position, each in enumerate(due, len(draft.messages)):
        post = replace(each.post, state="received", received_at=now, position=position)
        draft.posts[post.post_id] = replace(each, post=post, text=None)
    received = [received_message(each.text) for each in due if each.text is not None]
    draft.messages.extend(stored_messages(received, now))
    _set_next(draft)
    return received


def _waiting(record: SessionRecord) -> list[StoredPost]:
    """The waiting posts, in the order in which they are received."""
    waiting = [each for each in record.posts.values() if each.post.state == "waiting"]
    return sorted(waiting, key=lambda each: (each.due_at, each.post.sequence))


def _set_next(draft: SessionRecord) -> None:
    waiting = _waiting(draft)
    draft.columns["next_post_at"] = waiting[0].due_at if waiting else None


def _with_key(record: SessionRecord, key: str | None) -> StoredPost | None:
    if key is None:
        return None
    return next((each for each in record.posts.values() if each.post.key == key), None)


class MemoryMessages(MemoryOperations):
    def append(self, session_id: str, messages: Sequence[EncodedMessage], guard: Guard) -> int:
        with self._scope.writing(session_id, guard) as draft:
            if messages:
                draft.messages.extend(stored_messages(messages, moments.now()))
                draft.write()
            return len(draft.messages)

    def page(
        self, session_id: str, *, offset: int, limit: int | None, descending: bool
    ) -> tuple[list[str], int]:
        messages = self._scope.require(session_id).messages
        total = len(messages)
        first = min(offset, total)
        end = total if limit is None else min(first + limit, total)
        page = messages[total - end : total - first][::-1] if descending else messages[first:end]
        return [message.text for message in page], total

    def pages(self, session_id: str, size: int) -> Iterator[list[str]]:
        sequence = 0
        while (record := self._scope.find(session_id)) is not None:
            page = record.messages[sequence : sequence + size]
            if not page:
                return
            sequence += len(page)
            yield [message.text for message in page]

    def count(self, session_id: str) -> int:
        return len(self._scope.require(session_id).messages)

    def truncate(self, session_id: str, keep: int, guard: Guard) -> int:
        with self._scope.writing(session_id, guard) as draft:
            if keep >= len(draft.messages):
                return draft.version
            del draft.messages[keep:]
            draft.checkpoints = {
                checkpoint_id: checkpoint
                for checkpoint_id, checkpoint in draft.checkpoints.items()
                if checkpoint.head.message_count <= keep
            }
            if draft.newest_step is not None and draft.newest_step.message_count > keep:
                latest = draft.latest_checkpoint
                draft.newest_step = None if latest is None else latest.head
            return draft.write()


class MemorySteps(MemoryOperations):
    def enter(self, session_id: str) -> TurnEntry | None:
        record = self._scope.find(session_id)
        if record is None:
            return None
        state = record.state()
        newest = next(reversed(record.runs.values()), None)
        return TurnEntry(
            state,
            record.is_at_rest,
            None if newest is None else newest.value(),
        )

    def stage(self, session_id: str, step_id: str, tool_call_id: str, text: str) -> None:
        with self._scope.writing(session_id) as draft:
            draft.staged[step_id, tool_call_id] = text

    def staged(self, session_id: str, step_id: str) -> list[StagedChanges]:
        return staged_changes(self._scope.require(session_id), step_id)

    def promote(self, session_id: str, step_id: str, guard: Guard) -> int:
        with self._scope.writing(session_id, guard) as draft:
            staged = staged_changes(draft, step_id)
            if not staged:
                return draft.version
            limits = self._scope.limits
            promoted = promote_staged(decode(draft.payload), staged, limits=limits)
            draft.payload = encode_custom_state(promoted, draft.envelope, limits)
            discard_staged(draft, step_id)
            return draft.write()

    def discard(self, session_id: str, step_id: str) -> int:
        with self._scope.writing(session_id) as draft:
            return discard_staged(draft, step_id)

    def commit(self, step: StepWrite) -> StepCommit:
        with self._scope.writing(step.session_id) as draft:
            earlier = _earlier_commit(draft, step)
            if earlier is not None:
                return earlier
            staged = staged_changes(draft, step.info.step_id)
            if step.staged:
                step.require_staged(staged)
            self._scope.check_guard(draft, step.guard)
            step.check_refusal()
            return _apply(draft, step, staged)


def staged_changes(record: SessionRecord, step_id: str) -> list[StagedChanges]:
    """Return the changes staged for a step, in staging order."""
    return decode_staged(
        text for (staged_step_id, _), text in record.staged.items() if staged_step_id == step_id
    )


def discard_staged(draft: SessionRecord, step_id: str) -> int:
    """Delete the changes staged for a step and return their number."""
    kept = {key: text for key, text in draft.staged.items() if key[0] != step_id}
    dropped = len(draft.staged) - len(kept)
    draft.staged = kept
    return dropped


def _earlier_commit(record: SessionRecord, step: StepWrite) -> StepCommit | None:
    """Return the result of an earlier commit with the same operation id, if there is one."""
    if step.operation_id is None:
        return None
    operation = record.operations.get(step.operation_id)
    if operation is None:
        return None
    if operation.digest != step.digest():
        raise IdempotencyConflict(step.operation_id)
    return replace(operation.commit, received=decode_messages(operation.received))


def _apply(draft: SessionRecord, step: StepWrite, staged: Sequence[StagedChanges]) -> StepCommit:
    if step.run_id is not None and step.run_id not in draft.runs:
        raise RunNotFound(step.run_id)
    now = moments.now()
    is_due = draft.columns["next_post_at"] is not None and draft.columns["next_post_at"] <= now
    state, encoded = step.stored_state(has_due_posts=is_due and step.receives)
    encoded = step.promote(staged, state, encoded)
    if step.uses:
        usable = {each.asking for each in draft.decisions if each.is_final and each.used_at is None}
        if not usable.issuperset(step.uses):
            raise ended_approval()
        draft.decisions = _used_decisions(draft, step.uses, used_by_step=step.info.step_id)
        draft.columns["live_decisions"] = without_used(draft.columns["live_decisions"], step.uses)
    discard_staged(draft, step.info.step_id)
    draft.messages.extend(stored_messages(step.encoded_messages, now))
    received: list[str] = []
    newest_first = (decode_messages([stored.text])[0] for stored in reversed(draft.messages))
    if is_due and step.receives and not has_open_calls(newest_first):
        received = [message.text for message in receive_due(draft)]
    new_version = draft.write_state(encoded)
    head = CheckpointHead(
        checkpoint_id=step.checkpoint_id,
        session_id=step.session_id,
        run_id=step.run_id,
        step_id=step.info.step_id,
        step_count=step.info.step_count,
        status=SessionStatus(draft.columns["status"]),
        message_count=len(draft.messages),
        stream_sequence=step.info.stream_sequence,
        created_at=draft.columns["updated_at"],
    )
    draft.checkpoints[step.checkpoint_id] = StoredCheckpoint(head, new_version, encoded)
    draft.newest_step = head
    if step.keep is not None:
        draft.keep_checkpoints(step.keep)
    commit = StepCommit(step.checkpoint_id, new_version)
    if step.operation_id is not None:
        draft.operations[step.operation_id] = StoredOperation(step.digest(), commit, received)
    return replace(commit, received=decode_messages(received))


class MemoryCheckpoints(MemoryOperations):
    def get(self, session_id: str, checkpoint_id: str) -> Checkpoint | None:
        record = self._scope.find(session_id)
        return None if record is None else _value(record, record.checkpoints.get(checkpoint_id))

    def latest(self, session_id: str) -> Checkpoint | None:
        record = self._scope.find(session_id)
        return None if record is None else _value(record, record.latest_checkpoint)

    def select(
        self, session_id: str, *, limit: int, before_version: int | None
    ) -> tuple[list[CheckpointHead], int, int | None]:
        checkpoints = self._scope.require(session_id).checkpoints
        older = (
            checkpoint
            for checkpoint in reversed(checkpoints.values())
            if before_version is None or checkpoint.version < before_version
        )
        page = list(islice(older, limit))
        more_follow = next(older, None) is not None
        return (
            [checkpoint.head for checkpoint in page],
            len(checkpoints),
            page[-1].version if more_follow else None,
        )

    def restore(self, session_id: str, checkpoint_id: str, guard: Guard) -> int:
        with self._scope.writing(session_id, guard) as draft:
            target = _required(draft, checkpoint_id)
            del draft.messages[target.head.message_count :]
            draft.checkpoints = {
                kept_id: checkpoint
                for kept_id, checkpoint in draft.checkpoints.items()
                if checkpoint.version <= target.version
            }
            draft.newest_step = target.head
            draft.staged.clear()
            before = waiting_calls(draft.columns)
            version = draft.write_state(target.encoded)
            opened = opened_calls(before, waiting_calls(draft.columns), draft.decisions)
        self._scope.announce_waiting(session_id, _tree_of(draft), opened)
        return version

    def branch(self, request: BranchRequest) -> SessionState:
        with self._scope.lock:
            source = self._scope.require(request.session_id)
            state, boundary = _branching_point(source, request)
            if self._scope.find(request.new_session_id) is not None:
                raise SessionExists(request.new_session_id)
            branched = branched_state(state, new_session_id=request.new_session_id, title=request.title)
            decided = {each.tool_call_id for each in source.decisions}
            branched.completed_client_tool_calls = approvals_in_branch(
                branched.completed_client_tool_calls, decided
            )
            record = SessionRecord.new(request.new_session_id, encode_state(branched, AS_STORED))
            record.messages = source.messages[:boundary]
            record.columns["message_count"] = boundary
            self._scope.sessions[request.new_session_id] = record
        return record.state()

    def delete(self, session_id: str, checkpoint_id: str) -> bool:
        with self._scope.writing(session_id) as draft:
            return draft.checkpoints.pop(checkpoint_id, None) is not None

    def prune(self, session_id: str, keep: int) -> int:
        with self._scope.writing(session_id) as draft:
            return draft.keep_checkpoints(keep)


def _value(record: SessionRecord, checkpoint: StoredCheckpoint | None) -> Checkpoint | None:
    return None if checkpoint is None else checkpoint.value(record.columns["created_at"])


def _required(record: SessionRecord, checkpoint_id: str) -> StoredCheckpoint:
    checkpoint = record.checkpoints.get(checkpoint_id)
    if checkpoint is None:
        raise CheckpointNotFound(checkpoint_id)
    return checkpoint


def _branching_point(source: SessionRecord, request: BranchRequest) -> tuple[SessionState, int]:
    """Return the state to branch from, and the number of messages to copy."""
    boundary = len(source.messages) if request.message_index is None else request.message_index
    if boundary > len(source.messages):
        raise InvalidQuery("message_index is beyond the end of the history.", path="message_index")
    if request.checkpoint_id is None:
        newest_first = reversed(source.checkpoints.values())
        checkpoint = next((each for each in newest_first if each.head.message_count <= boundary), None)
    else:
        checkpoint = _required(source, request.checkpoint_id)
    if checkpoint is None:
        return source.state(), boundary
    if request.message_index is None:
        boundary = checkpoint.head.message_count
    return checkpoint.state(source.columns["created_at"]), boundary


class MemoryRuns(MemoryOperations):
    def start_run(
        self,
        session_id: str,
        run_id: str,
        *,
        start_sequence: int,
        supersede: bool,
        guard: Guard,
        keeps_status: bool,
    ) -> tuple[Run, str | None]:
        with self._scope.writing(session_id, guard) as draft:
            if run_id in draft.runs:
                raise taken_run(run_id)
            running = draft.running_run
            if running is not None:
                check_supersedes(
                    running.fencing_token, supersede=supersede, fencing_token=guard.fencing_token
                )
                draft.runs[running.run.run_id] = _updated(
                    running, RunUpdate(RunStatus.INTERRUPTED, completion_reason=SUPERSEDED)
                )
            started = Run(
                run_id=run_id,
                session_id=session_id,
                turn=len(draft.runs) + 1,
                status=RunStatus.RUNNING,
                step_count=0,
                start_sequence=start_sequence,
                started_at=moments.now(),
                build=conf.build(),
            )
            draft.runs[run_id] = StoredRun(started, guard.fencing_token)
            draft.interrupt = None
            if draft.columns["status"] != SessionStatus.ACTIVE and not keeps_status:
                draft.write(status=SessionStatus.ACTIVE.value)
            return started, None if running is None else running.run.run_id

    def update_run(self, session_id: str, run_id: str, update: RunUpdate, guard: Guard) -> Run:
        with self._scope.writing(session_id, guard) as draft:
            stored = draft.runs.get(run_id)
            if stored is None:
                raise RunNotFound(run_id)
            check_not_superseded(run_id, stored.run.completion_reason, guard)
            if update.status is RunStatus.RUNNING and not stored.is_running:
                check_no_other_runs(draft.running_run_id, run_id)
                check_may_run(run_id, stored.run.status, stored.run.completion_reason)
                draft.interrupt = None
            updated = draft.runs[run_id] = _updated(stored, update)
            return updated.value()

    def current_run(self, session_id: str) -> Run | None:
        running = self._scope.require(session_id).running_run
        return None if running is None else running.value()

    def select_runs(self, session_id: str, *, limit: int, offset: int) -> list[Run]:
        runs = self._scope.require(session_id).runs
        return [stored.value() for stored in list(reversed(runs.values()))[offset : offset + limit]]

    def add_refs(self, session_id: str, refs: Sequence[EncodedRef]) -> None:
        with self._scope.writing(session_id) as draft:
            for ref in refs:
                check_same_ref(draft.refs.setdefault(ref.sub_session_id, ref), ref)

    def update_ref(self, session_id: str, sub_session_id: str, changes: Mapping[str, str]) -> SubSessionRef:
        with self._scope.writing(session_id) as draft:
            ref = draft.refs.get(sub_session_id)
            if ref is None:
                raise unknown_ref(sub_session_id)
            updated = draft.refs[sub_session_id] = replace(ref, **changes)
            return sub_session_ref_from(updated)

    def select_refs(self, session_id: str) -> list[SubSessionRef]:
        return [sub_session_ref_from(ref) for ref in self._scope.require(session_id).refs.values()]

    def request_interrupt(
        self, session_id: str, kind: InterruptKind, reason: str | None, run_id: str | None
    ) -> InterruptRequest:
        with self._scope.writing(session_id) as draft:
            if run_id is None:
                run_id = draft.running_run_id
            elif run_id not in draft.runs:
                raise RunNotFound(run_id)
            else:
                check_interruptible(run_id, draft.runs[run_id].run.status)
            wanted = InterruptRequest(
                session_id=session_id, kind=kind, reason=reason, run_id=run_id, requested_at=moments.now()
            )
            draft.interrupt = kept = request_to_keep(draft.pending_interrupt, wanted)
            return kept

    def check_interrupt(self, session_id: str, run_id: str | None) -> InterruptRequest | None:
        pending = self._scope.require(session_id).pending_interrupt
        return pending if pending is not None and is_bound_to(pending, run_id) else None

    def clear_interrupt(self, session_id: str) -> bool:
        with self._scope.writing(session_id) as draft:
            was_pending = draft.pending_interrupt is not None
            draft.interrupt = None
            return was_pending


def _updated(stored: StoredRun, update: RunUpdate) -> StoredRun:
    """Return the run after the update; ``None`` leaves a field unchanged."""
    run = stored.run
    return replace(
        stored,
        run=replace(
            run,
            status=update.status,
            step_count=run.step_count if update.step_count is None else update.step_count,
            completion_reason=(
                run.completion_reason if update.completion_reason is None else update.completion_reason
            ),
            ended_at=end_of_run(update.status, run.ended_at, moments.now()),
            build=conf.build() if update.status is RunStatus.RUNNING else run.build,
        ),
        error=stored.error if update.error is None else update.error,
        refused_usd=stored.refused_usd if update.refused_usd is None else update.refused_usd,
        refused_tokens=stored.refused_tokens if update.refused_tokens is None else update.refused_tokens,
    )


class MemoryWaiting(MemoryOperations):
    def add_calls(
        self, session_id: str, calls: Mapping[str, dict[str, Any]], owner_id: str, guard: Guard
    ) -> None:
        with self._scope.lock:
            tree = _tree_of(self._scope.require(session_id))
            if _tree_of(self._scope.require(owner_id)) != tree:
                raise ConflictError(
                    "The owner of the calls is in another tree; choose a session of the same tree."
                )
            self._scope.check_guard(self._scope.require(session_id), guard)
            with self._scope.writing(owner_id) as owner:
                columns, opened = _asked_columns(self._scope, owner, calls)
                if columns:
                    owner.write(**columns)
        self._scope.announce_waiting(owner_id, tree, opened)

    def submit_answer(
        self, session_id: str, tool_call_id: str, answer: Answer, *, submitted_at: int
    ) -> Submission:
        with self._scope.lock:
            owner_id = self._owner_of(session_id, tool_call_id)
            tree = _tree_of(self._scope.require(session_id))
            found = self._scope.find(owner_id)
            if found is None or _tree_of(found) != tree:
                return Submission(outcome=SubmissionOutcome.UNKNOWN_TOOL_CALL, tool_call_id=tool_call_id)
            with self._scope.writing(owner_id) as owner:
                calls = ToolCalls.of(owner.columns)
                outcome = calls.answer(
                    tool_call_id,
                    answer,
                    submitted_at=submitted_at,
                    status=owner.columns["status"],
                    version=owner.version + 1,
                    decisions=owner.decisions,
                )
                version = None
                if outcome in STORED_ANSWERS:
                    if calls.decision is not None:
                        owner.decisions.append(calls.decision)
                    version = owner.write(**calls.columns(answer.limits, owner.decisions))
        if version is not None and calls.is_answered(owner.decisions):
            self._scope.announce(owner_id, [session_answered])
        return Submission(
            outcome=outcome,
            tool_call_id=tool_call_id,
            session_id=None if outcome is SubmissionOutcome.UNKNOWN_TOOL_CALL else owner_id,
            new_version=version,
        )

    def approved_call(self, session_id: str, tool_call_id: str) -> tuple[int, int, ApprovedCall]:
        record = self._scope.require(session_id)
        is_own = may_be_own(record.columns, session_id, tool_call_id)
        asking, call = ToolCalls.of(record.columns).approved_call(
            tool_call_id, _decisions(record, tool_call_id), is_own=is_own
        )
        return record.version, asking, call

    def decisions(self, session_id: str, tool_call_ids: Collection[str]) -> list[StoredDecision]:
        record = self._scope.find(session_id)
        return [] if record is None else [each for each in record.decisions if each.is_final]

    def unknown_permissions(self, names: Sequence[str]) -> list[str]:
        """Return no name: there are no stored permissions in memory."""
        return []

    def take_answers(self, session_id: str, guard: Guard) -> dict[str, Any]:
        with self._scope.writing(session_id, guard) as draft:
            calls = ToolCalls.of(draft.columns)
            taken = calls.take_given(draft.decisions)
            if taken:
                draft.write(**calls.columns(self._scope.limits, draft.decisions))
            return taken

    def overdue_calls(self, now: datetime | None, limit: int) -> list[PendingToolCall]:
        now_milliseconds = datetime_to_milliseconds(moments.now() if now is None else now)
        with self._scope.lock:
            records = list(self._scope.sessions.values())
        calls = [
            call
            for record in records
            if not SessionStatus(record.columns["status"]).is_terminal
            for call in due_calls(
                record.session_id,
                readable_overdue(record.session_id, *_pending(record), now_milliseconds).open(
                    record.decisions
                ),
            )
        ]
        return sorted(calls, key=attrgetter("deadline", "session_id", "tool_call_id"))[:limit]

    def due_calls(self, session_id: str, now: datetime) -> list[PendingToolCall]:
        record = self._scope.find(session_id)
        if record is None:
            return []
        overdue = overdue_in(*_pending(record), datetime_to_milliseconds(now))
        return due_calls(session_id, overdue.open(record.decisions))

    def _owner_of(self, session_id: str, tool_call_id: str) -> str:
        """Return the call's owner according to the root; by default the session itself is the owner."""
        own = self._scope.require(session_id)
        root = self._scope.find(_tree_of(own)) or own
        return owner_of(root.columns["client_tool_call_ownership"], tool_call_id) or session_id

    def suspend(self, session_id: str, suspension: Suspension, guard: Guard) -> int:
        with self._scope.writing(session_id, guard) as draft:
            suspension.require_allowed(draft.columns["status"])
            columns, opened = dict(suspension.columns), list[str]()
            if suspension.calls:
                asked, opened = _asked_columns(self._scope, draft, suspension.calls)
                columns |= asked
            running = draft.running_run
            if running is not None:
                ended = replace(running.run, status=RunStatus(suspension.kind), ended_at=moments.now())
                draft.runs[ended.run_id] = replace(running, run=ended)
            version = draft.write(**columns)
        calls = suspension.waits_for(*_pending(draft))
        if calls is not None and calls.is_answered(draft.decisions):
            self._scope.announce(session_id, [session_answered])
        self._scope.announce_waiting(session_id, _tree_of(draft), opened)
        return version

    def resume(self, session_id: str, guard: Guard) -> SessionState:
        with self._scope.writing(session_id) as draft:
            self._scope.check_fence(session_id, guard)
            # Check this before the version: the loser of two resumes gets ConflictError, not StaleStateError.
            require_suspended(draft.columns)
            guard.check_version(draft.version)
            state = draft.state()
            count = validation.next_number(state.resume_count, "resume_count")
            version = draft.write(resume_count=count, **RESUMED_COLUMNS)
            return resumed_state(state, version=version, at=draft.columns["updated_at"])


def _used_decisions(draft: SessionRecord, askings: Collection[int], **used_by: Any) -> list[StoredDecision]:
    """Return the decisions, of which the final ones about these askings are used now."""
    now = moments.now()
    return [
        each._replace(used_at=now, **used_by) if each.asking in askings and each.is_final else each
        for each in draft.decisions
    ]


def _pending(record: SessionRecord) -> tuple[str | None, Any]:
    return record.columns["pending_client_tool_calls"], record.columns["live_decisions"]


def _decisions(record: SessionRecord, tool_call_id: str) -> list[StoredDecision]:
    return [each for each in record.decisions if each.tool_call_id == tool_call_id]


def _asked_columns(
    scope: TenantScope, owner: SessionRecord, calls: Mapping[str, dict[str, Any]]
) -> tuple[dict[str, Any], list[str]]:
    """Return the columns that new calls change in their owner's draft, and the ids of these calls.

    Write the record on its root. If the root does not exist, the session holds the record itself. The lock
    must be held.
    """
    columns: dict[str, Any] = {}
    asked = ToolCalls.of(owner.columns)
    opened = asked.add(calls)
    if opened:
        columns = asked.columns(scope.limits, owner.decisions)
    root_id = _tree_of(owner)
    root = owner if root_id == owner.session_id else scope.find(root_id) or owner
    ownership = root.columns["client_tool_call_ownership"]
    record = claimed_ownership(ownership, calls, owner.session_id, scope.limits)
    if record is not None and root is owner:
        columns["client_tool_call_ownership"] = record
    elif record is not None:
        with scope.writing(root_id) as draft:
            # The version stays the same: a running step of the root has read nothing that changes.
            draft.columns["client_tool_call_ownership"] = record
    return columns, opened


def _tree_of(record: SessionRecord) -> str:
    return record.columns["root_session_id"] or record.session_id


def _require_attempt(record: SessionRecord, intent: Intent) -> None:
    request = record.interrupt
    asked = (None, None, None) if request is None else (request.kind, request.reason, request.run_id)
    require_attempt(intent, record.columns["status"], *asked)


class MemoryEffects(MemoryOperations):
    def enter(self, session_id: str, intent: Intent, guard: Guard) -> Entered:
        with self._scope.writing(session_id, guard) as draft:
            known = self._known(draft, intent.effect_id)
            calls = ToolCalls.of(draft.columns)
            decisions = _decisions(draft, intent.effect_id)
            is_own = may_be_own(draft.columns, session_id, intent.effect_id)
            if intent.call is not None and (known is None or not known.needs_approval):
                require_no_approval(intent.effect_id, calls, has_decisions=bool(decisions))
            if known is not None:
                outcome, known = entered_known(known, intent, calls, decisions, is_own=is_own)
                if outcome is Outcome.BEGUN:
                    _require_attempt(draft, intent)
                    known = started_again(known, intent, token=guard.fencing_token, at=moments.now())
                    draft.effects[intent.effect_id] = known
                return Entered(outcome, known)
            _require_attempt(draft, intent)
            if len(draft.effects) >= self._scope.limits.max_effects:
                raise too_many(self._scope.limits.max_effects)
            given, approved = intent.call, None
            if given is None:
                asking, approved = calls.approved_call(intent.effect_id, decisions, is_own=is_own)
                given = approved_text(approved)
                draft.decisions = _used_decisions(draft, {asking}, used_by_effect=intent.effect_id)
                draft.columns["live_decisions"] = without_used(draft.columns["live_decisions"], [asking])
            sequence, token = len(draft.effects) + 1, guard.fencing_token
            new = new_effect(
                session_id, intent, given, approved, sequence=sequence, token=token, at=moments.now()
            )
            draft.effects[intent.effect_id] = new
            return Entered(Outcome.BEGUN, new)

    def end(self, session_id: str, end: End, guard: Guard) -> None:
        of = end.of

        def stored() -> StoredEffect | None:
            return self._scope.require(session_id).effects.get(of.effect_id)

        with ending(of, stored), self._scope.writing(session_id, guard) as draft:
            if not of.is_same_attempt(stored()):
                raise not_current(of.effect_id)
            draft.effects[of.effect_id] = draft.effects[of.effect_id]._replace(
                state=end.state, result=end.result, error=end.error, ended_at=moments.now()
            )

    def settle(self, session_id: str, settlement: Settlement) -> bool:
        effect_id = settlement.effect_id
        with self._scope.writing(session_id) as draft:
            stored = self._known(draft, effect_id)
            if stored is None:
                raise unknown_effect(effect_id)
            if not settlement.decides(stored):
                return False
            draft.effects[effect_id] = settlement.settled(stored, at=moments.now())
            is_last = not any(each.state in ("started", "unknown") for each in draft.effects.values())
            columns = draft.columns
            goes_on = is_last and can_go_on(columns["status"], columns["suspension_kind"], draft.open_calls)
        if goes_on:
            self._scope.announce(session_id, [session_answered])
        return True

    def select(self, session_id: str, *, states: Sequence[str], after: int, limit: int) -> list[Effect]:
        found = (
            self._as_known(each)
            for each in self._scope.require(session_id).effects.values()
            if each.sequence > after
        )
        return [
            each.value(self._scope.tenant)
            for each in islice((each for each in found if each.state_as_read in states), limit)
        ]

    def unknown(self, limit: int) -> list[Effect]:
        with self._scope.lock:
            records = list(self._scope.sessions.values())
        found = [self._as_known(each) for record in records for each in record.effects.values()]
        unknown = [each for each in found if each.state_as_read == "unknown"]
        oldest_first = sorted(unknown, key=attrgetter("started_at", "session_id", "sequence"))
        return [each.value(self._scope.tenant) for each in oldest_first[:limit]]

    def _known(self, record: SessionRecord, effect_id: str) -> StoredEffect | None:
        stored = record.effects.get(effect_id)
        return None if stored is None else self._as_known(stored)

    def _as_known(self, stored: StoredEffect) -> StoredEffect:
        return stored._replace(is_held=self._scope.is_held(stored.session_id, stored.fencing_token))
