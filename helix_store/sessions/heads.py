"""Sessions as a whole: their tables in the catalogue, and creating, reading, writing and deleting them."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from functools import partial
from typing import Any, Final

from django.db import IntegrityError, transaction
from django.db.models import Exists, Model, OuterRef, Subquery
from django.db.models.functions import Coalesce

from helix_store.catalogue import Part, Table, copied_by
from helix_store.catalogue.table import children_with_rows, let_go, release_sessions
from helix_store.core import moments, validation
from helix_store.core.patches import merge_checked
from helix_store.core.payloads import decode_object
from helix_store.core.types import (
    SessionHead,
    SessionState,
    SessionStatus,
    StatusChange,
    StatusConflict,
)
from helix_store.core.validation import Guard
from helix_store.counters import delete_usage
from helix_store.engine.database import Database, DatabaseOperations, reads, refuse_moved, writes
from helix_store.engine.errors import is_unique_violation
from helix_store.engine.expressions import list_parameter, require_current_reads
from helix_store.engine.statement import recorded_value, with_recorded
from helix_store.exceptions import (
    ConflictError,
    IntegrityFault,
    InvalidPayload,
    SessionErased,
    SessionExists,
    StoreBusy,
    shown_id,
)
from helix_store.models import (
    Checkpoint,
    CheckpointKind,
    Decision,
    DecisionOutcome,
    Effect,
    InterruptRequest,
    Message,
    Operation,
    Post,
    PostState,
    Run,
    Session,
    StagedChange,
    SubSessionRef,
    Tombstone,
    UsageEntry,
)
from helix_store.sessions.effects import actors_in
from helix_store.sessions.lists import SessionQuery, select_sessions
from helix_store.sessions.locking import (
    advance,
    lock_known_session,
    lock_session,
    lock_sessions,
    session_with_id,
    sweep_tombstones,
    tombstones_of,
    touch_session,
)
from helix_store.sessions.runs import STOPS
from helix_store.sessions.state import (
    STATE_COLUMNS,
    CounterName,
    EncodedState,
    NewSession,
    current_state,
    decode_staged,
    encode_custom_state,
    read_current,
    require_readable,
    require_readable_checkpoint,
    set_loaded,
    stored_state,
    write_current,
    written_columns,
)
from helix_store.sessions.statements import (
    COMPARE_AND_SET_STATUS,
    COPY_MESSAGES,
    CURRENT_COLUMNS,
    FOREST_KEYS,
    LOAD_STATE,
    TREE_KEYS,
)
from helix_store.sessions.tool_calls import LiveDecisions, call_in
from helix_store.sessions.waiting import decisions_of
from helix_store.signals import announce, signals_of_status
from helix_store.streams.database import delete_orphaned_streams, streams_of


def _checkpoints(kind: CheckpointKind, *order: str) -> Part:
    return Part(order, {"kind": kind.value})


def _missing_decisions(db: Database, keys: Collection[int]) -> Iterator[tuple[int, str]]:
    """Yield the sessions in which an approval counts that no decision has given."""
    sessions = Session.objects.using(db.alias).filter(pk__in=keys, live_decisions__isnull=False)
    live = {key: LiveDecisions(column) for key, column in sessions.values_list("pk", "live_decisions")}
    stored = set(
        Decision.objects.using(db.alias)
        .filter(session_id__in=live, outcome=DecisionOutcome.APPROVED, used_at__isnull=True)
        .values_list("session_id", "tool_call_id", "asking")
    )
    for key, decisions in live.items():
        for tool_call_id, asking in decisions.askings():
            if (key, tool_call_id, asking) not in stored:
                yield key, f"the approval of {shown_id(tool_call_id)} has no decision"


def _unreadable_actors(db: Database, keys: Collection[int]) -> Iterator[tuple[int, str]]:
    """Yield the sessions that have effects without a readable list of actors."""
    effects = Effect.objects.using(db.alias).filter(session_id__in=keys).exclude(actors="[]")
    for key, effect_id, actors in effects.values_list("session_id", "effect_id", "actors"):
        try:
            actors_in(actors)
        except IntegrityFault:
            yield key, f"the actors of the effect {shown_id(effect_id)} cannot be read"


def _check_session(values: Mapping[str, Any]) -> None:
    require_readable(values)
    if values["version"] < 1:
        raise InvalidPayload(path="/version", reason="the first version of a session is 1")
    if values["stopped_by"] not in (None, *STOPS):
        raise InvalidPayload(path="/stopped_by", reason=f"expected one of {', '.join(STOPS)}")
    live = values["live_decisions"]
    if live is not None and (LiveDecisions(live).column() or {}) != live:
        raise InvalidPayload(path="/live_decisions", reason="an approval that counts cannot be read")
    root = values["root_session_id"]
    if values["parent_session_id"] is None and root not in (None, values["session_id"]):
        raise InvalidPayload(
            path="/root_session_id", reason="a session without a parent is the root of its own tree"
        )


def _check_checkpoint(values: Mapping[str, Any]) -> None:
    require_readable_checkpoint(values, is_delta=values["base"] is not None)
    if values["checkpoint_id"] is None and values["kind"] in _NAMED_KINDS:
        raise InvalidPayload(path="/checkpoint_id", reason="a checkpoint needs an id")


def _check_message(values: Mapping[str, Any]) -> None:
    (role,) = validation.messages([decode_object(values["payload"])])
    if role != values["role"]:
        raise InvalidPayload(path="/role", reason="the payload has another role")


def _check_post(values: Mapping[str, Any]) -> None:
    if values["payload"] is not None:
        validation.messages([decode_object(values["payload"])])
    elif values["state"] == PostState.WAITING:
        raise InvalidPayload(path="/payload", reason="a waiting post needs its message")


def _check_ref(values: Mapping[str, Any]) -> None:
    if values["remote"] is not None:
        decode_object(values["remote"])


def _check_effect(values: Mapping[str, Any]) -> None:
    actors_in(values["actors"])


_NAMED_KINDS: Final = (CheckpointKind.STEP, CheckpointKind.GRAPH, CheckpointKind.SNAPSHOT)
_AS_ADDED: Final = (Part(("id",)),)

TABLES: Final = (
    Table(
        Session,
        record="session",
        order=("session_id",),
        parent="tenant",
        not_exported={
            "base_key": "It matches states that processes have loaded from the other database, with its keys."
        },
        reads=None,
        check_import=_check_session,
        reference="current",
        unit="session",
        session_id="session_id",
    ),
    Table(
        Checkpoint,
        record="checkpoint",
        reads=None,
        check_import=_check_checkpoint,
        order=("kind", "namespace", "version"),
        parts=(
            # A base comes before the deltas that are built on it.
            _checkpoints(CheckpointKind.BASE, "namespace", "version"),
            _checkpoints(CheckpointKind.STEP, "namespace", "version"),
            _checkpoints(CheckpointKind.STATE, "namespace", "version"),
            # The newest of all namespaces has the highest version, and among equal versions the highest key.
            _checkpoints(CheckpointKind.GRAPH, "version", "id"),
            _checkpoints(CheckpointKind.SNAPSHOT, "namespace", "version"),
        ),
        reference="base",
    ),
    Table(
        Message,
        record="message",
        order=("sequence",),
        branch=copied_by(COPY_MESSAGES),
        reads=decode_object,
        check_import=_check_message,
    ),
    Table(Run, record="run", order=("turn",)),
    Table(
        SubSessionRef,
        record="sub_session_ref",
        order=("sub_session_id",),
        check_import=_check_ref,
        parts=_AS_ADDED,
    ),
    Table(InterruptRequest, record="interrupt_request"),
    Table(
        StagedChange,
        record="staged_change",
        order=("step_id", "tool_call_id"),
        parts=_AS_ADDED,
        reads=lambda text: decode_staged([text]),
    ),
    Table(Operation, record="operation", order=("operation_id",)),
    Table(Post, record="post", order=("sequence",), reads=decode_object, check_import=_check_post),
    Table(Decision, record="decision", order=("version",), check=_missing_decisions, reads=call_in),
    Table(
        Effect,
        record="effect",
        order=("sequence",),
        check=_unreadable_actors,
        check_import=_check_effect,
    ),
    Table(
        Tombstone,
        record="tombstone",
        order=("digest",),
        parent="tenant",
        reads=None,
        sweep=sweep_tombstones,
    ),
)


Rows = Counter[type[Model]]


class TreeBusy(Exception):
    """Another transaction has locked a session of the tree."""


def tree_keys(db: Database, session_id: str) -> list[int]:
    """Return the surrogate keys of a session and those below it, or none if it is unknown. One query."""
    rows = db.read(TREE_KEYS, {"tenant": db.tenant, "session_id": session_id})
    return [key for (key,) in rows]


def forest_keys(db: Database, tops: Sequence[int]) -> dict[int, set[int]]:
    """Return the `tree_keys` of many sessions by key, in order, without unknown ones. One query."""
    found: dict[int, set[int]] = defaultdict(set)
    for top, key in db.read(FOREST_KEYS, {"tenant": db.tenant, "keys": list_parameter(db, tops)}):
        found[top].add(key)
    return {top: found[top] for top in tops if top in found}


def delete_tree(db: Database, session_id: str, *, keep_usage: bool) -> int:
    """Delete a session tree, children first, and return the number of sessions. Call in a transaction."""
    return delete_locked_sessions(db, lock_tree(db, session_id), keep_usage=keep_usage)[Session]


def lock_tree(db: Database, session_id: str, *, wait: bool = True) -> set[int]:
    """Lock a whole tree and return its keys, or none if the session is unknown. Call this in a transaction.

    With ``wait=False``, raises `TreeBusy` if another transaction has locked a session of the tree.
    """
    locked: set[int] = set()
    while (keys := set(tree_keys(db, session_id))) - locked:
        # Only a second look finds a child that was created before its parent was locked.
        locked = {head.pk for head in lock_sessions(db, keys, wait=wait)}
        if not wait and keys - locked:
            raise TreeBusy
        if not locked:
            break
    if not keys:
        refuse_moved(db)
    return keys & locked


def lock_forest(db: Database, tops: Sequence[int]) -> dict[int, set[int]]:
    """Lock many trees without waiting, and return the keys of those that are locked, by their roots.

    A tree is left out if another transaction has locked a session of it. Call this in a transaction.
    """
    found = forest_keys(db, tops)
    locked = {head.pk for head in lock_sessions(db, set().union(*found.values()), wait=False)}
    # A child that was created before its parent was locked is not locked itself.
    return {top: keys for top, keys in forest_keys(db, tops).items() if keys <= locked}


def delete_locked_sessions(db: Database, locked: Collection[int], *, keep_usage: bool) -> Rows:
    """Delete locked sessions, children first, and return the numbers of deleted rows.

    Raises `ConflictError` if a foreign key of another app protects one of them.
    """
    deleted: Rows = Counter()
    if not locked:
        return deleted
    children = children_with_rows(db, locked)
    deleted += let_go(db, locked, [child.related_model for child in children])
    stream_ids = streams_of(db, locked)
    usage = UsageEntry.objects.using(db.alias).filter(session_id__in=locked)
    if not keep_usage:
        deleted[UsageEntry] = delete_usage(db, usage)
    for relation in children:
        rows = relation.related_model._base_manager.using(db.alias)
        deleted[relation.related_model] += rows.filter(**{f"{relation.field.name}__in": locked}).delete()[0]
    # A budget of the tree still counts the kept entries.
    session = Session.objects.filter(pk=OuterRef("session_id"))
    root_id = session.values(root=Coalesce("root_session_id", "session_id"))
    usage.update(tree_id=Subquery(root_id), session=None)
    release_sessions(db, locked)
    deleted[Session] = Session.objects.using(db.alias).filter(pk__in=locked)._raw_delete(db.alias)
    return deleted + delete_orphaned_streams(db, stream_ids)


_ATTEMPTS_TO_INSERT: Final = 5
"""The limit exists because isolation above READ COMMITTED never sees the session that caused the conflict."""


class DatabaseSessions(DatabaseOperations):
    @writes
    def create(self, new: NewSession) -> SessionState:
        parent_id = new.encoded.columns["parent_session_id"]
        root_id = new.session_id
        if parent_id is not None:
            root_id = touch_session(self.db, parent_id).root_session_id or parent_id
        _, state = insert_session(self.db, new, root_session_id=root_id, at=moments.now())
        return state

    @reads
    def exists(self, session_id: str) -> bool:
        return session_with_id(self.db, session_id).exists()

    def load(self, session_id: str) -> SessionState | None:
        for *current, has_budgets, has_due_posts in self.db.read(
            LOAD_STATE, {"tenant": self.db.tenant, "session_id": session_id}
        ):
            state = stored_state(CURRENT_COLUMNS, current)
            set_loaded(state, is_capped=bool(has_budgets), has_posts=bool(has_due_posts))
            return state
        refuse_moved(self.db)
        return None

    @writes
    def save(self, session_id: str, encoded: EncodedState, guard: Guard) -> int:
        head = lock_session(self.db, session_id, guard, "client_tool_call_ownership", "live_decisions")
        at = moments.now()
        columns = written_columns(encoded, vars(head), partial(decisions_of, self.db, head.pk))
        pointer = write_current(
            self.db,
            head,
            payload=encoded.payload,
            envelope=encoded.envelope,
            version=head.version + 1,
            at=at,
        )
        return advance(self.db, head, at=at, **columns, **pointer)

    @writes
    def delete(self, session_id: str, *, keep_usage: bool) -> int:
        return delete_tree(self.db, session_id, keep_usage=keep_usage)

    @writes
    def update_status(self, session_id: str, status: SessionStatus, failure_reason: str | None) -> int:
        head = lock_session(self.db, session_id)
        return advance(self.db, head, status=status.value, failure_reason=failure_reason)

    def compare_and_set_status(
        self,
        session_id: str,
        expected: frozenset[SessionStatus],
        status: SessionStatus,
        failure_reason: str | None,
        guard: Guard,
    ) -> StatusChange | StatusConflict:
        def compare(call_id: str) -> StatusChange | StatusConflict:
            head = lock_session(self.db, session_id, guard, *(["call_ids"] if call_id else []))
            if head.status not in expected:
                current = SessionStatus(head.status)
                return StatusConflict(current_status=current, current_version=head.version)
            columns: dict[str, Any] = {"status": status.value, "failure_reason": failure_reason}
            if call_id:
                columns["call_ids"] = with_recorded(head.call_ids, call_id, head.version + 1)
            return StatusChange(new_version=advance(self.db, head, **columns))

        def locked(call_id: str = "") -> StatusChange | StatusConflict:
            return self.db.transaction(partial(compare, call_id))

        def changed(row: Sequence[Any]) -> StatusChange | StatusConflict:
            announce(self.db, session_id, signals_of_status("", status, failure_reason))
            return StatusChange(new_version=int(row[0]))

        def look_first(call_id: str) -> StatusChange | StatusConflict:
            call_ids = lock_session(self.db, session_id, None, "call_ids").call_ids
            version = recorded_value(call_ids, call_id)
            return locked(call_id) if version is None else changed([version])

        # Otherwise the status before the write must be read, to find out if the session becomes terminal.
        changes_if_written = not status.is_terminal or status not in expected
        if guard != Guard() or not changes_if_written:
            if not self.db.is_postgresql:
                return locked()
            return self.db.committed_once(
                lambda call: locked(call.id),
                lambda call: look_first(call.id),
                operation_id=lambda: session_id,
            )
        parameters = {
            "tenant": self.db.tenant,
            "session_id": session_id,
            "expected": [member.value for member in expected],
            "status": status.value,
            "failure_reason": failure_reason,
            "at": moments.now(),
        }
        return self.db.write_once(
            COMPARE_AND_SET_STATUS,
            parameters,
            changed,
            otherwise=locked,
            look_first=look_first,
            operation_id=session_id,
        )

    @writes
    def increment(self, session_id: str, counter: CounterName) -> int:
        head = lock_session(self.db, session_id)
        value = validation.next_number(getattr(head, counter), counter)
        columns: dict[str, Any] = {counter: value}
        advance(self.db, head, **columns)
        return value

    @writes
    def merge_custom_state(
        self, session_id: str, changes: Mapping[str, Any], array_replacements: frozenset[str], guard: Guard
    ) -> list[str]:
        head = lock_session(self.db, session_id, guard)
        if not changes:
            return []
        custom_state, envelope = read_current(self.db, head)
        merged, warnings = merge_checked(custom_state, dict(changes), array_replacements)
        replace_custom_state(self.db, head, merged, envelope)
        return warnings

    @reads
    def select(self, query: SessionQuery) -> tuple[list[SessionHead], int | None, bool]:
        """Return the page, the total if the query counts, and whether more sessions follow."""
        found, total, has_more = select_sessions(self.db, query)
        return [head for _, head in found], total, has_more


def insert_session(
    db: Database, new: NewSession, *, root_session_id: str, at: datetime, unless_erased: bool = False
) -> tuple[int, SessionState]:
    """Insert a session, and return its key and its first state. Raises `SessionExists`.

    With ``unless_erased``, raises `SessionErased` if an erasure has left a tombstone for its id.
    """
    columns = {**new.encoded.columns, "root_session_id": root_session_id}
    head = Session(
        tenant=db.tenant, session_id=new.session_id, version=1, created_at=at, updated_at=at, **columns
    )
    try:
        head.save(using=db.alias, force_insert=True)
    except IntegrityError as exc:
        if is_unique_violation(exc):
            raise SessionExists(new.session_id) from exc
        raise
    pointer = write_current(
        db, head, payload=new.encoded.payload, envelope=new.encoded.envelope, version=1, at=at
    )
    inserted = Session.objects.using(db.alias).filter(pk=head.pk)
    if unless_erased:
        # An erasure that was still running has ended, because it had locked the row of the id until then.
        inserted = inserted.filter(~Exists(tombstones_of(db, [new.session_id])))
    if not inserted.update(**pointer):
        raise SessionErased(new.session_id)
    stored = {name: getattr(head, name) for name in STATE_COLUMNS}
    return head.pk, current_state(stored, new.encoded.payload, new.encoded.envelope)


def lock_or_insert_session(
    db: Database,
    session_id: str,
    new: Callable[[], NewSession],
    guard: Guard,
    *more_columns: str,
    recreate: bool = False,
) -> tuple[Session, bool]:
    """Lock a session, or insert the one that ``new`` returns; return the head and whether it was inserted.

    Also reads ``more_columns``. Raises `SessionErased` for the id of an erased session, unless ``recreate``.
    """
    is_new = False
    for _ in range(_ATTEMPTS_TO_INSERT):
        head = lock_known_session(db, session_id, guard, *more_columns)
        if head is not None:
            return head, is_new
        # Another writer may insert the session in the meantime; both then use it, unless it is deleted.
        with suppress(SessionExists), transaction.atomic(using=db.alias):
            insert_session(
                db, new(), root_session_id=session_id, at=moments.now(), unless_erased=not recreate
            )
            is_new = True
    head = lock_known_session(db, session_id, guard, *more_columns)
    if head is None:
        # A caller's transaction above READ COMMITTED began before another writer inserted the session.
        raise StoreBusy
    return head, is_new


def user_columns(user_id: str | None) -> tuple[str, ...]:
    """Return the columns of the locked session that `name_user` needs."""
    return () if user_id is None else ("user_id",)


def name_user(db: Database, head: Session, user_id: str | None) -> None:
    """Set the user of a locked session, unless ``user_id`` is ``None`` or already the session's user.

    Usage that was recorded earlier also gets the user. Raises `ConflictError` if the session belongs to
    another user, and `UnsupportedIsolation`.
    """
    if user_id is None or head.user_id == user_id:
        return
    if head.user_id is not None:
        raise ConflictError("The session belongs to another user, and the user of a session cannot change.")
    # Recording usage does not write the session's row.
    require_current_reads(db)
    head.version = advance(db, head, user_id=user_id)
    UsageEntry.objects.using(db.alias).filter(session_id=head.pk, user_id=None).update(user_id=user_id)


def replace_custom_state(db: Database, head: Session, custom_state: dict[str, Any], envelope: str) -> int:
    """Write a locked session's changed custom state without a checkpoint, and return the new version."""
    at = moments.now()
    payload = encode_custom_state(custom_state, envelope, db.limits)
    pointer = write_current(db, head, payload=payload, envelope=envelope, version=head.version + 1, at=at)
    return advance(db, head, at=at, **pointer)


# --- Lists ------------------------------------------------------------------------------------------
