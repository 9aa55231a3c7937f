"""Effects: when an attempt may begin and how it ends, and the statements.

The intent of an effect commits before the effect, and the result right after it. In between, the row says
``started`` and names the fencing token of the worker. If the session's lock is not held with this token any
more, the worker is gone, and nobody knows whether the effect happened.

Entering and ending are one statement each on PostgreSQL, whose conditions depend on the locked row of the
session or on the row of the effect. If it changes nothing, the portable form locks the session and decides.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from enum import Enum, auto
from functools import partial
from typing import Any, Final, Literal, NamedTuple, get_args

from helix_store.core import moments, validation
from helix_store.core.approvals import ApprovedCall, digest_of
from helix_store.core.effects import Effect, EffectState, effect_key
from helix_store.core.moments import as_utc
from helix_store.core.payloads import decode, decode_optional, encode
from helix_store.core.types import TERMINAL_STATUSES, Run, SessionStatus
from helix_store.core.validation import Guard
from helix_store.engine.database import Call, DatabaseOperations, Rows, writes
from helix_store.engine.expressions import update_row
from helix_store.engine.statement import (
    CITUS,
    POSTGRESQL,
    SQLITE,
    Clock,
    Statement,
    recorded,
    recorded_value,
    table,
    with_clock,
    with_recorded,
)
from helix_store.exceptions import (
    ConflictError,
    FencedOutError,
    HelixStoreError,
    IdempotencyConflict,
    IntegrityFault,
    InvalidPayload,
    LimitExceeded,
    NotApproved,
    NotFoundError,
    TurnInterrupted,
    shown_id,
)
from helix_store.models import Decision, InterruptRequest, Lock, Session
from helix_store.models import Effect as EffectRow
from helix_store.models import EffectState as StoredState
from helix_store.sessions.locking import missing_session, session_key, touch_session
from helix_store.sessions.messages import waits_for_answer
from helix_store.sessions.statements import (
    EXCEPTION_BEGINS,
    FENCE,
    FENCE_HOLDS,
    NO_EXCEPTION,
    SESSION_BY_ID,
    session_by_id,
)
from helix_store.sessions.tool_calls import StoredDecision, ToolCalls, may_be_own, without_used
from helix_store.sessions.waiting import readable_open_calls
from helix_store.signals import announce, session_answered

_logger = logging.getLogger(__name__)

MOST_EFFECTS: Final = 1_000
"""The maximum number of effects that `find_unknown_effects` returns."""
SETTLE_PERMISSION: Final = "helix_store.settle_effect"
_STATES: Final = get_args(EffectState)


# --- Rules -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Intent:
    """What a worker is about to do. ``call`` is the tool's name and the input as text; ``None`` if they are
    those of the approved call with the id of the effect.
    """

    effect_id: str
    call: tuple[str, str] | None
    may_retry: bool
    run_id: str | None = None
    step_count: int | None = None

    @property
    def digest(self) -> str | None:
        return None if self.call is None else digest_of(self.call[0], decode(self.call[1]))


class StoredEffect(NamedTuple):
    """A row. ``input``, ``result``, ``error`` and ``actors`` are text. ``is_held`` is true if the session's
    lock is held with the token of the row.
    """

    session_id: str
    effect_id: str
    sequence: int
    state: str
    tool_name: str
    input: str
    digest: str
    needs_approval: bool
    attempt: int
    run_id: str | None
    step_count: int | None
    fencing_token: int | None
    result: str | None
    error: str | None
    actors: str
    started_at: datetime
    ended_at: datetime | None
    call_ids: str | None = None
    is_held: bool = False

    @property
    def state_as_read(self) -> EffectState:
        is_gone = self.state == StoredState.STARTED and not self.is_held
        return "unknown" if is_gone else self.state  # type: ignore[return-value]

    def is_same_attempt(self, other: StoredEffect | None) -> bool:
        """Return whether the other row is of the same attempt in the same state."""
        return other is not None and (other.attempt, other.state, other.fencing_token) == (
            self.attempt,
            self.state,
            self.fencing_token,
        )

    def is_decided_after(self, run: Run) -> bool:
        """Return whether it was decided after the run, or during the run by somebody else."""
        if self.state not in (StoredState.DONE, StoredState.NOT_DONE) or self.ended_at is None:
            return False
        is_settled = (self.error or "").startswith((EXCEPTION_BEGINS, NO_EXCEPTION))
        after = run.started_at if is_settled else run.ended_at
        return after is not None and self.ended_at > after

    def value(self, tenant: str) -> Effect:
        ended_at = None if self.ended_at is None else as_utc(self.ended_at)
        return Effect(
            session_id=self.session_id,
            id=self.effect_id,
            key=effect_key(tenant, self.session_id, self.effect_id),
            sequence=self.sequence,
            tool_name=self.tool_name,
            input=decode(self.input),
            attempt=self.attempt,
            state=self.state_as_read,
            result=decode_optional(self.result),
            error=decode_optional(self.error),
            actors=actors_in(self.actors),
            run_id=self.run_id,
            step_count=self.step_count,
            started_at=as_utc(self.started_at),
            ended_at=ended_at,
        )


def actors_in(text: str) -> list[str]:
    """Return the people in the stored actors of an effect. Raises `IntegrityFault`."""
    actors = decode(text)
    if type(actors) is not list or any(type(each) is not str for each in actors):
        raise IntegrityFault("The stored actors of an effect cannot be read; other rows are not affected.")
    return actors


class Outcome(Enum):
    """What entering an effect has found."""

    BEGUN = auto()
    """This worker may attempt the effect now."""
    DONE = auto()
    OPEN = auto()
    """Nobody knows whether an earlier attempt happened."""


class Entered(NamedTuple):
    outcome: Outcome
    effect: StoredEffect


def outcome_of(stored: StoredEffect, intent: Intent) -> Outcome:
    """Return what entering a known effect means. ``BEGUN`` is decided, but not stored yet.

    Raises `IdempotencyConflict` for another call, and `ConflictError` while a worker attempts the effect.
    """
    if intent.call is None and not stored.needs_approval:
        raise IdempotencyConflict(intent.effect_id)
    if intent.call is not None and stored.needs_approval:
        raise _walks_around(intent.effect_id)
    if intent.digest not in (None, stored.digest):
        raise IdempotencyConflict(intent.effect_id)
    state = stored.state_as_read
    if state == "done":
        return Outcome.DONE
    if state == "started":
        raise ConflictError(
            f"A worker that holds the lock attempts the effect {shown_id(intent.effect_id)} at the moment."
        )
    return Outcome.BEGUN if state == "not_done" or intent.may_retry else Outcome.OPEN


def entered_known(
    stored: StoredEffect,
    intent: Intent,
    calls: ToolCalls,
    decisions: Sequence[StoredDecision],
    *,
    is_own: bool,
) -> Entered:
    """Return `outcome_of` a known effect, whose approval may have been asked for again since.

    The newest asking decides: unless it approves the same call, no other attempt begins. Raises
    `NotApproved`, and `IdempotencyConflict` if it approves another call.
    """
    outcome = outcome_of(stored, intent)
    if intent.call is not None:
        return Entered(outcome, stored)
    try:
        newer = calls.approved_again(intent.effect_id, decisions, is_own=is_own)
    except NotApproved:
        if outcome is Outcome.BEGUN:
            raise
        return Entered(outcome, stored)
    if newer is not None and newer.digest != stored.digest:
        raise IdempotencyConflict(intent.effect_id)
    if newer is not None and outcome is Outcome.BEGUN:
        actors = dict.fromkeys([*actors_in(stored.actors), *newer.actors])
        stored = stored._replace(actors=encode(list(actors)))
    return Entered(outcome, stored)


def _walks_around(effect_id: str) -> InvalidPayload:
    return InvalidPayload(
        path="effect_id",
        reason=f"{shown_id(effect_id)} is the id of an approval; pass approval=True, which binds the call to "
        "what was approved",
    )


def require_no_approval(effect_id: str, calls: ToolCalls, *, has_decisions: bool) -> None:
    """Raise `InvalidPayload` for an effect without an approval that has the id of one."""
    entry = (calls.pending or {}).get(effect_id) or (calls.completed or {}).get(effect_id)
    # A branch has copied answers without their decisions.
    is_approval = type(entry) is dict and (entry.get("approval_id") is not None or "approved" in entry)
    if has_decisions or is_approval:
        raise _walks_around(effect_id)


def too_many(limit: int) -> LimitExceeded:
    return LimitExceeded(name="max_effects", limit=limit, actual=limit + 1)


class _LateEndError(FencedOutError, ConflictError):
    """A newer holder has the lock, and this attempt was settled or made again."""

    def __init__(self, error: FencedOutError, effect_id: str) -> None:
        HelixStoreError.__init__(self, f"{error} {not_current(effect_id)}", **error.attributes)


@contextmanager
def ending(of: StoredEffect, stored: Callable[[], StoredEffect | None]) -> Iterator[None]:
    """Make the error of a lost lock a conflict too, if the stored effect is another attempt or decided."""
    try:
        yield
    except FencedOutError as error:
        if of.is_same_attempt(stored()):
            raise
        raise _LateEndError(error, of.effect_id) from error


def not_current(effect_id: str) -> ConflictError:
    return ConflictError(
        f"The effect {shown_id(effect_id)} was settled, or another worker has attempted it again; nothing "
        "was stored."
    )


_CLOSED: Final = (*TERMINAL_STATUSES, SessionStatus.PAUSED)


def require_attempt(
    intent: Intent, status: str, kind: str | None, reason: str | None, run_id: str | None
) -> None:
    """Raise what prevents a new attempt of a turn: a closed session, or a request to stop its run."""
    if intent.run_id is None:
        return
    if status in _CLOSED:
        raise ConflictError(
            f"The session is {status}; the effect {shown_id(intent.effect_id)} was not attempted."
        )
    if kind is not None and run_id == intent.run_id:
        raise TurnInterrupted(kind, reason)


def unknown_effect(effect_id: str) -> NotFoundError:
    return NotFoundError(f"The session has no effect with the id {shown_id(effect_id)}.", effect_id=effect_id)


def new_effect(
    session_id: str,
    intent: Intent,
    call: tuple[str, str],
    approved: ApprovedCall | None,
    *,
    sequence: int,
    token: int | None,
    at: datetime,
) -> StoredEffect:
    """Return the first attempt of an effect."""
    return StoredEffect(
        session_id=session_id,
        effect_id=intent.effect_id,
        sequence=sequence,
        state="started",
        tool_name=call[0],
        input=call[1],
        digest=str(intent.digest) if approved is None else approved.digest,
        needs_approval=approved is not None,
        attempt=1,
        run_id=intent.run_id,
        step_count=intent.step_count,
        fencing_token=token,
        result=None,
        error=None,
        actors=encode([] if approved is None else approved.actors),
        started_at=at,
        ended_at=None,
        is_held=True,
    )


def started_again(stored: StoredEffect, intent: Intent, *, token: int | None, at: datetime) -> StoredEffect:
    """Return the next attempt of an effect."""
    return stored._replace(
        state="started",
        attempt=stored.attempt + 1,
        run_id=intent.run_id,
        step_count=intent.step_count,
        fencing_token=token,
        error=None,
        started_at=at,
        ended_at=None,
        is_held=True,
    )


def approved_text(approved: ApprovedCall) -> tuple[str, str]:
    """Return the tool's name and the input, as `Intent.call` holds them."""
    return approved.tool_name, encode(approved.input)


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """The end of the attempt that ``of`` shows; nothing else may have ended it meanwhile."""

    of: StoredEffect
    state: Literal["done", "not_done", "unknown"]
    result: str | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Settlement:
    effect_id: str
    is_done: bool
    result: str | None
    actor: str | None

    def actors(self, stored: StoredEffect) -> str:
        named = [] if self.actor is None else [self.actor]
        return encode([*actors_in(stored.actors), *named])

    @property
    def state(self) -> Literal["done", "not_done"]:
        return "done" if self.is_done else "not_done"

    def settled(self, stored: StoredEffect, *, at: datetime) -> StoredEffect:
        """Return the effect as it is stored after this decision."""
        return stored._replace(
            state=self.state,
            result=self.result,
            error=stored.error or NO_EXCEPTION,
            actors=self.actors(stored),
            ended_at=at,
        )

    def decides(self, stored: StoredEffect) -> bool:
        """Return whether the effect is open. Raises `ConflictError` while its worker holds the lock."""
        state = stored.state_as_read
        if state == "started":
            raise ConflictError(
                f"The worker of the effect {shown_id(self.effect_id)} holds the session's lock; wait for it."
            )
        return state == "unknown"


