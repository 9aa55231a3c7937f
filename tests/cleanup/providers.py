"""Workspace providers for the tests."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

__all__ = ["FolderProvider", "MemoryProvider"]


class MemoryProvider:
    """Snapshots in a dict; hooks run before each call."""

    def __init__(self, snapshots: Mapping[str, list[str]] | None = None) -> None:
        self.snapshots = {session_id: list(ids) for session_id, ids in (snapshots or {}).items()}
        self.deleted: list[str] = []
        self.before_listing: Callable[[str], object] = lambda session_id: None
        self.before_deleting: Callable[[str], object] = lambda snapshot_id: None

    def list_snapshots(self, session_id: str, ref: Mapping[str, Any], *, tenant: str = "") -> Iterable[str]:
        self.before_listing(session_id)
        return list(self.snapshots.get(session_id, []))

    def delete_snapshot(self, snapshot_id: str) -> None:
        self.before_deleting(snapshot_id)
        self.deleted.append(snapshot_id)
        for ids in self.snapshots.values():
            if snapshot_id in ids:
                ids.remove(snapshot_id)


class FolderProvider:
    """A folder per session and a file per snapshot, in a folder that processes share."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def list_snapshots(self, session_id: str, ref: Mapping[str, Any], *, tenant: str = "") -> Iterable[str]:
        return [f"{session_id}/{path.name}" for path in (self.folder / session_id).iterdir()]

    def delete_snapshot(self, snapshot_id: str) -> None:
        (self.folder / snapshot_id).unlink(missing_ok=True)
