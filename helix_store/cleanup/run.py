"""Cleanup of expired sessions, their workspace snapshots, and tool calls past their deadline."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Final

from helix_store.cleanup.any_store import StateStoreCleanup
from helix_store.cleanup.cleaner import Cleaner, CleanupBackend
from helix_store.cleanup.database import DatabaseCleanup
from helix_store.cleanup.outcomes import CleanupDetails, CleanupSummary
from helix_store.cleanup.workspaces import WorkspaceProvider, configured_workspace_providers
from helix_store.core import validation
from helix_store.core.contracts import StateStore, require_state_store
from helix_store.core.types import Timestamp
from helix_store.engine.aliases import app_aliases
from helix_store.engine.database import Database
from helix_store.exceptions import InvalidQuery, StoreUnavailable
from helix_store.models import Session
from helix_store.stores.database import DatabaseStateStore

_LARGEST_PAGE: Final = 1_000


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

    def clean(backend: CleanupBackend, limit: int | None) -> Iterator[CleanupSummary]:
        at = backend.now() if time is None else time
        cleaner = Cleaner(backend, providers, at, page_size, details)
        return cleaner.detect(limit) if dry_run else cleaner.clean(limit, None if age is None else at - age)

    return _one_after_the_other(_backends(using, state_store), clean, limit)


def _one_after_the_other(
    backends: Sequence[CleanupBackend],
    clean: Callable[[CleanupBackend, int | None], Iterator[CleanupSummary]],
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
                yield before + done
        except StoreUnavailable as exc:
            failure = failure or exc
        before += done
    if failure is not None:
        raise failure


def _backends(using: str | None, state_store: StateStore | None) -> list[CleanupBackend]:
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
