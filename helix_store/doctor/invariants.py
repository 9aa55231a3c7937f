"""The checks of rows and payloads, and their fixes.

The SQL of the doctor. A statement on sessions returns the tenant, session id, key and row of each fault.

Each one examines a page of sessions in one statement, which sees all tables at the same moment.

Checks that the code can read what is stored: payloads, envelopes, deltas, typed values and words.

They include the checks that tables declare.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from functools import partial, reduce
from operator import or_
from typing import Any, Final

from django.db.models import BooleanField, Count, Exists, Func, Max, Model, OuterRef, Q, QuerySet

from helix_store.budgets import NOTHING, count_again, counters_of, sums_of
from helix_store.catalogue import Table, declared, tables
from helix_store.catalogue.table import cascades_of
from helix_store.core.payloads import decode, decode_object
from helix_store.core.typed_json import loads_object
from helix_store.core.types import RunStatus, SessionStatus
from helix_store.counters import bounded
from helix_store.doctor.findings import (
    Check,
    Fault,
    Scope,
    Severity,
    by_statement,
    each,
    fault,
    fetched,
    in_parts,
    over,
    read_keys,
    table_of,
)
from helix_store.engine.database import Database
from helix_store.engine.expressions import for_keys, list_parameter, paced_pages
from helix_store.engine.statement import Clock, Statement, table, with_clock
from helix_store.exceptions import IntegrityFault
from helix_store.models import (
    Budget,
    Checkpoint,
    CheckpointKind,
    Effect,
    Lock,
    Message,
    Operation,
    Post,
    Run,
    Session,
    Stream,
    StreamChunk,
    SubSessionRef,
    UsageEntry,
)
from helix_store.models.fields import MomentField, PayloadField
from helix_store.models.sessions import NON_TERMINAL, OPEN_EFFECTS
from helix_store.sessions.deltas import decode_with_delta
from helix_store.sessions.effects import is_unknown
from helix_store.sessions.locking import touch
from helix_store.sessions.messages import SET_NEXT_POST
from helix_store.sessions.runs import (
    BUDGET_REASON,
    EFFECT_REASON,
    STOPPED_BY_BUDGET,
    STOPPED_BY_EFFECT,
    STOPPED_BY_ERROR,
    is_abandoned,
)
from helix_store.sessions.state import (
    HEAD_FIELDS,
    JSON_COLUMNS,
    current_state,
    drop_unneeded_bases,
    graph_values,
    require_readable_envelope,
)
from helix_store.sessions.tool_calls import ToolCalls, earliest_deadline
from helix_store.sessions.waiting import open_calls
from helix_store.streams.watching import notify_after_commit

_SESSION: Final = table(Session)
_CHECKPOINT: Final = table(Checkpoint)

_STATES: Final = "('state', 'step', 'base')"
"""The kinds that have the session's version. Graphs and snapshots number their checkpoints on their own."""


def _words(values: Iterable[str]) -> str:
    return ", ".join(f"'{value}'" for value in values)


def _checkpoints(condition: str, *, join: str = "") -> Statement:
    """Return a statement on checkpoints ``c`` of sessions ``s`` that meet a condition."""
    return for_keys(
        f"""
        SELECT s.tenant, s.session_id, s.id, c.version FROM {_SESSION} AS s
        JOIN {_CHECKPOINT} AS c ON c.session_id = s.id {join}
        WHERE s.id IN %(keys)s AND {condition} ORDER BY s.id, c.id"""
    )


def _sessions(condition: str, *, join: str = "") -> Statement:
    """Return a statement on sessions ``s`` that meet a condition."""
    return for_keys(
        f"""
        SELECT s.tenant, s.session_id, s.id, NULL FROM {_SESSION} AS s {join}
        WHERE s.id IN %(keys)s AND {condition} ORDER BY s.id"""
    )


# --- Histories ---------------------------------------------------------------------------------------


def _of_messages(value: str) -> str:
    """Return a value of a session's messages. With a join, SQLite would build an index for each page."""
    return f"(SELECT {value} FROM {table(Message)} WHERE session_id = s.id)"


HISTORIES: Final = for_keys(
    f"""
    SELECT tenant, session_id, id, message_count, number, first, last FROM (
        SELECT s.tenant, s.session_id, s.id, s.message_count, {_of_messages("count(*)")} AS number,
            COALESCE({_of_messages("min(sequence)")}, 1) AS first,
            COALESCE({_of_messages("max(sequence)")}, 0) AS last
        FROM {_SESSION} AS s WHERE s.id IN %(keys)s
    ) AS h
    WHERE message_count <> last OR number <> last OR first <> 1 ORDER BY id"""
)
"""Sessions whose messages are not numbered from 1 to their count, with count, number, first and last."""

CHECKPOINT_BEYOND_HISTORY: Final = _checkpoints(
    f"c.kind = 'step' AND c.message_count > COALESCE({_of_messages('max(sequence)')}, 0)"
)

# --- States ------------------------------------------------------------------------------------------

