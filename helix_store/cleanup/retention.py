"""Retention: deletion of idle sessions, old checkpoints, chunks of ended streams and old usage."""

from __future__ import annotations

import logging
import secrets
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from functools import partial
from itertools import repeat
from typing import Any, Final

from django.db.models import Exists, Model, OuterRef, QuerySet

from helix_store import conf
from helix_store.budgets import ended_counters, forget_periods
from helix_store.catalogue.table import protected_sessions
from helix_store.cleanup.erasure import (
    ANONYMISE_USAGE,
    NOT_IDLE,
    SURPLUS_CHECKPOINTS,
    TOO_MANY_CHECKPOINTS,
    DoomedStream,
    Portions,
    Rows,
    delete_shared_rows,
    doomed_streams,
    has_shared_rows,
    in_use,
    in_use_from_now_on,
    is_in_use,
    links_into,
    require_deletable,
    row_counts,
    sessions_with_streams,
    snapshots_of_tree,
    tenants_of,
    with_workspaces,
)
from helix_store.cleanup.workspaces import (
    Counts,
    MissingProvider,
    WorkspaceProvider,
    checked_providers,
)
from helix_store.core import validation
from helix_store.core.limits import MAX_BATCH
from helix_store.core.types import RetentionPolicy, SessionStatus, Timestamp
from helix_store.core.usage import BudgetPeriod
from helix_store.counters import change_usage, delete_usage
from helix_store.engine.database import Database
from helix_store.engine.expressions import keyset_pages, list_parameter, with_keys
from helix_store.exceptions import InvalidQuery, TenantMoved
from helix_store.models import (
    Budget,
    BudgetCounter,
    Checkpoint,
    Operation,
    Session,
    Stream,
    StreamChunk,
    UsageEntry,
)
from helix_store.sessions.heads import (
    TreeBusy,
    delete_locked_sessions,
    forest_keys,
    lock_forest,
    lock_tree,
)
from helix_store.stores.store import DatabaseStateStore
from helix_store.streams.chunks import PruneRequest
from helix_store.streams.database import prune_batches, would_empty

logger = logging.getLogger("helix_store.cleanup")

_USAGE_PER_TRANSACTION: Final = 1_000


@dataclass(frozen=True, slots=True)
class RetentionSummary(Counts):
    """The numbers of rows, by table, that each rule deleted or anonymised, or would in a dry run.

    ``trees`` counts deleted session trees, ``in_use`` idle trees with a live lock, a running run or a stream
    with a live writer, and ``errors`` sessions with a problem. The last two were left unchanged.
    """

    dry_run: bool = False
    sessions: dict[str, int] = field(default_factory=dict)
    checkpoints: dict[str, int] = field(default_factory=dict)
    streams: dict[str, int] = field(default_factory=dict)
    usage_dropped: dict[str, int] = field(default_factory=dict)
    usage_anonymised: dict[str, int] = field(default_factory=dict)
    budget_periods: dict[str, int] = field(default_factory=dict)
    operations: dict[str, int] = field(default_factory=dict)
    trees: int = 0
    in_use: int = 0
    snapshots_deleted: int = 0
    streams_failed: int = 0
    errors: int = 0


def apply_retention(
    *,
    using: str | None = None,
    tenant: str | None = None,
    policy: RetentionPolicy | None = None,
    workspace_providers: Mapping[str, WorkspaceProvider] | None = None,
    page_size: int | None = None,
    now: Timestamp | None = None,
    dry_run: bool = False,
    progress: Callable[[RetentionSummary], object] | None = None,
) -> RetentionSummary:
    """Apply a policy, by default the one in the settings, to one tenant or to all of them.

    A session tree is deleted as a whole, children first, if each of its sessions is idle by the rule for its
    status. One transaction locks the rows of many trees, as many as it can delete in about a quarter of a
    second, checks again, and deletes the rows. A tree with workspaces has a transaction of its own, which
    first deletes their snapshots through their providers. Usage is kept until the rule for usage applies.
    Trees with a live lock, a running run or a stream with a live writer are skipped, and so are trees that
    share a session with another tree. All other deletions use one transaction for each session, each stream
    or each page of entries. It is safe to repeat, to interrupt, and to run several times at once. A session
    that cannot be deleted, or a tenant that is being moved to another database, is logged and counted in
    ``errors``.

    A dry run counts, in a few statements for each page. It does not roll back a real run: a rule must not
    find rows that another rule has deleted, so the run would be one transaction that locks all rows for
    minutes.

    ``now`` is an aware datetime or epoch milliseconds, by default the database's clock; streams always use
    that clock. ``progress`` is called after each batch. Raise `InvalidQuery` for invalid arguments.
    """
    validation.progress_function(progress)
    retention = Retention(
        using=using,
        tenant=tenant,
        policy=policy,
        workspace_providers=workspace_providers,
        page_size=page_size,
        now=now,
        dry_run=dry_run,
    )
    for summary in retention.batches():
        if progress is not None:
            progress(summary)
    return retention.summary