def can_go_on(status: str, suspension_kind: str | None, open_calls: Mapping[str, object] | None) -> bool:
    """Return whether nothing but an effect kept the session from going on."""
    return status not in TERMINAL_STATUSES and not waits_for_answer(status, suspension_kind, open_calls)


# --- Statements --------------------------------------------------------------------------------------

_EFFECT: Final = table(EffectRow)
_SESSION: Final = table(Session)
_DECISION: Final = table(Decision)
_INTERRUPT: Final = table(InterruptRequest)
_COLUMNS: Final = tuple(name for name in StoredEffect._fields if name not in ("session_id", "is_held"))
_OF_ATTEMPT: Final = (
    "tool_name",
    "input",
    "digest",
    "needs_approval",
    "run_id",
    "step_count",
    "fencing_token",
    "actors",
)
# In a prepared statement a parameter has a single type.
_ID: Final = "CAST(%(effect_id)s AS varchar)"
_RUN: Final = "CAST(%(run_id)s AS varchar)"


def _columns(alias: str) -> str:
    return ", ".join(f"{alias}.{name}" for name in _COLUMNS)


def _of_lock(column: str, condition: str = "") -> str:
    return f"""(SELECT {column} FROM {table(Lock)} AS l WHERE l.tenant = s.tenant AND l.name = s.session_id
                {condition})"""


