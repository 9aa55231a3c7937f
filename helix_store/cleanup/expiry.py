"""The cleanup of expired sessions."""

from __future__ import annotations

import json
import logging
import random
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from functools import partial
from itertools import chain, repeat
from typing import Any, Final

from django.db.models import F, QuerySet

from helix_store.catalogue.table import Sweep, sweeps
from helix_store.cleanup.erasure import (
    has_no_workspaces,
    require_deletable,
    require_writable,
    snapshots_of_tree,
)
from helix_store.cleanup.workspaces import (
    CleanupDetails,
    CleanupOutcome,
    CleanupSummary,
    ExpiryCandidate,
    MissingProvider,
    SessionKey,
    Snapshot,
    WorkspaceProvider,
    checked_providers,
    owned_snapshots,
)
from helix_store.core import moments, validation
from helix_store.core.contracts import StateStore, require_state_store
from helix_store.core.limits import MAX_BATCH, UNLIMITED
from helix_store.core.payloads import decode_object, encode
from helix_store.core.types import (
    NON_TERMINAL_STATUSES,
    SESSION_EXPIRED,
    PendingToolCall,
    SessionHead,
    SessionState,
    SessionStatus,
    Submission,
    SubmissionOutcome,
    Timestamp,
)
from helix_store.core.validation import datetime_to_milliseconds, milliseconds_to_datetime
from helix_store.engine.database import Database, app_aliases
from helix_store.engine.expressions import NoIndexHint, keyset_pages
from helix_store.engine.statement import Statement, table
from helix_store.exceptions import (
    InvalidQuery,
    LimitExceeded,
    StaleStateError,
    StoreUnavailable,
)
from helix_store.models import Session
from helix_store.models.sessions import NON_TERMINAL, SessionQuerySet
from helix_store.sessions.calls import due_calls_of, submit_default
from helix_store.sessions.heads import delete_tree, tree_keys
from helix_store.sessions.locking import first_row, lock_sessions
from helix_store.sessions.store import StateStoreBase
from helix_store.sessions.tool_calls import default_answer, due_calls, overdue_in
from helix_store.signals import EXPIRY_SIGNALS, announce
from helix_store.stores.store import DatabaseStateStore, InMemoryStateStore


