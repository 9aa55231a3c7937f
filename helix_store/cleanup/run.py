"""Cleanup of expired sessions, their workspace snapshots, and tool calls past their deadline."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from functools import partial
from typing import Any, Final

from django.core.exceptions import ImproperlyConfigured

from helix_store.cleanup.any_store import StateStoreCleanup
from helix_store.cleanup.backend import (
    CleanupBackend,
    CleanupOutcome,
    ExpiryCandidate,
    Page,
    SessionKey,
    known_outcome,
)
from helix_store.cleanup.database import DatabaseCleanup
from helix_store.cleanup.workspaces import WorkspaceProvider, configured_workspace_providers
from helix_store.core import validation
from helix_store.core.contracts import StateStore, require_state_store
from helix_store.core.limits import UNLIMITED
from helix_store.core.serialization import Serializable
from helix_store.core.types import SubmissionOutcome
from helix_store.exceptions import InvalidQuery
from helix_store.sessions.database.store import DatabaseStateStore
from helix_store.sessions.tool_calls import default_answer

__all__ = ["CleanupSummary", "expired_session_cleanup", "expired_session_cleanup_batches"]

logger = logging.getLogger("helix_store.cleanup")

_MAX_ATTEMPTS: Final = 10
_LARGEST_PAGE: Final = 1_000


@dataclass(frozen=True, slots=True)
class CleanupSummary(Serializable):
    """The counts of one cleanup. A dry run only detects.

    ``detected`` is the sum of ``marked``, ``already_terminal``, ``renewed`` and the sessions that failed.
    ``errors`` counts sessions and tool calls with a problem, ``defaults_applied`` tool calls that got their
    default after their deadline, ``deleted`` deleted sessions.
    """

    detected: int = 0
    marked: int = 0
    already_terminal: int = 0
    snapshots_deleted: int = 0
    errors: int = 0
    renewed: int = 0
    defaults_applied: int = 0
    deleted: int = 0


def expired_session_cleanup(
    *,
    using: str | None = None,
    state_store: StateStore | None = None,
    workspace_providers: Mapping[str, WorkspaceProvider] | None = None,
    page_size: int = 200,
    limit: int | None = None,
    now: datetime | int | None = None,
    dry_run: bool = False,
    progress: Callable[[CleanupSummary], object] | None = None,
    delete_after: timedelta | float | None = None,
) -> CleanupSummary:
    """Mark expired sessions as failed, and delete the workspace snapshots that they own.

    Cleans up every tenant of the database ``using``, or one ``state_store``. Each session is one transaction:
    it locks the session's row, deletes the snapshots, and sets the status ``failed`` with the reason
    ``session_expired``. If the cleanup is killed, the next one completes it. A session that was renewed or
    resumed before the lock keeps its snapshots. In a database, the sessions of a page without workspaces
    are marked by one statement. Then each call past its deadline gets its ``on_expiry`` default. Any number
    of cleanups may run at once; a repeat is safe.

    ``workspace_providers`` are providers by name, by default those of the settings. ``limit`` is the largest
    number of sessions to detect. ``now`` is an aware datetime or epoch milliseconds, by default the
    database's clock. A dry run changes nothing. ``progress`` is called after each page. ``delete_after`` (a
    timedelta, or days) also deletes the trees of marked sessions that expired longer ago, but keeps their
    usage. A session that cannot be cleaned up is logged, counted in ``errors`` and tried again by the next
    cleanup. Raises `InvalidQuery` for invalid arguments.
    Source: the operator-driven session cleanup of the state store document.
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
    now: datetime | int | None = None,
    dry_run: bool = False,
    delete_after: timedelta | float | None = None,
) -> Iterator[CleanupSummary]:
    """`expired_session_cleanup` as a generator of the counts so far, after each page. It may be stopped."""
    if using is not None and state_store is not None:
        raise InvalidQuery("Give using or state_store, not both.")
    providers = configured_workspace_providers() if workspace_providers is None else workspace_providers
    for name, provider in providers.items():
        if not isinstance(provider, WorkspaceProvider):
            raise TypeError(f"{name!r} is not a workspace provider: it cannot list or delete snapshots.")
    backend = _backend(using, state_store)
    time = backend.now() if now is None else validation.aware_datetime(now, "now")
    delete_before = None if delete_after is None else time - _age(delete_after)
    if limit is not None:
        limit = validation.page_limit(limit, maximum=UNLIMITED)
    cleaner = _Cleaner(backend, providers, time, validation.page_limit(page_size, maximum=_LARGEST_PAGE))
    return cleaner.detect(limit) if dry_run else cleaner.clean(limit, delete_before)


def _backend(using: str | None, state_store: StateStore | None) -> CleanupBackend:
    if state_store is None:
        return DatabaseCleanup(using, tenant=None)
    if isinstance(state_store, DatabaseStateStore):
        return DatabaseCleanup(state_store.alias, tenant=state_store.tenant)
    require_state_store(state_store)
    return StateStoreCleanup(state_store)


