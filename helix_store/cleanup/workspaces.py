"""Workspaces of sessions: their files, their providers, and the outcomes of a cleanup.

Workspace providers. A cleanup uses them to delete the snapshots of expired sessions.

The ``workspace_refs`` of a session are ``{workspace name: {"provider": provider name, …}}``.
``HELIX_STORE["WORKSPACE_PROVIDERS"]`` is ``{provider name: dotted path}`` of a provider, or of a callable
that returns one.
"""

from __future__ import annotations

import errno
import hashlib
import inspect
import os
import re
import stat
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import datetime
from enum import Enum, auto
from functools import partial
from typing import Any, Final, NamedTuple, Protocol, Self, runtime_checkable
from urllib.parse import quote

from django.core.exceptions import ImproperlyConfigured, SuspiciousFileOperation
from django.core.files.storage import InMemoryStorage, Storage, default_storage
from django.db.models import Model
from django.utils.module_loading import import_string

from helix_store import conf
from helix_store.core import validation
from helix_store.core.payloads import Serializable
from helix_store.core.types import PendingToolCall
from helix_store.exceptions import InvalidPayload, InvalidQuery, LimitExceeded

_PREFIX: Final = conf.table_name("")


class SessionKey(NamedTuple):
    """A session of a tenant. ``key`` is specific to the back end: in a database it is the primary key."""

    session_id: str
    tenant: str = ""
    key: int = 0


class CleanupOutcome(Enum):
    """The result of a cleanup for one session."""

    MARKED = auto()
    ALREADY_TERMINAL = auto()
    RENEWED = auto()
    GONE = auto()
    FAILED = auto()
    BUSY = auto()
    """Another worker holds its lock or has just written to it, so the cleanup must try again."""


@dataclass(frozen=True, slots=True)
class ExpiryCandidate:
    """An expired session as it was read. The version shows whether the session has changed since."""

    key: SessionKey
    version: int
    is_terminal: bool
    expires_at: datetime | None
    workspace_refs: dict[str, Any]

    def known_outcome(self, now: datetime) -> CleanupOutcome | None:
        """Return the outcome for a session that must not be marked, or ``None`` if it can be marked."""
        if self.is_terminal:
            return CleanupOutcome.ALREADY_TERMINAL
        if self.expires_at is None or self.expires_at > now:
            return CleanupOutcome.RENEWED
        return None


@dataclass(frozen=True, slots=True)
class Counts(Serializable):
    """Counts, and numbers of rows by table name without prefix; zeros are omitted, and names are in order."""

    def plus(self, **more: int | Mapping[type[Model], int]) -> Self:
        """Return the counts with these numbers, or numbers of rows by model, added to the named fields."""
        sums: dict[str, Any] = {}
        for name, rows in more.items():
            if isinstance(rows, int):
                sums[name] = getattr(self, name) + rows
                continue
            total = Counter(getattr(self, name))
            for model, number in rows.items():
                total[model._meta.db_table.removeprefix(_PREFIX)] += number
            sums[name] = {table: number for table, number in sorted(total.items()) if number}
        return replace(self, **sums)


@dataclass(frozen=True, slots=True)
class CleanupSummary(Counts):
    """The counts of one cleanup. A dry run only detects.

    ``detected`` is the sum of ``marked``, ``already_terminal``, ``renewed`` and the sessions that failed. A
    session whose workspaces are too large to list is marked, and also counts as an error.
    ``errors`` counts sessions, tool calls and sweeps with a problem, ``defaults_applied`` tool calls that got
    their default after their deadline, ``deleted`` deleted sessions, and ``swept`` other apps' rows.

    Example::

        summary = expired_session_cleanup()
        print(summary.marked, "sessions have expired,", summary.errors, "had a problem")
    """

    detected: int = 0
    marked: int = 0
    already_terminal: int = 0
    snapshots_deleted: int = 0
    errors: int = 0
    renewed: int = 0
    defaults_applied: int = 0
    deleted: int = 0
    swept: int = 0


