"""Sessions across tenants, for the people who operate the database: commands, admin and reports."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from helix_store.core import validation
from helix_store.core.serialization import Page, Serializable
from helix_store.core.signatures import takes_session_filters
from helix_store.core.types import SessionHead, SubSessionRef
from helix_store.engine.database import Database
from helix_store.exceptions import SessionNotFound
from helix_store.sessions.database.checkpoints import DatabaseCheckpoints
from helix_store.sessions.database.directory import DatabaseDirectory
from helix_store.sessions.queries import after_cursor, checked_query, next_cursor
from helix_store.stores.database import DatabaseStateStore

_LARGEST_PAGE: Final = 200


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
        self._using = using
        self._directory = DatabaseDirectory(Database(using, self.tenant or ""))

    def store(self, tenant: str) -> DatabaseStateStore:
        """Return a tenant's state store in this database."""
        return DatabaseStateStore(self._using, tenant=tenant)

    def tenants_of(self, session_id: str) -> list[str]:
        """List the tenants that have a session with this id, in order; none if the id is unknown."""
        validation.identifier(session_id, "session_id")
        if self.tenant is not None:
            return [self.tenant] if self.store(self.tenant).session_exists(session_id) else []
        return self._directory.tenants_of(session_id)

    def starting_with(self, start: str, *, limit: int) -> list[tuple[str, str]]:
        """Return the tenants and ids of at most ``limit`` sessions whose id begins with ``start``.

        A sub-session is left out if the root of its tree is also found.
        """
        validation.identifier(start, "session_id")
        return self._directory.starting_with(start, tenant=self.tenant, limit=limit)

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
        found, total, has_more = self._directory.select(query)
        cursor = None
        if has_more:
            tenant, last = found[-1]
            cursor = next_cursor(query, last, tenant, tenant=None)
        return DirectoryPage(sessions=found, total=total, next_cursor=cursor)

    def tree(self, session_id: str, *, tenant: str) -> TreeNode:
        """Return a session and everything below it: sessions by parent or local ref, and remote refs.

        Runs three queries, however large the tree is. Raises `SessionNotFound`.
        """
        validation.identifier(session_id, "session_id")
        heads, refs = DatabaseDirectory(Database(self._using, tenant)).tree(session_id)
        by_id = {head.session_id: head for head in heads}
        if session_id not in by_id:
            raise SessionNotFound(session_id)
        children: dict[str, dict[str, SubSessionRef | None]] = {
            parent: {ref.sub_session_id: ref for ref in listed} for parent, listed in refs.items()
        }
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
        ``dry_run`` rolls each transaction back.
        """
        validation.query_number(keep, "keep")
        summary = PruneSummary()
        after = 0
        while True:
            found = self._directory.with_more_checkpoints(
                keep=keep,
                before=before,
                tenant=self.tenant,
                session_id=session_id,
                after=after,
                limit=page_size,
            )
            for _, tenant, found_id in found:
                db = Database(self._using, tenant)
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


def _grown(
    root_id: str, heads: dict[str, SessionHead], children: dict[str, dict[str, SubSessionRef | None]]
) -> TreeNode:
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