def _is_held(clock: Clock, effect: str = "e") -> str:
    has_term = f"AND l.token = {effect}.fencing_token AND l.expires_at > {clock.now}"
    return f"EXISTS {_of_lock('1', has_term)}"


def is_unknown(clock: Clock, effect: str) -> str:
    """Return the condition that an effect of the session ``s`` is unknown, or that its worker is gone."""
    return f"""({effect}.state = 'unknown'
                OR ({effect}.state = 'started' AND NOT {_is_held(clock, effect)}))"""


def _row(clock: Clock) -> str:
    """The columns of a `StoredEffect` after the id of its session."""
    return f"{_columns('e')}, {_is_held(clock)} AS is_held"


_ENTRY_COLUMNS: Final = (
    "id",
    "version",
    "status",
    "root_session_id",
    "pending_client_tool_calls",
    "completed_client_tool_calls",
    "client_tool_call_ownership",
    "live_decisions",
)
_OF_DECISION: Final = StoredDecision._fields
_OF_INTERRUPT: Final = ("kind", "reason", "run_id")

# Everything that decides about an entry: the calls of the session, their decisions, and the effect.
ENTRY: Final = with_clock(
    lambda clock: (
        f"""
        SELECT {", ".join(f"s.{name}" for name in _ENTRY_COLUMNS)},
            (SELECT coalesce(max(sequence), 0) FROM {_EFFECT} WHERE session_id = s.id), {_of_lock("l.token")},
            {", ".join(f"i.{name}" for name in _OF_INTERRUPT)},
            {", ".join(f"d.{name}" for name in _OF_DECISION)}, s.session_id, {_row(clock)}
        FROM {_SESSION} AS s
        LEFT JOIN {_EFFECT} AS e ON e.session_id = s.id AND e.effect_id = %(effect_id)s
        LEFT JOIN {_DECISION} AS d ON d.session_id = s.id AND d.tool_call_id = %(effect_id)s
        LEFT JOIN {_INTERRUPT} AS i ON i.session_id = s.id
        WHERE {session_by_id("s")} ORDER BY d.version"""
    )
)