VERSION_ZERO: Final = for_keys(
    f"""
    SELECT tenant, session_id, id, NULL FROM {_SESSION} WHERE id IN %(keys)s AND version < 1
    UNION ALL
    SELECT s.tenant, s.session_id, s.id, c.version FROM {_SESSION} AS s
    JOIN {_CHECKPOINT} AS c ON c.session_id = s.id AND c.kind IN {_STATES}
    WHERE s.id IN %(keys)s AND c.version < 1"""
)
CHECKPOINT_FROM_THE_FUTURE: Final = _checkpoints(
    f"c.kind IN {_STATES} AND c.version > s.version AND s.version >= 1"
)
_CURRENT: Final = f"LEFT JOIN {_CHECKPOINT} AS k ON k.id = s.current_id AND k.session_id = s.id"
CURRENT_MISSING: Final = _sessions("k.id IS NULL", join=_CURRENT)
CURRENT_MISTAKEN: Final = _sessions(
    """k.id IS NOT NULL AND (
        (k.kind = 'step') <> s.current_is_checkpoint OR k.kind NOT IN ('step', 'state')
        OR (k.kind <> 'step' AND s.base_key IS NOT NULL))""",
    join=_CURRENT,
)
STATE_UNNEEDED: Final = _checkpoints("c.kind = 'state' AND k.id IS NOT NULL AND c.id <> k.id", join=_CURRENT)

# --- Deltas ------------------------------------------------------------------------------------------

_BASE: Final = f"LEFT JOIN {_CHECKPOINT} AS b ON b.id = c.base_id"
BASE_MISSING: Final = _checkpoints("c.base_id IS NOT NULL AND b.id IS NULL", join=_BASE)
BASE_UNSOUND: Final = _checkpoints(
    """b.id IS NOT NULL AND (
        b.session_id <> c.session_id OR b.base_id IS NOT NULL OR b.kind NOT IN ('step', 'base')
        OR b.version >= c.version OR c.kind NOT IN ('state', 'step'))""",
    join=_BASE,
)
BASE_NAMED: Final = _checkpoints("c.kind = 'base' AND c.checkpoint_id IS NOT NULL")
BASE_UNNEEDED: Final = _checkpoints(
    f"""c.kind = 'base' AND NOT EXISTS (
        SELECT 1 FROM {_CHECKPOINT} AS d WHERE d.session_id = c.session_id AND d.base_id = c.id)"""
)

_OTHER_ID: Final = "c.version = o.version AND c.checkpoint_id <> o.checkpoint_id"
_OTHER_VERSION: Final = "c.checkpoint_id = o.checkpoint_id AND c.version <> o.version"


def _has_checkpoint(condition: str) -> str:
    return f"""EXISTS (
        SELECT 1 FROM {_CHECKPOINT} AS c
        WHERE c.session_id = o.session_id AND c.kind = 'step' AND c.namespace = '' AND {condition})"""


OPERATION_MISFIT: Final = for_keys(
    f"""
    SELECT s.tenant, s.session_id, s.id, o.operation_id FROM {_SESSION} AS s
    JOIN {table(Operation)} AS o ON o.session_id = s.id
    WHERE s.id IN %(keys)s AND o.session_id IN %(keys)s AND (
        (o.version > s.version AND s.version >= 1)
        OR {_has_checkpoint(_OTHER_ID)} OR {_has_checkpoint(_OTHER_VERSION)})"""
)
"""Operations whose version never existed, or of another checkpoint. The checkpoint may have been pruned."""

NEXT_POST_OFF: Final = for_keys(
    f"""
    SELECT tenant, session_id, id, NULL FROM (
        SELECT s.tenant, s.session_id, s.id, s.next_post_at AS stored,
            (SELECT min(p.due_at) FROM {table(Post)} AS p
             WHERE p.session_id = s.id AND p.state = 'waiting') AS due
        FROM {_SESSION} AS s WHERE s.id IN %(keys)s
    ) AS h
    WHERE stored <> due OR (stored IS NULL) <> (due IS NULL) ORDER BY id"""
)

_NEWEST_RUN: Final = f"""JOIN {table(Run)} AS r ON r.session_id = s.id
        AND r.turn = (SELECT max(n.turn) FROM {table(Run)} AS n WHERE n.session_id = s.id)"""


def _is_stop(status: str, prefix: str) -> str:
    return f"r.status = '{status}' AND substr(r.completion_reason, 1, {len(prefix)}) = '{prefix}'"


_STOPPED_BY: Final = f"""CASE WHEN r.status = '{RunStatus.FAILED.value}' THEN '{STOPPED_BY_ERROR}'
        WHEN {_is_stop(RunStatus.INTERRUPTED.value, BUDGET_REASON)} THEN '{STOPPED_BY_BUDGET}'
        WHEN {_is_stop(RunStatus.INTERRUPTED.value, EFFECT_REASON)} THEN '{STOPPED_BY_EFFECT}' END"""

STOP_UNMARKED: Final = _sessions(
    f"s.status IN ({_words(NON_TERMINAL)}) AND {_STOPPED_BY} <> coalesce(s.stopped_by, '')", join=_NEWEST_RUN
)
MARK_STOPPED: Final = Statement(
    f"""UPDATE {_SESSION} SET
        stopped_by = (SELECT {_STOPPED_BY} FROM {table(Run)} AS r WHERE r.session_id = %(key)s
            ORDER BY r.turn DESC LIMIT 1),
        stopped_at = (SELECT r.ended_at FROM {table(Run)} AS r WHERE r.session_id = %(key)s
            ORDER BY r.turn DESC LIMIT 1)
    WHERE id = %(key)s"""
)


