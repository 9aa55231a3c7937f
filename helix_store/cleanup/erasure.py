"""Erasure: deleting trees of sessions with everything that refers to them."""

from __future__ import annotations

import logging
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from itertools import repeat
from typing import Any, Final, NamedTuple

from django.db.models import Count, Exists, F, Model, OuterRef, QuerySet, Sum

from helix_store import conf
from helix_store.catalogue import tables
from helix_store.catalogue.table import (
    children_of_sessions,
    children_with_rows,
    let_go,
    protected_sessions,
    refuse_protected,
    tenants_with_rows,
)
from helix_store.cleanup.workspaces import (
    ErasureReceipt,
    MissingProvider,
    SessionKey,
    Snapshot,
    WorkspaceProvider,
    checked_providers,
    digest_of,
    owned_snapshots,
)
from helix_store.core import moments, validation
from helix_store.core.approvals import USER
from helix_store.core.payloads import decode_object
from helix_store.core.types import BRANCHED_FROM, SessionStatus, StreamStatus, UserId
from helix_store.core.usage import BudgetScope
from helix_store.counters import delete_usage
from helix_store.engine.database import Database, refuse_moved
from helix_store.engine.expressions import for_keys, has_metadata, keyset_pages, list_parameter, with_keys
from helix_store.engine.statement import Clock, Statement, table, with_clock
from helix_store.exceptions import IntegrityFault, InvalidQuery
from helix_store.models import (
    Budget,
    BudgetCounter,
    Checkpoint,
    CheckpointKind,
    Lock,
    Post,
    PostState,
    Session,
    Stream,
    StreamChunk,
    SubSessionRef,
    Tombstone,
    UsageEntry,
)
from helix_store.sessions.heads import (
    delete_locked_sessions,
    forest_keys,
    lock_forest,
    lock_tree,
    tree_keys,
)
from helix_store.sessions.locking import (
    NO_TENANT,
    advance,
    forget_tenant,
    lock_session,
    lock_sessions,
    set_tombstones,
)
from helix_store.sessions.messages import SET_NEXT_POST, is_driven
from helix_store.sessions.runs import has_live_run
from helix_store.streams.database import delete_orphaned_streams

_SESSION: Final = table(Session)
_REF: Final = table(SubSessionRef)
_STREAM: Final = table(Stream)

# --- Sessions by their keys ---------------------------------------------------------------------------

LINKS_INTO: Final = for_keys(
    f"""
    SELECT child.id, parent.id FROM {_SESSION} AS child JOIN {_SESSION} AS parent
        ON parent.tenant = child.tenant AND parent.session_id = child.parent_session_id
    WHERE child.id IN %(keys)s
  UNION ALL
    SELECT child.id, ref.session_id FROM {_SESSION} AS child
    JOIN {_REF} AS ref ON ref.sub_session_id = child.session_id AND ref.location = 'local'
    JOIN {_SESSION} AS owner ON owner.id = ref.session_id AND owner.tenant = child.tenant
    WHERE child.id IN %(keys)s"""
)
"""The keys of these sessions, each with the key of a session of which it is a sub-session."""


def _is_idle(status: SessionStatus) -> str:
    """Return the condition for one status. A post that is due later, or a call that may be answered until
    later, is something to come: until then, the session is not idle.
    """
    condition = f"WHEN '{status}' THEN updated_at <= %({status})s"
    if status.is_terminal:
        return condition
    to_come = ("next_post_at", "pending_deadline")
    return condition + "".join(f" AND coalesce({column} <= %({status})s, TRUE)" for column in to_come)


_AGES: Final = " ".join(map(_is_idle, SessionStatus))

NOT_IDLE: Final = for_keys(
    f"""
    SELECT id FROM {_SESSION}
    WHERE id IN %(keys)s AND NOT coalesce(CASE status {_AGES} END, FALSE)"""
)
"""The keys of sessions that were not idle since the cutoff for their status, or whose status has none."""


def _in_use(clock: Clock) -> str:
    return f"""
        SELECT s.id FROM {_SESSION} AS s WHERE s.id IN %(keys)s AND (
            {has_live_run(clock, "s")} OR {is_driven(clock)} OR EXISTS (
                SELECT 1 FROM {_STREAM} AS st
                WHERE st.tenant = s.tenant AND st.stream_id = s.stream_id
                    AND st.status = '{StreamStatus.ACTIVE.value}' AND st.lease_expires_at > {clock.now}
            )
        )"""


IN_USE: Final = for_keys(with_clock(_in_use))
"""The keys of sessions with a live lock, a live run, or a stream with a live writer."""


def _streams_of_no_other(clock: Clock) -> str:
    not_chosen = "NOT (o.id IN %(keys)s)"
    # The search for other sessions is split in two, so that each part is one index lookup.
    other = f"SELECT 1 FROM {_SESSION} AS o WHERE o.tenant = st.tenant AND o.stream_id = st.stream_id"
    return f"""
        SELECT st.id, st.last_sequence - st.floor,
            st.status = '{StreamStatus.ACTIVE.value}' AND st.lease_expires_at <= {clock.now}
        FROM {_STREAM} AS st
        WHERE st.tenant = (SELECT %(tenant)s)
            AND st.stream_id IN (SELECT s.stream_id FROM {_SESSION} AS s WHERE s.id IN %(keys)s)
            AND NOT EXISTS ({other} AND o.session_id = st.stream_id AND {not_chosen})
            AND NOT EXISTS (
                {other} AND (o.stream_id < o.session_id OR o.stream_id > o.session_id) AND {not_chosen}
            )"""