class StateStoreCleanup:
    """`DatabaseCleanup` for a store without row locks, which checks the expected version instead.

    A store in memory has a lock for all writes. A session of another store that is renewed in the moment in
    which its snapshots are deleted loses them.
    """

    def __init__(self, store: StateStore) -> None:
        self._store = store
        self._writing = store.world.lock if isinstance(store, InMemoryStateStore) else nullcontext()
        # No method of the contract returns the tenant, but every store of this project has the attribute.
        self._tenant: str = getattr(store, "tenant", "")

    def now(self) -> datetime:
        return moments.now()

    def expired(self, now: datetime, size: int) -> Iterator[list[SessionKey]]:
        return self._pages(NON_TERMINAL_STATUSES, size, lambda head: _has_expired(head, now))

    def overdue(self, now: datetime, size: int) -> Iterator[list[SessionKey]]:
        return self._pages(NON_TERMINAL_STATUSES, size, lambda head: True)

    def deletable(self, before: datetime, size: int) -> Iterator[list[SessionKey]]:
        def is_deletable(head: SessionHead) -> bool:
            return head.failure_reason == SESSION_EXPIRED and _has_expired(head, before)

        return self._pages([SessionStatus.FAILED], size, is_deletable)

    def non_terminal(self, keys: list[SessionKey]) -> list[SessionKey]:
        return keys

    def mark_in_bulk(self, keys: list[SessionKey], now: datetime) -> list[SessionKey]:
        return keys

    def sweeps(self) -> Iterator[Sweep]:
        return iter(())

    def inspect(self, key: SessionKey) -> ExpiryCandidate | None:
        state = self._store.load_state(key.session_id)
        if state is None:
            return None
        expires_at = None if state.expires_at is None else milliseconds_to_datetime(state.expires_at)
        return ExpiryCandidate(key, state.version, state.status.is_terminal, expires_at, state.workspace_refs)

    def mark(
        self, candidate: ExpiryCandidate, delete_snapshots: Callable[[], None], *, wait: bool
    ) -> CleanupOutcome:
        session_id, version = candidate.key.session_id, candidate.version
        with self._writing:
            state = self._store.load_state(session_id)
            if state is None or state.version != version:
                return CleanupOutcome.BUSY
            delete_snapshots()
            state.status, state.failure_reason = SessionStatus.FAILED, SESSION_EXPIRED
            try:
                self._store.save_state(session_id, state, expected_version=version)
            except StaleStateError:
                return CleanupOutcome.BUSY
        return CleanupOutcome.MARKED

    def overdue_calls(self, key: SessionKey, now: datetime) -> tuple[StateStore, list[PendingToolCall]]:
        if isinstance(self._store, StateStoreBase):
            return self._store, due_calls_of(self._store, key.session_id, now)
        state = self._store.load_state(key.session_id)
        pending = {} if state is None else state.pending_client_tool_calls
        # Another store has no decisions: its state says what is answered.
        overdue = overdue_in(encode(pending, limit=UNLIMITED), None, datetime_to_milliseconds(now))
        return self._store, due_calls(key.session_id, overdue.unanswered)

    def delete(
        self, key: SessionKey, before: datetime, providers: Mapping[str, WorkspaceProvider]
    ) -> tuple[int, int]:
        state = self._store.load_state(key.session_id)
        if state is None or state.failure_reason != SESSION_EXPIRED or not _has_expired(state, before):
            return 0, 0
        root = state.root_session_id or key.session_id
        live = self._store.list_sessions(root_session_id=root, status=NON_TERMINAL_STATUSES, limit=1)
        if live.sessions:
            return 0, 0
        snapshots = [
            snapshot
            for below in self._below(key.session_id)
            if below.failure_reason != SESSION_EXPIRED
            for snapshot in owned_snapshots(
                providers, SessionKey(below.session_id, self._tenant), below.workspace_refs.values()
            )
        ]
        for snapshot in snapshots:
            snapshot.delete()
        return self._store.delete_session(key.session_id, keep_usage=True), len(snapshots)

    def _below(self, session_id: str) -> Iterator[SessionState]:
        """Yield the states of all sub-sessions of a session."""
        met, waiting = {session_id}, [session_id]
        while waiting:
            parent, cursor = waiting.pop(), None
            while True:
                page = self._store.list_sessions(parent_session_id=parent, cursor=cursor, count=False)
                new = [head.session_id for head in page.sessions if head.session_id not in met]
                met.update(new)
                waiting.extend(new)
                for each in new:
                    if (state := self._store.load_state(each)) is not None:
                        yield state
                if (cursor := page.next_cursor) is None:
                    break

    def _pages(
        self, statuses: Collection[SessionStatus], size: int, is_wanted: Callable[[SessionHead], bool]
    ) -> Iterator[list[SessionKey]]:
        cursor = None
        while True:
            page = self._store.list_sessions(
                status=statuses,
                order_by="created_at",
                direction="asc",
                limit=size,
                cursor=cursor,
                count=False,
            )
            yield [SessionKey(head.session_id, self._tenant) for head in page.sessions if is_wanted(head)]
            cursor = page.next_cursor
            if cursor is None:
                return


def _has_expired(session: SessionHead | SessionState, now: datetime) -> bool:
    return session.expires_at is not None and session.expires_at <= datetime_to_milliseconds(now)


_MARK: Final = f"""UPDATE {table(Session)}
    SET status = '{SessionStatus.FAILED.value}', failure_reason = '{SESSION_EXPIRED}',
        version = version + 1, updated_at = %(marked_at)s
    WHERE id IN ({{unchanged}}) RETURNING id"""
_IS_EXPIRED: Final = f"""
    status IN ({", ".join(f"'{status}'" for status in NON_TERMINAL)}) AND expires_at <= %(now)s"""

_MARK_IN_BULK: Final = Statement(
    # A session that another transaction has locked is skipped, and later marked on its own.
    postgresql=_MARK.format(
        unchanged=f"""
            SELECT s.id FROM {table(Session)} AS s
            JOIN jsonb_array_elements(%(candidates)s::jsonb) AS c(known)
                ON s.id = (c.known ->> 'id')::bigint AND s.version = (c.known ->> 'version')::bigint
            WHERE {_IS_EXPIRED} FOR NO KEY UPDATE OF s SKIP LOCKED"""
    ),
    sqlite=_MARK.format(
        unchanged=f"""
            SELECT id FROM {table(Session)}
            WHERE (id, version) IN (
                SELECT json_extract(value, '$.id'), json_extract(value, '$.version')
                FROM json_each(%(candidates)s)
            ) AND {_IS_EXPIRED}"""
    ),
)
"""Mark the candidates whose version is unchanged, and return their keys."""


