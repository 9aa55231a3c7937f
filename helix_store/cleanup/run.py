"""Cleanup of expired sessions, their workspace snapshots, and tool calls past their deadline."""

from __future__ import annotations

import logging
import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from functools import partial
from typing import Any, Final

from helix_store.catalogue.rows import Sweep
from helix_store.cleanup.any_store import StateStoreCleanup
from helix_store.cleanup.database import DatabaseCleanup
from helix_store.cleanup.outcomes import CleanupDetails, CleanupOutcome, CleanupSummary, SessionKey
from helix_store.cleanup.workspaces import (
    MissingProvider,
    Snapshot,
    WorkspaceProvider,
    configured_workspace_providers,
    owned_snapshots,
)
from helix_store.core import validation
from helix_store.core.contracts import StateStore, require_state_store
from helix_store.core.types import Submission, SubmissionOutcome, Timestamp
from helix_store.engine.aliases import app_aliases
from helix_store.engine.database import Database
from helix_store.exceptions import InvalidQuery, LimitExceeded, StoreUnavailable
from helix_store.models import Session
from helix_store.sessions.approvals import default_answer
from helix_store.sessions.store import StateStoreBase
from helix_store.stores.database import DatabaseStateStore

logger = logging.getLogger("helix_store.cleanup")

_MAX_ATTEMPTS: Final = 10
_LARGEST_PAGE: Final = 1_000

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
    invalid arguments. Source: the operator-driven session cleanup of the state store document.
    """
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
    providers = configured_workspace_providers() if workspace_providers is None else workspace_providers
    for name, provider in providers.items():
        if not isinstance(provider, WorkspaceProvider):
            raise TypeError(f"{name!r} is not a workspace provider: it cannot list or delete snapshots.")
    page_size = validation.page_limit(page_size, maximum=_LARGEST_PAGE)
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
    try:
        age = delete_after if isinstance(delete_after, timedelta) else timedelta(days=delete_after)
    except (TypeError, ValueError, OverflowError) as exc:
        raise InvalidQuery(
            "delete_after must be a timedelta or a number of days.", path="delete_after"
        ) from exc
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
                        self._count(deleted=self.backend.delete(key, delete_before))
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
        return store._submit_default(session_id, tool_call_id, default)
    return store.submit_tool_result(session_id, tool_call_id, **default)


def _delete_snapshots(snapshots: list[Snapshot], deleted: set[str]) -> None:
    for snapshot in snapshots:
        snapshot.delete()
        deleted.add(snapshot.snapshot_id)
