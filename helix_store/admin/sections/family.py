"""The tree of sub-sessions that the session belongs to, starting at its root."""

from __future__ import annotations

from itertools import islice
from typing import Any, Final

from django.utils.translation import gettext_lazy as _

from helix_store.admin.elements import NOTHING, badge, identifier, one_line, printable, progress
from helix_store.admin.sections.section import Section, SessionView
from helix_store.admin.times import distance
from helix_store.exceptions import IntegrityFault
from helix_store.models import Session, SubSessionRef
from helix_store.reports.session import session_tree
from helix_store.stores.directory import TreeNode

_NODES: Final = 200
_DEEPEST: Final = 8
_TITLE: Final = 80


class Family(Section):
    name = "tree"
    label = _("Sub-sessions")
    needs = (SubSessionRef,)

    def context(self, view: SessionView) -> dict[str, Any]:
        session = view.session
        try:
            tree = session_tree(view.store, session.session_id, root_id=session.root_session_id)
            nodes = list(islice(tree.walk(), _NODES + 1))
        except ValueError:
            # SQLite stores any bytes in a JSON column.
            raise IntegrityFault from None
        shown = nodes[:_NODES]
        below = {"tenant": session.tenant, "parent_session_id": session.session_id}
        links = view.session_links(node.session_id for _way, node in shown if node.head is not None)
        return {
            "nodes": [_node(view, len(way), node, links) for way, node in shown],
            "has_more": len(nodes) > _NODES,
            "limit": _NODES,
            "list_url": view.page.list_url(Session, **below),
        }


def _node(view: SessionView, depth: int, node: TreeNode, links: dict[str, Any]) -> dict[str, Any]:
    head, ref = node.head, node.ref
    return {
        "depth": min(depth, _DEEPEST),
        "link": links.get(node.session_id) or identifier(node.session_id),
        "is_here": node.session_id == view.session.session_id,
        "is_repeated": node.is_repeated,
        "is_missing": head is None and not node.is_remote,
        "is_remote": node.is_remote,
        "agent_type": printable(node.agent_type or NOTHING),
        "title": one_line(str(head.title or ""), _TITLE) if head is not None else "",
        "status": badge(node.status) if node.status else NOTHING,
        "progress": "" if head is None else progress(head.step_count, head.message_count),
        "updated": NOTHING if head is None else distance(head.updated_at),
        "call": printable(ref.parent_tool_call_id or "") if ref is not None else "",
    }