class DatabaseCleanup:
    """The store's side of a cleanup, for a database. ``tenant`` is one tenant, or ``None`` for all of them.

    Pages have up to ``size`` sessions, in an order that marking does not change. There is at least one page.
    """

    def __init__(self, using: str | None, tenant: str | None) -> None:
        self._using = using
        self._tenant = tenant
        self._db = Database(using, tenant or "")

    def now(self) -> datetime:
        return self._db.query(self._db.now)

    def expired(self, now: datetime, size: int) -> Iterator[list[SessionKey]]:
        """Yield pages of non-terminal sessions past their expiry."""
        return self._pages(self._of_tenant.non_terminal().expired(now), "expires_at", size)

    def overdue(self, now: datetime, size: int) -> Iterator[list[SessionKey]]:
        """Yield pages of non-terminal sessions with calls past their deadline."""
        return self._pages(self._of_tenant.non_terminal().overdue(now), "pending_deadline", size)

    def deletable(self, before: datetime, size: int) -> Iterator[list[SessionKey]]:
        """Yield pages of sessions that a cleanup has marked and that expired before this time."""
        # Filter by the reason alone, as the index does. With the status, PostgreSQL expects too few rows.
        marked = self._of_tenant.filter(failure_reason=SESSION_EXPIRED)
        return self._pages(marked.expired(before), "expires_at", size)

    def non_terminal(self, keys: list[SessionKey]) -> list[SessionKey]:
        """Return the non-terminal sessions, using one query."""
        rows = self._with_keys(keys).non_terminal().values_list("pk", flat=True)
        found = self._db.query(lambda: set(rows))
        return [key for key in keys if key.key in found]

    def mark_in_bulk(self, keys: list[SessionKey], now: datetime) -> list[SessionKey]:
        """Mark the sessions without workspaces that no other worker has locked, and return the others."""
        rows = self._with_keys(keys).values_list("pk", "version", "current__envelope")
        candidates = [
            {"id": key, "version": version}
            for key, version, envelope in self._db.query(lambda: list(rows))
            if has_no_workspaces(envelope)
        ]
        if not candidates:
            return list(keys)
        parameters = {"candidates": json.dumps(candidates), "now": now, "marked_at": moments.now()}
        rows_of_marked = self._db.transaction(lambda: self._db.execute(_MARK_IN_BULK, parameters))
        marked = {key for (key,) in rows_of_marked}
        for key in keys:
            if key.key in marked:
                self._announce_expiry(key)
        return [key for key in keys if key.key not in marked]

    def sweeps(self) -> Iterator[Sweep]:
        """Yield the sweeps that delete expired rows of other apps."""
        return sweeps(self._db.alias, self._tenant)

    def inspect(self, key: SessionKey) -> ExpiryCandidate | None:
        columns = ("version", "status", "expires_at", "current__envelope")
        row = self._db.query(lambda: first_row(self._with_keys([key]).values_list(*columns)))
        if row is None:
            return None
        version, status, expires_at, envelope = row
        refs = decode_object(envelope).get("workspace_refs", {})
        return ExpiryCandidate(key, version, SessionStatus(status).is_terminal, expires_at, refs)

    def mark(
        self, candidate: ExpiryCandidate, delete_snapshots: Callable[[], None], *, wait: bool
    ) -> CleanupOutcome:
        """Lock the row, delete the snapshots and mark the session, all in one transaction.

        Return `BUSY` if the session has changed since `inspect`, and with ``wait=False`` if another worker
        has locked it. If ``delete_snapshots`` raises an error, the session is left unchanged.
        """
        unchanged = self._with_keys([candidate.key]).filter(version=candidate.version)

        def lock_delete_and_mark() -> CleanupOutcome:
            locked = unchanged.select_for_update(no_key=True, skip_locked=not wait).values_list("pk")
            if first_row(locked) is None:
                return CleanupOutcome.BUSY
            if candidate.workspace_refs:
                require_writable(self._db, [candidate.key.key])
            delete_snapshots()
            # Check the version again: the row lock does not stop a provider that writes on this connection.
            marked = unchanged.update(
                status=SessionStatus.FAILED.value,
                failure_reason=SESSION_EXPIRED,
                version=F("version") + 1,
                updated_at=moments.now(),
            )
            if not marked:
                return CleanupOutcome.BUSY
            self._announce_expiry(candidate.key)
            return CleanupOutcome.MARKED

        return self._db.transaction(lock_delete_and_mark)

    def _announce_expiry(self, key: SessionKey) -> None:
        announce(self._db, key.session_id, EXPIRY_SIGNALS, tenant=key.tenant)

    def overdue_calls(self, key: SessionKey, now: datetime) -> tuple[StateStore, list[PendingToolCall]]:
        """Return a session's calls that are past their deadline, and the store that accepts their answers."""
        store = DatabaseStateStore(self._using, tenant=key.tenant)
        return store, due_calls_of(store, key.session_id, now)

    def delete(
        self, key: SessionKey, before: datetime, providers: Mapping[str, WorkspaceProvider]
    ) -> tuple[int, int]:
        """Delete a session and its tree, but no usage, and return the numbers of sessions and snapshots.

        Nothing is deleted if a session of the tree is non-terminal. Only the snapshots of sessions that have
        ended in another way remain: a cleanup deletes those of the sessions that it marks.
        """
        db = Database(self._using, key.tenant)

        def delete_if_all_have_ended() -> tuple[int, int]:
            locked = lock_sessions(db, tree_keys(db, key.session_id))
            tree = self._sessions.filter(pk__in=[head.pk for head in locked])
            marked = tree.filter(status=SessionStatus.FAILED.value, failure_reason=SESSION_EXPIRED)
            top = marked.filter(pk=key.key).expired(before)
            if tree.non_terminal().exists() or not top.exists():
                return 0, 0
            unmarked = {head.pk for head in locked} - set(marked.values_list("pk", flat=True))
            snapshots = snapshots_of_tree(db, unmarked, providers) if unmarked else []
            if snapshots:
                require_deletable(db, [head.pk for head in locked])
            for snapshot in snapshots:
                snapshot.delete()
            return delete_tree(db, key.session_id, keep_usage=True), len(snapshots)

        return db.transaction(delete_if_all_have_ended)

    def _pages(self, rows: QuerySet[Session], order: str, size: int) -> Iterator[list[SessionKey]]:
        columns = ("session_id", "tenant", "pk")
        pages = keyset_pages(self._db, rows, (order, "pk"), *columns, sizes=repeat(size))
        for page in chain([next(pages, [])], pages):
            yield [SessionKey(*row[: len(columns)]) for row in page]

    @property
    def _sessions(self) -> SessionQuerySet:
        return Session.objects.using(self._db.alias).all()

    @property
    def _of_tenant(self) -> SessionQuerySet:
        if self._tenant is None:
            return self._sessions
        unindexed = self._sessions.alias(unindexed_tenant=NoIndexHint("tenant"))
        return unindexed.filter(unindexed_tenant=self._tenant)

    def _with_keys(self, keys: list[SessionKey]) -> SessionQuerySet:
        return self._sessions.filter(pk__in=[key.key for key in keys])


