"""Workspace providers. A cleanup uses them to delete the snapshots of expired sessions.

The ``workspace_refs`` of a session are ``{workspace name: {"provider": provider name, …}}``.
``HELIX_STORE["WORKSPACE_PROVIDERS"]`` is ``{provider name: dotted path}`` of a provider, or of a callable
that returns one.
"""

from __future__ import annotations

import hashlib
import inspect
import re
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any, Final, NamedTuple, Protocol, runtime_checkable
from urllib.parse import quote

from django.core.exceptions import ImproperlyConfigured
from django.core.files.storage import Storage, default_storage
from django.utils.module_loading import import_string

from helix_store import conf
from helix_store.cleanup.files import files_below, files_of, portable_parts
from helix_store.cleanup.outcomes import SessionKey
from helix_store.core import validation

_FOLDER_OF_DEFAULT_STORAGE: Final = "helix_store_workspaces"
_LONGEST_NAME: Final = 200
"""The maximum length of a name, in characters. File systems allow 255 bytes."""

_SHORTENED: Final = re.compile(rf".{{{_LONGEST_NAME - 65}}}-[0-9a-f]{{64}}")


@runtime_checkable
class WorkspaceProvider(Protocol):
    """A provider that lists and deletes the workspace snapshots of sessions.

    Both calls are repeated after a failure, so deleting a snapshot that does not exist is not an error. A
    provider must not list another session's snapshots. Snapshots are deleted while the session's row is
    locked, so neither call may wait for a write to that session.
    """

    def list_snapshots(self, session_id: str, ref: Mapping[str, Any], *, tenant: str) -> Iterable[str]:
        """Return the ids of the snapshots that this session owns in the workspace of ``ref``.

        Session ids are only unique within a tenant. It is left out for a provider that does not take it.
        """
        ...

    def delete_snapshot(self, snapshot_id: str) -> None: ...


class StorageWorkspaceProvider:
    """Snapshots as files of a Django storage: a local folder, or any back end of django-storages.

    A session owns all files below its `folder`. A snapshot id is the file's name in the storage. If you pass
    a storage, it must belong to the provider: every folder in it belongs to a session or tenant. Otherwise
    the provider uses a folder of the project's default storage.

    Agents may write to these folders. In a local folder a link is never followed, only removed. Folders
    deeper than ``max_depth`` below the session's, and more than ``max_entries`` files and folders, are
    refused.
    """

    def __init__(
        self, storage: Storage | None = None, *, max_depth: int = 100, max_entries: int = 250_000
    ) -> None:
        self.storage: Storage = default_storage if storage is None else storage
        self.max_depth = max_depth
        self.max_entries = max_entries
        self._root: tuple[str, ...] = (_FOLDER_OF_DEFAULT_STORAGE,) if storage is None else ()

    def folder(self, session_id: str, ref: Mapping[str, Any] | None = None, *, tenant: str = "") -> str:
        """Return the folder of a session's snapshots: its own folder, followed by the ``path`` of the ref.

        Raise `InvalidPayload` for a ``path`` that leads elsewhere.
        """
        return "/".join(self._folder(session_id, ref, tenant))

    def list_snapshots(self, session_id: str, ref: Mapping[str, Any], *, tenant: str = "") -> Iterable[str]:
        """Return the files below the folder of the ref. A link counts as one file, regardless of its target.

        Raise `InvalidPayload` for an invalid ref, `LimitExceeded` for a folder that is too deep or has too
        many files, and `SuspiciousFileOperation` for a link above the session's own folder.
        """
        owned, folder = self._folder(session_id, None, tenant), self._folder(session_id, ref, tenant)
        return files_below(
            files_of(self.storage),
            owned,
            folder,
            max_depth=self.max_depth,
            max_entries=self.max_entries,
        )

    def delete_snapshot(self, snapshot_id: str) -> None:
        """Delete a file or link.

        Raise `InvalidPayload` for an id that leads out of the storage, and `SuspiciousFileOperation` if a
        folder in its path is a link.
        """
        files_of(self.storage).delete(snapshot_id)

    def _folder(self, session_id: str, ref: Mapping[str, Any] | None, tenant: str) -> tuple[str, ...]:
        path = None if ref is None else ref.get("path")
        inner = () if path is None else portable_parts(path, "/workspace_refs/path")
        return (*self._root, *_session_folder(session_id, tenant), *inner)


def _session_folder(session_id: str, tenant: str) -> tuple[str, ...]:
    """Return the folder of a session as a list of names, from the root of the storage downwards.

    No two sessions share a folder, and no session's folder is inside that of another: a tenant, an id and a
    ref's ``path`` occupy separate levels, and no quoted text contains the ``=`` of a tenant's level. This
    holds on file systems that distinguish upper and lower case.
    """
    name = _name(validation.identifier(session_id, "session_id"))
    return (f"tenant={_name(validation.tenant(tenant))}", name) if tenant else (name,)


def _name(text: str) -> str:
    """Return a name for a string that may contain slashes and dots. Names of different strings differ."""
    name = quote(text, safe=" ")
    if not name.strip("."):
        name = name.replace(".", "%2E")
    # A name that looks shortened is shortened too, so that it cannot equal the name of a longer string.
    if len(name) > _LONGEST_NAME or _SHORTENED.fullmatch(name):
        digest = hashlib.sha256(text.encode()).hexdigest()
        name = f"{name[: _LONGEST_NAME - len(digest) - 1]}-{digest}"
    return name


def configured_workspace_providers() -> dict[str, WorkspaceProvider]:
    """Return the providers of ``HELIX_STORE["WORKSPACE_PROVIDERS"]``. Raise `ImproperlyConfigured`."""
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


# --- Snapshots ---------------------------------------------------------------------------------------


class MissingProvider(Exception):
    """Raised if a session has a workspace of a provider that is not configured."""

    def __init__(self, name: object) -> None:
        super().__init__(name)
        self.provider = f"{name!r:.100}"


class Snapshot(NamedTuple):
    provider: WorkspaceProvider
    snapshot_id: str

    def delete(self) -> None:
        self.provider.delete_snapshot(self.snapshot_id)


def owned_snapshots(
    providers: Mapping[str, WorkspaceProvider], key: SessionKey, refs: Iterable[Any]
) -> list[Snapshot]:
    """Return the snapshots of a session. Raise `MissingProvider` before any snapshot is listed."""
    known = [(_provider(providers, ref), ref) for ref in refs]
    return [
        Snapshot(provider, snapshot_id)
        for provider, ref in known
        for snapshot_id in _listed_snapshots(provider, key.session_id, ref, tenant=key.tenant)
    ]


def _provider(providers: Mapping[str, WorkspaceProvider], ref: Any) -> WorkspaceProvider:
    name = ref.get("provider") if isinstance(ref, Mapping) else None
    provider = providers.get(name) if isinstance(name, str) else None
    if provider is None:
        raise MissingProvider(name)
    return provider


def _listed_snapshots(
    provider: WorkspaceProvider, session_id: str, ref: Mapping[str, Any], *, tenant: str
) -> Iterable[str]:
    """Call `WorkspaceProvider.list_snapshots`, even on a provider that does not support tenants."""
    list_snapshots: Any = provider.list_snapshots
    parameters = inspect.signature(list_snapshots).parameters
    if "tenant" in parameters or any(each.kind is each.VAR_KEYWORD for each in parameters.values()):
        list_snapshots = partial(list_snapshots, tenant=tenant)
    snapshots: Iterable[str] = list_snapshots(session_id, ref)
    return snapshots
