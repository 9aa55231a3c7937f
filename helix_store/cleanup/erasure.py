"""Erasure of a user, a session or a tenant, with a receipt."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Final

from django.db.models import Exists, Model, OuterRef, QuerySet

from helix_store import conf
from helix_store.app_tables import registered_tables
from helix_store.cleanup import references, trees
from helix_store.cleanup.backend import SessionKey
from helix_store.cleanup.forecast import (
    IN_USE,
    Erased,
    Forecast,
    Left,
    rows_of_streams,
    streams_without_session,
)
from helix_store.cleanup.receipt import ErasureReceipt, digest_of
from helix_store.cleanup.requests import ErasureRequest
from helix_store.cleanup.snapshots import MissingProvider
from helix_store.cleanup.workspaces import WorkspaceProvider, configured_workspace_providers
from helix_store.core import moments
from helix_store.engine.clocks import database_now
from helix_store.engine.database import Database
from helix_store.exceptions import InvalidQuery
from helix_store.models import Lock, Session, Stream, SubSessionRef, UsageEntry
from helix_store.sessions.database.trees import delete_locked_sessions, lock_tree, tree_keys
from helix_store.streams.database import delete_orphaned_streams

__all__ = ["Erasure", "erase"]

logger = logging.getLogger("helix_store.cleanup")

_ROWS_PER_PAGE: Final = 1_000

Rows = Counter[type[Model]]


class _NewBranches(Exception):
    """The session was branched while its known branches were erased."""


def erase(
    *,
    using: str | None = None,
    user_id: str | None = None,
    session_id: str | None = None,
    tenant: str | None = None,
    workspace_providers: Mapping[str, WorkspaceProvider] | None = None,
    keep_branches: bool = False,
    leave_snapshots: bool = False,
    force: bool = False,
    dry_run: bool = False,
    progress: Callable[[ErasureReceipt], object] | None = None,
) -> ErasureReceipt:
    """Erase a user (in one tenant or in all), a session, or a tenant, and return the receipt.

    Each session tree is one transaction. It locks the rows of the tree, deletes the workspace snapshots
    through their providers, and deletes the tree with its streams, locks and usage. It also deletes the
    branches of its sessions (they copy the history), usage that outlived a session, and what other sessions
    hold of the erased ones: sub-session refs and the ids in their usage. A user's usage entries go wherever
    they are. With a tenant go the rows that other apps keep of it. Safe to repeat and to interrupt; a
    repeat continues.

    A tree with a live lock, a running run or a stream with a live writer is left, unless ``force``. A tree
    whose snapshots cannot be deleted is left and logged, unless ``leave_snapshots`` keeps them. With
    ``keep_branches`` branches stay, without the id of their source. Raises `InvalidQuery` for any other
    combination of arguments, and for a session id that several tenants have.
    """
    request = ErasureRequest(
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
    erasure = Erasure(request)
    for receipt in erasure.batches():
        if progress is not None:
            progress(receipt)
    return erasure.receipt


class Erasure:
    """One erasure, and its receipt so far.

    ``left`` are the sessions that it left, with the reason; they are not part of the receipt.
    """

    def __init__(self, request: ErasureRequest) -> None:
        conf.require_usable_prefix()
        self._request = request
        given = request.workspace_providers
        self._providers = configured_workspace_providers() if given is None else given
        self._forecast = Forecast(request)
        self.left: list[tuple[SessionKey, str]] = []
        subject, name = request.subject
        self.receipt = ErasureReceipt(
            subject=subject,
            subject_sha256=digest_of(name),
            tenant_sha256=None if request.tenant is None else digest_of(request.tenant),
            dry_run=request.dry_run,
            started_at=moments.now(),
        )

    def batches(self) -> Iterator[ErasureReceipt]:
        """Erase tree by tree; whoever stops to iterate has stopped it between two transactions."""
        for tenant in self._tenants():
            db = Database(self._request.using, tenant)
            if self._request.is_of_tenant and self._request.dry_run:
                yield from self._count_trees(db)
            else:
                for page in self._session_pages(db):
                    for session_id in page.values():
                        yield from self._erase_with_branches(db, session_id)
            yield from self._erase_rest(db)
        receipt = self.receipt
        is_complete = not (
            self._request.dry_run or receipt.sessions_left or receipt.locks_left or receipt.errors
        )
        self.receipt = replace(receipt, finished_at=moments.now(), complete=is_complete)
        yield self.receipt

    def _tenants(self) -> list[str]:
        if self._request.tenant is not None:
            return [self._request.tenant]
        known = trees.tenants_of(self._request.using, [Session, UsageEntry, Lock, Stream])
        if self._request.session_id is None:
            return known
        having = [tenant for tenant in known if self._has_traces(Database(self._request.using, tenant))]
        if len(having) > 1:
            raise InvalidQuery(
                f"{len(having)} tenants have a session with this id; give the tenant.", path="tenant"
            )
        return having

    def _has_traces(self, db: Database) -> bool:
        """Whether the tenant has the session, or what is left of it."""
        session_id = self._request.session_id or ""
        rows: list[QuerySet[Any]] = [
            Session.objects.using(db.alias).filter(tenant=db.tenant, session_id=session_id),
            references.kept_usage(db, [session_id]),
            Lock.objects.using(db.alias).filter(tenant=db.tenant, name=session_id),
            Stream.objects.using(db.alias).filter(tenant=db.tenant, stream_id=session_id),
        ]
        return any(db.query(each.exists) for each in rows)

    def _session_pages(self, db: Database) -> Iterator[dict[int, str]]:
        """The ids of the sessions to erase by their key, in its order: one that is left is not met again."""
        sessions = Session.objects.using(db.alias).filter(tenant=db.tenant)
        if self._request.user_id is not None:
            sessions = sessions.filter(user_id=self._request.user_id)
        elif self._request.session_id is not None:
            sessions = sessions.filter(session_id=self._request.session_id)
        yield from map(dict, _pages(db, sessions, "session_id"))

    # --- Trees and their branches -------------------------------------------------------------------

    def _erase_with_branches(self, db: Database, session_id: str) -> Iterator[ErasureReceipt]:
        """Erase the branches first: when it is stopped, a repeat still finds them by their source."""
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
        if self._request.keep_branches or self._request.is_of_tenant:
            return set()
        return set(references.branches_of(db, trees.ids_of(db, tree_keys(db, session_id))))

    def _erase_tree(self, db: Database, session_id: str, met: Collection[str], *, is_branch: bool) -> None:
        """Erase one tree, or note why it is left. An error is that of this tree alone."""
        try:
            if self._request.dry_run:
                erased = db.query(partial(self._forecast.of_tree, db, session_id))
            else:
                erased = db.transaction(partial(self._erase_now, db, session_id, met))
        except Left as exc:
            self._leave(db, session_id, exc.reason, sessions_left=1)
        except _NewBranches:
            raise
        except MissingProvider as exc:
            self._leave(db, session_id, f"no workspace provider {exc.provider} is configured", errors=1)
        except Exception:
            self._leave(db, session_id, "an error, which the log of helix_store.cleanup has", errors=1)
            logger.exception("Session %r could not be erased.", session_id)
        else:
            self._count(
                erased.deleted,
                erased.changed,
                trees=bool(erased.deleted),
                branches=bool(erased.deleted) and is_branch,
                snapshots_deleted=erased.snapshots,
            )

    def _erase_now(self, db: Database, session_id: str, met: Collection[str]) -> Erased:
        """The transaction of one tree."""
        keys = lock_tree(db, session_id)
        if not keys:
            return Erased(Counter(), Counter())
        if not self._request.force and trees.is_in_use(db, keys):
            raise Left(IN_USE)
        ids = trees.ids_of(db, keys)
        changed: Rows = Counter()
        branches = set() if self._request.is_of_tenant else set(references.branches_of(db, ids))
        if self._request.keep_branches:
            for branch in sorted(branches):
                references.forget_branching_point(db, branch)
            changed[Session] += len(branches)
        elif branches.difference(met):
            raise _NewBranches
        elif branches.intersection(key.session_id for key, _ in self.left if key.tenant == db.tenant):
            raise Left("a branch of it is left")
        snapshots = (
            [] if self._request.leave_snapshots else trees.snapshots_of_tree(db, keys, self._providers)
        )
        if snapshots:
            trees.require_writable(db, keys)
        for snapshot in snapshots:
            snapshot.delete()
        deleted: Rows = Counter()
        deleted[SubSessionRef] = references.remove_foreign_refs(db, keys, ids)
        deleted[UsageEntry], _ = references.kept_usage(db, ids).delete()
        changed[UsageEntry] = references.usage_of_sub_sessions(db, keys, ids).update(sub_session_id=None)
        deleted[Lock], _ = trees.locks_of(db, keys).delete()
        deleted += delete_locked_sessions(db, keys, keep_usage=False)
        # A stream of the session's own id, which no session names.
        deleted += delete_orphaned_streams(db, ids)
        return Erased(deleted, changed, len(snapshots))

    def _count_trees(self, db: Database) -> Iterator[ErasureReceipt]:
        """Count what the erasure of a tenant does with its trees, page by page."""
        for page in self._session_pages(db):
            foreseen = self._forecast.of_page(db, list(page))
            for key in foreseen.in_use:
                self._leave(db, page[key], IN_USE, sessions_left=1)
            self._count(foreseen.deleted, trees=foreseen.trees)
            yield self.receipt

    # --- What belongs to no tree ----------------------------------------------------------------------

    def _erase_rest(self, db: Database) -> Iterator[ErasureReceipt]:
        if self._request.dry_run and not self._request.is_of_tenant:
            self._count(db.query(partial(self._forecast.beside_trees, db)))
        usage = UsageEntry.objects.using(db.alias).filter(tenant=db.tenant)
        if self._request.user_id is not None:
            yield from self._delete_pages(db, usage.filter(user_id=self._request.user_id))
        elif self._request.session_id is not None:
            yield from self._erase_deleted_session(db, self._request.session_id)
        else:
            yield from self._erase_rest_of_tenant(db, usage)

    def _erase_deleted_session(self, db: Database, session_id: str) -> Iterator[ErasureReceipt]:
        """What a session that was deleted before has left: usage, and a lock."""
        session = Session.objects.using(db.alias).filter(tenant=db.tenant, session_id=session_id)
        if db.query(session.exists):
            return
        yield from self._delete_pages(db, references.kept_usage(db, [session_id]))
        locks = Lock.objects.using(db.alias).filter(tenant=db.tenant, name=session_id)
        yield from self._delete_pages(db, self._free(db, locks))
        streams = streams_without_session(db).filter(stream_id=session_id)
        yield from self._delete_streams(db, streams)

    def _erase_rest_of_tenant(self, db: Database, usage: QuerySet[UsageEntry]) -> Iterator[ErasureReceipt]:
        if not self._request.dry_run:
            # The usage, streams and locks of a session that was left stay with it.
            usage = usage.filter(session__isnull=True)
        yield from self._delete_pages(db, usage)
        streams = Stream.objects.using(db.alias).filter(tenant=db.tenant)
        yield from self._delete_streams(db, streams if self._request.dry_run else streams_without_session(db))
        locks = Lock.objects.using(db.alias).filter(tenant=db.tenant)
        if not self._request.dry_run:
            session = Session.objects.using(db.alias).filter(
                tenant=OuterRef("tenant"), session_id=OuterRef("name")
            )
            locks = locks.filter(~Exists(session))
        yield from self._delete_pages(db, self._free(db, locks))
        if not self.left:
            # A session that was left may need them.
            for table in registered_tables("tenant"):
                rows = table.model._base_manager.using(db.alias).filter(tenant=db.tenant)
                yield from self._delete_pages(db, rows)

    def _free(self, db: Database, locks: QuerySet[Lock]) -> QuerySet[Lock]:
        """Those of the locks that nobody holds; the others are left, unless forced."""
        if self._request.force:
            return locks
        now = db.query(lambda: database_now(db))
        held = locks.filter(expires_at__gt=now)
        self._count(locks_left=db.query(held.count))
        return locks.exclude(expires_at__gt=now)

    def _delete_pages(self, db: Database, rows: QuerySet[Any]) -> Iterator[ErasureReceipt]:
        if self._request.dry_run:
            self._count({rows.model: db.query(rows.count)})
            yield self.receipt
            return
        for page in _pages(db, rows, "pk"):
            doomed = rows.filter(pk__in=[key for key, _ in page])
            self._count({rows.model: db.transaction(lambda doomed=doomed: doomed.delete()[0])})  # type: ignore[misc]
            yield self.receipt

    def _delete_streams(self, db: Database, streams: QuerySet[Stream]) -> Iterator[ErasureReceipt]:
        if self._request.dry_run:
            self._count(db.query(partial(rows_of_streams, streams)))
            yield self.receipt
            return
        for page in _pages(db, streams, "stream_id"):
            for _, stream_id in page:
                self._count(db.transaction(partial(delete_orphaned_streams, db, [stream_id])))
            yield self.receipt

    # --- The receipt ----------------------------------------------------------------------------------

    def _leave(self, db: Database, session_id: str, reason: str, **numbers: int) -> None:
        self.left.append((SessionKey(session_id, db.tenant), reason))
        self._count(None, None, **numbers)

    def _count(
        self,
        deleted: Mapping[type[Model], int] | None = None,
        changed: Mapping[type[Model], int] | None = None,
        **numbers: int,
    ) -> None:
        sums: dict[str, Any] = {
            name: getattr(self.receipt, name) + number for name, number in numbers.items()
        }
        for name, rows in (("deleted", deleted), ("changed", changed)):
            if rows:
                total = Counter(getattr(self.receipt, name)) + Counter(trees.by_table(rows))
                sums[name] = dict(sorted(total.items()))
        self.receipt = replace(self.receipt, **sums)


def _pages(db: Database, rows: QuerySet[Any], column: str) -> Iterator[list[tuple[int, Any]]]:
    """Pages by key, with a column."""
    ordered = rows.order_by("pk").values_list("pk", column)
    key = 0
    while True:
        page: list[tuple[int, Any]] = db.query(partial(list, ordered.filter(pk__gt=key)[:_ROWS_PER_PAGE]))
        if not page:
            return
        yield page
        key = page[-1][0]