logger = logging.getLogger("helix_store.cleanup")

_MAX_ATTEMPTS: Final = 10

_Backend = DatabaseCleanup | StateStoreCleanup


def expired_session_cleanup(
    *,
    using: str | None = None,
    state_store: StateStore | None = None,
    workspace_providers: Mapping[str, WorkspaceProvider] | None = None,
    page_size: int = 200,
    limit: int | None = None,
    now: Timestamp | None = None,
    dry_run: bool = False,
    progress: Callable[[CleanupSummary], object] | None = None,
    delete_after: timedelta | float | None = None,
) -> CleanupSummary:
    """Mark expired sessions as failed, and delete the workspace snapshots that they own.

    Clean up every tenant of the database ``using``, or one ``state_store``; by default, every database that
    the app is migrated to, one after the other, and return the sums. If a database is not available, the next
    ones are still cleaned up, and its error is raised at the end.

    Each session is one transaction: it locks the session's row, deletes the snapshots, and sets the status
    ``failed`` with the reason ``session_expired``. If the cleanup is killed, the next one completes it. A
    session that was renewed or resumed before the lock keeps its snapshots. In a database, one statement
    marks all sessions of a page that have no workspaces. Then each call past its deadline gets its
    ``on_expiry`` default. Any number of cleanups may run at once; a repeat is safe.

    ``workspace_providers`` maps names to providers; by default, those in the settings are used. ``limit`` is
    the maximum number of sessions to detect. ``now`` is an aware datetime or epoch milliseconds, by default
    the database's clock. A dry run changes nothing. ``progress`` is called after each page. ``delete_after``
    (a timedelta, or days) also deletes the trees of marked sessions that expired longer ago than this, but
    keeps their usage. At the end, the expired rows of other apps are deleted. A session that cannot be
    cleaned up is logged, counted in ``errors`` and tried again by the next cleanup. Raise `InvalidQuery` for
    invalid arguments. Source: the operator-driven cleanup of `@helix-agents/store-postgres`.
    """
    validation.progress_function(progress)
    summary = CleanupSummary()
    for summary in expired_session_cleanup_batches(
        using=using,
        state_store=state_store,
        workspace_providers=workspace_providers,
        page_size=page_size,
        limit=limit,
        now=now,
        dry_run=dry_run,
        delete_after=delete_after,
    ):
        if progress is not None:
            progress(summary)
    return summary