@dataclass(frozen=True, slots=True)
class CleanupDetails:
    """The sessions and calls that the counts refer to. Several cleanups may share them.

    A dry run adds the ``expired`` sessions and the ``overdue`` calls of other sessions. Every cleanup adds
    the sessions ``with_problems``; a session with repeated problems is only added once. ``not_swept`` holds
    the records of tables of other apps whose expired rows could not be deleted.
    """

    expired: list[SessionKey] = field(default_factory=list)
    overdue: list[tuple[SessionKey, PendingToolCall]] = field(default_factory=list)
    with_problems: set[SessionKey] = field(default_factory=set)
    not_swept: set[str] = field(default_factory=set)


# --- Erasure -------------------------------------------------------------------------------------------


def digest_of(identifier: str) -> str:
    """Return the SHA-256 of an id. The owner of the id can use it to find the receipt."""
    return hashlib.sha256(identifier.encode()).hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class ErasureReceipt(Counts):
    """A record of the rows that an erasure deleted, or would delete in a dry run. ``to_dict()`` is plain
    JSON. It only contains numbers and digests, and nothing that was erased.

    ``subject`` is ``user``, ``session`` or ``tenant``. ``deleted`` and ``changed`` are numbers of rows by
    table; ``changed`` rows belong to others and lost their reference to the erased data. ``sessions_left``
    counts trees in use, and sources of branches in use; ``errors`` counts trees with a problem. ``complete``
    is true if nothing is left to erase.
    """

    subject: str
    subject_sha256: str
    tenant_sha256: str | None
    dry_run: bool
    started_at: datetime
    finished_at: datetime | None = None
    complete: bool = False
    deleted: dict[str, int] = field(default_factory=dict)
    changed: dict[str, int] = field(default_factory=dict)
    trees: int = 0
    branches: int = 0
    snapshots_deleted: int = 0
    sessions_left: int = 0
    locks_left: int = 0
    errors: int = 0

    @property
    def is_empty(self) -> bool:
        """True if nothing was stored for the subject, so that nothing was erased, changed or left."""
        rows = (*self.deleted.values(), *self.changed.values())
        left = (self.snapshots_deleted, self.sessions_left, self.locks_left, self.errors)
        return not any((*rows, *left, self.trees, self.branches))


Parts = tuple[str, ...]

_ERRORS_OF_A_LINK: Final = (errno.ELOOP, errno.ENOTDIR)


def files_of(storage: Storage) -> RemoteFiles | LocalFiles:
    # Django's in-memory storage has paths, but no files exist there.
    if isinstance(storage, InMemoryStorage):
        return RemoteFiles(storage)
    try:
        root = storage.path("")
    except NotImplementedError:
        return RemoteFiles(storage)
    return LocalFiles(root)


def files_below(
    files: RemoteFiles | LocalFiles, owned: Parts, folder: Parts, *, max_depth: int, max_entries: int
) -> Iterator[str]:
    """Yield the names of all files below a folder, counting links as files.

    If there is anything other than a folder on the path from ``owned`` to ``folder``, it is the only file.
    Raise `LimitExceeded` if a folder is deeper than ``max_depth`` below ``folder``, and after ``max_entries``
    files and folders.
    """
    for length in range(len(owned), len(folder) + 1):
        is_folder = files.is_folder(folder[:length])
        if is_folder is None:
            return
        if not is_folder:
            yield "/".join(folder[:length])
            return
    count = 0
    folders = [folder]
    while folders:
        parts = folders.pop()
        if (depth := len(parts) - len(folder)) > max_depth:
            raise LimitExceeded(name="max_depth of a workspace", limit=max_depth, actual=depth)
        for name, is_folder in files.entries(parts):
            if (count := count + 1) > max_entries:
                raise LimitExceeded(name="max_entries of a workspace", limit=max_entries, actual=count)
            if is_folder:
                folders.append((*parts, name))
            else:
                yield "/".join((*parts, name))


