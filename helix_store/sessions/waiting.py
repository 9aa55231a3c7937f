"""Pending tool calls, suspension and resumption: their rules, then their storage in the database."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from itertools import chain
from operator import attrgetter
from typing import Any, Final, NamedTuple

from django.apps import apps
from django.db.models import FilteredRelation, Q

from helix_store.core import moments, validation
from helix_store.core.approvals import ApprovedCall
from helix_store.core.types import (
    STORED_ANSWERS,
    PendingToolCall,
    RunStatus,
    SessionState,
    SessionStatus,
    Submission,
    SubmissionOutcome,
)
from helix_store.core.validation import Guard, datetime_to_milliseconds
from helix_store.engine.database import Database, DatabaseOperations, Rows, reads, writes
from helix_store.engine.expressions import NoIndexHint, after_keyset, insert_row, update_row, with_keys
from helix_store.exceptions import ConflictError, IntegrityFault, SessionNotFound
from helix_store.locks import hold_fence
from helix_store.models import Decision, Run, Session
from helix_store.sessions.locking import (
    advance,
    check_guard,
    first_row,
    lock_known_session,
    lock_root_with_call,
    lock_session,
    lock_sessions_of_tree,
    missing_session,
    pk_of,
    root_of,
    session_with_id,
    sessions_with_ids,
)
from helix_store.sessions.state import SUSPENSION_FIELDS, current_from, set_loaded
from helix_store.sessions.statements import CURRENT_COLUMNS, OWNERSHIP
from helix_store.sessions.tool_calls import (
    Answer,
    StoredDecision,
    ToolCalls,
    claimed_ownership,
    due_calls,
    may_be_own,
    overdue_in,
    owner_of,
    readable_overdue,
)
from helix_store.signals import announce, session_answered, session_waiting

_RESUMABLE: Final = frozenset({SessionStatus.PAUSED, SessionStatus.INTERRUPTED})


RESUMED_COLUMNS: Final[dict[str, Any]] = {
    "status": SessionStatus.ACTIVE.value,
    **dict.fromkeys(SUSPENSION_FIELDS),
    "expires_at": None,
}
"""The columns that a resume writes. The expiry was the suspension's and must not end an active session."""


@dataclass(frozen=True, slots=True)
class Suspension:
    """A checked suspension: The ``columns`` of the head, and the calls that the same write adds."""

    columns: dict[str, Any]
    calls: dict[str, dict[str, Any]]

    @property
    def kind(self) -> str:
        return str(self.columns["suspension_kind"])

    def waits_for(self, pending: str | None, live: Any) -> ToolCalls | None:
        """Return the session's calls if it waits for them. They may have been answered before."""
        waits = self.kind == RunStatus.SUSPENDED_CLIENT_TOOL
        return ToolCalls.stored(pending, None, live) if waits else None

    def require_allowed(self, status: str) -> None:
        """Raise `ConflictError` if the session has ended: `resume` would make it active again."""
        if SessionStatus(status).is_terminal:
            raise ConflictError(
                f"The session is {status} and cannot be suspended; start a new session or branch this one."
            )


def require_suspended(columns: Mapping[str, Any]) -> None:
    """Raise `ConflictError` unless the session is paused or interrupted and has a continuation."""
    has_continuation = any(
        columns[name] is not None
        for name in (
            "suspension_kind",
            "suspension_context",
            "suspended_awaiting_children",
            "suspended_step_id",
        )
    )
    if not has_continuation or columns["status"] not in _RESUMABLE:
        raise ConflictError(
            "The session is not suspended: it was resumed, has ended or was never suspended; load its state."
        )


def resumed_state(state: SessionState, *, version: int, at: datetime) -> SessionState:
    """Return the state after resuming, including the continuation that the store cleared and a save omits."""
    state.status = SessionStatus.ACTIVE
    state.resume_count += 1
    state.expires_at = None
    state.version = version
    state.updated_at = at
    cleared = {name: getattr(state, name) for name in SUSPENSION_FIELDS}
    set_loaded(state, cleared=cleared)
    return state


_CALL_COLUMNS: Final = (
    "pending_client_tool_calls",
    "completed_client_tool_calls",
    "client_tool_call_ownership",
    "live_decisions",
)
_PENDING: Final = ("pending_client_tool_calls", "live_decisions")
_DECISION_COLUMNS: Final = StoredDecision._fields
_OF_CALL: Final = tuple(f"decision__{name}" for name in _DECISION_COLUMNS)