def expired_session_cleanup_batches(
    *,
    using: str | None = None,
    state_store: StateStore | None = None,
    workspace_providers: Mapping[str, WorkspaceProvider] | None = None,
    page_size: int = 200,
    limit: int | None = None,
    now: Timestamp | None = None,
    dry_run: bool = False,
    delete_after: timedelta | float | None = None,
    details: CleanupDetails | None = None,
) -> Iterator[CleanupSummary]:
    """Run `expired_session_cleanup` as a generator of the counts after each page. It can be stopped.

    The sessions and calls that the counts refer to are added to ``details``, if given.
    """
    if using is not None and state_store is not None:
        raise InvalidQuery("Pass using or state_store, not both.", path="using")
    providers = checked_providers(workspace_providers)
    page_size = validation.page_limit(page_size, maximum=MAX_BATCH, name="page_size")
    validation.query_flag(dry_run, "dry_run")
    limit = None if limit is None else validation.query_number(limit, "limit", minimum=1)
    time = None if now is None else validation.aware_datetime(now, "now")
    age = None if delete_after is None else _age(delete_after)

    def clean(backend: _Backend, limit: int | None) -> Iterator[CleanupSummary]:
        at = backend.now() if time is None else time
        cleaner = _Cleaner(backend, providers, at, page_size, details)
        return cleaner.detect(limit) if dry_run else cleaner.clean(limit, None if age is None else at - age)

    return _one_after_the_other(_backends(using, state_store), clean, limit)


def _one_after_the_other(
    backends: Sequence[_Backend],
    clean: Callable[[_Backend, int | None], Iterator[CleanupSummary]],
    limit: int | None,
) -> Iterator[CleanupSummary]:
    before = CleanupSummary()
    failure: StoreUnavailable | None = None
    for backend in backends:
        rest = None if limit is None else limit - before.detected
        if rest == 0:
            break
        done = CleanupSummary()
        try:
            for done in clean(backend, rest):
                yield before.plus(**done.to_dict())
        except StoreUnavailable as exc:
            failure = failure or exc
        before = before.plus(**done.to_dict())
    if failure is not None:
        raise failure


def _backends(using: str | None, state_store: StateStore | None) -> list[_Backend]:
    if state_store is None:
        aliases = _migrated_aliases() if using is None else [using]
        return [DatabaseCleanup(alias, tenant=None) for alias in aliases]
    if isinstance(state_store, DatabaseStateStore):
        return [DatabaseCleanup(state_store.alias, tenant=state_store.tenant)]
    require_state_store(state_store)
    return [StateStoreCleanup(state_store)]


def _migrated_aliases() -> list[str]:
    """Return the app's databases. A router may allow migrations on a database that was never migrated."""
    aliases = app_aliases()
    return aliases if len(aliases) == 1 else [alias for alias in aliases if _has_tables(Database(alias, ""))]


def _has_tables(db: Database) -> bool:
    introspection = db.connection.introspection
    try:
        return db.query(lambda: Session._meta.db_table in introspection.table_names())
    except StoreUnavailable:
        # The cleanup reports this error at its end.
        return True