def _run_abandoned(clock: Clock) -> str:
    since = f"(SELECT {clock.after('run_age_ms')})"
    return f"""
        SELECT s.tenant, s.session_id, s.id, r.run_id FROM {_SESSION} AS s
        JOIN {table(Run)} AS r ON r.session_id = s.id AND r.status = '{RunStatus.RUNNING.value}'
        WHERE s.id IN %(keys)s AND r.started_at <= {since} AND {is_abandoned(clock, run="r", session="s")}
            AND NOT EXISTS (SELECT 1 FROM {table(Lock)} AS l WHERE l.tenant = s.tenant
                AND l.name = s.session_id AND l.expires_at > {since})
        ORDER BY s.id"""


RUN_ABANDONED: Final = for_keys(with_clock(_run_abandoned))


def _effect_unknown(clock: Clock) -> str:
    return f"""
        SELECT s.tenant, s.session_id, s.id, e.effect_id FROM {_SESSION} AS s
        JOIN {table(Effect)} AS e ON e.session_id = s.id
        WHERE s.id IN %(keys)s AND e.state IN ({_words(OPEN_EFFECTS)})
            AND e.started_at <= (SELECT {clock.after("effect_age_ms")}) AND {is_unknown(clock, "e")}
        ORDER BY s.id, e.sequence"""


EFFECT_UNKNOWN: Final = for_keys(with_clock(_effect_unknown))

# --- Trees -------------------------------------------------------------------------------------------

_PARENT: Final = f"LEFT JOIN {_SESSION} AS p ON p.tenant = s.tenant AND p.session_id = s.parent_session_id"
PARENT_MISSING: Final = _sessions("s.parent_session_id IS NOT NULL AND p.id IS NULL", join=_PARENT)
ROOT_OF_ANOTHER_TREE: Final = _sessions(
    """(s.parent_session_id IS NULL OR p.id IS NOT NULL)
        AND COALESCE(s.root_session_id, s.session_id)
            <> COALESCE(p.root_session_id, p.session_id, s.session_id)""",
    join=_PARENT,
)

REF_MISSING: Final = for_keys(
    f"""
    SELECT s.tenant, s.session_id, s.id, r.sub_session_id, r.status FROM {_SESSION} AS s
    JOIN {table(SubSessionRef)} AS r ON r.session_id = s.id
    WHERE s.id IN %(keys)s AND r.session_id IN %(keys)s AND r.location = 'local' AND NOT EXISTS (
        SELECT 1 FROM {_SESSION} AS c WHERE c.tenant = s.tenant AND c.session_id = r.sub_session_id
    ) ORDER BY s.id, r.id"""
)

# --- Words and texts ---------------------------------------------------------------------------------

_STATUSES: Final = ", ".join(f"'{status.value}'" for status in SessionStatus)
# Only steps have a status, and no constraint restricts it.
UNKNOWN_CHECKPOINT_STATUS: Final = _checkpoints(f"c.kind = 'step' AND c.status NOT IN ({_STATUSES})")


def _head_texts(cast: str) -> str:
    return f"""
        SELECT tenant, session_id, id, tags{cast}, metadata{cast}, typed_metadata,
            {", ".join(JSON_COLUMNS)}
        FROM {_SESSION} WHERE id IN %(keys)s ORDER BY id"""


HEAD_TEXTS: Final = for_keys(Statement(_head_texts("::text"), _head_texts("")))

# --- Rows without an owner, streams ------------------------------------------------------------------

USAGE_OF_UNKNOWN_SESSION: Final = for_keys(
    f"""
    SELECT u.tenant, u.recorded_for, u.id, u.entry_id FROM {table(UsageEntry)} AS u
    LEFT JOIN {_SESSION} AS s ON s.id = u.session_id
    WHERE u.id IN %(keys)s AND u.session_id IS NOT NULL
        AND (s.id IS NULL OR s.tenant <> u.tenant OR s.session_id <> u.recorded_for)
    ORDER BY u.id"""
)


def _of_chunks(value: str) -> str:
    return f"(SELECT {value} FROM {table(StreamChunk)} WHERE stream_id = t.id)"


STREAMS: Final = for_keys(
    f"""
    SELECT tenant, stream_id, id, floor, last_sequence, number, first, last FROM (
        SELECT t.tenant, t.stream_id, t.id, t.floor, t.last_sequence, {_of_chunks("count(*)")} AS number,
            {_of_chunks("min(sequence)")} AS first, {_of_chunks("max(sequence)")} AS last
        FROM {table(Stream)} AS t WHERE t.id IN %(keys)s
    ) AS h
    WHERE floor < 0 OR floor > last_sequence OR last_sequence <> COALESCE(last, floor)
        OR first <> floor + 1 OR number <> last - floor
    ORDER BY id"""
)
"""Streams whose chunks do not run from the floor to the last sequence, with number, first and last."""