class RemoteFiles:
    """Files that can only be accessed through Django's storage API. They contain no links."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage

    def is_folder(self, parts: Parts) -> bool | None:
        # The API cannot distinguish them, but a folder that does not exist has no entries.
        return True

    def entries(self, folder: Parts) -> Iterator[tuple[str, bool]]:
        try:
            folders, files = self._storage.listdir("/".join(folder))
        except FileNotFoundError:
            return
        yield from ((name, False) for name in files if name)
        for name in folders:
            if name:
                # A key in an object store may contain "..", which the back end of the storage resolves.
                portable_parts(name, "snapshot_id")
                yield name, True

    def delete(self, name: str) -> None:
        self._storage.delete("/".join(portable_parts(name, "snapshot_id")))


class _OpenFolder(NamedTuple):
    """An open folder. Paths of its files are relative to the descriptor, if there is one."""

    descriptor: int | None
    path: str

    @property
    def folder(self) -> int | str:
        return self.path if self.descriptor is None else self.descriptor


class LocalFiles:
    """Files below a folder on this machine. The folder's own path may contain links."""

    def __init__(self, root: str) -> None:
        self._root = root

    def is_folder(self, parts: Parts) -> bool | None:
        """Return whether this is a folder and not a link to one, or ``None`` if it does not exist."""
        try:
            with self._opened(parts[:-1]) as opened:
                path = os.path.join(opened.path, parts[-1])
                status = os.stat(path, dir_fd=opened.descriptor, follow_symlinks=False)
        except FileNotFoundError:
            return None
        return stat.S_ISDIR(status.st_mode)

    def entries(self, folder: Parts) -> Iterator[tuple[str, bool]]:
        """Yield each name in a folder and whether it is a folder, or nothing if the folder does not exist."""
        try:
            with self._opened(folder) as opened, os.scandir(opened.folder) as entries:
                for entry in entries:
                    yield entry.name, entry.is_dir(follow_symlinks=False)
        except FileNotFoundError:
            return

    def delete(self, name: str) -> None:
        """Delete a file, or a link but not its target. It is not an error if the file does not exist."""
        # Do not use the storage: it follows links, and a folder may have been replaced since the listing.
        *folder, file = _parts_of_path(name, "snapshot_id")
        try:
            with self._opened(tuple(folder)) as opened:
                os.unlink(os.path.join(opened.path, file), dir_fd=opened.descriptor)
        except FileNotFoundError:
            return

    @contextmanager
    def _opened(self, folder: Parts) -> Iterator[_OpenFolder]:
        """Open a folder. Raise `SuspiciousFileOperation` if the path contains a link or a file."""
        if not {os.open, os.stat, os.unlink} <= os.supports_dir_fd:
            # On Windows, a link created between the check and the use goes unnoticed.
            path = os.path.join(os.path.realpath(self._root), *folder)
            if os.path.realpath(path) != path:
                raise _link_on_the_way(folder)
            yield _OpenFolder(None, path)
            return
        descriptor = os.open(self._root, os.O_RDONLY | os.O_DIRECTORY)
        try:
            for part in folder:
                try:
                    inner = os.open(part, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=descriptor)
                except OSError as exc:
                    if exc.errno in _ERRORS_OF_A_LINK:
                        raise _link_on_the_way(folder) from exc
                    raise
                os.close(descriptor)
                descriptor = inner
            yield _OpenFolder(descriptor, "")
        finally:
            os.close(descriptor)


def _link_on_the_way(folder: Parts) -> SuspiciousFileOperation:
    return SuspiciousFileOperation(
        f"There is a link or a file in the path of the folder {'/'.join(folder)!r}."
    )


def portable_parts(path: Any, where: str) -> tuple[str, ...]:
    """Return `_parts_of_path` for any storage. Windows and django-storages treat a backslash like a slash."""
    if type(path) is str and "\\" in path:
        raise InvalidPayload(path=where, reason="a backslash is not allowed in a path")
    return _parts_of_path(path, where)