@dataclass(kw_only=True, eq=False)
class Retention:
    """One run of a policy, with the arguments of `apply_retention` and its summary so far."""

    using: str | None = None
    tenant: str | None = None
    policy: RetentionPolicy | None = None
    workspace_providers: Mapping[str, WorkspaceProvider] | None = None
    page_size: int | None = None
    now: Timestamp | None = None
    dry_run: bool = False
    summary: RetentionSummary = field(init=False)

    def __post_init__(self) -> None:
        conf.require_usable_prefix()
        if self.tenant is not None:
            validation.tenant(self.tenant)
        validation.query_flag(self.dry_run, "dry_run")
        if self.policy is not None and not isinstance(self.policy, RetentionPolicy):
            raise InvalidQuery("policy must be a RetentionPolicy.", path="policy")
        self._policy = conf.retention() if self.policy is None else self.policy
        self._providers = checked_providers(self.workspace_providers)
        page_size = conf.page_size() if self.page_size is None else self.page_size
        self._page_size = validation.page_limit(page_size, maximum=MAX_BATCH, name="page_size")
        self._now = None if self.now is None else validation.aware_datetime(self.now, "now")
        self.summary = RetentionSummary(dry_run=self.dry_run)
        self._prune_request: PruneRequest | None = None
        if (days := self._policy.streams_ended_days) is not None:
            age = timedelta(days=days)
            self._prune_request = PruneRequest.checked(older_than=age, keep_chunks=None, dry_run=self.dry_run)
        self._portions = Portions()
        # The rows that a dry run counted with their sessions, so that no other rule counts them again.
        self._doomed: Counter[str] = Counter()
        # The sessions that a dry run counted and whose stream or app rows other sessions share, by key.
        self._sharing: set[int] = set()
        self._with_shared_rows: set[int] = set()

    def batches(self) -> Iterator[RetentionSummary]:
        """Apply the policy batch by batch. Stop iterating to stop it between two batches."""
        if self._policy.keeps_everything:
            return
        if self._now is None:
            db = Database(self.using, "")
            self._now = db.query(db.now)
        given = self.tenant
        tenants = tenants_of(self.using, [Session, UsageEntry, Budget]) if given is None else [given]
        for tenant in tenants:
            yield from self._unless_moved(tenant, self._apply(Database(self.using, tenant)))
        yield from self._prune_streams()

    def _apply(self, db: Database) -> Iterator[RetentionSummary]:
        yield from self._delete_idle_sessions(db)
        yield from self._prune_checkpoints(db)
        yield from self._reduce_usage(db)
        yield from self._forget_periods(db)
        yield from self._forget_operations(db)

    def _unless_moved(self, tenant: str, steps: Iterator[RetentionSummary]) -> Iterator[RetentionSummary]:
        """Run all rules for one of several tenants.

        If this tenant is being moved, the run continues with the others.
        """
        try:
            yield from steps
        except TenantMoved:
            if self.tenant is not None:
                raise
            self._count(errors=1)
            logger.warning("Tenant %r is being moved to another database; retention is postponed.", tenant)
            yield self.summary

    def _before(self, days: float) -> datetime:
        assert self._now is not None  # noqa: S101  `batches` sets it
        return self._now - timedelta(days=days)

    def _count(self, **more: int | Mapping[type[Model], int]) -> None:
        self.summary = self.summary.plus(**more)

    # --- Idle sessions ------------------------------------------------------------------------------

    def _delete_idle_sessions(self, db: Database) -> Iterator[RetentionSummary]:
        for status, days in self._policy.sessions_idle_days.items():
            for page in self._idle_pages(db, str(status), self._before(days)):
                closed = self._closed_trees(db, list(page))
                if self.dry_run:
                    self._count_trees(db, closed.values())
                else:
                    self._delete_trees(db, page, closed)
                yield self.summary
        if self._with_shared_rows:
            self._count_shared_rows(db)
            yield self.summary
        self._sharing, self._with_shared_rows = set(), set()

    def _idle_pages(self, db: Database, status: str, before: datetime) -> Iterator[dict[int, str]]:
        """Yield the ids, by key, of idle sessions without a parent, in the order of the index by status."""
        parent = Session.objects.using(db.alias).filter(
            tenant=OuterRef("tenant"), session_id=OuterRef("parent_session_id")
        )
        idle = Session.objects.using(db.alias).filter(tenant=db.tenant, status=status, updated_at__lte=before)
        order = ("updated_at", "session_id")
        for page in keyset_pages(
            db, idle.filter(~Exists(parent)), order, "pk", sizes=repeat(self._page_size)
        ):
            yield {key: session_id for key, _, session_id in page}

    def _closed_trees(self, db: Database, tops: Sequence[int]) -> dict[int, set[int]]:
        """Return the idle trees that do not share a session with another tree."""
        found = forest_keys(db, tops)
        used = self._not_idle(db, set().union(*found.values()))
        idle = {top: keys for top, keys in found.items() if not keys & used}
        links = links_into(db, set().union(*idle.values()))
        return {
            top: keys
            for top, keys in idle.items()
            if not any(links[key] - keys for key in keys if key in links)
        }

    def _not_idle(self, db: Database, keys: Collection[int]) -> set[int]:
        ages: dict[str, datetime | None] = dict.fromkeys(SessionStatus)
        ages |= {str(status): self._before(days) for status, days in self._policy.sessions_idle_days.items()}
        parameters = {**ages, "keys": list_parameter(db, list(keys))}
        return {key for (key,) in db.read(NOT_IDLE, parameters)}

    def _delete_trees(self, db: Database, page: Mapping[int, str], closed: Collection[int]) -> None:
        """Delete trees together, and one by one those that `_delete_together` leaves."""
        for tops in self._portions.of(list(closed)):
            deleted = self._delete_together(db, tops)
            for top in tops:
                if top not in deleted:
                    self._delete(db, page[top])

    def _delete_together(self, db: Database, tops: Sequence[int]) -> Collection[int]:
        """Delete the trees that nobody uses and that have no workspaces, and return their roots.

        After an error nothing is deleted: each tree on its own tells which of them it concerns.
        """

        def delete_free() -> tuple[Collection[int], Rows]:
            trees = lock_forest(db, tops)
            keys = set[int]().union(*trees.values())
            kept = self._not_idle(db, keys)
            kept |= in_use_from_now_on(db, keys)
            kept |= with_workspaces(db, keys)
            kept |= protected_sessions(db, keys)
            free = {top: keys for top, keys in trees.items() if not keys & kept}
            return free.keys(), delete_locked_sessions(db, set().union(*free.values()), keep_usage=True)

        try:
            deleted, rows = db.transaction(delete_free)
        except Exception:
            logger.debug("Trees are deleted one by one.", exc_info=True)
            return ()
        self._count(sessions=rows, trees=len(deleted))
        return deleted

    def _delete(self, db: Database, session_id: str) -> None:
        """Delete one tree unless it is in use. An error does not affect other trees."""
        deleted_snapshots = 0

        def delete_if_still_idle() -> Rows | None:
            """Return the deleted rows, or ``None`` if the tree is in use."""
            nonlocal deleted_snapshots
            keys = lock_tree(db, session_id, wait=False)
            if not keys or self._not_idle(db, keys):
                return Counter()
            if is_in_use(db, keys):
                return None
            if snapshots := snapshots_of_tree(db, keys, self._providers):
                require_deletable(db, keys)
            for snapshot in snapshots:
                snapshot.delete()
                deleted_snapshots += 1
            return delete_locked_sessions(db, keys, keep_usage=True)

        try:
            rows = db.transaction(delete_if_still_idle)
        except TreeBusy:
            rows = None
        except MissingProvider as exc:
            self._count(errors=1)
            logger.warning(
                "Session %r was not deleted: no workspace provider %s is configured.",
                session_id,
                exc.provider,
            )
            return
        except Exception:
            self._count(errors=1)
            logger.exception("Session %r could not be deleted.", session_id)
            return
        finally:
            self._count(snapshots_deleted=deleted_snapshots)
        if rows is None:
            self._count(in_use=1)
        elif rows:
            self._count(sessions=rows, trees=1)

    def _count_trees(self, db: Database, closed: Iterable[set[int]]) -> None:
        """Count the trees and rows that `_delete` would delete."""
        distinct = set(map(frozenset, closed))
        used = in_use(db, set().union(*distinct))
        unused = [keys for keys in distinct if not keys & used]
        protected = db.query(partial(protected_sessions, db, set().union(*unused)))
        free = [keys for keys in unused if not keys & protected]
        self._count(in_use=len(distinct) - len(unused), errors=len(unused) - len(free))
        keys = set().union(*free)
        # A stream is deleted with the last of its sessions, which may be on a later page than the others.
        sharing = keys | self._sharing
        streams = doomed_streams(db, sharing)
        self._sharing = sessions_with_streams(db, sharing, except_for=[stream.key for stream in streams])
        self._count(sessions=row_counts(db, keys, streams), trees=len(free))
        self._doom(db, keys, streams)
        if has_shared_rows(db, keys):
            self._with_shared_rows |= keys

    def _count_shared_rows(self, db: Database) -> None:
        """Count the rows that other apps delete with the last of the sessions that share them.

        Only these rows are deleted, in a transaction that is rolled back.
        """
        with db.rolled_back():
            rows = db.transaction(partial(delete_shared_rows, db, self._with_shared_rows))
        self._count(sessions=rows)

    def _doom(self, db: Database, keys: Collection[int], streams: Sequence[DoomedStream]) -> None:
        """Record the rows that other rules would also have counted here."""
        if self._policy.checkpoints_keep is not None:
            parameters = {"keep": self._policy.checkpoints_keep, "keys": list_parameter(db, list(keys))}
            ((surplus,),) = db.read(SURPLUS_CHECKPOINTS, parameters)
            self._doomed["checkpoints"] += int(surplus)
        if (request := self._prune_request) is not None:
            rows = Stream.objects.using(db.alias).filter(pk__in=[stream.key for stream in streams])
            self._doomed["chunks"] += would_empty(db, rows, request).chunks
            self._doomed["lost"] += sum(stream.is_lost for stream in streams)
        if (days := self._policy.operations_days) is not None:
            old = with_keys(db, self._old_operations(db, days), "session", list(keys))
            self._doomed["operations"] += db.query(old.count)

    def _without_doomed(self, kind: str, number: int) -> int:
        doomed = min(number, self._doomed[kind])
        self._doomed[kind] -= doomed
        return number - doomed

    # --- Checkpoints ----------------------------------------------------------------------------------

    def _prune_checkpoints(self, db: Database) -> Iterator[RetentionSummary]:
        keep = self._policy.checkpoints_keep
        if keep is None:
            return
        store = DatabaseStateStore(self.using, tenant=db.tenant)
        after = ""
        while True:
            parameters = {"tenant": db.tenant, "after": after, "keep": keep, "limit": self._page_size}
            rows = db.read(TOO_MANY_CHECKPOINTS, parameters)
            for session_id, surplus in rows:
                if self.dry_run:
                    pruned = self._without_doomed("checkpoints", surplus)
                else:
                    pruned = store.prune_checkpoints(session_id, keep=keep)
                self._count(checkpoints={Checkpoint: pruned})
            if rows:
                yield self.summary
            if len(rows) < self._page_size:
                return
            after = rows[-1][0]

    # --- Streams --------------------------------------------------------------------------------------

    def _prune_streams(self) -> Iterator[RetentionSummary]:
        if self._prune_request is None:
            return
        try:
            yield from self._prune_streams_of(self.tenant, self._prune_request)
        except TenantMoved:
            if self.tenant is not None:
                raise
            # One statement for all tenants fails if one of them is being moved.
            for tenant in tenants_of(self.using, [Stream]):
                yield from self._unless_moved(tenant, self._prune_streams_of(tenant, self._prune_request))

    def _prune_streams_of(self, tenant: str | None, request: PruneRequest) -> Iterator[RetentionSummary]:
        before = self.summary
        for pruned in prune_batches(Database(self.using, tenant or ""), tenant, request):
            self.summary = before
            chunks = self._without_doomed("chunks", pruned.chunks)
            failed = self._without_doomed("lost", pruned.failed)
            self._count(streams={StreamChunk: chunks}, streams_failed=failed)
            yield self.summary

    # --- Usage ----------------------------------------------------------------------------------------

    def _reduce_usage(self, db: Database) -> Iterator[RetentionSummary]:
        drop, anonymise = self._policy.usage_drop_days, self._policy.usage_anonymise_days
        entries = UsageEntry.objects.using(db.alias).filter(tenant=db.tenant)
        dropped = entries.none()
        if drop is not None:
            dropped = entries.filter(timestamp__lte=self._before(drop))
            yield from self._in_pages(db, "usage_dropped", dropped, _drop_usage)
        if anonymise is not None:
            # An entry without a session id is already anonymous.
            named = entries.filter(timestamp__lte=self._before(anonymise), recorded_for__gt="")
            if drop is not None:
                named = named.filter(timestamp__gt=self._before(drop))
            yield from self._in_pages(db, "usage_anonymised", named, _anonymise_usage)

    # --- Budgets and repeats ------------------------------------------------------------------------------

    def _forget_periods(self, db: Database) -> Iterator[RetentionSummary]:
        days = self._policy.budget_periods_days
        if days is None:
            return
        before = self._before(days)
        name: str
        period: str
        budgets = Budget.objects.using(db.alias).filter(tenant=db.tenant).values_list("name", "period")
        for name, period in db.query(partial(list, budgets.order_by("name"))):
            if self.dry_run:
                ended = ended_counters(db, name, BudgetPeriod(period), before)
                self._count(budget_periods=Rows({BudgetCounter: db.query(ended.count)}))
                yield self.summary
                continue
            deleted = self._page_size
            while deleted == self._page_size:
                deleted = db.transaction(partial(forget_periods, db, name, before, self._page_size))
                self._count(budget_periods=Rows({BudgetCounter: deleted}))
                yield self.summary

    def _forget_operations(self, db: Database) -> Iterator[RetentionSummary]:
        days = self._policy.operations_days
        if days is None:
            return
        old = self._old_operations(db, days)
        if self.dry_run:
            number = self._without_doomed("operations", db.query(old.count))
            self._count(operations=Rows({Operation: number}))
            yield self.summary
            return
        for page in keyset_pages(db, old, ("pk",), sizes=repeat(self._page_size)):
            keys = [key for (key,) in page]
            deleted, _ = db.transaction(Operation.objects.using(db.alias).filter(pk__in=keys).delete)
            self._count(operations=Rows({Operation: deleted}))
            yield self.summary

    def _old_operations(self, db: Database, days: float) -> QuerySet[Operation]:
        rows = Operation.objects.using(db.alias).filter(session__tenant=db.tenant)
        return rows.filter(created_at__lte=self._before(days))

    def _in_pages(
        self, db: Database, rule: str, entries: Any, change: Callable[[Database, list[int]], int]
    ) -> Iterator[RetentionSummary]:
        """Change entries in the order of the index by time."""
        if self.dry_run:
            self._count(**{rule: Rows({UsageEntry: db.query(entries.count)})})
            yield self.summary
            return
        for page in keyset_pages(db, entries, ("timestamp", "pk"), sizes=repeat(_USAGE_PER_TRANSACTION)):
            keys = [key for _, key in page]
            changed = db.transaction(partial(change, db, keys))
            self._count(**{rule: Rows({UsageEntry: changed})})
            yield self.summary


def _drop_usage(db: Database, keys: list[int]) -> int:
    return delete_usage(db, UsageEntry.objects.using(db.alias).filter(pk__in=keys))


def _anonymise_usage(db: Database, keys: list[int]) -> int:
    parameters = {"keys": list_parameter(db, keys), "secret": secrets.token_hex()}
    return len(change_usage(db, keys, lambda: db.execute(ANONYMISE_USAGE, parameters)))
