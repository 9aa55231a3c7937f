"""Files of a storage, listed and deleted without following links."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final, NamedTuple

from django.core.exceptions import SuspiciousFileOperation
from django.core.files.storage import InMemoryStorage, Storage

from helix_store.exceptions import InvalidPayload, LimitExceeded

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


class _Place(NamedTuple):
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
            with self._opened(parts[:-1]) as place:
                path = os.path.join(place.path, parts[-1])
                status = os.stat(path, dir_fd=place.descriptor, follow_symlinks=False)
        except FileNotFoundError:
            return None
        return stat.S_ISDIR(status.st_mode)

    def entries(self, folder: Parts) -> Iterator[tuple[str, bool]]:
        """Yield each name in a folder and whether it is a folder, or nothing if the folder does not exist."""
        try:
            with self._opened(folder) as place, os.scandir(place.folder) as entries:
                for entry in entries:
                    yield entry.name, entry.is_dir(follow_symlinks=False)
        except FileNotFoundError:
            return

    def delete(self, name: str) -> None:
        """Delete a file, or a link but not its target. It is not an error if the file does not exist."""
        # Do not use the storage: it follows links, and a folder may have been replaced since the listing.
        *folder, file = _parts_of_path(name, "snapshot_id")
        try:
            with self._opened(tuple(folder)) as place:
                os.unlink(os.path.join(place.path, file), dir_fd=place.descriptor)
        except FileNotFoundError:
            return

    @contextmanager
    def _opened(self, folder: Parts) -> Iterator[_Place]:
        """Open a folder. Raise `SuspiciousFileOperation` if the path contains a link or a file."""
        if not {os.open, os.stat, os.unlink} <= os.supports_dir_fd:
            # On Windows, a link created between the check and the use goes unnoticed.
            path = os.path.join(os.path.realpath(self._root), *folder)
            if os.path.realpath(path) != path:
                raise _link_on_the_way(folder)
            yield _Place(None, path)
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
            yield _Place(descriptor, "")
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
