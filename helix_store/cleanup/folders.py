"""Names of the folders in which sessions keep their workspace snapshots.

No two sessions share a folder, and none is inside that of another: a tenant, an id and a ref's ``path`` take
separate levels, and no quoted text contains the ``=`` of a tenant's level. This holds on file systems that
distinguish upper and lower case.
"""

from __future__ import annotations

import hashlib
import os
import re
from typing import Any, Final
from urllib.parse import quote

from helix_store.core import validation
from helix_store.exceptions import InvalidPayload

__all__ = ["parts_of_path", "portable_parts", "session_folder"]

_LONGEST_NAME: Final = 200
"""In characters; file systems allow 255 bytes for one name."""

_SHORTENED: Final = re.compile(rf".{{{_LONGEST_NAME - 65}}}-[0-9a-f]{{64}}")


def session_folder(session_id: str, tenant: str) -> tuple[str, ...]:
    """The folder of a session, as the names from the root of the storage downwards."""
    name = _name(validation.identifier(session_id, "session_id"))
    return (f"tenant={_name(validation.tenant(tenant))}", name) if tenant else (name,)


def _name(text: str) -> str:
    """One name for a text that may contain slashes and dots; each text has another one."""
    name = quote(text, safe=" ")
    if not name.strip("."):
        name = name.replace(".", "%2E")
    # A name that looks like a shortened one is shortened too: it cannot be that of a longer text.
    if len(name) > _LONGEST_NAME or _SHORTENED.fullmatch(name):
        digest = hashlib.sha256(text.encode()).hexdigest()
        name = f"{name[: _LONGEST_NAME - len(digest) - 1]}-{digest}"
    return name


def portable_parts(path: Any, where: str) -> tuple[str, ...]:
    """`parts_of_path` for any storage: Windows and django-storages take a backslash for a slash."""
    if type(path) is str and "\\" in path:
        raise InvalidPayload(path=where, reason="a backslash is not allowed in a path")
    return parts_of_path(path, where)


def parts_of_path(path: Any, where: str) -> tuple[str, ...]:
    """The names in a relative path. Raises `InvalidPayload` for a path that could lead upwards."""
    if type(path) is not str or "\x00" in path:
        raise InvalidPayload(path=where, reason="expected a path as text without NUL")
    parts = tuple(path.removesuffix("/").split("/"))
    # `basename` is what the system takes for one name; on Windows that excludes drives and backslashes.
    if any(part in ("", ".", "..") or os.path.basename(part) != part for part in parts):
        raise InvalidPayload(path=where, reason='expected a relative path without empty parts, "." and ".."')
    return parts
