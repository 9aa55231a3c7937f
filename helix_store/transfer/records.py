"""Records as lines, units of records that are exported and imported together, and the results of both."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from tempfile import SpooledTemporaryFile
from typing import IO, Any, Final, Protocol

from helix_store.core.serialization import Serializable
from helix_store.exceptions import shown_id

Record = dict[str, Any]
"""A JSON object; ``record`` is the name of its kind and comes first."""

_IN_MEMORY: Final = 4_000_000
_in_utf8: Final = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode
_in_ascii: Final = json.JSONEncoder(allow_nan=False, separators=(",", ":")).encode


@dataclass(frozen=True, slots=True)
class Unit:
    """A record and its parts: a session, a stream, the locks of a tenant, the usage of a deleted session.

    Each call of ``records`` reads them from the start; call it before the next unit is read. ``sha256`` is
    the hash of their lines, if it is known.
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
    """A failure to export or import something; ``line`` is the line in the file, if there is one."""

    text: str
    line: int | None = None

    def __str__(self) -> str:
        return self.text if self.line is None else f"line {self.line}: {self.text}"


class Source(Protocol):
    """A source of sessions: a database of this app, or a store of another one.

    A unit has the records of `helix_store.transfer.layout`, in the same order. The same data must always
    yield the same records, in the same order.
    """

    @property
    def session_count(self) -> int:
        """The number of sessions, for showing progress."""
        ...

    def reading(self) -> AbstractContextManager[None]:
        """Return a context in which all units show the same moment."""
        ...

    def units(self) -> Iterator[Unit]:
        """Yield all units in order. Read the records of a unit before you request the next one."""
        ...

    def left_out(self, exported: Counts) -> Iterable[Problem]:
        """Yield problems of data outside all units; ``exported`` counts the units that were read."""
        ...


Counts = Counter[str]
"""The number of records by name."""


@dataclass(slots=True)
class ExportSummary:
    """Counts of complete units in ``counts``, by the name of the record, and of other units in ``failed``.

    ``sha256`` is the hash of the file without its last line, or ``None`` if the export was stopped.
    """

    counts: Counts = field(default_factory=Counter)
    failed: int = 0
    sha256: str | None = None
    problems: list[Problem] = field(default_factory=list)

    @property
    def sessions(self) -> int:
        return self.counts["session"]

    def to_dict(self) -> dict[str, Any]:
        return {
            "sessions": self.sessions,
            "records": dict(sorted(self.counts.items())),
            "failed": self.failed,
            "sha256": self.sha256,
            "problems": [str(problem) for problem in self.problems],
        }


@dataclass(slots=True)
class ImportSummary:
    """Units by kind: ``imported``, ``identical`` to stored ones, of another tenant, or with a problem.

    ``records`` counts the rows that were written, by the name of their record.
    """

    imported: Counter[str] = field(default_factory=Counter)
    identical: Counter[str] = field(default_factory=Counter)
    other_tenants: int = 0
    records: Counts = field(default_factory=Counter)
    problems: list[Problem] = field(default_factory=list)
    is_complete: bool = False

    @property
    def sessions(self) -> int:
        """The number of sessions that are stored as they are in the file."""
        return self.imported["session"] + self.identical["session"]

    def to_dict(self) -> dict[str, Any]:
        return {
            "imported": dict(sorted(self.imported.items())),
            "identical": dict(sorted(self.identical.items())),
            "other_tenants": self.other_tenants,
            "records": dict(sorted(self.records.items())),
            "is_complete": self.is_complete,
            "problems": [str(problem) for problem in self.problems],
        }


def spool() -> IO[bytes]:
    """Return a file for lines that are written once. It is in memory as long as it is small."""
    return SpooledTemporaryFile(_IN_MEMORY)


def lines_from(file: IO[bytes]) -> Iterator[bytes]:
    """Yield the lines of a `spool` from the start."""
    file.seek(0)
    yield from file


def line_of(record: Record) -> bytes:
    """Return a record as a line. Raises `TypeError` or `ValueError` if JSON cannot represent it."""
    try:
        return _in_utf8(record).encode() + b"\n"
    except UnicodeEncodeError:
        return _in_ascii(record).encode() + b"\n"


def digest_of(unit: Unit) -> str:
    """Return the SHA-256 of a unit's lines."""
    if unit.sha256 is not None:
        return unit.sha256
    digest = hashlib.sha256()
    for record in unit.records():
        digest.update(line_of(record))
    return digest.hexdigest()


def named(kind: str, tenant: str, name: str) -> str:
    """Return the name of a unit for a message."""
    text = kind.replace("_", " ") + (f" {shown_id(name)}" if name else "")
    return f"{text} of tenant {shown_id(tenant)}" if tenant else text
