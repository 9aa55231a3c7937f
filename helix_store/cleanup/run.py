"""Cleaning up what nobody came back for: expired sessions, their snapshots, and calls past their deadline."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from datetime import datetime, timedelta
from functools import partial
from typing import Any, Final

from django.core.exceptions import ImproperlyConfigured

from helix_store.cleanup.any_store import (
    Expiry,
    Page,
    StateStoreExpiry,
)
from helix_store.cleanup.candidates import (
    CleanupSummary,
    SeenSession,
    SessionKey,
    Settlement,
    settlement_of,
)
from helix_store.cleanup.database import DatabaseExpiry
from helix_store.cleanup.workspaces import WorkspaceProvider, configured_workspace_providers
from helix_store.core import validation
from helix_store.core.contracts import StateStore, require_state_store
from helix_store.core.types import SubmissionOutcome
from helix_store.exceptions import InvalidQuery
from helix_store.sessions.tool_calls import default_answer
from helix_store.stores import DatabaseStateStore

__all__ = ["CleanupSummary", "expired_session_cleanup", "expired_session_cleanup_batches"]

logger = logging.getLogger("helix_store.cleanup")

_LOOKS_AT_A_BUSY_SESSION: Final = 10
_LARGEST_PAGE: Final = 1_000
_NO_LIMIT: Final = 2**62


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
    """Fail the sessions that have expired, and delete the workspace snapshots that they own.

    It works on every tenant of the database ``using``, or on one ``state_store``. Each session is claimed,
    its snapshots are deleted, and it becomes ``failed`` with the reason ``session_expired``: one transaction
    under its row lock, so that a cleaner which dies leaves it for the next one, and a session renewed or
    resumed before the claim keeps its snapshots. In a database, the sessions of a page that own no snapshots
    become so in one statement. Calls past their deadline then get their ``on_expiry``
    default. Any number of cleaners may run at once; repeating is safe.

    ``workspace_providers`` by name, by default those of the settings. ``limit`` is the most sessions to
    detect. ``now`` is an aware datetime or epoch milliseconds, by default the database's clock. A dry run
    changes nothing. ``progress`` is called after every page. ``delete_after`` (a timedelta, or days) deletes
    the trees of sessions that expired longer ago and were marked, but keeps their usage. A session that
    cannot be settled is logged, counted in ``errors`` and tried again by the next cleanup.
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
    """`expired_session_cleanup` step by step: the sums so far after each page, to be left at any of them."""
    if using is not None and state_store is not None:
        raise InvalidQuery("Give using or state_store, not both.")
    providers = configured_workspace_providers() if workspace_providers is None else workspace_providers
    for name, provider in providers.items():
        if not isinstance(provider, WorkspaceProvider):
            raise TypeError(f"{name!r} is no workspace provider: it cannot list or delete snapshots.")
    expiry = _expiry(using, state_store)
    moment = expiry.now() if now is None else validation.aware_datetime(now, "now")
    before = None if delete_after is None else moment - _age(delete_after)
    if limit is not None:
        limit = validation.page_limit(limit, maximum=_NO_LIMIT)
    cleaner = _Cleaner(expiry, providers, moment, validation.page_limit(page_size, maximum=_LARGEST_PAGE))
    return cleaner.detect(limit) if dry_run else cleaner.clean(limit, delete_before=before)


def _expiry(using: str | None, state_store: StateStore | None) -> Expiry:
    if state_store is None:
        return DatabaseExpiry(using, tenant=None)
    if isinstance(state_store, DatabaseStateStore):
        return DatabaseExpiry(state_store.alias, tenant=state_store.tenant)
    require_state_store(state_store)
    return StateStoreExpiry(state_store)


def _age(delete_after: timedelta | float) -> timedelta:
    try:
        age = delete_after if isinstance(delete_after, timedelta) else timedelta(days=delete_after)
    except (TypeError, ValueError, OverflowError) as exc:
        raise InvalidQuery("delete_after must be a timedelta or a number of days.") from exc
    if age < timedelta():
        raise InvalidQuery("delete_after must not be negative.")
    return age


