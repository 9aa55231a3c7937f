"""Records as lines, and units of records that are exported and imported together."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Final, Protocol

from helix_store.core.serialization import Serializable
from helix_store.exceptions import shown_id

__all__ = ["Counts", "Problem", "Record", "Source", "Unit", "digest_of", "line_of", "named"]

Record = dict[str, Any]
"""An object of JSON; ``record`` is the name of its kind, and comes first."""

_in_utf8: Final = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode
_in_ascii: Final = json.JSONEncoder(allow_nan=False, separators=(",", ":")).encode


@dataclass(frozen=True, slots=True)
class Unit:
    """A record and its parts: a session, a stream, the locks of a tenant, the usage of a deleted session.

    ``records`` reads them from the start at each call, until the next unit is read. ``sha256`` is that of
    their lines, where it is known.
    """

    kind: str
    tenant: str
    name: str
    records: Callable[[], Iterator[Record]]
    sha256: str | None = None
    line: int | None = None

    def __str__(self) -> str:
        return named(self.kind, self.tenant, self.name)


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem(Serializable):
    """What could not be exported or imported; ``line`` is that of the file, where there is one."""

    text: str
    line: int | None = None

    def __str__(self) -> str:
        return self.text if self.line is None else f"line {self.line}: {self.text}"


class Source(Protocol):
    """Where sessions come from: a database of this app, or a store of another one.

    The records of a unit are those of `helix_store.transfer.layout`, in its order. The same data must always
    be the same records, in the same order.
    """

    @property
    def session_count(self) -> int:
        """How many sessions there are, for the progress."""
        ...

    def reading(self) -> AbstractContextManager[None]:
        """A context in which all units show one moment."""
        ...

    def units(self) -> Iterator[Unit]:
        """All units in order. The records of one are read before the next one is asked for."""
        ...

    def left_out(self, exported: Counts) -> Iterable[Problem]:
        """What was asked for, or is stored, but is in no unit; after all units, with their counts."""
        ...


Counts = Counter[str]
"""The number of records by name."""


def line_of(record: Record) -> bytes:
    """A record as a line. Raises `TypeError` or `ValueError` for what is no JSON."""
    try:
        return _in_utf8(record).encode() + b"\n"
    except UnicodeEncodeError:
        return _in_ascii(record).encode() + b"\n"


def digest_of(unit: Unit) -> str:
    """The SHA-256 of the lines of a unit."""
    if unit.sha256 is not None:
        return unit.sha256
    digest = hashlib.sha256()
    for record in unit.records():
        digest.update(line_of(record))
    return digest.hexdigest()


def named(kind: str, tenant: str, name: str) -> str:
    """A unit as a message names it."""
    text = kind.replace("_", " ") + (f" {shown_id(name)}" if name else "")
    return f"{text} of tenant {shown_id(tenant)}" if tenant else text
