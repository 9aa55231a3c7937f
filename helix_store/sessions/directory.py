"""Sessions across tenants, for those who operate the database: commands, admin, reports."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, Final

from helix_store.core import validation
from helix_store.core.pages import Page
from helix_store.core.types import SessionHead, SubSessionRef
from helix_store.engine.cursors import read_cursor, write_cursor
from helix_store.engine.database import Database
from helix_store.exceptions import InvalidQuery, SessionNotFound
from helix_store.sessions.database.checkpoints import DatabaseCheckpoints
from helix_store.sessions.database.directory import DatabaseDirectory
from helix_store.sessions.database.store import DatabaseStateStore
from helix_store.sessions.queries import checked_query, cursor_binding

__all__ = ["DirectoryPage", "PruneSummary", "SessionDirectory", "TreeNode"]

_LARGEST_PAGE: Final = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class DirectoryPage(Page[tuple[str, SessionHead]]):
    """Sessions with their tenants. ``total`` is ``None`` unless the query counts."""

    sessions: list[tuple[str, SessionHead]]
    total: int | None
    next_cursor: str | None

    @property
    def _items(self) -> list[tuple[str, SessionHead]]:
        return self.sessions


@dataclass(slots=True, kw_only=True)
class TreeNode:
    """A session or a ref in a tree. ``head`` is ``None`` for a remote session and for a missing one.

    ``is_repeated``: the session stands elsewhere in the tree, with its own children.
    """

    session_id: str
    head: SessionHead | None
    ref: SubSessionRef | None
    children: list[TreeNode]
    is_repeated: bool = False

    def walk(self) -> Iterator[tuple[tuple[bool, ...], TreeNode]]:
        """Each node from the top, with the way to it: whether each node on it is the last of its siblings."""
        waiting: list[tuple[tuple[bool, ...], TreeNode]] = [((), self)]
        while waiting:
            way, node = waiting.pop()
            yield way, node
            last = len(node.children) - 1
            for index in range(last, -1, -1):
                waiting.append(((*way, index == last), node.children[index]))


@dataclass(frozen=True, slots=True, kw_only=True)
class PruneSummary:
    """What a prune has done so far: sessions with something to drop, dropped checkpoints."""

    sessions: int = 0
    checkpoints: int = 0

    def to_dict(self) -> dict[str, int]:
        return {"sessions": self.sessions, "checkpoints": self.checkpoints}


class SessionDirectory:
    """The sessions of a database: of one tenant, or of every tenant with ``tenant=None``."""

    def __init__(self, using: str | None = None, *, tenant: str | None = None) -> None:
        self.tenant = None if tenant is None else validation.tenant(tenant)
        self._using = using
        self._directory = DatabaseDirectory(Database(using, self.tenant or ""))

    def store(self, tenant: str) -> DatabaseStateStore:
        """The state store of a tenant in this database."""
        return DatabaseStateStore(self._using, tenant=tenant)

    def tenants_of(self, session_id: str) -> list[str]:
        """The tenants that have a session with this id, in order; empty for an unknown one."""
        validation.identifier(session_id, "session_id")
        if self.tenant is not None:
            return [self.tenant] if self.store(self.tenant).session_exists(session_id) else []
        return self._directory.tenants_of(session_id)

    def pages(
        self, *, limit: int, offset: int = 0, cursor: str | None = None, count: bool = False, **filters: Any
    ) -> Iterator[DirectoryPage]:
        """At most ``limit`` sessions in pages of 200, by the filters of ``list_sessions``.

        Across tenants the order is time, session id, tenant. Only the first page counts. Raises
        `InvalidQuery` and `InvalidCursor`.
        """
        while limit > 0:
            page = self._page(
                limit=min(limit, _LARGEST_PAGE), offset=offset, cursor=cursor, count=count, filters=filters
            )
            yield page
            limit -= len(page.sessions)
            offset, cursor, count = 0, page.next_cursor, False
            if cursor is None:
                return

    def _page(
        self, *, limit: int, offset: int, cursor: str | None, count: bool, filters: dict[str, Any]
    ) -> DirectoryPage:
        if self.tenant is not None:
            page = self.store(self.tenant).list_sessions(
                limit=limit, offset=offset, cursor=cursor, count=count, **filters
            )
            sessions = [(self.tenant, head) for head in page.sessions]
            return DirectoryPage(sessions=sessions, total=page.total, next_cursor=page.next_cursor)
        query = checked_query(limit=limit, offset=offset, count=count, **filters)
        binding = cursor_binding(None, query)
        after = None
        if cursor is not None:
            if query.offset:
                raise InvalidQuery("Give a cursor or an offset, not both.", path="cursor")
            time, session_id, tenant = read_cursor(cursor, query=binding)
            after = (datetime.fromisoformat(time), session_id, tenant)
        found, total, has_more = self._directory.select(query, after)
        next_cursor = None
        if has_more:
            tenant, last = found[-1]
            position = [getattr(last, query.order_by).isoformat(), last.session_id, tenant]
            next_cursor = write_cursor(position, query=binding)
        return DirectoryPage(sessions=found, total=total, next_cursor=next_cursor)

    def tree(self, session_id: str, *, tenant: str) -> TreeNode:
        """A session and all that it started: sessions by their parent or by a local ref, and remote refs.

        Three queries, however large the tree is. Raises `SessionNotFound`.
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
        """Drop all but the newest ``keep`` checkpoints of each session; yield the sums after each.

        With ``before`` only checkpoints from before this time are dropped. One transaction per session, under
        its lock; safe to stop and to repeat. The current state, messages and graphs stay.
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
            for key, tenant, found_id, count in found:
                if not dry_run:
                    dropped = self._drop(tenant, found_id, keep, before)
                elif before is None:
                    dropped = count - keep
                else:
                    dropped = self._directory.count_beyond(key, keep=keep, before=before)
                if dropped:
                    summary = replace(
                        summary,
                        sessions=summary.sessions + 1,
                        checkpoints=summary.checkpoints + dropped,
                    )
                yield summary
            if len(found) < page_size:
                return
            after = found[-1].key

    def _drop(self, tenant: str, session_id: str, keep: int, before: datetime | None) -> int:
        try:
            return DatabaseCheckpoints(Database(self._using, tenant)).prune(session_id, keep, before)
        except SessionNotFound:
            # Deleted since it was found.
            return 0


def _grown(
    root_id: str, heads: dict[str, SessionHead], children: dict[str, dict[str, SubSessionRef | None]]
) -> TreeNode:
    """The tree below a session, breadth first: a session stands where it is reached first."""
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
