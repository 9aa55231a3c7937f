"""Names of the folders in which sessions keep their workspace snapshots.

No two sessions share a folder, and no session's folder is inside another's: a tenant, an id and a ref's
``path`` occupy separate levels, and no quoted text contains the ``=`` of a tenant's level. This holds on file
systems that distinguish upper and lower case.
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
"""The longest name, in characters. File systems allow 255 bytes."""

_SHORTENED: Final = re.compile(rf".{{{_LONGEST_NAME - 65}}}-[0-9a-f]{{64}}")


def session_folder(session_id: str, tenant: str) -> tuple[str, ...]:
    """Return the folder of a session as its names, from the root of the storage downwards."""
    name = _name(validation.identifier(session_id, "session_id"))
    return (f"tenant={_name(validation.tenant(tenant))}", name) if tenant else (name,)


def _name(text: str) -> str:
    """Return a name for a text that may contain slashes and dots. Different texts have different names."""
    name = quote(text, safe=" ")
    if not name.strip("."):
        name = name.replace(".", "%2E")
    # A name that looks shortened is also shortened, so that it cannot equal the name of a longer text.
    if len(name) > _LONGEST_NAME or _SHORTENED.fullmatch(name):
        digest = hashlib.sha256(text.encode()).hexdigest()
        name = f"{name[: _LONGEST_NAME - len(digest) - 1]}-{digest}"
    return name


def portable_parts(path: Any, where: str) -> tuple[str, ...]:
    """Return `parts_of_path` for any storage. Windows and django-storages treat a backslash as a slash."""
    if type(path) is str and "\\" in path:
        raise InvalidPayload(path=where, reason="a backslash is not allowed in a path")
    return parts_of_path(path, where)


def parts_of_path(path: Any, where: str) -> tuple[str, ...]:
    """Return the names in a relative path. Raise `InvalidPayload` if the path could lead upwards."""
    if type(path) is not str or "\x00" in path:
        raise InvalidPayload(path=where, reason="expected a path as text without NUL")
    parts = tuple(path.removesuffix("/").split("/"))
    # `basename` returns the part that the system treats as one name; Windows excludes drives and backslashes.
    if any(part in ("", ".", "..") or os.path.basename(part) != part for part in parts):
        raise InvalidPayload(path=where, reason='expected a relative path without empty parts, "." and ".."')
    return parts