_NEW: Final = """effect_id, sequence, state, tool_name, input, digest, needs_approval, attempt, run_id,
            step_count, fencing_token, actors"""
_NEW_VALUES: Final = f"""'started', %(tool_name)s, %(input)s, %(digest)s, %(needs_approval)s, 1, {_RUN},
            %(step_count)s, %(fencing_token)s, %(actors)s"""

INSERT: Final = with_clock(
    lambda clock: (
        f"""
        INSERT INTO {_EFFECT} (session_id, {_NEW}, started_at, call_ids)
        VALUES (%(key)s, %(effect_id)s, %(sequence)s, {_NEW_VALUES}, {clock.now}, %(call_ids)s)
        RETURNING started_at"""
    )
)
START_AGAIN: Final = with_clock(
    lambda clock: (
        f"""
        UPDATE {_EFFECT} SET state = 'started', attempt = attempt + 1, run_id = %(run_id)s,
            step_count = %(step_count)s, fencing_token = %(fencing_token)s, actors = %(actors)s, error = NULL,
            ended_at = NULL, started_at = {clock.now}, call_ids = %(call_ids)s
        WHERE session_id = %(key)s AND effect_id = %(effect_id)s
        RETURNING started_at"""
    )
)


def _begin(*, is_fenced: bool, known: str, head: str, condition: str, after: str, result: str) -> str:
    """An intent in one statement. Two that begin at the same time conflict, and the portable form decides."""
    sequence = f"(SELECT coalesce(max(sequence), 0) FROM {_EFFECT} WHERE session_id = head.id)"
    return f"""
        WITH {FENCE if is_fenced else ""}{known}head AS ({head} {f"AND {FENCE_HOLDS}" if is_fenced else ""}
            {after}
        ), added AS (
            INSERT INTO {_EFFECT} AS e (session_id, {_NEW}, started_at, call_ids)
            SELECT head.id, {_ID}, 1 + {sequence}, {_NEW_VALUES}, {POSTGRESQL.now}, {recorded("''")}
            FROM head WHERE {condition} AND {sequence} < %(most)s
            ON CONFLICT DO NOTHING
            RETURNING e.session_id AS key, {_columns("e")}
        ){result}"""