# --- Sessions ----------------------------------------------------------------------------------------


@each(Session, "message-count-off", "message-hole")
def histories(db: Database, keys: list[int]) -> Iterator[Fault]:
    """Compare the count in the head with the last message. A gap concerns only the messages themselves."""
    for tenant, name, key, count, number, first, last in read_keys(db, HISTORIES, keys):
        if count != last:
            yield fault("message-count-off", "session", tenant, name, key=key)
        if number != last or first != 1:
            yield fault("message-hole", "message", tenant, name, f"{number} of {last}", key=key)


_PENDING: Final = ("pending_client_tool_calls", "live_decisions")


@each(Session, "deadline-off")
def deadlines(db: Database, keys: list[int]) -> Iterator[Fault]:
    rows = (
        Session.objects.using(db.alias)
        .filter(pk__in=keys)
        .exclude(pending_client_tool_calls__isnull=True, pending_deadline__isnull=True)
    )
    columns = ("tenant", "session_id", "pk", "pending_deadline", *_PENDING)
    found: dict[int, tuple[str, str, Any]] = {}
    calls: dict[int, ToolCalls] = {}
    for tenant, name, key, deadline, pending, live in fetched(db, rows.values_list(*columns)):
        # Unreadable calls are a separate fault.
        with suppress(IntegrityFault):
            calls[key] = ToolCalls.stored(pending, None, live)
            found[key] = tenant, name, deadline
    still_open = open_calls(db, calls)
    for key, (tenant, name, deadline) in found.items():
        if earliest_deadline(still_open[key]) != deadline:
            yield fault("deadline-off", "session", tenant, name, key=key)


# --- Owners ------------------------------------------------------------------------------------------

CHILDREN: Final = tuple(
    (relation.related_model, relation.field.attname, owner)
    for owner in (Session, Stream)
    for relation in cascades_of(owner)
)
"""Every table whose rows are deleted with their owner, its foreign key column, and the owner."""


@over("orphan-row")
def orphans(scope: Scope) -> Iterator[Fault]:
    """Yield rows without an owner. They belong to no tenant, so only a check of all tenants finds them."""
    if scope.is_narrowed:
        return
    for model, column, owner in CHILDREN:
        for key, owner_key in _orphans(scope, model, column, owner):
            sample = f"{key} of {table_of(owner)} {owner_key}"
            yield fault("orphan-row", table_of(model), None, None, sample, key=key)


def _orphans(scope: Scope, model: Any, column: str, owner: Any) -> Iterator[tuple[int, int]]:
    rows = scope.all_rows(model)
    known = scope.all_rows(owner).filter(pk=OuterRef(column))
    # Most rows have an owner, so a page of orphans could scan the whole table: examine one range of keys at a
    # time, which ends at the last of the page's rows however far apart their keys are.
    after, is_last = -1, False
    while not is_last:
        page = rows.filter(pk__gt=after).order_by("pk").values("pk")[: scope.page_size]
        ends = scope.db.query(partial(page.aggregate, count=Count("pk"), last=Max("pk")))
        if not ends["count"]:
            return
        of_range = rows.filter(~Exists(known), pk__gt=after, pk__lte=ends["last"])
        yield from fetched(scope.db, of_range.order_by("pk").values_list("pk", column))
        scope.after_page(ends["count"])
        after, is_last = ends["last"], ends["count"] < scope.page_size


@each(Stream, "stream-last-off", "stream-floor-off", "stream-hole")
def streams(db: Database, keys: list[int]) -> Iterator[Fault]:
    for tenant, name, key, *numbers in read_keys(db, STREAMS, keys):
        for rule in _stream_faults(*numbers):
            table = "stream" if rule != "stream-hole" else "stream_chunk"
            yield fault(rule, table, tenant, name, key=key)


def _stream_faults(
    floor: int, last_sequence: int, number: int, first: int | None, last: int | None
) -> Iterator[str]:
    """Yield the rules that a stream's head breaks, given its number of chunks and the ends of their range."""
    newest = floor if last is None else last
    if last_sequence != newest:
        yield "stream-last-off"
    if floor < 0 or floor > max(last_sequence, newest) or (first is not None and first <= floor):
        yield "stream-floor-off"
    elif number and number != newest - floor:
        yield "stream-hole"


# --- Budgets -----------------------------------------------------------------------------------------

_ATTEMPTS: Final = 3


@each(Budget, "budget-counter-off")
def counters(db: Database, keys: list[int]) -> Iterator[Fault]:
    rows = Budget.objects.using(db.alias).filter(pk__in=keys).order_by("pk")
    for tenant, name, key in fetched(db, rows.values_list("tenant", "name", "pk")):
        for value, period in _differing(Database(db.alias, tenant), name):
            row = " ".join(filter(None, (value, period)))
            yield fault("budget-counter-off", "budget_counter", tenant, name, row or None, key=key)