def _age(delete_after: timedelta | float) -> timedelta:
    try:
        age = delete_after if isinstance(delete_after, timedelta) else timedelta(days=delete_after)
    except (TypeError, ValueError, OverflowError) as exc:
        raise InvalidQuery("delete_after must be a timedelta or a number of days.") from exc
    if age < timedelta():
        raise InvalidQuery("delete_after must not be negative.")
    return age


class _Cleaner:
    """One run of a cleanup, and its counts."""

    def __init__(
        self,
        backend: CleanupBackend,
        providers: Mapping[str, WorkspaceProvider],
        now: datetime,
        page_size: int,
    ) -> None:
        self.backend = backend
        self.providers = providers
        self.now = now
        self.page_size = page_size
        self.summary = CleanupSummary()

    def detect(self, limit: int | None) -> Iterator[CleanupSummary]:
        for keys in self._expired_pages(limit):
            self._count(detected=len(keys))
            yield self.summary

    def clean(self, limit: int | None, delete_before: datetime | None) -> Iterator[CleanupSummary]:
        busy: list[SessionKey] = []
        for keys in self._expired_pages(limit):
            busy.extend(self._mark_page(keys))
            yield self.summary
        for first in range(0, len(busy), self.page_size):
            for key in busy[first : first + self.page_size]:
                self._mark_busy(key)
            yield self.summary
        for keys in self._pages(partial(self.backend.overdue, self.now)):
            for key in keys:
                self._apply_defaults(key)
            yield self.summary
        if delete_before is not None:
            for keys in self._pages(partial(self.backend.deletable, delete_before)):
                for key in keys:
                    self._delete(key, delete_before)
                yield self.summary

    def _expired_pages(self, limit: int | None) -> Iterator[list[SessionKey]]:
        detected = 0
        for keys in self._pages(partial(self.backend.expired, self.now)):
            wanted = keys if limit is None else keys[: limit - detected]
            detected += len(wanted)
            yield wanted
            if detected == limit:
                return

    def _pages(self, page_after: Callable[[Any, int], Page]) -> Iterator[list[SessionKey]]:
        keys, position = page_after(None, self.page_size)
        yield keys
        while position is not None:
            keys, position = page_after(position, self.page_size)
            yield keys

    # An error of one session is counted and logged. It does not stop the cleanup of the others.

    def _mark_page(self, keys: list[SessionKey]) -> Iterator[SessionKey]:
        """Mark the sessions of a page, and yield those that are `BUSY`.

        The order is random, so that cleaners at the same page diverge. Where they meet, the sessions that
        are left are read again.
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
        self._count(detected=1, errors=1)
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
        except Exception:
            self._count(errors=1)
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
        if outcome := known_outcome(candidate, self.now):
            return outcome
        snapshots = self._snapshots(candidate)
        return self.backend.mark(candidate, partial(_delete_snapshots, snapshots, deleted), wait=wait)

    def _snapshots(self, candidate: ExpiryCandidate) -> list[tuple[WorkspaceProvider, str]]:
        """The snapshots that the session owns. A ref without a provider raises before any is deleted."""
        refs = candidate.workspace_refs.values()
        providers = [self._provider(ref["provider"]) for ref in refs]
        return [
            (provider, snapshot_id)
            for provider, ref in zip(providers, refs, strict=True)
            for snapshot_id in provider.list_snapshots(candidate.key.session_id, ref)
        ]

    def _provider(self, name: str) -> WorkspaceProvider:
        provider = self.providers.get(name)
        if provider is None:
            raise ImproperlyConfigured(f"No workspace provider is configured under the name {name!r}.")
        return provider

    def _apply_defaults(self, key: SessionKey) -> None:
        try:
            store, calls = self.backend.overdue_calls(key, self.now)
            for call in calls:
                answer = default_answer(call)
                if answer is None:
                    continue
                submission = store.submit_tool_result(key.session_id, call.tool_call_id, **answer)
                if submission.outcome is SubmissionOutcome.ACCEPTED:
                    self._count(defaults_applied=1)
        except Exception:
            self._count(errors=1)
            logger.exception("Overdue calls of session %r did not all get their default.", key.session_id)

    def _delete(self, key: SessionKey, before: datetime) -> None:
        try:
            self._count(deleted=self.backend.delete(key, before))
        except Exception:
            self._count(errors=1)
            logger.exception("Session %r could not be deleted.", key.session_id)

    def _count(self, **numbers: int) -> None:
        sums = {name: getattr(self.summary, name) + number for name, number in numbers.items()}
        self.summary = replace(self.summary, **sums)


def _delete_snapshots(snapshots: list[tuple[WorkspaceProvider, str]], deleted: set[str]) -> None:
    for provider, snapshot_id in snapshots:
        provider.delete_snapshot(snapshot_id)
        deleted.add(snapshot_id)