STREAMS_OF_NO_OTHER: Final = for_keys(with_clock(_streams_of_no_other))
"""The key, the chunk count and the lost-writer flag of streams that only these sessions refer to."""


@cache
def row_counts_statement() -> Statement:
    """Return the statement that counts rows of these sessions, in the order of `children_of_sessions`.

    It is built on first use, because only then are all models known.
    """
    counts = (
        f"(SELECT count(*) FROM {table(child.related_model)} WHERE {child.field.column} IN %(keys)s)"
        for child in children_of_sessions()
    )
    return for_keys(f"SELECT {', '.join(counts)}")


# --- Usage --------------------------------------------------------------------------------------------


def _anonymise(random_id: str) -> str:
    # Rows that are already anonymous are not written again.
    return f"""
        UPDATE {table(UsageEntry)} SET user_id = NULL, session_id = NULL, run_id = NULL,
            sub_session_id = NULL, recorded_for = '', entry_id = {random_id}
        WHERE id IN %(keys)s AND recorded_for <> '' RETURNING id"""


# Citus does not allow random functions in an UPDATE.
_DIGEST_OF_ID: Final = "left(encode(pg_catalog.sha256((%(secret)s || id::text)::bytea), 'hex'), 32)"
ANONYMISE_USAGE: Final = for_keys(
    Statement(_anonymise(_DIGEST_OF_ID), _anonymise("lower(hex(randomblob(16)))"))
)
"""Remove the user, the session and the run from usage entries.

The id of an entry is also replaced, because it may be derived from the session's id. ``secret`` is random.
"""


# --- Checkpoints --------------------------------------------------------------------------------------

_IS_STEP: Final = f"c.kind = '{CheckpointKind.STEP.value}' AND c.namespace = ''"


def _too_many_checkpoints(clock: Clock) -> str:
    checkpoints = f"""
        {table(Checkpoint)} AS c
        WHERE c.session_id = s.id AND {_IS_STEP}"""
    return f"""
        SELECT s.session_id, (SELECT count(*) FROM {checkpoints}) - %(keep)s
        FROM {_SESSION} AS s
        WHERE s.tenant = (SELECT %(tenant)s) AND s.session_id > %(after)s
            AND (SELECT c.version FROM {checkpoints} ORDER BY c.version DESC LIMIT 1 OFFSET %(keep)s)
                IS NOT NULL
            AND NOT {has_live_run(clock, "s")}
            AND NOT {is_driven(clock)}
        ORDER BY s.session_id LIMIT %(limit)s"""


TOO_MANY_CHECKPOINTS: Final = with_clock(_too_many_checkpoints)
"""The id of each session that is not in use, and its number of surplus step checkpoints, ordered by id."""

SURPLUS_CHECKPOINTS: Final = for_keys(
    f"""
    SELECT coalesce(sum(grouped.surplus), 0) FROM (
        SELECT count(*) - %(keep)s AS surplus FROM {table(Checkpoint)} AS c
        WHERE c.session_id IN %(keys)s AND {_IS_STEP} GROUP BY c.session_id HAVING count(*) > %(keep)s
    ) AS grouped"""
)
"""The total number of surplus step checkpoints of these sessions."""


Rows = Counter[type[Model]]


def tenants_of(using: str | None, models: Iterable[type[Model]]) -> list[str]:
    """Return the tenants with rows in these tables.

    Each tenant takes one index lookup, regardless of its size.
    """
    alias = Database(using, "").alias
    return sorted({tenant for model in models for tenant in tenants_with_rows(model, alias)})


def sessions_with_keys(db: Database, keys: Collection[int]) -> QuerySet[Session]:
    return Session.objects.using(db.alias).filter(pk__in=keys)


def require_writable(db: Database, keys: Collection[int]) -> None:
    """Write locked rows unchanged, so that a tenant being moved is refused before any irreversible step.

    Its sessions may continue in the other database, with the same snapshots. Raise `TenantMoved`.
    """
    sessions_with_keys(db, keys).update(updated_at=F("updated_at"))


def require_deletable(db: Database, keys: Collection[int]) -> None:
    """Refuse the deletion of locked sessions before their snapshots are deleted.

    Raise `TenantMoved`, or `ConflictError` if a foreign key of another app protects one of the sessions.
    """
    refuse_protected(db, keys)
    require_writable(db, keys)


def ids_of(db: Database, keys: Collection[int]) -> list[str]:
    return list(sessions_with_keys(db, keys).values_list("session_id", flat=True))


def links_into(db: Database, keys: Collection[int]) -> dict[int, set[int]]:
    """Return, by the key of a session, the keys of the sessions of which it is a sub-session."""
    links = defaultdict(set)
    for key, owner in db.read(LINKS_INTO, {"keys": list_parameter(db, list(keys))}):
        links[key].add(owner)
    return links


