"""Erasure of a user, a session or a tenant, with a receipt."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Collection, Generator, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import repeat
from typing import Any, Final

from django.db.models import Exists, Model, OuterRef, QuerySet

from helix_store import conf
from helix_store.catalogue import tables
from helix_store.cleanup import references, trees
from helix_store.cleanup.outcomes import ErasureReceipt, SessionKey, digest_of
from helix_store.cleanup.workspaces import (
    MissingProvider,
    WorkspaceProvider,
    configured_workspace_providers,
)
from helix_store.core import moments, validation
from helix_store.core.budgets import BudgetScope
from helix_store.core.types import UserId
from helix_store.counters.counting import delete_usage
from helix_store.engine.database import Database
from helix_store.engine.moved_tenants import refuse_moved
from helix_store.engine.paging import keyset_pages
from helix_store.exceptions import InvalidQuery
from helix_store.models import Lock, Post, Session, Stream, SubSessionRef, UsageEntry
from helix_store.sessions.database.trees import delete_locked_sessions, lock_tree, tree_keys
from helix_store.streams.database import delete_orphaned_streams

logger = logging.getLogger("helix_store.cleanup")

_ROWS_PER_PAGE: Final = 1_000
_IN_USE: Final = "it is in use"


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

    Each session tree is one transaction. It locks the rows of the tree, deletes the workspace snapshots
    through their providers, and deletes the tree with its streams, locks and usage. It also deletes the
    branches of its sessions (they copy the history), usage that outlived a session, and the data about the
    erased sessions that other sessions hold: sub-session refs and the ids in their usage. All usage entries
    of a user are deleted, wherever they are. Posts by the user in the sessions of others lose their author,
    and waiting ones are withdrawn. Erasing a tenant also deletes the rows that other apps keep for it.
    Erasure is safe to repeat and to interrupt; a repeat continues.

    Unless ``force`` is set, a tree with a live lock, a running run or a stream with a live writer is skipped.
    A tree whose snapshots cannot be deleted is skipped and logged, unless ``leave_snapshots`` keeps them.
    With ``keep_branches``, branches are kept but lose the id of their source. Raise `InvalidQuery` for any
    other combination of arguments and for a session id that several tenants have, and `TenantMoved` for a
    tenant that is being moved to another database.

    A dry run erases a user or a session in one transaction for each tenant, and rolls it back; it ignores
    workspace snapshots. On SQLite, other writers wait for that transaction. A tenant may have too many
    sessions for one transaction, so its rows are only counted.
    """
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
        given = self.workspace_providers
        self._providers = configured_workspace_providers() if given is None else given
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
                        for session_id in page.values():
                            yield from self._erase_with_branches(db, session_id)
                    yield from self._erase_rest(db)
        receipt = self.receipt
        is_complete = not (self.dry_run or receipt.sessions_left or receipt.locks_left or receipt.errors)
        self.receipt = replace(receipt, finished_at=moments.now(), complete=is_complete)
        yield self.receipt

    def _tenants(self) -> list[str]:
        if self.tenant is not None:
            return [self.tenant]
        known = trees.tenants_of(self.using, [each.model for each in tables() if each.names_tenant])
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
        return any(db.query(rows.filter(tenant=db.tenant).exists) for rows in found)

    def _session_pages(self, db: Database) -> Iterator[dict[int, str]]:
        """Yield the ids of the sessions to erase, by key. Key order avoids reading a session twice."""
        sessions = Session.objects.using(db.alias).filter(tenant=db.tenant)
        if self._user_id is not None:
            sessions = sessions.filter(user_id=self._user_id)
        elif self.session_id is not None:
            sessions = sessions.filter(session_id=self.session_id)
        for page in _pages(db, sessions, "session_id"):
            yield {key: session_id for session_id, key in page}

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
        return set(references.branches_of(db, trees.ids_of(db, tree_keys(db, session_id))))

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
        if not self.force and trees.is_in_use(db, keys):
            raise _Left(_IN_USE)
        ids = trees.ids_of(db, keys)
        changed: trees.Rows = Counter()
        branches = set() if self._is_of_tenant else set(references.branches_of(db, ids))
        if self.keep_branches:
            for branch in sorted(branches):
                references.forget_branching_point(db, branch)
            changed[Session] += len(branches)
        elif branches.difference(met):
            raise _NewBranches
        elif branches.intersection(key.session_id for key, _ in self.left if key.tenant == db.tenant):
            raise _Left("a branch of it is kept")
        keeps_snapshots = self.leave_snapshots or self.dry_run
        snapshots = [] if keeps_snapshots else trees.snapshots_of_tree(db, keys, self._providers)
        if snapshots:
            trees.require_writable(db, keys)
        for snapshot in snapshots:
            snapshot.delete()
        deleted: trees.Rows = Counter()
        deleted[SubSessionRef] = references.remove_foreign_refs(db, keys, ids)
        deleted[UsageEntry] = delete_usage(db, references.kept_usage(db, ids))
        changed[UsageEntry] = references.usage_of_sub_sessions(db, keys, ids).update(sub_session_id=None)
        deleted[Lock], _ = trees.locks_of(db, keys).delete()
        for rows in references.budgets_of(db, BudgetScope.TREE, ids):
            deleted[rows.model], _ = rows.delete()
        deleted += delete_locked_sessions(db, keys, keep_usage=False)
        # A stream may have the session's own id without being named by any session.
        deleted += delete_orphaned_streams(db, ids)
        return {"deleted": deleted, "changed": changed, "snapshots_deleted": len(snapshots)}

    def _count_tenant(self, db: Database) -> Iterator[ErasureReceipt]:
        """Count the rows that the erasure of a tenant would delete or keep, page by page for trees.

        Erasing 100,000 sessions in a transaction that is rolled back would lock their rows for minutes.
        """
        forecast = trees.Forecast(force=self.force)
        for page in self._session_pages(db):
            deleted, number, in_use = forecast.of_page(db, list(page))
            for key in in_use:
                self._leave(db, page[key], _IN_USE, sessions_left=1)
            self._count(deleted=deleted, trees=number)
            yield self.receipt
        self._count(deleted=db.query(partial(forecast.streams, db)))
        rows = [_of_tenant(db, UsageEntry), self._free(db, _of_tenant(db, Lock))]
        if not self.left:
            rows += [_of_tenant(db, table.model) for table in tables("tenant")]
        for each in rows:
            self._count(deleted={each.model: db.query(each.count)})
            yield self.receipt

    # --- Rows that belong to no tree ------------------------------------------------------------------

    def _erase_rest(self, db: Database) -> Iterator[ErasureReceipt]:
        usage = _of_tenant(db, UsageEntry)
        if self._user_id is not None:
            yield from self._delete_pages(db, usage.filter(user_id=self._user_id))
            for rows in references.budgets_of(db, BudgetScope.USER, [self._user_id]):
                yield from self._delete_pages(db, rows)
            yield from self._forget_author(db, self._user_id)
        elif self.session_id is not None:
            yield from self._erase_deleted_session(db, self.session_id)
        else:
            yield from self._erase_rest_of_tenant(db, usage)

    def _forget_author(self, db: Database, user_id: str) -> Iterator[ErasureReceipt]:
        """Remove a user from posts in the sessions of others, and withdraw the waiting ones."""
        posts = references.posts_of(db, user_id)
        keys = db.query(
            lambda: list(posts.order_by("session_id").values_list("session_id", flat=True).distinct())
        )
        for key in keys:
            forgotten = db.transaction(partial(references.forget_author, db, key, user_id))
            self._count(changed={Post: forgotten})
            yield self.receipt

    def _erase_deleted_session(self, db: Database, session_id: str) -> Iterator[ErasureReceipt]:
        """Erase the usage, lock and stream that a session has left behind if it was deleted earlier."""
        session = Session.objects.using(db.alias).filter(tenant=db.tenant, session_id=session_id)
        if db.query(session.exists):
            return
        yield from self._delete_pages(db, references.kept_usage(db, [session_id]))
        for rows in references.budgets_of(db, BudgetScope.TREE, [session_id]):
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
            for table in reversed(tables("tenant")):
                yield from self._delete_pages(db, _of_tenant(db, table.model))

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