def decisions_about(db: Database, claimed: Mapping[int, Collection[str]]) -> dict[int, list[StoredDecision]]:
    """Return the final decisions about calls of sessions by key, inside a query or transaction.

    This takes one statement, or none without calls. What was approved can be long, and is left out.
    """
    decisions: dict[int, list[StoredDecision]] = {key: [] for key in claimed}
    keys = [key for key, of_session in claimed.items() if of_session]
    if keys:
        rows = with_keys(db, Decision.objects.using(db.alias), "session", keys)
        for key, decision in _final_decisions(db, rows, {*chain(*claimed.values())}):
            decisions[key].append(decision)
    return decisions


def _final_decisions(
    db: Database, rows: Any, tool_call_ids: Iterable[str]
) -> Iterator[tuple[int, StoredDecision]]:
    """Yield the final ones of these decisions about calls, with the keys of their sessions."""
    final = rows.filter(is_final=True).order_by()
    final = with_keys(db, final, "tool_call_id", sorted(tool_call_ids), column_type="text")
    columns = [name for name in _DECISION_COLUMNS if name != "content"]
    for key, *row in final.values_list("session_id", *columns):
        yield key, StoredDecision(content=None, **dict(zip(columns, row, strict=True)))


def decisions_of(db: Database, key: int, claimed: Collection[str]) -> list[StoredDecision]:
    """Return the `decisions_about` the calls of one session."""
    return decisions_about(db, {key: claimed})[key]


def open_calls(db: Database, sessions: Mapping[int, ToolCalls]) -> dict[int, dict[str, dict[str, Any]]]:
    """Return the calls of sessions, by key, that somebody still has to answer.

    This takes one statement if a state holds an answer that may be the agent's own, otherwise none.
    """
    claimed = {key: ids for key, calls in sessions.items() if (ids := list(calls.claimed))}
    decisions = db.query(partial(decisions_about, db, claimed)) if claimed else {}
    return {key: calls.open(decisions.get(key, ())) for key, calls in sessions.items()}


def readable_open_calls(
    db: Database, columns: Mapping[int, tuple[str | None, Any]]
) -> dict[int, dict[str, dict[str, Any]] | None]:
    """Return the `open_calls` of sessions, given their pending calls and live decisions by key.

    The value is ``None`` for calls that cannot be read.
    """
    sessions = {}
    for key, (pending, live) in columns.items():
        with suppress(IntegrityFault):
            sessions[key] = ToolCalls.stored(pending, None, live)
    return {**dict.fromkeys(columns), **open_calls(db, sessions)}


class KnownCalls(NamedTuple):
    """The calls of a session in one of its versions, and those of them that somebody still has to answer."""

    version: int
    calls: ToolCalls
    open: dict[str, dict[str, Any]]


def calls_of(db: Database, session_id: str) -> KnownCalls:
    """Return the calls of a session.

    This takes one statement more than `open_calls`. Raises `SessionNotFound` and `IntegrityFault`.
    """
    columns = ("pk", "version", "pending_client_tool_calls", "completed_client_tool_calls", "live_decisions")
    row = db.query(lambda: session_with_id(db, session_id).values_list(*columns).first())
    if row is None:
        raise SessionNotFound(session_id)
    key, version, *texts = row
    calls = ToolCalls.stored(*texts)
    return KnownCalls(version, calls, open_calls(db, {key: calls})[key])