def is_in_use(db: Database, keys: Collection[int]) -> bool:
    """Return whether one of the sessions is in use and must be kept. See `in_use_from_now_on`."""
    return bool(in_use_from_now_on(db, keys))


def in_use_from_now_on(db: Database, keys: Collection[int]) -> set[int]:
    """Return the sessions in use, and keep the others from being used. Call this in a transaction.

    It locks the rows of the sessions' locks, so that nobody can acquire one until the transaction ends.
    """
    locks = locks_of(db, keys)
    free = set(locks.select_for_update(skip_locked=True).order_by("pk").values_list("pk", flat=True))
    # If a row is locked, someone is acquiring that lock, so it is about to become live.
    acquired = [name for key, name in locks.values_list("pk", "name") if key not in free]
    used = in_use(db, keys)
    if acquired:
        named = sessions_with_keys(db, keys).filter(session_id__in=acquired)
        used.update(named.values_list("pk", flat=True))
    return used


def in_use(db: Database, keys: Collection[int]) -> set[int]:
    """Return the sessions with a live lock, a live run, or a stream with a live writer."""
    return {key for (key,) in db.read(IN_USE, {"keys": list_parameter(db, list(keys))})}


def locks_of(db: Database, keys: Collection[int]) -> QuerySet[Lock]:
    """Return the locks with the names of these sessions."""
    names = sessions_with_keys(db, keys).values("session_id")
    return Lock.objects.using(db.alias).filter(tenant=db.tenant, name__in=names)


def snapshots_of_tree(
    db: Database, keys: Collection[int], providers: Mapping[str, WorkspaceProvider]
) -> list[Snapshot]:
    """Return the workspace snapshots of these sessions.

    Raise `MissingProvider`, or `IntegrityFault` if a session cannot be read.
    """
    rows = sessions_with_keys(db, keys).order_by("pk").values_list("pk", "session_id", "current__envelope")
    return [
        snapshot
        for key, session_id, envelope in list(rows)
        for snapshot in owned_snapshots(
            providers,
            SessionKey(session_id, db.tenant, key),
            decode_object(envelope or "").get("workspace_refs", {}).values(),
        )
    ]


def with_workspaces(db: Database, keys: Collection[int]) -> set[int]:
    """Return the sessions that have workspaces, or whose workspaces are unknown."""
    rows = sessions_with_keys(db, keys).values_list("pk", "current__envelope")
    return {key for key, envelope in rows if not has_no_workspaces(envelope)}


def has_no_workspaces(envelope: str | None) -> bool:
    """Return whether a stored state names no workspace. If it cannot be read, its workspaces are unknown."""
    if envelope is None:
        return False
    try:
        return not decode_object(envelope).get("workspace_refs")
    except IntegrityFault:
        return False


_FIRST_PORTION: Final = 8
_LARGEST_PORTION: Final = 1_000
_SHORT_SECONDS: Final = 0.125


