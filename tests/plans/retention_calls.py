"""Retention and erasure: a page of session trees is found by its keys, in tables of any size."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any, Final

from django.db.models import QuerySet

from helix_store.cleanup import erase
from helix_store.cleanup import erasure as references
from helix_store.cleanup import erasure as trees
from helix_store.cleanup.retention import Retention
from helix_store.core.types import RetentionPolicy, SessionStatus
from helix_store.engine.database import Database
from helix_store.models import Session
from helix_store.sessions.locking import sweep_tombstones, tombstones_of
from tests.plans.calls import ANALYSED, PAGE, SQLITE, Call, gap
from tests.plans.rows import NOW, World

__all__ = ["RETENTION_CALLS"]

Make = Callable[[World], Callable[[], object]]

_FIRST: Final = 2_000
_EVERY_STATUS: Final = RetentionPolicy(
    sessions_idle_days=dict.fromkeys(SessionStatus, 0), checkpoints_keep=1, streams_ended_days=0
)
_DOCUMENTS: Final = "SQLite has no index of documents: it looks for branches in the metadata of every session"


def _first_page(world: World) -> Callable[[], object]:
    retention = partial(
        Retention,
        using=world.database.alias,
        tenant=world.database.tenant,
        policy=_EVERY_STATUS,
        page_size=PAGE,
        now=NOW + timedelta(days=1),
        dry_run=True,
    )
    return lambda: next(retention().batches())


def _of_page(function: Callable[[Database, list[int]], object]) -> Make:
    """For sessions after the busy ones, which come first."""

    def make(world: World) -> Callable[[], object]:
        db = Database(world.database.alias, world.database.tenant)
        sessions = Session.objects.using(db.alias).filter(tenant=db.tenant).order_by("pk")
        keys = list(sessions.values_list("pk", flat=True)[_FIRST : _FIRST + PAGE])
        return lambda: function(db, keys)

    return make


def _of_ids(rows: Callable[[Database, list[int], list[str]], QuerySet[Any]]) -> Make:
    def read(db: Database, keys: list[int]) -> object:
        ids = trees.sessions_with_keys(db, keys).values_list("session_id", flat=True)
        return list(rows(db, keys, list(ids)))

    return _of_page(read)


def _posts_of_a_user(world: World) -> Callable[[], object]:
    db = Database(world.database.alias, world.database.tenant)
    return lambda: list(references.posts_of(db, "author-7"))


def _of_tenant(function: Callable[[Database], object]) -> Make:
    return lambda world: partial(function, Database(world.database.alias, world.database.tenant))


def _erase(**options: Any) -> Make:
    return lambda world: (
        lambda: erase(
            using=world.database.alias,
            tenant=world.database.tenant,
            session_id="session-301",
            workspace_providers={},
            **options,
        )
    )


RETENTION_CALLS: Final = [
    Call("retention, the first page", _first_page, sorts=PAGE),
    Call("links into sessions", _of_page(trees.links_into)),
    Call("sessions in use", _of_page(trees.in_use)),
    # Some rows of each kind for each session.
    Call("rows of sessions", _of_page(lambda db, keys: trees.row_counts(db, keys, [])), reads=50 * PAGE),
    Call("streams of sessions", _of_page(trees.doomed_streams)),
    Call("refs to sessions", _of_ids(references.foreign_refs)),
    Call("usage that names sub-sessions", _of_ids(references.usage_of_sub_sessions)),
    Call(
        "usage of deleted sessions",
        _of_ids(lambda db, keys, ids: references.kept_usage(db, ids)),
        gaps=gap("with statistics SQLite reads all entries of deleted sessions", [ANALYSED]),
    ),
    Call("posts of a user", _posts_of_a_user),
    Call("tombstones of sessions", _of_tenant(lambda db: list(tombstones_of(db, ["session-301"])))),
    Call("sweep of tombstones", _of_tenant(lambda db: sweep_tombstones(db, NOW))),
    Call("erase a session", _erase(force=True), sorts=PAGE, gaps=gap(_DOCUMENTS, [SQLITE, ANALYSED])),
    Call("erase a session, dry", _erase(dry_run=True), sorts=PAGE, gaps=gap(_DOCUMENTS, [SQLITE, ANALYSED])),
]