# A turn that was asked to stop, or whose session was ended elsewhere, attempts nothing more.
_IS_OPEN: Final = "s.status NOT IN (" + ", ".join(f"'{each}'" for each in _CLOSED) + ")"
_MAY_ATTEMPT: Final = f"""({_RUN} IS NULL OR {_IS_OPEN} AND NOT EXISTS (
                    SELECT 1 FROM {_INTERRUPT} AS i WHERE i.session_id = s.id AND i.run_id = {_RUN}))"""

_NOT_ASKED: Final = """strpos(coalesce(s.pending_client_tool_calls, ''), %(quoted_id)s) = 0
                AND strpos(coalesce(s.completed_client_tool_calls, ''), %(quoted_id)s) = 0"""


def _not_decided(session: str) -> str:
    return f"""NOT EXISTS (
                SELECT 1 FROM {_DECISION} WHERE session_id = {session}.id AND tool_call_id = {_ID})"""


def _begin_free(*, is_fenced: bool) -> Statement:
    """Return the known effect, or begin one, unless an approval has its id."""
    names = ", ".join(_COLUMNS)
    return Statement(
        postgresql=_begin(
            is_fenced=is_fenced,
            known=f"""known AS (
            SELECT {_row(POSTGRESQL)} FROM {_EFFECT} AS e JOIN {_SESSION} AS s ON s.id = e.session_id
            WHERE {session_by_id("s")} AND e.effect_id = {_ID}
                AND {_NOT_ASKED} AND {_not_decided("s")} {f"AND {FENCE_HOLDS}" if is_fenced else ""}
        ), """,
            head=f"""
            UPDATE {_SESSION} AS s SET version = version
            WHERE {SESSION_BY_ID} AND NOT EXISTS (SELECT 1 FROM known)
                AND {_NOT_ASKED} AND {_MAY_ATTEMPT}""",
            after="RETURNING id",
            condition=_not_decided("head"),
            result=f"""
        SELECT {names}, true, true AS is_new FROM added
        UNION ALL SELECT {names}, is_held, false FROM known""",
        )
    )


def _begin_approved(*, is_fenced: bool) -> Statement:
    """Begin the effect of an approval, and mark the approval as used, if the session has not changed."""
    return Statement(
        postgresql=_begin(
            is_fenced=is_fenced,
            known="",
            head=f"""
            SELECT s.id FROM {_SESSION} AS s
            WHERE {SESSION_BY_ID} AND s.version = %(version)s AND {_MAY_ATTEMPT}""",
            after="FOR NO KEY UPDATE",
            condition=f"""EXISTS (
                SELECT 1 FROM {_DECISION} WHERE session_id = head.id AND asking = %(asking)s AND is_final
                    AND used_at IS NULL)""",
            result=f""", used AS (
            UPDATE {_DECISION} SET used_at = added.started_at, used_by_effect = added.effect_id
            FROM added WHERE session_id = added.key AND asking = %(asking)s AND is_final
        ), without AS (
            UPDATE {_SESSION} AS s
            SET live_decisions = nullif(live_decisions - added.effect_id::text, '{{}}'::jsonb)
            FROM added WHERE s.id = added.key
        )
        SELECT {", ".join(_COLUMNS)}, true, true FROM added""",
        )
    )


BEGIN_FREE: Final = {is_fenced: _begin_free(is_fenced=is_fenced) for is_fenced in (False, True)}
BEGIN_APPROVED: Final = {is_fenced: _begin_approved(is_fenced=is_fenced) for is_fenced in (False, True)}
"""The key is whether the write has a fence."""


def _use_approval(clock: Clock) -> str:
    return f"""
        UPDATE {_DECISION} SET used_at = {clock.now}, used_by_effect = %(effect_id)s
        WHERE session_id = %(key)s AND asking = %(asking)s AND is_final AND used_at IS NULL"""


USE_APPROVAL: Final = with_clock(_use_approval)


def _end(clock: Clock, key: str, call: str, source: str = "") -> str:
    is_same_token = "IS NOT DISTINCT FROM" if clock is not SQLITE else "IS"
    return f"""
        UPDATE {_EFFECT} AS e SET state = %(state)s, result = %(result)s, error = %(error)s,
            ended_at = {clock.now}{call}
        {source}
        WHERE e.session_id = {key} AND e.effect_id = %(effect_id)s AND e.attempt = %(attempt)s
            AND e.state = %(known_state)s AND e.fencing_token {is_same_token} %(known_token)s
        RETURNING ended_at"""


END_LOCKED: Final = Statement(
    postgresql=_end(POSTGRESQL, "%(key)s", f", call_ids = {recorded('e.call_ids')}"),
    sqlite=_end(SQLITE, "%(key)s", ""),
    citus=(_end(CITUS, "%(key)s", ""),),
)


