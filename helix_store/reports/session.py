"""A report of everything that an operator needs to know about one session, read through the stores."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime
from typing import Any, Final, TypeVar

from django.db.models import QuerySet

from helix_store.catalogue import ConversationPage
from helix_store.core.serialization import Serializable
from helix_store.core.types import (
    CheckpointPage,
    InterruptRequest,
    Message,
    Run,
    SessionState,
    SubSessionRef,
)
from helix_store.core.usage import UsageRollup
from helix_store.counters.rules import Spender
from helix_store.engine.database import Database
from helix_store.exceptions import IntegrityFault, SessionNotFound
from helix_store.models import Post
from helix_store.models.messages import PostState
from helix_store.reports.budgets import BudgetReport, reports_of_session
from helix_store.reports.conversations import conversations_of, said_at_start
from helix_store.reports.payloads import payload_start
from helix_store.sessions.database.rows import pk_of, session_with_id
from helix_store.stores import DatabaseStateStore, DatabaseUsageStore
from helix_store.stores.directory import SessionDirectory, TreeNode
from helix_store.usage.reports import unpriced_entries

T = TypeVar("T")

_PARTS: Final = (
    *("state", "interrupt", "runs", "sub_sessions", "waiting_posts", "checkpoints", "usage"),
    "budgets",
)


@dataclass(slots=True, kw_only=True)
class SessionReport:
    """The parts of a session. An unreadable part is ``None``; see ``problems``. Messages include their
    sequence.

    ``conversations`` holds the conversations that adapters keep with the session, by the name of the
    framework. ``unpriced`` counts the token entries without a cost, which the sum of ``usage`` does not
    include.
    """

    tenant: str
    session_id: str
    state: SessionState | None = None
    interrupt: InterruptRequest | None = None
    runs: list[Run] | None = None
    sub_sessions: list[SubSessionRef] | None = None
    waiting_posts: WaitingPosts | None = None
    checkpoints: CheckpointPage | None = None
    usage: UsageRollup | None = None
    unpriced: int | None = None
    budgets: list[BudgetReport] | None = None
    messages: list[tuple[int, Message]] | None = None
    conversations: dict[str, ConversationPage] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        numbered = self.messages or ()
        messages = [{"sequence": number, "message": message} for number, message in numbered]
        return {
            "tenant": self.tenant,
            "session_id": self.session_id,
            **{name: _plain(getattr(self, name)) for name in _PARTS},
            "messages": None if self.messages is None else messages,
            "conversations": {name: _plain_page(page) for name, page in self.conversations.items()},
            "problems": self.problems,
        }


def _plain(part: Any) -> Any:
    if isinstance(part, list):
        return [each.to_dict() for each in part]
    return None if part is None else part.to_dict()


def _plain_page(page: ConversationPage) -> dict[str, Any]:
    return {
        "total": page.total,
        "thread": page.thread,
        "threads": list(page.threads),
        "messages": [
            {
                "number": each.number,
                "role": each.role,
                "created_at": each.at and each.at.isoformat(),
                "step": each.step,
                "parts": None if each.parts is None else [asdict(part) for part in each.parts],
            }
            for each in page.messages
        ],
        "path": [
            {
                "step_id": each.step_id,
                "name": each.name,
                "step": each.step,
                "message_count": each.count,
                "created_at": each.at and each.at.isoformat(),
            }
            for each in page.path
        ],
    }


def session_report(
    store: DatabaseStateStore, session_id: str, *, limit: int = 10, messages: int | None = None
) -> SessionReport:
    """Return a report of a session, with up to ``limit`` posts, runs and checkpoints, and with ``messages``,
    both the store's own and those of each adapter.

    A damaged part does not hide the others. Raise `SessionNotFound`. Each part is read separately, so if the
    session is being written, one part may be older than another.
    """
    report = SessionReport(tenant=store.tenant, session_id=session_id)

    def read(name: str, body: Callable[[], T]) -> T | None:
        try:
            return body()
        except IntegrityFault as exc:
            report.problems.append(f"{name}: {exc}")
            return None

    if not store.session_exists(session_id):
        raise SessionNotFound(session_id)
    db = Database(store.alias, store.tenant, None)
    posts = Post.objects.using(db.alias).filter(session_id=pk_of(db, session_id))
    usage = DatabaseUsageStore(store.alias, tenant=store.tenant)
    report.state = read("state", lambda: store.load_state(session_id))
    report.interrupt = read("interrupt", lambda: store.check_interrupt(session_id))
    report.runs = read("runs", lambda: store.list_runs(session_id, limit=limit))
    report.sub_sessions = read("sub_sessions", lambda: store.get_sub_session_refs(session_id))
    report.waiting_posts = read("waiting_posts", lambda: db.query(lambda: waiting_posts(posts, limit=limit)))
    report.checkpoints = read("checkpoints", lambda: store.list_checkpoints(session_id, limit=limit))
    report.usage = read("usage", lambda: usage.get_rollup(session_id))
    state = report.state
    if state is not None:
        spender = Spender(state.root_session_id or session_id, state.user_id, state.agent_type)
        report.budgets = read("budgets", lambda: reports_of_session(db, spender))
    report.unpriced = unpriced_entries(session_id, using=store.alias, tenant=store.tenant)
    if messages is not None:
        report.messages = read("messages", lambda: _newest(store, session_id, messages))
    key = db.query(lambda: session_with_id(db, session_id).values_list("pk", flat=True).first())
    if key is not None:
        found = read("conversations", lambda: _conversations(db, key, limit, messages))
        report.conversations = found or {}
    return report


def _conversations(db: Database, key: int, limit: int, messages: int | None) -> dict[str, ConversationPage]:
    found = {}
    for conversation in conversations_of(db, [key]):
        page = conversation.page(db, key, first=None, limit=messages or 1)
        if page is not None:
            shown = () if messages is None else page.messages
            found[conversation.name] = replace(page, messages=shown, path=page.path[:limit])
    return found


def _newest(store: DatabaseStateStore, session_id: str, count: int) -> list[tuple[int, Message]]:
    page = store.get_messages(session_id, limit=count, order="desc")
    return [(page.total - index, message) for index, message in enumerate(page.messages)][::-1]


# --- Waiting posts


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitingPost(Serializable):
    """A waiting post. ``text`` is the start of its content, or ``None`` if it cannot be read."""

    post_id: str
    sequence: int
    author: str | None
    key: str | None
    posted_at: datetime
    due_at: datetime
    text: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitingPosts(Serializable):
    items: list[WaitingPost]
    total: int


def waiting_posts(posts: QuerySet[Post], *, first: int = 0, limit: int) -> WaitingPosts:
    """Return a page of the waiting posts of a session, from the index ``first``."""
    waiting = posts.filter(state=PostState.WAITING)
    columns = ("post_id", "sequence", "author", "key", "posted_at", "due_at")
    rows = waiting.order_by("due_at", "sequence").values(*columns, start=payload_start())
    page = rows[first : first + limit]
    items = [WaitingPost(text=said_at_start(row.pop("start") or ""), **row) for row in page]
    return WaitingPosts(items=items, total=waiting.count())


# --- The tree: ancestors and sub-sessions


def session_tree(store: DatabaseStateStore, session_id: str, *, root_id: str | None = None) -> TreeNode:
    """Return the tree below the root, or below the session itself if the root has been deleted.

    Raise `SessionNotFound`.
    """
    directory = SessionDirectory(store.alias, tenant=store.tenant)
    if root_id not in (None, session_id):
        try:
            return directory.tree(str(root_id), tenant=store.tenant)
        except SessionNotFound:
            pass  # The root has been deleted, so the remaining tree starts at this session.
    return directory.tree(session_id, tenant=store.tenant)


def nodes_of(tree: TreeNode) -> list[dict[str, Any]]:
    """Return the nodes of a tree from top to bottom, each with its depth and its parent session."""
    above: list[str] = []
    nodes = []
    for way, node in tree.walk():
        del above[len(way) :]
        nodes.append(
            {
                "session_id": node.session_id,
                "depth": len(way),
                "above": above[-1] if above else None,
                "is_repeated": node.is_repeated,
                "session": None if node.head is None else node.head.to_dict(),
                "ref": None if node.ref is None else node.ref.to_dict(),
            }
        )
        above.append(node.session_id)
    return nodes
