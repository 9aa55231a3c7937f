"""The tree of sub-sessions that the session belongs to, from its root."""

from __future__ import annotations

from itertools import islice
from typing import Any, Final

from django.utils.translation import gettext_lazy as _

from helix_store.admin.elements import NOTHING, badge, identifier, one_line, printable, progress
from helix_store.admin.sections.section import Section, SessionView
from helix_store.admin.times import distance
from helix_store.exceptions import IntegrityFault, SessionNotFound
from helix_store.models import SubSessionRef
from helix_store.sessions.directory import SessionDirectory, TreeNode

__all__ = ["Family"]

_NODES: Final = 200
_DEEPEST: Final = 8
_TITLE: Final = 80


class Family(Section):
    name = "tree"
    label = _("Sub-sessions")
    needs = (SubSessionRef,)

    def context(self, view: SessionView) -> dict[str, Any]:
        try:
            nodes = list(islice(_tree(view).walk(), _NODES + 1))
        except ValueError:
            # SQLite stores any bytes in a column of JSON.
            raise IntegrityFault from None
        shown = nodes[:_NODES]
        links = view.session_links(node.session_id for _way, node in shown if node.head is not None)
        return {
            "nodes": [_node(view, len(way), node, links) for way, node in shown],
            "has_more": len(nodes) > _NODES,
            "limit": _NODES,
            "list_url": view.children_url(),
        }


def _tree(view: SessionView) -> TreeNode:
    session = view.session
    directory = SessionDirectory(view.alias, tenant=session.tenant)
    if session.root_session_id not in (None, session.session_id):
        try:
            return directory.tree(str(session.root_session_id), tenant=session.tenant)
        except SessionNotFound:
            pass  # The root is deleted: what is left of the tree begins here.
    return directory.tree(session.session_id, tenant=session.tenant)


def _node(view: SessionView, depth: int, node: TreeNode, links: dict[str, Any]) -> dict[str, Any]:
    head, ref = node.head, node.ref
    is_remote = ref is not None and ref.location == "remote"
    status = head.status if head is not None else ref.status if ref is not None else ""
    agent_type = head.agent_type if head is not None else ref.agent_type if ref is not None else NOTHING
    return {
        "depth": min(depth, _DEEPEST),
        "link": links.get(node.session_id) or identifier(node.session_id),
        "is_here": node.session_id == view.session.session_id,
        "is_repeated": node.is_repeated,
        "is_missing": head is None and not is_remote,
        "is_remote": is_remote,
        "agent_type": printable(agent_type),
        "title": one_line(str(head.title or ""), _TITLE) if head is not None else "",
        "status": badge(status) if status else NOTHING,
        "progress": "" if head is None else progress(head.step_count, head.message_count),
        "updated": NOTHING if head is None else distance(head.updated_at),
        "call": printable(ref.parent_tool_call_id or "") if ref is not None else "",
    }
