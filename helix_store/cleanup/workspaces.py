"""Workspace providers, through which a cleanup deletes the snapshots of expired sessions.

``workspace_refs`` of a session: ``{workspace name: {"provider": provider name, …}}``.
``HELIX_STORE["WORKSPACE_PROVIDERS"]``: ``{provider name: dotted path}`` of a provider, or of a callable that
returns one.
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
"""In characters; file systems allow 255 bytes for one name."""


@runtime_checkable
class WorkspaceProvider(Protocol):
    """Lists and deletes the workspace snapshots of sessions.

    Both calls are repeated after a failure: to delete a snapshot that does not exist is no error. A provider
    lists no snapshot of another session. Snapshots are deleted while the session's row is locked, so neither
    call may wait for a write to that session.
    """

    def list_snapshots(self, session_id: str, ref: Mapping[str, Any]) -> Iterable[str]:
        """The ids of the snapshots that this session owns in the workspace of ``ref``."""
        ...

    def delete_snapshot(self, snapshot_id: str) -> None: ...


class StorageWorkspaceProvider:
    """Snapshots as files of a Django storage: a local folder, or any back end of django-storages.

    A session owns every file below its `folder`. A snapshot id is the file's name in the storage. The
    default is the project's default storage.
    """

    def __init__(self, storage: Storage | None = None) -> None:
        self.storage: Storage = default_storage if storage is None else storage

    def folder(self, session_id: str, ref: Mapping[str, Any] | None = None) -> str:
        """The folder of a session's snapshots: ``path`` of the ref, or else a folder named after the id.

        Session ids are unique within a tenant only: tenants that share a storage must set ``path``.
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
    """The name of one folder for a session id, which may contain slashes and dots."""
    name = quote(session_id, safe=" ")
    if not name.strip("."):
        name = name.replace(".", "%2E")
    if len(name) > _LONGEST_FOLDER:
        digest = hashlib.sha256(session_id.encode()).hexdigest()
        name = f"{name[: _LONGEST_FOLDER - len(digest) - 1]}-{digest}"
    return name


def _checked_path(path: Any) -> str:
    """A folder below the storage's root, but not the root: every file in the folder is deleted."""
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
        raise ImproperlyConfigured(
            f"{path!r} is not a workspace provider: it cannot list or delete snapshots."
        )
    return provider