def _parts_of_path(path: Any, where: str) -> tuple[str, ...]:
    """Return the names in a relative path. Raise `InvalidPayload` if the path could lead upwards."""
    if type(path) is not str or "\x00" in path:
        raise InvalidPayload(path=where, reason="expected a path as text without NUL")
    parts = tuple(path.removesuffix("/").split("/"))
    # `basename` returns the part that the system treats as one name, on Windows without drive and backslash.
    if any(part in ("", ".", "..") or os.path.basename(part) != part for part in parts):
        raise InvalidPayload(path=where, reason='expected a relative path without empty parts, "." and ".."')
    return parts


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
        """Return the ids of the snapshots that this session owns in the workspace of ``ref``: a collection of
        texts that are not empty. If there is anything else in it, nothing is deleted.

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

    Example::

        provider = StorageWorkspaceProvider(InMemoryStorage())
        provider.storage.save(f"{provider.folder('trip')}/monday.tar", ContentFile(b"..."))
        expired_session_cleanup(workspace_providers={"disk": provider})
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


def checked_providers(given: Any) -> Mapping[str, WorkspaceProvider]:
    """Return the providers of a call, by default those of the settings.

    Raise `InvalidQuery`, `TypeError` for an object that is not a provider, or `ImproperlyConfigured`.
    """
    if given is None:
        return configured_workspace_providers()
    if not isinstance(given, Mapping) or not all(isinstance(name, str) for name in given):
        raise InvalidQuery(
            "workspace_providers must be a dict of providers by their names.", path="workspace_providers"
        )
    for name, provider in given.items():
        if not isinstance(provider, WorkspaceProvider):
            raise TypeError(f"{name!r} is not a workspace provider: it cannot list or delete snapshots.")
    return given


def configured_workspace_providers() -> dict[str, WorkspaceProvider]:
    """Return the providers of ``HELIX_STORE["WORKSPACE_PROVIDERS"]``. Raise `ImproperlyConfigured`."""
    return {name: _loaded(name, path) for name, path in conf.workspace_providers().items()}


def _loaded(name: str, path: str) -> WorkspaceProvider:
    try:
        found = import_string(path)
        provider = found() if isinstance(found, type) or not isinstance(found, WorkspaceProvider) else found
    except Exception as exc:
        # A module or a provider of the project may raise anything.
        reason = f"{type(exc).__name__}: {exc}"
        raise ImproperlyConfigured(
            f"Workspace provider {name!r} cannot be loaded from {path!r}: {reason}."
        ) from exc
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
    """Return the snapshots of a session. Raise `MissingProvider` before any snapshot is listed, and
    `InvalidPayload` if a provider lists anything other than ids: nothing may be deleted then.
    """
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
) -> Iterator[str]:
    """Call `WorkspaceProvider.list_snapshots`, even on a provider that does not support tenants."""
    list_snapshots: Any = provider.list_snapshots
    parameters = inspect.signature(list_snapshots).parameters
    if "tenant" in parameters or any(each.kind is each.VAR_KEYWORD for each in parameters.values()):
        list_snapshots = partial(list_snapshots, tenant=tenant)
    snapshots: Any = list_snapshots(session_id, ref)
    # A text is a collection of texts, and its characters could be the ids of other sessions' snapshots.
    if not isinstance(snapshots, Iterable) or isinstance(snapshots, str | bytes | Mapping):
        reason = f"the workspace provider must return a collection of ids, not {type(snapshots).__name__}"
        raise InvalidPayload(path="list_snapshots", reason=reason)
    for number, snapshot_id in enumerate(snapshots):
        if not isinstance(snapshot_id, str) or not snapshot_id:
            given = "an empty text" if snapshot_id == "" else type(snapshot_id).__name__
            reason = f"a workspace provider's id of a snapshot is text, not {given}"
            raise InvalidPayload(path=f"list_snapshots/{number}", reason=reason)
        yield snapshot_id