class DatabaseWaiting(DatabaseOperations):
    @writes
    def add_calls(
        self, session_id: str, calls: Mapping[str, dict[str, Any]], owner_id: str, guard: Guard
    ) -> None:
        """Add pending calls to the owner, and record the owner on the root of both sessions.

        The guard's fence belongs to ``session_id``.
        """
        rows = sessions_with_ids(self.db, {session_id, owner_id}).only("session_id", "root_session_id")
        trees = {head.session_id: head.root_session_id or head.session_id for head in rows}
        for unknown_id in sorted({session_id, owner_id} - trees.keys()):
            raise missing_session(self.db, unknown_id)
        root_id = trees[session_id]
        if trees[owner_id] != root_id:
            raise ConflictError(
                "The owner of the calls is in another tree; choose a session of the same tree."
            )
        locked = lock_sessions_of_tree(self.db, {owner_id, root_id}, *_CALL_COLUMNS)
        owner = locked.get(owner_id)
        if owner is None:
            raise missing_session(self.db, owner_id)
        hold_fence(self.db, session_id, guard)
        columns = _asked_columns(self.db, owner, calls, locked.get(root_id))
        if columns:
            advance(self.db, owner, **columns)

    @writes
    def submit_answer(
        self, session_id: str, tool_call_id: str, answer: Answer, *, submitted_at: int
    ) -> Submission:
        owner_id = session_id
        # Nearly always, which saves a statement.
        owner = lock_root_with_call(self.db, session_id, tool_call_id, *_CALL_COLUMNS)
        if owner is None:
            owner_id, root_id = self._owner_of(session_id, tool_call_id)
            owner = lock_known_session(self.db, owner_id, None, *_CALL_COLUMNS)
            if owner is None or (owner.root_session_id or owner_id) != root_id:
                return Submission(outcome=SubmissionOutcome.UNKNOWN_TOOL_CALL, tool_call_id=tool_call_id)
        calls = ToolCalls.of(vars(owner))
        decisions = decisions_of(self.db, owner.pk, calls.claimed)
        outcome = calls.answer(
            tool_call_id,
            answer,
            submitted_at=submitted_at,
            status=owner.status,
            version=owner.version + 1,
            decisions=decisions,
        )
        version = None
        if outcome in STORED_ANSWERS:
            if calls.decision is not None:
                insert_row(self.db, Decision, {"session_id": owner.pk, **calls.decision._asdict()})
            version = advance(self.db, owner, **calls.columns(answer.limits, decisions))
            if calls.is_answered(decisions):
                announce(self.db, owner_id, [session_answered])
        return Submission(
            outcome=outcome,
            tool_call_id=tool_call_id,
            session_id=None if outcome is SubmissionOutcome.UNKNOWN_TOOL_CALL else owner_id,
            new_version=version,
        )

    @reads
    def approved_call(self, session_id: str, tool_call_id: str) -> tuple[int, int, ApprovedCall]:
        """Return the version of the session, the asking and the approved call, from one statement."""
        of_call = FilteredRelation("decisions", condition=Q(decisions__tool_call_id=tool_call_id))
        columns = ("version", "root_session_id", *_CALL_COLUMNS)
        rows = (
            session_with_id(self.db, session_id)
            .alias(decision=of_call)
            .order_by("decision__version")
            .values_list(*columns, *_OF_CALL)
        )
        found = list(rows)
        if not found:
            raise missing_session(self.db, session_id)
        row = dict(zip(columns, found[0], strict=False))
        decisions = [
            StoredDecision(*each[len(columns) :]) for each in found if each[-1 * len(_OF_CALL)] is not None
        ]
        is_own = may_be_own(row, session_id, tool_call_id)
        asking, call = ToolCalls.of(row).approved_call(tool_call_id, decisions, is_own=is_own)
        return row["version"], asking, call

    @reads
    def decisions(self, session_id: str, tool_call_ids: Collection[str]) -> list[StoredDecision]:
        """Return the final decisions about calls of a session. One statement."""
        rows = Decision.objects.using(self.db.alias).filter(session_id=pk_of(self.db, session_id))
        return [decision for _, decision in _final_decisions(self.db, rows, tool_call_ids)]

    @reads
    def unknown_permissions(self, names: Sequence[str]) -> list[str]:
        """Return the names that no permission of Django has. One statement."""
        if not apps.is_installed("django.contrib.auth"):
            return list(names)
        wanted = Q()
        for name in names:
            app_label, _, codename = name.partition(".")
            wanted |= Q(content_type__app_label=app_label, codename=codename)
        permissions = apps.get_model("auth", "Permission")._default_manager.filter(wanted).order_by()
        rows = permissions.values_list("content_type__app_label", "codename")
        known = {f"{app_label}.{codename}" for app_label, codename in rows}
        return [name for name in names if name not in known]

    @writes
    def take_answers(self, session_id: str, guard: Guard) -> dict[str, Any]:
        head = lock_session(self.db, session_id, guard, *_CALL_COLUMNS)
        calls = ToolCalls.of(vars(head))
        decisions = decisions_of(self.db, head.pk, calls.claimed)
        taken = calls.take_given(decisions)
        if taken:
            advance(self.db, head, **calls.columns(self.db.limits, decisions))
        return taken

    @reads
    def overdue_calls(self, now: datetime | None, limit: int) -> list[PendingToolCall]:
        """Return calls ordered by deadline; ``now=None`` means the time of the back end's clock."""
        at = self.db.now() if now is None else now
        now_milliseconds = datetime_to_milliseconds(at)
        sessions = (
            Session.objects.using(self.db.alias)
            .alias(unindexed_tenant=NoIndexHint("tenant"))
            .filter(unindexed_tenant=self.db.tenant)
            .non_terminal()
            .overdue(at)
            .order_by("pending_deadline", "pk")
            .values_list("pending_deadline", "pk", "session_id", *_PENDING)
        )
        calls: list[PendingToolCall] = []
        page, missing = sessions, limit
        # Each session has at least one such call, so the first calls belong to the first sessions: one page
        # is enough, unless one of its rows cannot be read.
        while missing:
            rows = list(page[:missing])
            is_last = len(rows) < missing
            overdue = {
                key: readable_overdue(session_id, pending, live, now_milliseconds)
                for _, key, session_id, pending, live in rows
            }
            decisions = decisions_about(self.db, {key: each.claimed for key, each in overdue.items()})
            for _, key, session_id, *_ in rows:
                due = due_calls(session_id, overdue[key].open(decisions[key]))
                missing -= bool(due)
                calls += due
            if is_last:
                break
            deadline, key, *_ = rows[-1]
            page = sessions.filter(after_keyset(Session, {"pending_deadline": deadline, "id": key}))
        return sorted(calls, key=attrgetter("deadline", "session_id", "tool_call_id"))[:limit]

    @reads
    def due_calls(self, session_id: str, now: datetime) -> list[PendingToolCall]:
        """Return the overdue calls of one session. Raises `IntegrityFault`."""
        row = first_row(session_with_id(self.db, session_id).values_list("pk", *_PENDING))
        if row is None:
            return []
        key, pending, live = row
        overdue = overdue_in(pending, live, datetime_to_milliseconds(now))
        return due_calls(session_id, overdue.open(decisions_of(self.db, key, overdue.claimed)))

    def _owner_of(self, session_id: str, tool_call_id: str) -> tuple[str, str]:
        """Return the call's owner according to the root, and the root; by default the session is the owner.

        No lock is needed: the owner of a call never changes, and later checks use the owner's locked row,
        including the check that the owner is in the tree.
        """
        for own_root_id, recorded in self._ownership(session_id):
            root_id = own_root_id or session_id
            if root_id != session_id:
                recorded = next((record for _, record in self._ownership(root_id)), recorded)
            return owner_of(recorded, tool_call_id) or session_id, root_id
        raise missing_session(self.db, session_id)

    def _ownership(self, session_id: str) -> Rows:
        return self.db.execute(OWNERSHIP, {"tenant": self.db.tenant, "session_id": session_id})

    @writes
    def suspend(self, session_id: str, suspension: Suspension, guard: Guard) -> int:
        root_id = root_of(self.db, session_id) if suspension.calls else session_id
        heads = lock_sessions_of_tree(self.db, {session_id, root_id}, *_CALL_COLUMNS)
        head = heads.get(session_id)
        if head is None:
            raise missing_session(self.db, session_id)
        check_guard(self.db, head, guard)
        suspension.require_allowed(head.status)
        columns = dict(suspension.columns)
        if suspension.calls:
            columns |= _asked_columns(self.db, head, suspension.calls, heads.get(root_id))
        at = moments.now()
        running = Run.objects.using(self.db.alias).filter(session_id=head.pk, status=RunStatus.RUNNING.value)
        running.update(status=suspension.kind, ended_at=at)
        pending = columns.get("pending_client_tool_calls", head.pending_client_tool_calls)
        calls = suspension.waits_for(pending, head.live_decisions)
        if calls is not None and calls.is_answered(decisions_of(self.db, head.pk, calls.claimed)):
            announce(self.db, session_id, [session_answered])
        return advance(self.db, head, at=at, **columns)

    @writes
    def resume(self, session_id: str, guard: Guard) -> SessionState:
        head = lock_session(self.db, session_id)
        hold_fence(self.db, session_id, guard)
        row = Session.objects.using(self.db.alias).values(*CURRENT_COLUMNS).get(pk=head.pk)
        # Check this before the version: the loser of two resumes gets ConflictError, not StaleStateError.
        require_suspended(row)
        guard.check_version(head.version)
        state = current_from(row)
        at = moments.now()
        count = validation.next_number(head.resume_count, "resume_count")
        version = advance(self.db, head, at=at, resume_count=count, **RESUMED_COLUMNS)
        return resumed_state(state, version=version, at=at)


def _asked_columns(
    db: Database, owner: Session, calls: Mapping[str, dict[str, Any]], root: Session | None
) -> dict[str, Any]:
    """Return the columns that new calls change in their locked owner, and write the locked root's record.

    If the root does not exist, the session holds the record itself.
    """
    columns: dict[str, Any] = {}
    asked = ToolCalls.of(vars(owner))
    if opened := asked.add(calls):
        columns = asked.columns(db.limits, decisions_of(db, owner.pk, asked.doubtful))
        root_id = owner.root_session_id or owner.session_id
        announce(db, owner.session_id, [session_waiting], tool_call_ids=opened, root_session_id=root_id)
    keeper = owner if root is None else root
    record = claimed_ownership(keeper.client_tool_call_ownership, calls, owner.session_id, db.limits)
    if record is not None and keeper.pk == owner.pk:
        columns["client_tool_call_ownership"] = record
    elif record is not None:
        # The version stays the same: a running step of the root has read nothing that changes.
        update_row(db, Session, keeper.pk, {"client_tool_call_ownership": record})
    return columns
