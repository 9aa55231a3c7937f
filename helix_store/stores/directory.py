"""Sessions across tenants, for the people who operate the database: commands, admin and reports."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from typing import Any, Final

from django.db.models import Count, Exists, Min, OuterRef, Q

from helix_store.core import validation
from helix_store.core.contracts import takes_session_filters
from helix_store.core.limits import MAX_BATCH
from helix_store.core.payloads import Page, Serializable
from helix_store.core.types import SessionHead, SubSessionRef
from helix_store.engine.database import Database
from helix_store.engine.expressions import tenants_with
from helix_store.engine.statement import table
from helix_store.exceptions import SessionNotFound
from helix_store.models import Checkpoint, CheckpointKind, Session
from helix_store.models import SubSessionRef as SubSessionRow
from helix_store.sessions.checkpoints import DatabaseCheckpoints
from helix_store.sessions.heads import tree_keys
from helix_store.sessions.lists import after_cursor, checked_query, next_cursor, select_sessions
from helix_store.sessions.state import HEAD_FIELDS, listed_head, sub_session_ref_from
from helix_store.stores.conditions import StuckSession, find_stuck
from helix_store.stores.store import DatabaseStateStore

_LARGEST_PAGE: Final = 200
_TENANTS_OF: Final = tenants_with(table(Session), "session_id")


@dataclass(frozen=True, slots=True, kw_only=True)
class DirectoryPage(Page[tuple[str, SessionHead]]):
    """The sessions of a page, with their tenants. ``total`` is ``None`` if the query does not count."""

    sessions: list[tuple[str, SessionHead]]
    total: int | None
    next_cursor: str | None


@dataclass(slots=True, kw_only=True)
class TreeNode:
    """A session or a ref in a tree. ``head`` is ``None`` for a remote or missing session.

    If ``is_repeated`` is set, the session appears elsewhere in the tree, with its own children.
    """

    session_id: str
    head: SessionHead | None
    ref: SubSessionRef | None
    children: list[TreeNode]
    is_repeated: bool = False

    @property
    def agent_type(self) -> str | None:
        """The agent type of the session or of the ref."""
        known = self.head or self.ref
        return None if known is None else known.agent_type

    @property
    def status(self) -> str | None:
        """The status of the session or of the ref."""
        known = self.head or self.ref
        return None if known is None else str(known.status)

    @property
    def is_remote(self) -> bool:
        return self.ref is not None and self.ref.location == "remote"

    def walk(self) -> Iterator[tuple[tuple[bool, ...], TreeNode]]:
        """Yield each node from the top, with a flag for each node on its path: is it the last sibling?"""
        waiting: list[tuple[tuple[bool, ...], TreeNode]] = [((), self)]
        while waiting:
            way, node = waiting.pop()
            yield way, node
            last = len(node.children) - 1
            for index in range(last, -1, -1):
                waiting.append(((*way, index == last), node.children[index]))


@dataclass(frozen=True, slots=True, kw_only=True)
class PruneSummary(Serializable):
    """The progress of pruning: the sessions with checkpoints to delete, and the deleted checkpoints."""

    sessions: int = 0
    checkpoints: int = 0


class SessionDirectory:
    """The sessions of a database: of one tenant, or of every tenant with ``tenant=None``."""

    def __init__(self, using: str | None = None, *, tenant: str | None = None) -> None:
        self.tenant = None if tenant is None else validation.tenant(tenant)
        self._db = Database(using, self.tenant or "")

    def store(self, tenant: str) -> DatabaseStateStore:
        """Return a tenant's state store in this database."""
        return DatabaseStateStore(self._db.alias, tenant=tenant)

    def tenants_of(self, session_id: str) -> list[str]:
        """List the tenants that have a session with this id, in order; none if the id is unknown."""
        validation.identifier(session_id, "session_id")
        if self.tenant is not None:
            return [self.tenant] if self.store(self.tenant).session_exists(session_id) else []
        return [tenant for (tenant,) in self._db.read(_TENANTS_OF, {"session_id": session_id})]

    def starting_with(self, start: str, *, limit: int) -> list[tuple[str, str]]:
        """Return the tenants and ids of at most ``limit`` sessions whose id begins with ``start``.

        A sub-session is left out if the root of its tree is also found.
        """
        validation.identifier(start, "session_id")
        sessions = Session.objects.using(self._db.alias)
        # This is a range because LIKE ignores case on SQLite, and ids are ordered by their bytes.
        begins = Q(session_id__gte=start, session_id__lt=start + chr(sys.maxunicode))
        roots = sessions.filter(begins, tenant=OuterRef("tenant"), session_id=OuterRef("root_session_id"))
        found = sessions.filter(begins).exclude(Exists(roots.exclude(session_id=OuterRef("session_id"))))
        if self.tenant is not None:
            found = found.filter(tenant=self.tenant)
        rows = found.order_by("session_id", "tenant").values_list("tenant", "session_id")[:limit]
        return self._db.query(lambda: list(rows))

    @takes_session_filters
    def pages(self, **filters: Any) -> Iterator[DirectoryPage]:
        """Yield at most ``limit`` sessions in pages of 200, selected by the filters of ``list_sessions``.

        Across tenants, sessions are ordered by time, session id and tenant. Only the first page has a total.
        Raises `InvalidQuery` and `InvalidCursor`.
        """
        limit = filters["limit"]
        while limit > 0:
            page = self._page({**filters, "limit": min(limit, _LARGEST_PAGE)})
            yield page
            limit -= len(page.sessions)
            filters |= {"offset": 0, "cursor": page.next_cursor, "count": False}
            if page.next_cursor is None:
                return

    def _page(self, filters: Mapping[str, Any]) -> DirectoryPage:
        if self.tenant is not None:
            page = self.store(self.tenant).list_sessions(**filters)
            sessions = [(self.tenant, head) for head in page.sessions]
            return DirectoryPage(sessions=sessions, total=page.total, next_cursor=page.next_cursor)
        query = after_cursor(checked_query(filters), filters["cursor"], tenant=None)
        found, total, has_more = self._db.query(lambda: select_sessions(self._db, query, of_all_tenants=True))
        cursor = None
        if has_more:
            tenant, last = found[-1]
            cursor = next_cursor(query, last, tenant, tenant=None)
        return DirectoryPage(sessions=found, total=total, next_cursor=cursor)

    def stuck(
        self, conditions: Collection[str], *, limit: int
    ) -> list[tuple[str, SessionHead, StuckSession]]:
        """Return the sessions of `find_stuck` with their tenants and heads, at most one for each session."""
        # Each session may be found once for each condition.
        most = limit * len(set(conditions))
        found = find_stuck(using=self._db.alias, tenant=self.tenant, conditions=conditions, limit=most)
        by_id: dict[tuple[str, str], StuckSession] = {}
        for stuck in found:
            if len(by_id) < limit:
                by_id.setdefault((stuck.tenant, stuck.session_id), stuck)
        rows = Session.objects.using(self._db.alias).filter(
            tenant__in={tenant for tenant, _ in by_id}, session_id__in={each for _, each in by_id}
        )
        read = self._db.query(lambda: list(rows.values("tenant", *HEAD_FIELDS)))
        heads = {(row["tenant"], row["session_id"]): row for row in read}
        return [
            (key[0], listed_head({name: heads[key][name] for name in HEAD_FIELDS}), stuck)
            for key, stuck in by_id.items()
            if key in heads
        ]

    def tree(self, session_id: str, *, tenant: str) -> TreeNode:
        """Return a session and everything below it: sessions by parent or local ref, and remote refs.

        Runs three queries, however large the tree is. Raises `SessionNotFound`.
        """
        validation.identifier(session_id, "session_id")
        db = Database(self._db.alias, tenant)
        heads, children = db.query(partial(_members, db, tree_keys(db, session_id)))
        by_id = {head.session_id: head for head in heads}
        if session_id not in by_id:
            raise SessionNotFound(session_id)
        for head in heads:
            if head.parent_session_id in by_id:
                children.setdefault(head.parent_session_id, {}).setdefault(head.session_id, None)
        return _grown(session_id, by_id, children)

    def prune_checkpoints(
        self,
        *,
        keep: int,
        before: datetime | None = None,
        session_id: str | None = None,
        dry_run: bool = False,
        page_size: int = 200,
    ) -> Iterator[PruneSummary]:
        """Delete all but the newest ``keep`` checkpoints of each session; yield the totals after each one.

        With ``before``, only checkpoints made before that time are deleted. Runs one transaction per session,
        under its lock; safe to stop and to repeat. The current state, messages and graphs are kept. A
        ``dry_run`` rolls each transaction back. Raises `InvalidQuery` for invalid arguments, and
        `InvalidPayload` for an invalid session id.
        """
        validation.query_number(keep, "keep")
        validation.query_flag(dry_run, "dry_run")
        validation.optional_identifier(session_id, "session_id")
        before = None if before is None else validation.aware_datetime(before, "before")
        return self._prune(
            keep=keep,
            before=before,
            session_id=session_id,
            dry_run=dry_run,
            page_size=validation.page_limit(page_size, maximum=MAX_BATCH, name="page_size"),
        )

    def _prune(
        self, *, keep: int, before: datetime | None, session_id: str | None, dry_run: bool, page_size: int
    ) -> Iterator[PruneSummary]:
        summary = PruneSummary()
        after = 0
        while True:
            page = partial(self._with_more_checkpoints, keep, before, session_id, after, page_size)
            found = self._db.query(page)
            for _, tenant, found_id in found:
                # Not the database of the routers: the rows of a moved tenant must not name other rows.
                db = Database(self._db.alias, tenant)
                dropped = 0
                # The session may have been deleted after it was found.
                with db.rolled_back(dry_run=dry_run), suppress(SessionNotFound):
                    dropped = DatabaseCheckpoints(db).prune(found_id, keep, before)
                if dropped:
                    summary = PruneSummary(
                        sessions=summary.sessions + 1, checkpoints=summary.checkpoints + dropped
                    )
                yield summary
            if len(found) < page_size:
                return
            after = found[-1][0]

    def _with_more_checkpoints(
        self, keep: int, before: datetime | None, session_id: str | None, after: int, limit: int
    ) -> list[tuple[int, str, str]]:
        """Return sessions after a key that have more than ``keep`` step checkpoints, the oldest of them
        ``before`` a time, each as its surrogate key, tenant and id.
        """
        checkpoints = Checkpoint.objects.using(self._db.alias).filter(
            kind=CheckpointKind.STEP, namespace="", session_id__gt=after
        )
        if self.tenant is not None:
            checkpoints = checkpoints.filter(session__tenant=self.tenant)
        if session_id is not None:
            checkpoints = checkpoints.filter(session__session_id=session_id)
        found: Any = checkpoints.values("session_id").annotate(count=Count("*")).filter(count__gt=keep)
        if before is not None:
            found = found.annotate(oldest=Min("created_at")).filter(oldest__lt=before)
        keys = list(found.order_by("session_id").values_list("session_id", flat=True)[:limit])
        rows = Session.objects.using(self._db.alias).filter(pk__in=keys).order_by("pk")
        return list(rows.values_list("pk", "tenant", "session_id"))