class _Cleaner:
    """One run of a cleanup, and its sums."""

    def __init__(
        self, expiry: Expiry, providers: Mapping[str, WorkspaceProvider], now: datetime, page_size: int
    ) -> None:
        self.expiry = expiry
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
            busy.extend(self._settle_page(keys))
            yield self.summary
        for first in range(0, len(busy), self.page_size):
            for key in busy[first : first + self.page_size]:
                self._settle_busy(key)
            yield self.summary
        for keys in self._pages(partial(self.expiry.overdue, self.now)):
            for key in keys:
                self._apply_defaults(key)
            yield self.summary
        if delete_before is not None:
            for keys in self._pages(partial(self.expiry.deletable, delete_before)):
                for key in keys:
                    self._delete(key, delete_before)
                yield self.summary

    def _expired_pages(self, limit: int | None) -> Iterator[list[SessionKey]]:
        seen = 0
        for keys in self._pages(partial(self.expiry.expired, self.now)):
            wanted = keys if limit is None else keys[: limit - seen]
            seen += len(wanted)
            yield wanted
            if seen == limit:
                return

    def _pages(self, page_after: Callable[[Any, int], Page]) -> Iterator[list[SessionKey]]:
        keys, position = page_after(None, self.page_size)
        yield keys
        while position is not None:
            keys, position = page_after(position, self.page_size)
            yield keys

    # --- One session: whatever goes wrong with it is counted and logged, and the loop goes on ---------

    def _settle_page(self, keys: list[SessionKey]) -> Iterator[SessionKey]:
        """Settle what nobody else is busy with, and yield the rest.

        What owns nothing is settled at once. The rest goes in any order, so that cleaners at the same page
        part; where they meet, one looks what is left of it.
        """
        keys = self._mark(keys)
        random.shuffle(keys)
        while keys:
            key = keys.pop()
            settlement = self._settle(key, wait=False)
            if settlement is Settlement.BUSY:
                yield key
            if settlement in (Settlement.BUSY, Settlement.ALREADY_TERMINAL):
                keys = self.expiry.still_open(keys)

    def _mark(self, keys: list[SessionKey]) -> list[SessionKey]:
        """Mark what can be marked at once, and return what is left."""
        try:
            left = self.expiry.mark(keys, self.now)
        except Exception:
            logger.exception("%d sessions could not be marked at once; they are settled singly.", len(keys))
            return keys
        marked = len(keys) - len(left)
        self._count(detected=marked, marked=marked)
        return self.expiry.still_open(left) if marked and left else left

    def _settle_busy(self, key: SessionKey) -> None:
        for _ in range(_LOOKS_AT_A_BUSY_SESSION):
            if self._settle(key, wait=True) is not Settlement.BUSY:
                return
        self._count(detected=1, errors=1)
        logger.warning("Session %r was written to all the time; it was not cleaned up.", key.session_id)

    def _settle(self, key: SessionKey, *, wait: bool) -> Settlement | None:
        """Settle and count one session that is not `BUSY`; ``None`` is a problem."""
        deleted: set[str] = set()
        try:
            seen = self.expiry.see(key)
            settlement = settlement_of(seen, self.now)
            if seen is not None and settlement is None:
                snapshots = self._snapshots(seen)
                settlement = self.expiry.settle(
                    seen, partial(_delete_snapshots, snapshots, deleted), wait=wait
                )
        except Exception:
            self._count(detected=1, errors=1, snapshots_deleted=len(deleted))
            logger.exception("Session %r could not be cleaned up.", key.session_id)
            return None
        self._count(snapshots_deleted=len(deleted))
        if settlement is Settlement.MARKED:
            self._count(detected=1, marked=1)
        elif settlement is Settlement.ALREADY_TERMINAL:
            self._count(detected=1, already_terminal=1)
        elif settlement is Settlement.RENEWED:
            self._count(detected=1, renewed=1)
        return settlement

    def _snapshots(self, seen: SeenSession) -> list[tuple[WorkspaceProvider, str]]:
        """What the session owns; raises before anything is deleted when a ref has no provider."""
        providers = [self._provider(ref["provider"]) for ref in seen.workspace_refs.values()]
        return [
            (provider, snapshot_id)
            for provider, ref in zip(providers, seen.workspace_refs.values(), strict=True)
            for snapshot_id in provider.list_snapshots(seen.key.session_id, ref)
        ]

    def _provider(self, name: str) -> WorkspaceProvider:
        provider = self.providers.get(name)
        if provider is None:
            raise ImproperlyConfigured(f"No workspace provider is configured under the name {name!r}.")
        return provider

    def _apply_defaults(self, key: SessionKey) -> None:
        try:
            store, calls = self.expiry.due(key, self.now)
            for call in calls:
                answer = default_answer(call)
                if answer is None:
                    continue
                submission = store.submit_tool_result(key.session_id, call.tool_call_id, **answer)
                if submission.outcome is SubmissionOutcome.ACCEPTED:
                    self._count(defaults_applied=1)
        except Exception:
            self._count(errors=1)
            logger.exception("Overdue calls of session %r did not get their default.", key.session_id)

    def _delete(self, key: SessionKey, before: datetime) -> None:
        try:
            self._count(deleted=self.expiry.delete(key, before))
        except Exception:
            self._count(errors=1)
            logger.exception("Session %r could not be deleted.", key.session_id)

    def _count(self, **more: int) -> None:
        sums = {name: getattr(self.summary, name) + number for name, number in more.items()}
        self.summary = replace(self.summary, **sums)


def _delete_snapshots(snapshots: list[tuple[WorkspaceProvider, str]], deleted: set[str]) -> None:
    for provider, snapshot_id in snapshots:
        provider.delete_snapshot(snapshot_id)
        deleted.add(snapshot_id)