def _age(delete_after: timedelta | float) -> timedelta:
    problem = "delete_after must be a timedelta or a number of days."
    if isinstance(delete_after, bool):
        # Python would take True for one day.
        raise InvalidQuery(problem, path="delete_after")
    try:
        age = delete_after if isinstance(delete_after, timedelta) else timedelta(days=delete_after)
    except (TypeError, ValueError, OverflowError) as exc:
        raise InvalidQuery(problem, path="delete_after") from exc
    if not validation.is_age(age):
        raise InvalidQuery("delete_after must be from 0 to a hundred years.", path="delete_after")
    return age


# --- One run ------------------------------------------------------------------------------------------


@dataclass(eq=False)
class _Cleaner:
    """One run of a cleanup, and its counts. An error affects only the session that caused it."""

    backend: _Backend
    providers: Mapping[str, WorkspaceProvider]
    now: datetime
    page_size: int
    details: CleanupDetails | None
    summary: CleanupSummary = field(init=False, default_factory=CleanupSummary)
    missing_providers: Counter[str] = field(init=False, default_factory=Counter)

    def detect(self, limit: int | None) -> Iterator[CleanupSummary]:
        """Count expired sessions. ``details`` also lists them and the overdue calls of other sessions.

        This does not roll back a real run, because stores from other packages may not have transactions.
        """
        for keys in self._expired_pages(limit):
            self._count(detected=len(keys))
            if self.details is not None:
                self.details.expired.extend(keys)
            yield self.summary
        if self.details is not None:
            would_fail = set(self.details.expired)
            for keys in self.backend.overdue(self.now, self.page_size):
                for key in keys:
                    if key in would_fail:
                        continue
                    with self._logged(key, "Overdue calls of session %r cannot be read."):
                        _, calls = self.backend.overdue_calls(key, self.now)
                        self.details.overdue.extend((key, call) for call in calls)
                yield self.summary

    def clean(self, limit: int | None, delete_before: datetime | None) -> Iterator[CleanupSummary]:
        try:
            yield from self._clean(limit, delete_before)
        finally:
            for name, count in self.missing_providers.items():
                logger.warning(
                    "No workspace provider %s is configured; sessions left for this reason: %d.",
                    name,
                    count,
                )

    def _clean(self, limit: int | None, delete_before: datetime | None) -> Iterator[CleanupSummary]:
        busy: list[SessionKey] = []
        for keys in self._expired_pages(limit):
            busy.extend(self._mark_page(keys))
            yield self.summary
        for first in range(0, len(busy), self.page_size):
            for key in busy[first : first + self.page_size]:
                self._mark_busy(key)
            yield self.summary
        for keys in self.backend.overdue(self.now, self.page_size):
            for key in keys:
                self._apply_defaults(key)
            yield self.summary
        if delete_before is not None:
            for keys in self.backend.deletable(delete_before, self.page_size):
                for key in keys:
                    with self._logged(key, "Session %r could not be deleted."):
                        deleted, snapshots = self.backend.delete(key, delete_before, self.providers)
                        self._count(deleted=deleted, snapshots_deleted=snapshots)
                yield self.summary
        for sweep in self.backend.sweeps():
            self._sweep(sweep)
            yield self.summary

    def _expired_pages(self, limit: int | None) -> Iterator[list[SessionKey]]:
        detected = 0
        for keys in self.backend.expired(self.now, self.page_size):
            wanted = keys if limit is None else keys[: limit - detected]
            detected += len(wanted)
            yield wanted
            if detected == limit:
                return

    # An error in one session is counted and logged. It does not stop the cleanup of the others.

    def _mark_page(self, keys: list[SessionKey]) -> Iterator[SessionKey]:
        """Mark the sessions of a page, and yield the `BUSY` ones.

        The order is random, so that cleaners that work on the same page diverge. If they collide, the
        remaining sessions are read again.
        """
        keys = self._mark_in_bulk(keys)
        random.shuffle(keys)
        while keys:
            key = keys.pop()
            outcome = self._mark(key, wait=False)
            if outcome is CleanupOutcome.BUSY:
                yield key
            if outcome in (CleanupOutcome.BUSY, CleanupOutcome.ALREADY_TERMINAL):
                keys = self.backend.non_terminal(keys)

    def _mark_in_bulk(self, keys: list[SessionKey]) -> list[SessionKey]:
        """Mark the sessions that can be marked at once, and return the others."""
        try:
            rest = self.backend.mark_in_bulk(keys, self.now)
        except Exception:
            logger.exception(
                "%d sessions could not be marked by one statement; they are marked one by one.", len(keys)
            )
            return keys
        marked = len(keys) - len(rest)
        self._count(detected=marked, marked=marked)
        return self.backend.non_terminal(rest) if marked and rest else rest

    def _mark_busy(self, key: SessionKey) -> None:
        for _ in range(_MAX_ATTEMPTS):
            if self._mark(key, wait=True) is not CleanupOutcome.BUSY:
                return
        self._count(detected=1)
        self._count_problem(key)
        logger.warning(
            "Session %r was changed during each of %d attempts; it was not cleaned up.",
            key.session_id,
            _MAX_ATTEMPTS,
        )

    def _mark(self, key: SessionKey, *, wait: bool) -> CleanupOutcome:
        """Delete the snapshots of one session, mark it, and count the outcome unless it is `BUSY`."""
        deleted: set[str] = set()
        try:
            outcome = self._attempt(key, deleted, wait=wait)
        except MissingProvider as exc:
            # Many sessions may have the same provider, so one line at the end reports all of them.
            self.missing_providers[exc.provider] += 1
            self._count_problem(key)
            outcome = CleanupOutcome.FAILED
        except Exception:
            self._count_problem(key)
            logger.exception("Session %r could not be cleaned up.", key.session_id)
            outcome = CleanupOutcome.FAILED
        self._count(
            detected=outcome not in (CleanupOutcome.BUSY, CleanupOutcome.GONE),
            marked=outcome is CleanupOutcome.MARKED,
            already_terminal=outcome is CleanupOutcome.ALREADY_TERMINAL,
            renewed=outcome is CleanupOutcome.RENEWED,
            snapshots_deleted=len(deleted),
        )
        return outcome

    def _attempt(self, key: SessionKey, deleted: set[str], *, wait: bool) -> CleanupOutcome:
        candidate = self.backend.inspect(key)
        if candidate is None:
            return CleanupOutcome.GONE
        if outcome := candidate.known_outcome(self.now):
            return outcome
        refs, left = candidate.workspace_refs.values(), None
        try:
            snapshots = owned_snapshots(self.providers, candidate.key, refs)
        except LimitExceeded as exc:
            # Agents write to these folders. A folder that is too large must not keep its session from
            # expiring.
            snapshots, left = [], exc
        outcome = self.backend.mark(candidate, partial(_delete_snapshots, snapshots, deleted), wait=wait)
        if left is not None and outcome is CleanupOutcome.MARKED:
            self._count_problem(key)
            logger.error("Session %r has expired, but its workspaces remain: %s", key.session_id, left)
        return outcome

    def _apply_defaults(self, key: SessionKey) -> None:
        with self._logged(key, "Some overdue calls of session %r did not get their default."):
            store, calls = self.backend.overdue_calls(key, self.now)
            for call in calls:
                answer = default_answer(call)
                if answer is None:
                    continue
                submission = _submit_default(store, key.session_id, call.tool_call_id, answer)
                if submission.outcome is SubmissionOutcome.ACCEPTED:
                    self._count(defaults_applied=1)

    @contextmanager
    def _logged(self, key: SessionKey, message: str) -> Iterator[None]:
        """Log and count an error that the block raises; the run continues with the next session."""
        try:
            yield
        except Exception:
            self._count_problem(key)
            logger.exception(message, key.session_id)

    def _sweep(self, sweep: Sweep) -> None:
        try:
            self._count(swept=sweep.delete(self.now))
        except Exception:
            self._count(errors=1)
            if self.details is not None:
                self.details.not_swept.add(sweep.record)
            logger.exception("Expired rows of %s of tenant %r were not deleted.", sweep.record, sweep.tenant)

    def _count_problem(self, key: SessionKey) -> None:
        self._count(errors=1)
        if self.details is not None:
            self.details.with_problems.add(key)

    def _count(self, **numbers: int) -> None:
        self.summary = self.summary.plus(**numbers)


def _submit_default(
    store: StateStore, session_id: str, tool_call_id: str, default: Mapping[str, Any]
) -> Submission:
    if isinstance(store, StateStoreBase):
        return submit_default(store, session_id, tool_call_id, default)
    return store.submit_tool_result(session_id, tool_call_id, **default)


def _delete_snapshots(snapshots: list[Snapshot], deleted: set[str]) -> None:
    for snapshot in snapshots:
        snapshot.delete()
        deleted.add(snapshot.snapshot_id)
