"""Writer of an export: a header, units with the count and hash of each, and a trailer with the totals."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable
from typing import Any, Final, Protocol

from helix_store.exceptions import IntegrityFault
from helix_store.transfer.layout import FORMAT, FORMAT_VERSION
from helix_store.transfer.records import Counts, Problem, Record, Source, Unit, line_of
from helix_store.transfer.summary import ExportSummary

__all__ = ["write_export"]

_UNREADABLE: Final = (IntegrityFault, TypeError, ValueError, ArithmeticError, RecursionError)
"""The errors that a stored value raises if it does not have its column's type."""


class _Writable(Protocol):
    def write(self, data: bytes, /) -> Any: ...


def write_export(
    source: Source,
    file: _Writable,
    *,
    progress: Callable[[ExportSummary], object] | None = None,
    is_stopped: Callable[[], bool] | None = None,
) -> ExportSummary:
    """Write all units of a source to a binary file, in constant memory.

    All reads see one moment of the database, and lock nothing. A unit with an unreadable row ends with a
    record ``failed``, is a problem in the summary, and does not stop the export. ``progress`` is called after
    each unit. ``is_stopped`` is called between units; a stopped export has no trailer, and importing it
    reports that.
    """
    writer = _Writer(file)
    with source.reading():
        writer.write({"record": "header", "format": FORMAT, "version": FORMAT_VERSION})
        for unit in source.units():
            if is_stopped is not None and is_stopped():
                return writer.summary
            writer.write_unit(unit)
            if progress is not None:
                progress(writer.summary)
        writer.summary.problems.extend(source.left_out(writer.summary.counts))
    writer.write_trailer()
    return writer.summary


class _Writer:
    def __init__(self, file: _Writable) -> None:
        self._file = file
        self._digest = hashlib.sha256()
        self.summary = ExportSummary()

    def write(self, record: Record) -> bytes:
        line = line_of(record)
        self._digest.update(line)
        self._file.write(line)
        return line

    def write_unit(self, unit: Unit) -> None:
        digest, counts = hashlib.sha256(), Counts()
        try:
            for record in unit.records():
                digest.update(self.write(record))
                counts[record["record"]] += 1
        except _UNREADABLE as exc:
            reason = str(exc) if isinstance(exc, IntegrityFault) else "A stored value cannot be read."
            self.write({"record": "failed", "of": unit.kind, "problem": reason})
            self.summary.failed += 1
            self.summary.problems.append(Problem(text=f"The {unit} is incomplete: {reason}"))
            return
        self.write(
            {"record": "end", "of": unit.kind, "counts": _sorted(counts), "sha256": digest.hexdigest()}
        )
        self.summary.counts.update(counts)

    def write_trailer(self) -> None:
        counts, sha256 = self.summary.counts, self._digest.hexdigest()
        trailer = {"record": "trailer", "counts": _sorted(counts), "failed": self.summary.failed}
        self.write({**trailer, "sha256": sha256})
        self.summary.sha256 = sha256


def _sorted(counts: Counter[str]) -> dict[str, int]:
    return dict(sorted(counts.items()))
