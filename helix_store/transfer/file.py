"""The file of an export: a header, units with the count and hash of each, and a trailer with the totals.

The reader checks each unit against its count and hash before it returns it.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields
from typing import IO, Any, Final, Protocol

from helix_store import conf
from helix_store.core.limits import MAX_CALL_BYTES
from helix_store.exceptions import HelixStoreError, IntegrityFault, InvalidPayload, shown_id
from helix_store.transfer.layout import formats, units
from helix_store.transfer.records import (
    Counts,
    ExportSummary,
    Problem,
    Record,
    Source,
    Unit,
    line_of,
    lines_from,
    named,
    spool,
)

_FORMAT: Final = "helix_store.export"
_VERSION: Final = 1
_LONGEST_SHOWN: Final = 200
_RECORD: Final = re.compile(rb'\{"record":"(\w+)"[,}]')
_UNREADABLE: Final = (IntegrityFault, TypeError, ValueError, ArithmeticError, RecursionError)
"""The errors that are raised for a stored value that does not have its column's type."""


# --- Writing -----------------------------------------------------------------------------------------


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

    All reads see the database at the same moment, and lock nothing. A unit with an unreadable row ends with a
    record ``failed``, is listed as a problem in the summary, and does not stop the export. ``progress`` is
    called after each unit. ``is_stopped`` is called between units; a stopped export has no trailer, and
    importing it reports that.
    """
    writer = _Writer(file)
    with source.reading():
        writer.write({"record": "header", "format": _FORMAT, "version": _VERSION})
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


# --- Reading -----------------------------------------------------------------------------------------


class NotAnExport(HelixStoreError):
    """The file is not an export of helix_store, or one of a newer version."""

    code = "not_an_export"


class ExportFile:
    """An export in a binary file, which is read once from its start.

    After `units` has ended, ``problems`` lists missing or altered data, ``counts`` counts the units' records,
    and ``is_complete`` is true if the trailer was found and matches all lines.
    """

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._whole = hashlib.sha256()
        self._layouts = units()
        self._number = 0
        self._unit: _OpenUnit | None = None
        self._is_skipping = False
        self._failed = 0
        self.counts: Counts = Counter()
        self.problems: list[Problem] = []
        self.is_complete = False

    def units(self) -> Iterator[Unit]:
        """Yield the units that are unaltered. Raises `NotAnExport` if the file is not an export."""
        self._read_header()
        try:
            yield from self._units()
        finally:
            self._drop_unit()

    def _units(self) -> Iterator[Unit]:
        has_ended = False
        longest = _longest_line()
        while line := self._file.readline(longest + 1):
            self._number += 1
            if len(line) > longest:
                self._drop_unit()
                self._problem(f"the line has more than {longest:,} bytes; the rest was not read")
                return
            if has_ended:
                self._problem("there is more after the trailer")
                self.is_complete = False
                return
            name = _name_of(line)
            if name == "trailer":
                self._close_unit()
                self._check_trailer(line)
                has_ended = True
                continue
            self._whole.update(line)
            if name in self._layouts:
                self._open_unit(name, line)
            elif name == "end":
                yield from self._ended_unit(line)
            elif name == "failed":
                self._failed_unit(line)
            else:
                self._part(name, line)
        if not has_ended:
            self._close_unit()
            self._problem("the file ends here, without a trailer: its end is missing")

    # --- Lines -------------------------------------------------------------------------------------

    def _read_header(self) -> None:
        line = self._file.readline(1_000)
        self._number = 1
        self._whole.update(line)
        header = _record(line)
        if header is None or header.get("record") != "header" or header.get("format") != _FORMAT:
            raise NotAnExport("Line 1 is not the header of an export of helix_store.")
        if header.get("version") != _VERSION:
            raise NotAnExport(
                f"The export has the format {header.get('version')!r}; this release reads {_VERSION}. "
                "Import it with the release that wrote it, or a newer one."
            )

    def _open_unit(self, kind: str, line: bytes) -> None:
        self._close_unit()
        self._is_skipping = False
        head = _record(line) or {}
        tenant, name = ("" if column is None else head.get(column) for column in self._layouts[kind].identity)
        if not isinstance(tenant, str) or not isinstance(name, str):
            self._problem(f"it lacks the columns that name a {kind.replace('_', ' ')}")
            self._is_skipping = True
            return
        self._unit = _OpenUnit(kind, tenant, name, line=self._number)
        self._unit.add(kind, line)

    def _part(self, name: str, line: bytes) -> None:
        unit = self._unit
        if unit is None:
            if not self._is_skipping:
                self._problem("the record belongs to no unit: lines before it are missing")
                self._is_skipping = True
        elif name not in self._layouts[unit.kind].records:
            self._problem(f"the line is {_kind_of(name)}, in the {unit}; no part of it is imported")
            self._drop_unit()
        else:
            unit.add(name, line)

    def _ended_unit(self, line: bytes) -> Iterator[Unit]:
        unit = self._unit
        if unit is None:
            if not self._is_skipping:
                self._problem("the end belongs to no unit: lines before it are missing")
            self._is_skipping = False
            return
        end = _record(line) or {}
        if end.get("of") != unit.kind or end.get("counts") != unit.counts:
            self._problem(f"the {unit}, from line {unit.line}, does not have the records that its end counts")
        elif end.get("sha256") != unit.digest.hexdigest():
            self._problem(f"the {unit}, from line {unit.line}, does not have the sha256 of the export")
        else:
            self.counts.update(unit.counts)
            yield unit.checked()
        self._drop_unit()
        self._is_skipping = False

    def _failed_unit(self, line: bytes) -> None:
        reason = _shown((_record(line) or {}).get("problem"))
        if self._unit is not None:
            self._problem(f"the {self._unit} could not be exported: {reason}")
            self._failed += 1
        self._drop_unit()
        self._is_skipping = False

    def _check_trailer(self, line: bytes) -> None:
        trailer = _record(line) or {}
        if trailer.get("counts") != dict(self.counts) or trailer.get("failed") != self._failed:
            self._problem("the file does not have the records that the trailer counts")
        elif trailer.get("sha256") != self._whole.hexdigest():
            self._problem("the file differs from the export: its sha256 is not that of the trailer")
        else:
            self.is_complete = True

    def _close_unit(self) -> None:
        """Close a unit without an end, if one is open."""
        if self._unit is not None:
            self._problem(f"the {self._unit}, from line {self._unit.line}, has no end before this line")
        self._drop_unit()

    def _drop_unit(self) -> None:
        if self._unit is not None:
            self._unit.spool.close()
            self._unit = None
            self._is_skipping = True

    def _problem(self, text: str) -> None:
        self.problems.append(Problem(text=text, line=self._number))


@dataclass(eq=False)
class _OpenUnit:
    """The lines of a unit so far."""

    kind: str
    tenant: str
    name: str
    line: int
    counts: Counts = field(default_factory=Counter)
    digest: Any = field(default_factory=hashlib.sha256)
    spool: IO[bytes] = field(default_factory=spool)

    def __str__(self) -> str:
        return named(self.kind, self.tenant, self.name)

    def add(self, name: str, line: bytes) -> None:
        self.counts[name] += 1
        self.digest.update(line)
        self.spool.write(line)

    def checked(self) -> Unit:
        sha256 = self.digest.hexdigest()
        return Unit(self.kind, self.tenant, self.name, self._records, sha256, self.line)

    def _records(self) -> Iterator[Record]:
        for line in lines_from(self.spool):
            record = _record(line)
            if record is None or record.get("record") != _name_of(line):
                raise InvalidPayload(path="", reason="the line is not a JSON object with distinct names")
            yield record


def _longest_line() -> int:
    """Return more bytes than any record has; JSON can triple the length of the text in its columns."""
    limits = conf.limits()
    return MAX_CALL_BYTES + 24 * max(int(getattr(limits, each.name)) for each in fields(limits))


def _kind_of(name: str) -> str:
    if name and name not in formats():
        return f"a record {shown_id(name)}, and no app in INSTALLED_APPS has registered a table of that name"
    return f"a {name.replace('_', ' ')}" if name else "no record"


def _shown(text: Any) -> str:
    """Return text from the file without characters that control a terminal."""
    text = str(text)[:_LONGEST_SHOWN]
    return text if text.isprintable() else ascii(text)


def _name_of(line: bytes) -> str:
    """Return the name of the record, or ``""`` if the line is not a record."""
    match = _RECORD.match(line)
    return match[1].decode() if match and line.endswith(b"}\n") else ""


def _record(line: bytes) -> dict[str, Any] | None:
    try:
        value = json.loads(line, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")