def _end_at_once(*, is_fenced: bool) -> Statement:
    return Statement(
        postgresql=f"""
        WITH {FENCE if is_fenced else ""}head AS (
            UPDATE {_SESSION} SET version = version
            WHERE {SESSION_BY_ID} {f"AND {FENCE_HOLDS}" if is_fenced else ""}
            RETURNING id AS key
        ){_end(POSTGRESQL, "head.key", f", call_ids = {recorded('e.call_ids')}", "FROM head")}"""
    )


END: Final = {is_fenced: _end_at_once(is_fenced=is_fenced) for is_fenced in (False, True)}

SETTLE: Final = with_clock(
    lambda clock: (
        f"""
        UPDATE {_EFFECT} SET state = %(state)s, result = %(result)s, actors = %(actors)s,
            error = coalesce(error, '{NO_EXCEPTION}'), ended_at = {clock.next}
        WHERE session_id = %(key)s AND effect_id = %(effect_id)s
        RETURNING NOT EXISTS (SELECT 1 FROM {_EFFECT} AS other WHERE other.session_id = %(key)s
            AND other.state IN ('started', 'unknown') AND other.effect_id <> %(effect_id)s)"""
    )
)

_AS_READ: Final = "CASE WHEN state = 'started' AND NOT is_held THEN 'unknown' ELSE state END"
_PLACES: Final = tuple(f"state_{number}" for number in range(len(_STATES)))

OF_SESSION: Final = with_clock(
    lambda clock: (
        f"""
        SELECT * FROM (
            SELECT s.session_id, {_row(clock)} FROM {_EFFECT} AS e JOIN {_SESSION} AS s ON s.id = e.session_id
            WHERE {session_by_id("s")} AND e.sequence > %(after)s
        ) AS found
        WHERE {_AS_READ} IN ({", ".join(f"%({name})s" for name in _PLACES)})
        ORDER BY sequence LIMIT %(limit)s"""
    )
)
UNKNOWN: Final = with_clock(
    lambda clock: (
        f"""
        SELECT s.session_id, {_row(clock)} FROM {_EFFECT} AS e JOIN {_SESSION} AS s ON s.id = e.session_id
        WHERE e.state IN ('started', 'unknown') AND s.tenant = %(tenant)s
            AND {is_unknown(clock, "e")}
        ORDER BY e.started_at, e.id LIMIT %(limit)s"""
    )
)


# --- The database ------------------------------------------------------------------------------------


class _Entry(NamedTuple):
    """The row of a session with the rows that decide about entering an effect."""

    columns: dict[str, Any]
    last_sequence: int
    newest_token: int | None
    interrupt: tuple[str | None, str | None, str | None]
    decisions: list[StoredDecision]
    effect: StoredEffect | None

    @classmethod
    def of(cls, rows: Rows) -> _Entry:
        width = len(_ENTRY_COLUMNS)
        begin = width + 2 + len(_OF_INTERRUPT)
        end = begin + len(_OF_DECISION)
        first = rows[0]
        decisions = [_decision_from(*row[begin:end]) for row in rows if row[begin] is not None]
        known = stored_from(*first[end:]) if first[end + 1] is not None else None
        columns = dict(zip(_ENTRY_COLUMNS, first, strict=False))
        last_sequence, newest_token, *interrupt = first[width:begin]
        return cls(columns, last_sequence, newest_token, tuple(interrupt), decisions, known)

    def require_attempt(self, intent: Intent) -> None:
        """Raise what prevents a new attempt, as `require_attempt` does."""
        require_attempt(intent, self.columns["status"], *self.interrupt)

    def entered_known(self, known: StoredEffect, intent: Intent) -> Entered:
        is_own = may_be_own(self.columns, known.session_id, intent.effect_id)
        return entered_known(known, intent, ToolCalls.of(self.columns), self.decisions, is_own=is_own)

    def approved_call(self, session_id: str, effect_id: str) -> tuple[int, ApprovedCall]:
        """Return the asking and the approved call. Raises `NotApproved` and `ApprovalUsed`."""
        is_own = may_be_own(self.columns, session_id, effect_id)
        return ToolCalls.of(self.columns).approved_call(effect_id, self.decisions, is_own=is_own)


def _decision_from(*values: Any) -> StoredDecision:
    row = StoredDecision(*values)
    # SQLite has neither booleans nor time zones.
    return row._replace(is_final=bool(row.is_final), decided_at=as_utc(row.decided_at))


def stored_from(session_id: str, *values: Any) -> StoredEffect:
    row = StoredEffect(session_id, *values)
    # SQLite has no booleans.
    return row._replace(needs_approval=bool(row.needs_approval), is_held=bool(row.is_held))


