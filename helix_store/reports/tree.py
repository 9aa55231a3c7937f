"""The tree of a session: its ancestors and its sub-sessions."""

from __future__ import annotations

from typing import Any

from helix_store.exceptions import SessionNotFound
from helix_store.stores import DatabaseStateStore
from helix_store.stores.directory import SessionDirectory, TreeNode


def session_tree(store: DatabaseStateStore, session_id: str, *, root_id: str | None = None) -> TreeNode:
    """Return the tree below the root, or below the session itself if the root is deleted.

    Raise `SessionNotFound`.
    """
    directory = SessionDirectory(store.alias, tenant=store.tenant)
    if root_id not in (None, session_id):
        try:
            return directory.tree(str(root_id), tenant=store.tenant)
        except SessionNotFound:
            pass  # The root is deleted, so the remaining tree starts at this session.
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
