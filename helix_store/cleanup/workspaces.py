"""Where workspaces of sessions keep their snapshots, so that a cleanup can delete them.

A session names its workspaces in ``workspace_refs``: ``{workspace name: {"provider": provider name, …}}``.
``HELIX_STORE["WORKSPACE_PROVIDERS"]`` names the providers: ``{provider name: dotted path}`` to an object, or
to something that is called without arguments to get one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from pathlib import PurePosixPath
from typing import Any, Final, Protocol, runtime_checkable
from urllib.parse import quote

from django.core.exceptions import ImproperlyConfigured
from django.core.files.storage import Storage, default_storage
from django.utils.module_loading import import_string

from helix_store import conf
from helix_store.exceptions import InvalidPayload

__all__ = ["StorageWorkspaceProvider", "WorkspaceProvider", "configured_workspace_providers"]

_LONGEST_FOLDER: Final = 200
"""Below the 255 bytes that file systems allow for one name."""


@runtime_checkable
class WorkspaceProvider(Protocol):
    """What the cleanup needs of whatever keeps snapshots.

    Both calls may be repeated: deleting a snapshot that is gone is no error. Other sessions' snapshots must
    never be listed. Snapshots are deleted while the session's row is locked, so neither call may wait for a
    write to that session.
    """

    def list_snapshots(self, session_id: str, ref: Mapping[str, Any]) -> Iterable[str]:
        """The ids of the snapshots that this session owns in the workspace of this ref."""
        ...

    def delete_snapshot(self, snapshot_id: str) -> None: ...


class StorageWorkspaceProvider:
    """Snapshots as files of a Django storage: a local folder, or any back end of django-storages.

    A session owns every file below its `folder`; the snapshot's id is the file's name in the storage.
    Without a storage it is the project's default one.
    """

    def __init__(self, storage: Storage | None = None) -> None:
        self.storage: Storage = default_storage if storage is None else storage

    def folder(self, session_id: str, ref: Mapping[str, Any] | None = None) -> str:
        """Where a session keeps its snapshots: ``path`` of the ref, or else a folder named after its id.

        Two tenants that share a storage need paths of their own, because ids are unique within a tenant.
        """
        path = None if ref is None else ref.get("path")
        return _folder_of(session_id) if path is None else _checked_path(path)

    def list_snapshots(self, session_id: str, ref: Mapping[str, Any]) -> Iterable[str]:
        folders = [self.folder(session_id, ref)]
        for folder in folders:
            try:
                inner, files = self.storage.listdir(folder)
            except FileNotFoundError:
                continue
            yield from (f"{folder}/{name}" for name in files if name)
            folders.extend(f"{folder}/{name}" for name in inner)

    def delete_snapshot(self, snapshot_id: str) -> None:
        self.storage.delete(snapshot_id)


def _folder_of(session_id: str) -> str:
    """A session id as the name of one folder: ids hold any character, also slashes and dots."""
    name = quote(session_id, safe=" ")
    if not name.strip("."):
        name = name.replace(".", "%2E")
    if len(name) > _LONGEST_FOLDER:
        digest = hashlib.sha256(session_id.encode()).hexdigest()
        name = f"{name[: _LONGEST_FOLDER - len(digest) - 1]}-{digest}"
    return name


def _checked_path(path: Any) -> str:
    """A folder below the storage's root, and never that root itself: everything in it is deleted."""
    if type(path) is not str or "\\" in path or "\x00" in path:
        raise InvalidPayload(path="/workspace_refs/path", reason="expected the path of a folder")
    parts = PurePosixPath(path).parts
    if not parts or path.startswith("/") or ".." in parts:
        raise InvalidPayload(path="/workspace_refs/path", reason="expected a folder below the storage's root")
    return "/".join(parts)


def configured_workspace_providers() -> dict[str, WorkspaceProvider]:
    """The providers of ``HELIX_STORE["WORKSPACE_PROVIDERS"]``. Raises `ImproperlyConfigured`."""
    return {name: _loaded(name, path) for name, path in conf.workspace_providers().items()}


def _loaded(name: str, path: str) -> WorkspaceProvider:
    try:
        found = import_string(path)
        provider = found() if isinstance(found, type) or not isinstance(found, WorkspaceProvider) else found
    except (ImportError, TypeError) as exc:
        raise ImproperlyConfigured(f"Workspace provider {name!r} cannot be loaded from {path!r}.") from exc
    if not isinstance(provider, WorkspaceProvider):
        raise ImproperlyConfigured(f"{path!r} is no workspace provider: it cannot list or delete snapshots.")
    return provider