def _differing(db: Database, name: str) -> list[tuple[str, str]]:
    """Return the value and period of each counter that differs from the ledger, unless it is changing."""
    before = db.query(partial(counters_of, db, name))
    for _ in range(_ATTEMPTS):
        sums = db.query(partial(sums_of, db, name))
        stored = db.query(partial(counters_of, db, name))
        if stored == before:
            expected = {key: tuple(map(bounded, amounts)) for key, amounts in sums.items()}
            places = sorted({*stored, *expected})
            return [each for each in places if stored.get(each, NOTHING) != expected.get(each, NOTHING)]
        before = stored
    return []


INVARIANTS: Final = (
    histories,
    deadlines,
    by_statement("next-post-off", Session, "session", NEXT_POST_OFF),
    by_statement("stop-unmarked", Session, "session", STOP_UNMARKED),
    by_statement("version-zero", Session, "session", VERSION_ZERO),
    by_statement("checkpoint-from-the-future", Session, "checkpoint", CHECKPOINT_FROM_THE_FUTURE),
    by_statement("checkpoint-beyond-history", Session, "checkpoint", CHECKPOINT_BEYOND_HISTORY),
    by_statement("current-missing", Session, "session", CURRENT_MISSING),
    by_statement("current-mistaken", Session, "session", CURRENT_MISTAKEN),
    by_statement("state-unneeded", Session, "checkpoint", STATE_UNNEEDED),
    by_statement("base-missing", Session, "checkpoint", BASE_MISSING),
    by_statement("base-unsound", Session, "checkpoint", BASE_UNSOUND),
    by_statement("base-named", Session, "checkpoint", BASE_NAMED),
    by_statement("base-unneeded", Session, "checkpoint", BASE_UNNEEDED),
    by_statement("operation-misfit", Session, "operation", OPERATION_MISFIT),
    orphans,
    by_statement("usage-of-unknown-session", UsageEntry, "usage_entry", USAGE_OF_UNKNOWN_SESSION),
    streams,
    counters,
)

# --- Suspicions --------------------------------------------------------------------------------------

_LONG_AGO: Final = timedelta(days=1)
"""The age after which nobody is expected to release an expired lock."""


@each(Session, "ownership-outside-tree")
def owners(db: Database, keys: list[int]) -> Iterator[Fault]:
    """Yield owners in other trees. A deleted owner is not a fault, because the record outlives it."""
    rows = Session.objects.using(db.alias).filter(pk__in=keys, client_tool_call_ownership__isnull=False)
    columns = ("tenant", "session_id", "pk", "root_session_id", "client_tool_call_ownership")
    for tenant, name, key, root, text in fetched(db, rows.values_list(*columns)):
        named = _owners(text)
        known = Session.objects.using(db.alias).filter(tenant=tenant, session_id__in=set(named.values()))
        trees = dict(fetched(db, known.values_list("session_id", "root_session_id")))
        for call, owner in named.items():
            if owner in trees and (trees[owner] or owner) != (root or name):
                yield fault("ownership-outside-tree", "session", tenant, name, call, key=key)


def _owners(text: str) -> dict[str, str]:
    try:
        return {call: owner for call, owner in decode_object(text).items() if type(owner) is str}
    except IntegrityFault:
        return {}


@each(Session, "ref-missing")
def missing_refs(db: Database, keys: list[int]) -> Iterator[Fault]:
    """Yield local refs without a session. A ref may be recorded before its sub-session begins."""
    for tenant, name, key, ref, status in read_keys(db, REF_MISSING, keys):
        severity = Severity.INFO if status == _RUNNING else None
        yield fault("ref-missing", "sub_session_ref", tenant, name, ref, key=key, severity=severity)


@each(Lock, "lock-expired")
def locks(db: Database, keys: list[int]) -> Iterator[Fault]:
    def expired() -> list[tuple[Any, ...]]:
        rows = Lock.objects.using(db.alias).filter(pk__in=keys, expires_at__lt=db.now() - _LONG_AGO)
        return list(rows.order_by("pk").values_list("tenant", "name", "pk", "owner"))

    for tenant, name, key, owner in db.query(expired):
        yield fault("lock-expired", "lock", tenant, name, owner, key=key)