class DatabaseEffects(DatabaseOperations):
    def enter(self, session_id: str, intent: Intent, guard: Guard) -> Entered:
        """Begin an attempt in a transaction of its own, or return what an earlier one has left."""
        names = {"tenant": self.db.tenant, "session_id": session_id, "effect_id": intent.effect_id}

        def write(call: Call) -> Entered:
            entered = self._entered_at_once(call, names, intent, guard) if call.has_fast_writes else None
            return entered or self._enter_locked(session_id, intent, guard, call.id)

        def look_first(call: Call) -> Entered:
            touch_session(self.db, session_id)
            entry = self._entry(names)
            known = entry.effect
            if known is not None and recorded_value(known.call_ids, call.id) is not None:
                return Entered(Outcome.BEGUN, known)
            return self._enter_locked(session_id, intent, guard, call.id)

        return self.db.committed_once(write, look_first, operation_id=lambda: intent.effect_id)

    def _entered_at_once(
        self, call: Call, names: dict[str, str], intent: Intent, guard: Guard
    ) -> Entered | None:
        """Enter in one statement, or two with an approval; ``None`` if the portable form has to decide."""
        is_fenced = guard.fencing_token is not None
        session_id = names["session_id"]
        more: dict[str, Any] = {}
        if intent.call is not None:
            statement, given, approved = BEGIN_FREE[is_fenced], intent.call, None
            more["quoted_id"] = encode(intent.effect_id)
        else:
            entry = self._entry(names)
            guard.check_fence(entry.newest_token)
            if entry.effect is not None:
                return _unless_begun(entry.entered_known(entry.effect, intent))
            entry.require_attempt(intent)
            asking, approved = entry.approved_call(session_id, intent.effect_id)
            statement, given = BEGIN_APPROVED[is_fenced], approved_text(approved)
            more |= {"version": entry.columns["version"], "asking": asking}
        new = new_effect(
            session_id, intent, given, approved, sequence=0, token=guard.fencing_token, at=moments.now()
        )
        parameters = {
            **names,
            **more,
            **_parameters(new),
            "most": self.db.limits.max_effects,
            "call_id": call.id,
        }
        for *values, is_new in call.try_write(statement, parameters):
            found = stored_from(session_id, *values)
            if is_new:
                return Entered(Outcome.BEGUN, found)
            return _unless_begun(Entered(outcome_of(found, intent), found))
        return None

    @writes
    def _enter_locked(self, session_id: str, intent: Intent, guard: Guard, call_id: str) -> Entered:
        names = {"tenant": self.db.tenant, "session_id": session_id, "effect_id": intent.effect_id}
        touch_session(self.db, session_id, guard)
        entry = self._entry(names)
        known, key, token = entry.effect, {"key": entry.columns["id"]}, guard.fencing_token
        if intent.call is not None and (known is None or not known.needs_approval):
            calls = ToolCalls.of(entry.columns)
            require_no_approval(intent.effect_id, calls, has_decisions=bool(entry.decisions))
        if known is not None:
            outcome, known = entry.entered_known(known, intent)
            if outcome is Outcome.BEGUN:
                entry.require_attempt(intent)
                known = started_again(known, intent, token=token, at=known.started_at)
                ids = {"call_ids": with_recorded(known.call_ids, call_id)}
                ((at,),) = self.db.execute(START_AGAIN, {**names, **key, **_parameters(known), **ids})
                known = known._replace(started_at=at)
            return Entered(outcome, known)
        entry.require_attempt(intent)
        if entry.last_sequence >= self.db.limits.max_effects:
            raise too_many(self.db.limits.max_effects)
        given, approved = intent.call, None
        if given is None:
            asking, approved = entry.approved_call(session_id, intent.effect_id)
            given = approved_text(approved)
            self.db.execute(USE_APPROVAL, {**names, **key, "asking": asking})
            live = without_used(entry.columns["live_decisions"], [asking])
            update_row(self.db, Session, key["key"], {"live_decisions": live})
        sequence = entry.last_sequence + 1
        new = new_effect(
            session_id, intent, given, approved, sequence=sequence, token=token, at=moments.now()
        )
        row = {"sequence": sequence, "call_ids": with_recorded(None, call_id)}
        ((at,),) = self.db.execute(INSERT, {**names, **key, **_parameters(new), **row})
        return Entered(Outcome.BEGUN, new._replace(started_at=at))

    def _entry(self, names: Mapping[str, Any]) -> _Entry:
        rows = self.db.execute(ENTRY, names) if self.db.in_transaction else self.db.read(ENTRY, names)
        if not rows:
            raise missing_session(self.db, names["session_id"])
        return _Entry.of(rows)

    def end(self, session_id: str, end: End, guard: Guard) -> None:
        """Store the end of an attempt, as part of the caller's transaction. Raises `ConflictError`."""
        parameters = {
            "tenant": self.db.tenant,
            "session_id": session_id,
            "effect_id": end.of.effect_id,
            "attempt": end.of.attempt,
            "known_state": end.of.state,
            "known_token": end.of.fencing_token,
            "state": end.state,
            "result": end.result,
            "error": end.error,
            "fencing_token": guard.fencing_token,
        }

        def look_first(call_id: str) -> None:
            touch_session(self.db, session_id)
            effect = self._entry(parameters).effect
            if effect is None or recorded_value(effect.call_ids, call_id) is None:
                self._end_locked(end.of, parameters, guard, call_id)

        self.db.write_once(
            END[guard.fencing_token is not None],
            parameters,
            lambda row: None,
            otherwise=partial(self._end_locked, end.of, parameters, guard),
            look_first=look_first,
            operation_id=end.of.effect_id,
        )

    @writes
    def _end_locked(self, of: StoredEffect, parameters: dict[str, Any], guard: Guard, call_id: str) -> None:
        session_id = parameters["session_id"]
        with ending(of, lambda: self._entry(parameters).effect):
            key = touch_session(self.db, session_id, guard).pk
        if not self.db.execute(END_LOCKED, {**parameters, "key": key, "call_id": call_id}):
            raise not_current(of.effect_id)

    @writes
    def settle(self, session_id: str, settlement: Settlement) -> bool:
        """Decide an open effect, and return whether this call decided it."""
        columns = ("suspension_kind", "pending_client_tool_calls", "live_decisions")
        head = touch_session(self.db, session_id, None, *columns)
        names = {"tenant": self.db.tenant, "session_id": session_id, "effect_id": settlement.effect_id}
        stored = self._entry(names).effect
        if stored is None:
            raise unknown_effect(settlement.effect_id)
        if not settlement.decides(stored):
            return False
        values = {
            "key": head.pk,
            "effect_id": settlement.effect_id,
            "state": settlement.state,
            "result": settlement.result,
            "actors": settlement.actors(stored),
        }
        ((is_last,),) = self.db.execute(SETTLE, values)
        if is_last:
            columns_of_calls = {head.pk: (head.pending_client_tool_calls, head.live_decisions)}
            calls = readable_open_calls(self.db, columns_of_calls)[head.pk]
            if can_go_on(head.status, head.suspension_kind, calls):
                announce(self.db, session_id, [session_answered])
        return True

    def select(self, session_id: str, *, states: Sequence[str], after: int, limit: int) -> list[Effect]:
        """Return the effects after a sequence in these states, as they are read."""
        names = {"tenant": self.db.tenant, "session_id": session_id}
        chosen = dict(zip(_PLACES, (*states, *_PLACES), strict=False))
        rows = self.db.read(OF_SESSION, {**names, **chosen, "after": after, "limit": limit})
        if not rows:
            self.db.query(partial(session_key, self.db, session_id))
        return [stored_from(*row).value(self.db.tenant) for row in rows]

    def unknown(self, limit: int) -> list[Effect]:
        """Return the unknown effects of the tenant, the oldest first.

        For a row that cannot be read, log a warning instead, so that it hides no effect of another session.
        """
        damaged: set[tuple[str, str]] = set()
        while True:
            asked = limit + len(damaged)
            rows = self.db.read(UNKNOWN, {"tenant": self.db.tenant, "limit": asked})
            found, known = [], len(damaged)
            for stored in (stored_from(*row) for row in rows):
                try:
                    found.append(stored.value(self.db.tenant))
                except IntegrityFault as fault:
                    of = (stored.session_id, stored.effect_id)
                    if of not in damaged:
                        damaged.add(of)
                        _logger.warning("The effect %r of session %r cannot be read: %s", of[1], of[0], fault)
            if len(rows) < asked or len(damaged) == known:
                return found[:limit]


def _unless_begun(entered: Entered) -> Entered | None:
    """Return what entering a known effect has found; ``None`` if it begins again, which is another write."""
    return None if entered.outcome is Outcome.BEGUN else entered


def _parameters(effect: StoredEffect) -> dict[str, Any]:
    return {name: getattr(effect, name) for name in _OF_ATTEMPT}


# --- Arguments -----------------------------------------------------------------------------------------


def encoded_result(result: Any, limit: int) -> str:
    """Return a result as text. Raises `InvalidPayload` and `LimitExceeded`."""
    return encode(result, limit=limit, name="max_message_bytes", path="/result")


def checked_states(states: Any) -> tuple[str, ...]:
    """Return the states to list, in a fixed order. Raises `InvalidQuery`."""
    return _STATES if states is None else validation.some_of(states, _STATES, "states")
