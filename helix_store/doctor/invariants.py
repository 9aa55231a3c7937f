"""The invariants between the rows of a sound database, each defined only here, and suspicious conditions."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from functools import partial
from typing import Any, Final

from django.db.models import Exists, Max, Min, OuterRef

from helix_store.budgets.database import counters_of, sums_of
from helix_store.budgets.rules import NOTHING
from helix_store.catalogue.rows import cascades_of
from helix_store.core.payloads import decode_object
from helix_store.counters.rules import bounded
from helix_store.doctor import sql
from helix_store.doctor.checks import Scope, by_statement, each, fault, fetched, over, read_keys, table_of
from helix_store.doctor.findings import Fault
from helix_store.engine.database import Database
from helix_store.exceptions import IntegrityFault
from helix_store.models import Budget, Lock, Session, Stream, UsageEntry
from helix_store.sessions.tool_calls import earliest_deadline

# --- Sessions ----------------------------------------------------------------------------------------


@each(Session, "message-count-off", "message-hole")
def histories(db: Database, keys: list[int]) -> Iterator[Fault]:
    """Compare the count in the head with the last message. A gap concerns only the messages themselves."""
    for tenant, name, key, count, number, first, last in read_keys(db, sql.HISTORIES, keys):
        if count != last:
            yield fault("message-count-off", "session", tenant, name, key=key)
        if number != last or first != 1:
            yield fault("message-hole", "message", tenant, name, f"{number} of {last}", key=key)


@each(Session, "deadline-off")
def deadlines(db: Database, keys: list[int]) -> Iterator[Fault]:
    rows = (
        Session.objects.using(db.alias)
        .filter(pk__in=keys)
        .exclude(pending_client_tool_calls__isnull=True, pending_deadline__isnull=True)
    )
    columns = ("tenant", "session_id", "pk", "pending_client_tool_calls", "pending_deadline")
    for tenant, name, key, calls, deadline in fetched(db, rows.values_list(*columns)):
        if _has_deadline_off(calls, deadline):
            yield fault("deadline-off", "session", tenant, name, key=key)


def _has_deadline_off(calls: str | None, deadline: Any) -> bool:
    """Return whether the deadline does not match that of the calls. Unreadable calls are a separate fault."""
    try:
        return bool(earliest_deadline({} if calls is None else decode_object(calls)) != deadline)
    except IntegrityFault:
        return False


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
    ends = scope.db.query(lambda: rows.aggregate(first=Min("pk"), last=Max("pk")))
    if ends["first"] is None:
        return
    known = scope.all_rows(owner).filter(pk=OuterRef(column))
    # Use key ranges, not pages: most rows have an owner, so a page of orphans could scan the whole table.
    for start in range(ends["first"], ends["last"] + 1, scope.page_size):
        page = rows.filter(~Exists(known), pk__gte=start, pk__lt=start + scope.page_size)
        found = fetched(scope.db, page.order_by("pk").values_list("pk", column))
        yield from found
        scope.after_page(scope.page_size)


@each(Stream, "stream-last-off", "stream-floor-off", "stream-hole")
def streams(db: Database, keys: list[int]) -> Iterator[Fault]:
    for tenant, name, key, *numbers in read_keys(db, sql.STREAMS, keys):
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
            expected = {place: tuple(map(bounded, amounts)) for place, amounts in sums.items()}
            places = sorted({*stored, *expected})
            return [each for each in places if stored.get(each, NOTHING) != expected.get(each, NOTHING)]
        before = stored
    return []


INVARIANTS: Final = (
    histories,
    deadlines,
    by_statement("next-post-off", Session, "session", sql.NEXT_POST_OFF),
    by_statement("version-zero", Session, "session", sql.VERSION_ZERO),
    by_statement("checkpoint-from-the-future", Session, "checkpoint", sql.CHECKPOINT_FROM_THE_FUTURE),
    by_statement("checkpoint-beyond-history", Session, "checkpoint", sql.CHECKPOINT_BEYOND_HISTORY),
    by_statement("current-missing", Session, "session", sql.CURRENT_MISSING),
    by_statement("current-mistaken", Session, "session", sql.CURRENT_MISTAKEN),
    by_statement("state-unneeded", Session, "checkpoint", sql.STATE_UNNEEDED),
    by_statement("base-missing", Session, "checkpoint", sql.BASE_MISSING),
    by_statement("base-unsound", Session, "checkpoint", sql.BASE_UNSOUND),
    by_statement("base-named", Session, "checkpoint", sql.BASE_NAMED),
    by_statement("base-unneeded", Session, "checkpoint", sql.BASE_UNNEEDED),
    by_statement("operation-misfit", Session, "operation", sql.OPERATION_MISFIT),
    orphans,
    by_statement("usage-of-unknown-session", UsageEntry, "usage_entry", sql.USAGE_OF_UNKNOWN_SESSION),
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


@each(Lock, "lock-expired")
def locks(db: Database, keys: list[int]) -> Iterator[Fault]:
    def expired() -> list[tuple[Any, ...]]:
        rows = Lock.objects.using(db.alias).filter(pk__in=keys, expires_at__lt=db.now() - _LONG_AGO)
        return list(rows.order_by("pk").values_list("tenant", "name", "pk", "owner"))

    for tenant, name, key, owner in db.query(expired):
        yield fault("lock-expired", "lock", tenant, name, owner, key=key)


SUSPICIONS: Final = (
    by_statement("parent-missing", Session, "session", sql.PARENT_MISSING),
    by_statement("root-of-another-tree", Session, "session", sql.ROOT_OF_ANOTHER_TREE),
    owners,
    locks,
)