class Portions:
    """How many trees a transaction deletes: as many as take about a quarter of a second, at least one."""

    def __init__(self) -> None:
        self._trees = _FIRST_PORTION

    def of(self, tops: Sequence[int]) -> Iterator[Sequence[int]]:
        """Divide the roots of trees. The time in which the caller uses a portion decides about the next."""
        first = 0
        while first < len(tops):
            began = time.monotonic()
            portion = tops[first : first + self._trees]
            yield portion
            first += len(portion)
            seconds = time.monotonic() - began
            if seconds < _SHORT_SECONDS and len(portion) == self._trees:
                self._trees = min(2 * self._trees, _LARGEST_PORTION)
            elif seconds > 2 * _SHORT_SECONDS:
                self._trees = max(1, self._trees // 2)


class DoomedStream(NamedTuple):
    """A stream that no session refers to once these sessions are deleted."""

    key: int
    chunks: int
    is_lost: bool
    """True if its writer died, so that pruning would mark the stream as failed."""


def doomed_streams(db: Database, keys: Collection[int]) -> list[DoomedStream]:
    parameters = {"tenant": db.tenant, "keys": list_parameter(db, list(keys))}
    return [DoomedStream(*row) for row in db.read(STREAMS_OF_NO_OTHER, parameters)]


def sessions_with_streams(db: Database, keys: Collection[int], *, except_for: Sequence[int]) -> set[int]:
    """Return those of the sessions that have a stream other than these."""
    streams = Stream.objects.using(db.alias).filter(
        tenant=OuterRef("tenant"), stream_id=OuterRef("stream_id")
    )
    others = with_keys(db, Session.objects.using(db.alias), "id", list(keys)).filter(
        Exists(streams.exclude(pk__in=except_for))
    )
    return set(db.query(partial(list, others.values_list("pk", flat=True))))


def has_shared_rows(db: Database, keys: Collection[int]) -> bool:
    """Return whether the sessions have rows with which their apps delete rows that sessions share."""
    sharing = {each.model for each in tables("session") if each.before_delete is not None}
    found = db.query(partial(children_with_rows, db, keys)) if sharing and keys else []
    return any(child.related_model in sharing for child in found)


def delete_shared_rows(db: Database, keys: Collection[int]) -> Rows:
    """Delete the rows that no other sessions share, as the deletion of these sessions does."""
    return let_go(db, keys, [child.related_model for child in children_with_rows(db, keys)])


def row_counts(db: Database, keys: Collection[int], streams: Collection[DoomedStream]) -> Rows:
    """Return the rows of each model that are deleted with these sessions and streams, without usage."""
    (numbers,) = db.read(row_counts_statement(), {"keys": list_parameter(db, list(keys))})
    models = (relation.related_model for relation in children_of_sessions())
    counts: Rows = Counter(dict(zip(models, numbers, strict=True)))
    counts[Session] = len(keys)
    counts[Stream] = len(streams)
    counts[StreamChunk] = sum(stream.chunks for stream in streams)
    return counts


# --- Forecast ----------------------------------------------------------------------------------------


class PageForecast(NamedTuple):
    """What happens to the trees of a page: the rows and the number of trees that are deleted, and the roots
    of those that are kept because they are in use or protected by a foreign key of another app.
    """

    deleted: Rows
    trees: int
    in_use: list[int]
    protected: list[int]


class Forecast:
    """The forecast of a tenant's erasure for a dry run, tree by tree in the order of a real one."""

    def __init__(self, *, force: bool) -> None:
        self._force = force
        self._counted: set[int] = set()

    def of_page(self, db: Database, tops: Sequence[int]) -> PageForecast:
        """Return what happens to the trees of these sessions.

        Usage, streams and locks are not counted. Pages come in key order, so only those sub-sessions already
        counted that have larger keys must be remembered.
        """
        found = forest_keys(db, tops)
        every = set[int]().union(*found.values())
        used = set() if self._force else in_use(db, every)
        protected = db.query(partial(protected_sessions, db, every))
        left, refused, counted, number = [], [], set[int](), 0
        for top, keys in found.items():
            if top in self._counted:
                continue
            if keys & used:
                left.append(top)
                continue
            if keys & protected:
                refused.append(top)
                continue
            # A session with a smaller key has already been counted with its tree.
            counted |= {key for key in keys if key >= top} - self._counted
            self._counted |= keys
            number += 1
        self._counted = {key for key in self._counted if key > tops[-1]}
        return PageForecast(row_counts(db, counted, []), number, left, refused)

    def streams(self, db: Database) -> Rows:
        """Count the tenant's streams and their chunks. Call this in a query."""
        chunks = Sum(F("last_sequence") - F("floor"), default=0)
        streams = Stream.objects.using(db.alias).filter(tenant=db.tenant)
        sums = streams.aggregate(streams=Count("pk"), chunks=chunks)
        return Counter({Stream: sums["streams"], StreamChunk: sums["chunks"]})


def branches_of(db: Database, session_ids: Collection[str]) -> list[str]:
    """Return the sessions branched from one of these. Each has a copy of part of its history."""
    sessions = Session.objects.using(db.alias).filter(tenant=db.tenant)
    found: set[str] = set()
    for session_id in session_ids:
        branched = sessions.filter(has_metadata(BRANCHED_FROM, session_id))
        found.update(branched.values_list("session_id", flat=True))
    return sorted(found.difference(session_ids))


def forget_branching_point(db: Database, session_id: str) -> None:
    """Remove the id of the source session from a branch. Call this in a transaction."""
    head = lock_session(db, session_id)
    metadata = Session.objects.using(db.alias).values_list("metadata", flat=True).get(pk=head.pk)
    advance(db, head, metadata={key: value for key, value in metadata.items() if key != BRANCHED_FROM})


def foreign_refs(
    db: Database, keys: Collection[int], session_ids: Collection[str]
) -> QuerySet[SubSessionRef]:
    """Return the refs that other sessions have to these. A ref holds the output of its sub-session."""
    refs = SubSessionRef.objects.using(db.alias).filter(sub_session_id__in=session_ids, location="local")
    # This is not a join, because without statistics SQLite would start with all sessions of the tenant.
    of_tenant = Session.objects.using(db.alias).filter(pk=OuterRef("session_id"), tenant=db.tenant)
    return refs.filter(Exists(of_tenant)).exclude(session_id__in=keys)


def remove_foreign_refs(db: Database, keys: Collection[int], session_ids: Collection[str]) -> int:
    """Delete these refs, lock each session and increment its version. Call this in a transaction."""
    refs = foreign_refs(db, keys, session_ids)
    owners = list(refs.order_by("session_id").values_list("session__session_id", flat=True).distinct())
    removed = 0
    for owner in owners:
        head = lock_session(db, owner)
        removed += refs.filter(session_id=head.pk).delete()[0]
        advance(db, head)
    return removed


def kept_usage(db: Database, session_ids: Collection[str]) -> QuerySet[UsageEntry]:
    """Return the usage entries of deleted sessions with these ids."""
    entries = UsageEntry.objects.using(db.alias).filter(tenant=db.tenant)
    return entries.filter(recorded_for__in=session_ids, session__isnull=True)


def usage_of_sub_sessions(
    db: Database, keys: Collection[int], session_ids: Collection[str]
) -> QuerySet[UsageEntry]:
    """Return the entries of other sessions that name one of these as their sub-session."""
    entries = UsageEntry.objects.using(db.alias).filter(tenant=db.tenant, sub_session_id__in=session_ids)
    return entries.exclude(session_id__in=keys)


def budgets_of(db: Database, scope: BudgetScope, values: Collection[str]) -> Iterator[QuerySet[Any]]:
    """Yield the counters of these users or trees, including those of budgets per user, and their budgets."""
    budgets = Budget.objects.using(db.alias).filter(tenant=db.tenant, scope=scope)
    counters = BudgetCounter.objects.using(db.alias).filter(tenant=db.tenant, value__in=values)
    yield counters.filter(name__in=budgets.filter(value__in=[*values, ""]).values("name"))
    yield budgets.filter(value__in=values)


def posts_of(db: Database, user_id: str) -> QuerySet[Post]:
    """Return a user's posts. An author is a user's id, or a Django user, whose primary key may be that id."""
    return Post.objects.using(db.alias).filter(author__in=[user_id, f"{USER}{user_id}"])


def forget_author(db: Database, key: int, user_id: str) -> int:
    """Remove a user from a session's posts, withdraw waiting ones, and return the number of posts.

    Call this in a transaction.
    """
    lock_sessions(db, [key])
    posts = posts_of(db, user_id).filter(session_id=key)
    posts.filter(state=PostState.WAITING).update(state=PostState.WITHDRAWN, payload=None)
    forgotten = posts.update(author=None)
    db.execute(SET_NEXT_POST, {"key": key})
    return forgotten


logger = logging.getLogger("helix_store.cleanup")

_ROWS_PER_PAGE: Final = 1_000
_IN_USE: Final = "it is in use"
_PROTECTED: Final = "rows of another app protect it"


class _Left(Exception):
    """Raised with the reason if a tree is left unchanged."""


class _NewBranches(Exception):
    """The session was branched while its known branches were erased."""


def erase(
    *,
    using: str | None = None,
    user_id: UserId | None = None,
    session_id: str | None = None,
    tenant: str | None = None,
    workspace_providers: Mapping[str, WorkspaceProvider] | None = None,
    keep_branches: bool = False,
    leave_snapshots: bool = False,
    force: bool = False,
    dry_run: bool = False,
    progress: Callable[[ErasureReceipt], object] | None = None,
) -> ErasureReceipt:
    """Erase a user (in one tenant or in all), a session or a tenant, and return the receipt.

    Each session tree is one transaction; the erasure of a tenant takes many trees together, as many as it
    can erase in about a quarter of a second. The transaction locks the rows of the tree, deletes the
    workspace snapshots through their providers, and deletes the tree with its streams, locks and usage. It
    also deletes the branches of its sessions (they copy the history), usage that outlived a session, and the
    data about the erased sessions that other sessions hold: sub-session refs and the ids in their usage. All
    usage entries of a user are deleted, wherever they are. Posts by the user, and by the Django user with
    this primary key, lose their author in the sessions of others, and waiting ones are withdrawn. Erasing a
    tenant also deletes the rows that other apps keep for it. Erasure is safe to repeat and to interrupt; a
    repeat continues.

    Unless ``force`` is set, a tree with a live lock, a running run or a stream with a live writer is skipped.
    A tree whose snapshots cannot be deleted is skipped and logged, unless ``leave_snapshots`` keeps them.
    With ``keep_branches``, branches are kept but lose the id of their source. Raise `InvalidQuery` for any
    other combination of arguments and for a session id that several tenants have, and `TenantMoved` for a
    tenant that is being moved to another database.

    A dry run erases a user or a session in one transaction for each tenant, and rolls it back; it ignores
    workspace snapshots. On SQLite, other writers wait for that transaction. A tenant may have too many
    sessions for one transaction, so its rows are only counted.
    """
    validation.progress_function(progress)
    erasure = Erasure(
        using=using,
        user_id=user_id,
        session_id=session_id,
        tenant=tenant,
        workspace_providers=workspace_providers,
        keep_branches=keep_branches,
        leave_snapshots=leave_snapshots,
        force=force,
        dry_run=dry_run,
    )
    for receipt in erasure.batches():
        if progress is not None:
            progress(receipt)
    return erasure.receipt


@dataclass(kw_only=True, eq=False)
class Erasure:
    """One erasure, with the arguments of `erase` and its receipt so far.

    ``left`` holds the skipped sessions, each with the reason. They are not part of the receipt.
    """

    using: str | None = None
    user_id: UserId | None = None
    session_id: str | None = None
    tenant: str | None = None
    workspace_providers: Mapping[str, WorkspaceProvider] | None = None
    keep_branches: bool = False
    leave_snapshots: bool = False
    force: bool = False
    dry_run: bool = False
    receipt: ErasureReceipt = field(init=False)
    left: list[tuple[SessionKey, str]] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        conf.require_usable_prefix()
        self._user_id = validation.user_id(self.user_id)
        if self._user_id is not None and self.session_id is not None:
            raise InvalidQuery("Pass user_id or session_id, not both.", path="user_id")
        validation.optional_identifier(self.session_id, "session_id")
        if self.tenant is not None:
            validation.tenant(self.tenant)
        named = {"user": self._user_id, "session": self.session_id, "tenant": self.tenant}
        subject, name = next(((kind, name) for kind, name in named.items() if name is not None), ("", ""))
        if not subject:
            raise InvalidQuery("Pass user_id, session_id or tenant.", path="user_id")
        self._is_of_tenant = subject == "tenant"
        for flag in ("keep_branches", "leave_snapshots", "force", "dry_run"):
            validation.query_flag(getattr(self, flag), flag)
        self._providers = checked_providers(self.workspace_providers)
        self._portions = Portions()
        self.receipt = ErasureReceipt(
            subject=subject,
            subject_sha256=digest_of(name),
            tenant_sha256=None if self.tenant is None else digest_of(self.tenant),
            dry_run=self.dry_run,
            started_at=moments.now(),
        )

    def batches(self) -> Generator[ErasureReceipt, None, None]:
        """Erase tree by tree. Stop iterating to stop the erasure between two transactions."""
        for tenant in self._tenants():
            db = Database(self.using, tenant)
            if self.tenant is not None:
                # A tenant whose rows are in another database would look erased.
                refuse_moved(db)
            if self._is_of_tenant and self.dry_run:
                yield from self._count_tenant(db)
            else:
                # A dry run is one transaction: the next tree must not find rows that the previous one has
                # deleted.
                with db.rolled_back(dry_run=self.dry_run):
                    for page in self._session_pages(db):
                        yield from self._erase_page(db, page)
                    yield from self._erase_rest(db)
        receipt = self.receipt
        is_complete = not (self.dry_run or receipt.sessions_left or receipt.locks_left or receipt.errors)
        self.receipt = replace(receipt, finished_at=moments.now(), complete=is_complete)
        yield self.receipt

    def _tenants(self) -> list[str]:
        if self.tenant is not None:
            return [self.tenant]
        known = tenants_of(self.using, [each.model for each in tables() if each.names_tenant])
        if self.session_id is None:
            return known
        having = [tenant for tenant in known if self._has_traces(Database(self.using, tenant))]
        if len(having) > 1:
            raise InvalidQuery(
                f"{len(having)} tenants have a session with this id; pass the tenant.", path="tenant"
            )
        return having

    def _has_traces(self, db: Database) -> bool:
        """Return whether the tenant has the session, or rows that a deleted one left behind."""
        found: list[QuerySet[Any]] = [
            table.model._base_manager.using(db.alias).filter(**{table.session_id: self.session_id})
            for table in tables()
            if table.session_id is not None
        ]
        assert self.session_id is not None  # noqa: S101  `_tenants` asks for a session
        refs = foreign_refs(db, [], [self.session_id])
        return any(db.query(rows.filter(tenant=db.tenant).exists) for rows in found) or db.query(refs.exists)

    def _session_pages(self, db: Database) -> Iterator[dict[int, str]]:
        """Yield the ids of the sessions to erase, by key. Key order avoids reading a session twice."""
        sessions = Session.objects.using(db.alias).filter(tenant=db.tenant)
        if self._user_id is not None:
            sessions = sessions.filter(user_id=self._user_id)
        elif self.session_id is not None:
            sessions = sessions.filter(session_id=self.session_id)
        for page in _pages(db, sessions, "session_id"):
            yield {key: session_id for session_id, key in page}

    def _erase_page(self, db: Database, page: Mapping[int, str]) -> Iterator[ErasureReceipt]:
        if not self._is_of_tenant:
            for session_id in page.values():
                yield from self._erase_with_branches(db, session_id)
            return
        for tops in self._portions.of(list(page)):
            erased = self._erase_together(db, tops)
            yield self.receipt
            for top in tops:
                if top not in erased:
                    yield from self._erase_with_branches(db, page[top])

    def _erase_together(self, db: Database, tops: Sequence[int]) -> Collection[int]:
        """Erase a tenant's trees that nobody uses and that have no workspaces, and return their sessions.

        Branches need no attention, because they are erased too. After an error nothing is erased: each tree
        on its own tells which of them it concerns.
        """

        def erase_free() -> tuple[set[int], int, dict[str, Any]]:
            trees = lock_forest(db, tops)
            keys = set[int]().union(*trees.values())
            kept = set[int]() if self.leave_snapshots else with_workspaces(db, keys)
            if not self.force:
                kept |= in_use_from_now_on(db, keys)
            kept |= protected_sessions(db, keys)
            free = {top: keys for top, keys in trees.items() if not keys & kept}
            # A sub-session is part of the tree of a root before it.
            erased, number = set[int](), 0
            for top, keys in free.items():
                number += top not in erased
                erased |= keys
            counts: dict[str, Any] = self._erase_locked(db, erased, ids_of(db, erased)) if erased else {}
            return erased, number, counts

        try:
            erased, number, counts = db.transaction(erase_free)
        except Exception:
            logger.debug("Trees are erased one by one.", exc_info=True)
            return ()
        self._count(**counts, trees=number)
        return erased

    # --- Trees and their branches -------------------------------------------------------------------

    def _erase_with_branches(self, db: Database, session_id: str) -> Iterator[ErasureReceipt]:
        """Erase the branches first. If this is interrupted, a repeat can still find them by their source."""
        waiting, met = [session_id], {session_id}
        while waiting:
            current = waiting[-1]
            branches = db.query(partial(self._branches, db, current)) - met
            if branches:
                met |= branches
                waiting.extend(sorted(branches))
                continue
            try:
                self._erase_tree(db, current, met, is_branch=len(waiting) > 1)
            except _NewBranches:
                continue
            waiting.pop()
            yield self.receipt

    def _branches(self, db: Database, session_id: str) -> set[str]:
        if self.keep_branches or self._is_of_tenant:
            return set()
        return set(branches_of(db, ids_of(db, tree_keys(db, session_id))))

    def _erase_tree(self, db: Database, session_id: str, met: Collection[str], *, is_branch: bool) -> None:
        """Erase one tree, or record why it is skipped. An error does not affect other trees."""
        try:
            erased = db.transaction(partial(self._erase_now, db, session_id, met))
        except _Left as exc:
            self._leave(db, session_id, str(exc), sessions_left=1)
        except _NewBranches:
            raise
        except MissingProvider as exc:
            self._leave(db, session_id, f"no workspace provider {exc.provider} is configured", errors=1)
        except Exception:
            self._leave(db, session_id, "an error; see the log of helix_store.cleanup", errors=1)
            logger.exception("Session %r could not be erased.", session_id)
        else:
            was_there = bool(erased["deleted"])
            self._count(**erased, trees=was_there, branches=was_there and is_branch)

    def _erase_now(self, db: Database, session_id: str, met: Collection[str]) -> dict[str, Any]:
        """Erase one tree in the current transaction, and return its part of the receipt."""
        keys = lock_tree(db, session_id)
        if not keys:
            return {"deleted": {}}
        if not self.force and is_in_use(db, keys):
            raise _Left(_IN_USE)
        ids = ids_of(db, keys)
        changed: Rows = Counter()
        branches = set() if self._is_of_tenant else set(branches_of(db, ids))
        if self.keep_branches:
            for branch in sorted(branches):
                forget_branching_point(db, branch)
            changed[Session] += len(branches)
        elif branches.difference(met):
            raise _NewBranches
        elif branches.intersection(key.session_id for key, _ in self.left if key.tenant == db.tenant):
            raise _Left("a branch of it is kept")
        keeps_snapshots = self.leave_snapshots or self.dry_run
        snapshots = [] if keeps_snapshots else snapshots_of_tree(db, keys, self._providers)
        if snapshots:
            require_deletable(db, keys)
        for snapshot in snapshots:
            snapshot.delete()
        erased = self._erase_locked(db, keys, ids)
        erased["changed"] += changed
        return {**erased, "snapshots_deleted": len(snapshots)}

    def _erase_locked(self, db: Database, keys: Collection[int], ids: Sequence[str]) -> dict[str, Rows]:
        """Erase locked sessions, and return the counts of the rows that were deleted and changed."""
        deleted: Rows = Counter()
        changed: Rows = Counter()
        deleted[SubSessionRef] = remove_foreign_refs(db, keys, ids)
        deleted[UsageEntry] = delete_usage(db, kept_usage(db, ids))
        changed[UsageEntry] = usage_of_sub_sessions(db, keys, ids).update(sub_session_id=None)
        deleted[Lock], _ = locks_of(db, keys).delete()
        for rows in budgets_of(db, BudgetScope.TREE, ids):
            deleted[rows.model], _ = rows.delete()
        deleted += delete_locked_sessions(db, keys, keep_usage=False)
        # A stream may have the session's own id without being named by any session.
        deleted += delete_orphaned_streams(db, ids)
        set_tombstones(db, ids, of_erased_tenant=self._is_of_tenant)
        return {"deleted": deleted, "changed": changed}

    def _count_tenant(self, db: Database) -> Iterator[ErasureReceipt]:
        """Count the rows that the erasure of a tenant would delete or keep, page by page for trees.

        Erasing 100,000 sessions in a transaction that is rolled back would lock their rows for minutes.
        """
        forecast = Forecast(force=self.force)
        for page in self._session_pages(db):
            found = forecast.of_page(db, list(page))
            for key in found.in_use:
                self._leave(db, page[key], _IN_USE, sessions_left=1)
            for key in found.protected:
                self._leave(db, page[key], _PROTECTED, errors=1)
            self._count(deleted=found.deleted, trees=found.trees)
            yield self.receipt
        self._count(deleted=db.query(partial(forecast.streams, db)))
        rows = [_of_tenant(db, UsageEntry), self._free(db, _of_tenant(db, Lock))]
        if not self.left:
            rows += [_of_tenant(db, each) for each in _models_of_tenant()]
        for each in rows:
            self._count(deleted={each.model: db.query(each.count)})
            yield self.receipt

    # --- Rows that belong to no tree ------------------------------------------------------------------

    def _erase_rest(self, db: Database) -> Iterator[ErasureReceipt]:
        usage = _of_tenant(db, UsageEntry)
        if self._user_id is not None:
            yield from self._delete_pages(db, usage.filter(user_id=self._user_id))
            for rows in budgets_of(db, BudgetScope.USER, [self._user_id]):
                yield from self._delete_pages(db, rows)
            yield from self._forget_author(db, self._user_id)
        elif self.session_id is not None:
            yield from self._erase_deleted_session(db, self.session_id)
        else:
            yield from self._erase_rest_of_tenant(db, usage)

    def _forget_author(self, db: Database, user_id: str) -> Iterator[ErasureReceipt]:
        """Remove a user from posts in the sessions of others, and withdraw the waiting ones."""
        posts = posts_of(db, user_id).filter(session__tenant=db.tenant)
        keys = db.query(
            lambda: list(posts.order_by("session_id").values_list("session_id", flat=True).distinct())
        )
        for key in keys:
            forgotten = db.transaction(partial(forget_author, db, key, user_id))
            self._count(changed={Post: forgotten})
            yield self.receipt

    def _erase_deleted_session(self, db: Database, session_id: str) -> Iterator[ErasureReceipt]:
        """Erase the usage, lock, stream and refs that a session has left behind if it was deleted earlier."""
        session = Session.objects.using(db.alias).filter(tenant=db.tenant, session_id=session_id)
        if db.query(session.exists):
            return
        db.transaction(partial(set_tombstones, db, [session_id]))
        refs = db.transaction(partial(remove_foreign_refs, db, [], [session_id]))
        self._count(deleted={SubSessionRef: refs})
        yield from self._delete_pages(db, kept_usage(db, [session_id]))
        for rows in budgets_of(db, BudgetScope.TREE, [session_id]):
            yield from self._delete_pages(db, rows)
        locks = _of_tenant(db, Lock).filter(name=session_id)
        yield from self._delete_pages(db, self._free(db, locks))
        yield from self._delete_streams(db, _streams_without_session(db).filter(stream_id=session_id))

    def _erase_rest_of_tenant(self, db: Database, usage: QuerySet[UsageEntry]) -> Iterator[ErasureReceipt]:
        # If a session is skipped, its usage, streams and locks are also kept.
        yield from self._delete_pages(db, usage.filter(session__isnull=True))
        yield from self._delete_streams(db, _streams_without_session(db))
        session = Session.objects.using(db.alias).filter(
            tenant=OuterRef("tenant"), session_id=OuterRef("name")
        )
        yield from self._delete_pages(db, self._free(db, _of_tenant(db, Lock).filter(~Exists(session))))
        if not self.left:
            # A session that was skipped may need these rows. Rows that refer to others are deleted first, so
            # that they are counted.
            for model in reversed(_models_of_tenant()):
                yield from self._delete_pages(db, _of_tenant(db, model))
            if db.tenant != NO_TENANT:
                for page in _pages(db, _of_tenant(db, Tombstone)):
                    db.transaction(partial(forget_tenant, db, [key for (key,) in page]))

    def _free(self, db: Database, locks: QuerySet[Lock]) -> QuerySet[Lock]:
        """Return the locks that nobody holds, or all locks with ``force``. Held locks are kept."""
        if self.force:
            return locks
        now = db.query(db.now)
        held = locks.filter(expires_at__gt=now)
        self._count(locks_left=db.query(held.count))
        return locks.exclude(expires_at__gt=now)

    def _delete_pages(self, db: Database, rows: QuerySet[Any]) -> Iterator[ErasureReceipt]:
        for page in _pages(db, rows):
            doomed = rows.filter(pk__in=[key for (key,) in page])
            self._count(deleted={rows.model: db.transaction(partial(_delete, db, doomed))})
            yield self.receipt

    def _delete_streams(self, db: Database, streams: QuerySet[Stream]) -> Iterator[ErasureReceipt]:
        for page in _pages(db, streams, "stream_id"):
            for stream_id, _ in page:
                self._count(deleted=db.transaction(partial(delete_orphaned_streams, db, [stream_id])))
            yield self.receipt

    # --- The receipt ----------------------------------------------------------------------------------

    def _leave(self, db: Database, session_id: str, reason: str, **numbers: int) -> None:
        self.left.append((SessionKey(session_id, db.tenant), reason))
        self._count(**numbers)

    def _count(self, **more: int | Mapping[type[Model], int]) -> None:
        self.receipt = self.receipt.plus(**more)


def _models_of_tenant() -> list[type[Model]]:
    """Return the models whose rows belong to a tenant, except tombstones, which outlive an erasure."""
    return [each.model for each in tables("tenant") if each.model is not Tombstone]


def _of_tenant(db: Database, model: type[Model]) -> QuerySet[Any]:
    return model._base_manager.using(db.alias).filter(tenant=db.tenant)


def _streams_without_session(db: Database) -> QuerySet[Stream]:
    """Return the streams that no session refers to."""
    named = Session.objects.using(db.alias).filter(tenant=OuterRef("tenant"), stream_id=OuterRef("stream_id"))
    return _of_tenant(db, Stream).filter(~Exists(named))


def _delete(db: Database, rows: QuerySet[Any]) -> int:
    return delete_usage(db, rows) if rows.model is UsageEntry else rows.delete()[0]


def _pages(db: Database, rows: QuerySet[Any], *columns: str) -> Iterator[list[tuple[Any, ...]]]:
    return keyset_pages(db, rows, ("pk",), *columns, sizes=repeat(_ROWS_PER_PAGE))