_Children = dict[str, dict[str, SubSessionRef | None]]
"""The sessions below each session by id, with its refs to them."""


def _members(db: Database, keys: Collection[int]) -> tuple[list[SessionHead], _Children]:
    """Return the sessions with these keys, and their refs."""
    sessions = Session.objects.using(db.alias).filter(pk__in=keys).order_by("created_at", "pk")
    rows = list(sessions.values("pk", *HEAD_FIELDS))
    ids = {row.pop("pk"): row["session_id"] for row in rows}
    refs: _Children = {}
    for ref in SubSessionRow.objects.using(db.alias).filter(session_id__in=keys).order_by("pk"):
        if ref.session_id in ids:
            value = sub_session_ref_from(ref)
            refs.setdefault(ids[ref.session_id], {})[value.sub_session_id] = value
    return [listed_head(row) for row in rows], refs


def _grown(root_id: str, heads: dict[str, SessionHead], children: _Children) -> TreeNode:
    """Return the tree below a session, breadth first: each session appears where it is first reached."""
    root = TreeNode(session_id=root_id, head=heads[root_id], ref=None, children=[])
    placed = {root_id}
    row = [root]
    while row:
        below: list[TreeNode] = []
        for node in row:
            for child_id, ref in children.get(node.session_id, {}).items():
                is_remote = ref is not None and ref.location == "remote"
                head = None if is_remote else heads.get(child_id)
                child = TreeNode(session_id=child_id, head=head, ref=ref, children=[])
                child.is_repeated = head is not None and child_id in placed
                node.children.append(child)
                if head is not None and not child.is_repeated:
                    placed.add(child_id)
                    below.append(child)
        row = below
    return root