@each(Session, "run-abandoned")
def abandoned_runs(db: Database, keys: list[int]) -> Iterator[Fault]:
    ages = {"run_age_ms": -(_RUN_AGE // _MILLISECOND)}
    for tenant, name, key, run_id in db.read(RUN_ABANDONED, {"keys": list_parameter(db, keys), **ages}):
        yield fault("run-abandoned", "run", tenant, name, run_id, key=key)


@each(Session, "effect-unknown")
def unknown_effects(db: Database, keys: list[int]) -> Iterator[Fault]:
    ages = {"effect_age_ms": -(_EFFECT_AGE // _MILLISECOND)}
    for tenant, name, key, effect_id in db.read(EFFECT_UNKNOWN, {"keys": list_parameter(db, keys), **ages}):
        yield fault("effect-unknown", "effect", tenant, name, effect_id, key=key)


_MILLISECOND: Final = timedelta(milliseconds=1)
_RUNNING: Final = "running"
"""The status of a new ref. A ref's status is any text."""

_RUN_AGE: Final = timedelta(hours=1)
_EFFECT_AGE: Final = timedelta(days=1)

SUSPICIONS: Final = (
    abandoned_runs,
    unknown_effects,
    by_statement("parent-missing", Session, "session", PARENT_MISSING),
    by_statement("root-of-another-tree", Session, "session", ROOT_OF_ANOTHER_TREE),
    missing_refs,
    owners,
    locks,
)


_MOST_PAYLOADS: Final = 1_000
"""The maximum number of rows whose payloads are in memory at once; fewer if the payloads are long."""

_SOUND_ENVELOPE: Final = '{"agent_type":"any","status":"active"}'


def _can_read(read: Callable[[], Any]) -> bool:
    """Return whether stored text is readable by ``read``, which raises `IntegrityFault` for faulty text."""
    try:
        read()
    except IntegrityFault:
        return False
    return True


# --- Sessions ----------------------------------------------------------------------------------------


@each(Session, "unreadable-columns", "unreadable-typed-values")
def heads(db: Database, keys: list[int]) -> Iterator[Fault]:
    for tenant, name, key, tags, metadata, typed, *texts in read_keys(db, HEAD_TEXTS, keys):
        if typed is not None and not _can_read(partial(loads_object, typed)):
            yield fault("unreadable-typed-values", "session", tenant, name, key=key)
        columns = dict.fromkeys(HEAD_FIELDS) | {"tags": tags, "metadata": metadata}
        columns |= dict(zip(JSON_COLUMNS, texts, strict=True))
        if not _can_read(partial(_read_head, columns)):
            yield fault("unreadable-columns", "session", tenant, name, key=key)


def _read_head(columns: dict[str, Any]) -> None:
    """Read the columns as a load does, but together with a sound state."""
    try:
        documents = {name: json.loads(columns[name]) for name in ("tags", "metadata")}
    except (ValueError, RecursionError) as exc:
        raise IntegrityFault from exc
    current_state({**columns, **documents, "status": SessionStatus.ACTIVE}, "{}", _SOUND_ENVELOPE)


# --- Rows --------------------------------------------------------------------------------------------


@each(Stream, "unreadable-payload")
def stream_payloads(db: Database, keys: list[int]) -> Iterator[Fault]:
    heads = Stream.objects.using(db.alias).filter(pk__in=keys).order_by("pk")
    columns = ("tenant", "stream_id", "pk", "output", "error")
    for tenant, name, key, *texts in fetched(db, heads.values_list(*columns)):
        if any(text is not None and not _can_read(partial(decode, text)) for text in texts):
            yield fault("unreadable-payload", "stream", tenant, name, key=key)


def _shown_key(key: tuple[Any, ...]) -> str:
    """Return the values that distinguish a row from the other rows of its owner."""
    return " ".join(map(str, key[1:]))


_Row = tuple[tuple[Any, ...], tuple[Any, ...]]


def _rows_of(scope: Scope, model: type[Model], parent: str, keys: list[int]) -> QuerySet[Any]:
    """Return the rows of these owners, in a form that uses the model's unique index."""
    bounds = {f"{parent}__in": keys, f"{parent}__gte": min(keys), f"{parent}__lte": max(keys)}
    return scope.all_rows(model).filter(**bounds)


def _paged(
    scope: Scope, rows: QuerySet[Any], order: tuple[str, ...], columns: tuple[str, ...]
) -> Iterator[_Row]:
    """Yield the position of each row in an order and its columns, one page of payloads at a time."""
    for page in paced_pages(scope.db, rows, order, *columns, most=_MOST_PAYLOADS):
        for row in page:
            yield row[len(columns) :], row[: len(columns)]
        scope.after_page(len(page))


# --- States ------------------------------------------------------------------------------------------


@over("unreadable-payload", "unreadable-envelope", "unreadable-typed-values", "delta-misfit")
def states(scope: Scope) -> Iterator[Fault]:
    columns = ("session__tenant", "session__session_id", "payload", "envelope", "base_id", "base__payload")
    order = ("kind", "namespace", "version")

    def of_sessions(keys: list[int]) -> Iterator[Fault]:
        rows = _rows_of(scope, Checkpoint, "session_id", keys)
        for key, (tenant, name, *texts) in _paged(scope, rows, ("session_id", *order), columns):
            rule = _broken_rule(key[1], *texts)
            if rule is not None:
                yield fault(rule, "checkpoint", tenant, name, _shown_key(key))

    for keys in scope.pages(Session):
        yield from in_parts(Session, keys, of_sessions)


def _broken_rule(kind: str, payload: str, envelope: str, base_id: int | None, base: str | None) -> str | None:
    """Return the rule that a row's columns break. An unreadable or missing base is a fault of another row."""
    if kind == CheckpointKind.GRAPH:
        return None if _can_read(partial(graph_values, payload)) else "unreadable-typed-values"
    if kind == CheckpointKind.SNAPSHOT:
        return None if _can_read(partial(decode_object, payload)) else "unreadable-payload"
    if not _can_read(partial(decode_object, payload)):
        return "unreadable-payload"
    if kind != CheckpointKind.BASE and not _can_read(partial(require_readable_envelope, envelope)):
        return "unreadable-envelope"
    if base_id is None or base is None or not _can_read(partial(decode_object, base)):
        return None
    return None if _can_read(partial(decode_with_delta, base, payload)) else "delta-misfit"


PAYLOAD_CHECKS: Final = (
    by_statement("unknown-word", Session, "checkpoint", UNKNOWN_CHECKPOINT_STATUS),
    heads,
    stream_payloads,
    states,
)

# --- Tables ------------------------------------------------------------------------------------------


def declared_checks() -> tuple[Check, ...]:
    """Return the checks of the tables in the catalogue."""
    return tuple(check for table in tables() for check in _checks_of(table))


def _checks_of(table: Table) -> Iterator[Check]:
    fields = table.model._meta.concrete_fields
    payloads = [field.attname for field in fields if isinstance(field, PayloadField)]
    if payloads and table.reads is not None:
        yield _readable(table, payloads, table.reads)
    if times := {field.attname: field.null for field in fields if isinstance(field, MomentField)}:
        yield _times(table, times)
    if table.check is not None:
        yield _own(table)


class _IsUnusualTime(Func):
    """The condition that a column of SQLite does not hold a time as `MomentField` writes it, with digits that
    name a second of the years 1 to 9999. Python may be able to read it nevertheless.
    """

    # The modifier turns 30 February into 1 March. The column itself would be compared as a number.
    template = (
        "(datetime(substr(%(expressions)s, 1, 19), '+0 days') IS NOT substr(%(expressions)s, 1, 19)"
        " OR substr(%(expressions)s, 1, 4) = '0000' OR length(%(expressions)s) <> 19"
        " AND substr(%(expressions)s, 20) NOT GLOB '.[0-9][0-9][0-9][0-9][0-9][0-9]')"
    )
    conditional = True

    def __init__(self, column: str) -> None:
        super().__init__(column, output_field=BooleanField())


_FIRST: Final = datetime.min.replace(tzinfo=UTC)
_LAST: Final = datetime.max.replace(tzinfo=UTC)


def _times(table: Table, times: Mapping[str, bool]) -> Check:
    """Return a check that reads the times of a table, which maps each to whether it may be null.

    A database may hold times that Python cannot represent: PostgreSQL's ``infinity``, or any text on SQLite.
    The statement returns only the rows with such a time, and on SQLite some others, so that few are read.
    """
    is_beyond = reduce(or_, (Q((f"{name}__lt", _FIRST)) | Q((f"{name}__gt", _LAST)) for name in times))
    is_unusual = reduce(or_, (Q(_IsUnusualTime(name), (f"{name}__isnull", False)) for name in times))
    # Rows that name their tenant may have no owner.
    is_own = table.names_tenant
    of: Any = table.model if is_own else table.owner
    parent, order = ("pk", ("pk",)) if is_own else (table.parent, (table.parent, *table.order))

    @over("unreadable-row")
    def check(scope: Scope) -> Iterator[Fault]:
        def of_owners(keys: list[int]) -> Iterator[Fault]:
            rows = _rows_of(scope, table.model, parent, keys)
            rows = rows.filter(is_beyond if scope.db.is_postgresql else is_unusual)
            for _, values in _paged(scope, rows, order, tuple(times)):
                # SQLite reads text that is no time as null.
                if any(value is None and not times[name] for name, value in zip(times, values, strict=True)):
                    raise IntegrityFault
            yield from ()

        for keys in scope.pages(of):
            yield from in_parts(of, keys, of_owners)

    return check


def _readable(table: Table, payloads: list[str], read: Callable[[str], object]) -> Check:
    parent, names = "pk", [table.parent, "pk"]
    if table.owner is not None:
        parent = table.parent
        owner = table.parent_field.name
        names = [f"{owner}__tenant", f"{owner}__{declared(table.owner).order[0]}"]

    @over("unreadable-payload")
    def check(scope: Scope) -> Iterator[Fault]:
        def of_owners(keys: list[int]) -> Iterator[Fault]:
            rows, order = _rows_of(scope, table.model, parent, keys), (table.parent, *table.order)
            for key, (tenant, name, *texts) in _paged(scope, rows, order, (*names, *payloads)):
                if any(text is not None and not _can_read(partial(read, text)) for text in texts):
                    shown = None if table.is_of_tenant else name
                    yield fault("unreadable-payload", table_of(table.model), tenant, shown, _shown_key(key))

        for keys in _pages(scope, table):
            yield from in_parts(table.owner or table.model, keys, of_owners)

    return check


def _own(table: Table) -> Check:
    """Return a table's own check as a check for the doctor."""
    of: Any = table.model if table.is_of_tenant else Session
    columns = ("pk", "tenant", "pk" if table.is_of_tenant else "session_id")

    @over("app-rows-unsound")
    def check(scope: Scope) -> Iterator[Fault]:
        for keys in _pages(scope, table):
            found = scope.db.query(partial(_found, table, scope.db, keys))
            rows = of._base_manager.using(scope.db.alias).filter(pk__in={key for key, _ in found})
            owners = {key: owner for key, *owner in fetched(scope.db, rows.values_list(*columns))}
            for key, text in found:
                tenant, name = owners.get(key, (None, None))
                shown = None if table.is_of_tenant else name
                yield fault("app-rows-unsound", table_of(table.model), tenant, shown, text, key=key)

    return check


def _found(table: Table, db: Database, keys: list[int]) -> list[tuple[int, str]]:
    return [] if table.check is None else list(table.check(db, keys))


def _pages(scope: Scope, table: Table) -> Iterator[list[int]]:
    """Yield the keys of owners, or of a tenant's own rows, which belong to no session."""
    if table.owner is not None:
        yield from scope.pages(table.owner)
    elif scope.session_id is None:
        yield from scope.pages(table.model)


Fix = Callable[[Database, Any], object]
"""A function that fixes a locked row, or leaves it unchanged if a fix is not safe."""


def fix(db: Database, check: Check, rule: str, key: int, *, dry_run: bool) -> list[Fault]:
    """Fix a rule's faults in one row, in one transaction, and return the remaining faults.

    The check is repeated under the row's lock, so a row that has been fixed in the meantime is left
    unchanged. A dry run is rolled back. It is safe to repeat.
    """

    def mend() -> list[Fault]:
        assert check.of is not None and check.keyed is not None  # noqa: PT018, S101  a rule with a fix has both
        rows = check.of._base_manager.using(db.alias).filter(pk=key)
        row = next(iter(rows.select_for_update(no_key=True)), None)
        if row is None or not _still_found(db, check, rule, key):
            return []
        FIXES[rule](db, row)
        return _still_found(db, check, rule, key)

    with db.rolled_back(dry_run=dry_run):
        return db.transaction(mend)


def _still_found(db: Database, check: Check, rule: str, key: int) -> list[Fault]:
    assert check.keyed is not None  # noqa: S101
    return [fault for fault in check.keyed(db, [key]) if fault.rule_id == rule]


def _message_count(db: Database, head: Session) -> None:
    """Fix the count only if the history is complete. A longer checkpoint shows that messages were lost."""
    messages = Message.objects.using(db.alias).filter(session_id=head.pk)
    last = messages.aggregate(last=Max("sequence"))["last"] or 0
    beyond = Checkpoint.objects.using(db.alias).filter(
        session_id=head.pk, kind=CheckpointKind.STEP, message_count__gt=last
    )
    if messages.count() == last and not beyond.exists():
        _update(db, head, message_count=last)


def _deadline(db: Database, head: Session) -> None:
    calls = ToolCalls.stored(head.pending_client_tool_calls, None, head.live_decisions)
    _update(db, head, pending_deadline=earliest_deadline(open_calls(db, {head.pk: calls})[head.pk]))


def _current(db: Database, head: Session) -> None:
    """Also clear the base key: without it, the next step stores a full payload, which is always correct."""
    current = (
        Checkpoint.objects.using(db.alias)
        .filter(pk=head.current_id or 0)
        .values_list("kind", flat=True)
        .get()
    )
    if current in (CheckpointKind.STEP, CheckpointKind.STATE):
        _update(db, head, current_is_checkpoint=current == CheckpointKind.STEP, base_key=None)


def _unneeded_state(db: Database, head: Session) -> None:
    rows = Checkpoint.objects.using(db.alias).filter(session_id=head.pk)
    current = rows.get(pk=head.current_id or 0)
    older = rows.filter(kind=CheckpointKind.STATE, version__lt=current.version)
    older.exclude(pk=current.pk).delete()
    touch(db, head)


def _unneeded_bases(db: Database, head: Session) -> None:
    drop_unneeded_bases(db, head)
    touch(db, head)


def _usage(db: Database, entry: UsageEntry) -> None:
    if not Session.objects.using(db.alias).filter(pk=entry.session_id or 0).exists():
        UsageEntry.objects.using(db.alias).filter(pk=entry.pk).update(session=None)


def _last_sequence(db: Database, stream: Stream) -> None:
    """Only increase the number. A lower one would be used for a chunk other than the one that readers saw."""
    newest = stream.chunks.using(db.alias).aggregate(newest=Max("sequence"))["newest"]
    if newest is not None and newest > stream.last_sequence:
        Stream.objects.using(db.alias).filter(pk=stream.pk).update(last_sequence=newest)
        notify_after_commit(db.alias, stream.pk, newest)


def _lock(db: Database, lock: Lock) -> None:
    Lock.objects.using(db.alias).filter(pk=lock.pk).update(owner=None, expires_at=None)


def _update(db: Database, head: Session, **columns: Any) -> None:
    Session.objects.using(db.alias).filter(pk=head.pk).update(**columns)


FIXES: Final[dict[str, Fix]] = {
    "message-count-off": _message_count,
    "deadline-off": _deadline,
    "next-post-off": lambda db, head: db.execute(SET_NEXT_POST, {"key": head.pk}),
    "stop-unmarked": lambda db, head: db.execute(MARK_STOPPED, {"key": head.pk}),
    "current-mistaken": _current,
    "state-unneeded": _unneeded_state,
    "base-unneeded": _unneeded_bases,
    "usage-of-unknown-session": _usage,
    "budget-counter-off": lambda db, budget: count_again(Database(db.alias, budget.tenant), budget.name),
    "stream-last-off": _last_sequence,
    "lock-expired": _lock,
}
