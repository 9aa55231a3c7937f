"""The output of commands: tables, text and times."""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import shutil
import time
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from datetime import datetime, timedelta, tzinfo
from itertools import pairwise
from os.path import commonprefix
from typing import Any, ClassVar, Final, Literal, Self

from django.core.management.base import OutputWrapper

from helix_store.core import moments, validation
from helix_store.core.transcript import KEPT_IN_PROSE, SPACES, is_invisible
from helix_store.core.transcript import visible as shown_text
from helix_store.reports.payloads import NOTHING, TONES, moment

ELLIPSIS: Final = "…"

_EMOJI_FORM: Final = "\ufe0f"
_TAB: Final = " " * 4


def visible(text: str, *, keep: str = "") -> str:
    """Return text on one line, in which each character that a terminal obeys, refuses or hides is escaped.

    Spaces of other widths and the characters in ``keep`` are not escaped.
    """
    return shown_text(text, keep=keep + SPACES, is_short=True)


def shown_json(line: str) -> str:
    """Return a line of JSON with the same value, without characters that a terminal obeys or hides."""
    return "".join(
        json.dumps(char)[1:-1].replace("\x7f", "\\u007f") if char != "\n" and is_invisible(char) else char
        for char in line
    )


def width_of(text: str) -> int:
    """Return the number of cells that visible text takes in a terminal. The result is never too small."""
    if text.isascii():
        return len(text)
    return sum(map(_cells, text))


def _cells(char: str) -> int:
    if char.isascii():
        return 1
    if char == _EMOJI_FORM:
        # On some terminals, this selector makes the narrow character before it wide.
        return 1
    if unicodedata.category(char) in ("Mn", "Me", "Cf"):
        return 0
    return 2 if unicodedata.east_asian_width(char) in "WF" else 1


def cut(text: str, width: int) -> str:
    """Return the start of a string followed by ``…`` if the string is wider than ``width`` cells."""
    if width_of(text) <= width:
        return text
    return _start(text, width - 1) + ELLIPSIS if width > 0 else ""


def cut_middle(text: str, width: int) -> str:
    """Return the start and end of a string with ``…`` between them if it is wider than ``width`` cells."""
    if width_of(text) <= width:
        return text
    if width < 3:
        return cut(text, width)
    start = _start(text, width // 2)
    return start + ELLIPSIS + _end(text, width - 1 - width_of(start))


def padded(text: str, width: int, *, right: bool = False) -> str:
    """Return a string padded with spaces to ``width`` cells. ``right`` aligns it to the right."""
    spaces = " " * (width - width_of(text))
    return spaces + text if right else text + spaces


def wrapped(text: str, width: int, *, indent: str = "") -> list[str]:
    """Return the lines of text of any length, visible, indented and at most ``width`` cells wide.

    A line breaks at a space if it contains one. Newlines and spaces at the start of a line are kept.
    """
    # The widest character takes two cells.
    room = max(width - len(indent), 2)
    lines = [
        piece
        for line in text.replace("\r\n", "\n").replace("\t", _TAB).split("\n")
        for piece in _wrapped_line(visible(line, keep=KEPT_IN_PROSE).rstrip(), room)
    ]
    return [(indent + line).rstrip() for line in lines]


def _wrapped_line(line: str, room: int) -> list[str]:
    pieces: list[str] = []
    at = 0
    while (end := _reach(line, at, room)) < len(line):
        space = line.rfind(" ", at, end)
        if line[end] != " " and line[at : max(space, at)].strip():
            end = space
        pieces.append(line[at:end])
        at = end
        while line[at] == " ":
            at += 1
    return [*pieces, line[at:]]


def encodable(text: str, encoding: str | None) -> str:
    """Return text in which characters that the encoding of a stream cannot represent are escaped."""
    name = encoding or "utf-8"
    return text.encode(name, "backslashreplace").decode(name)


def _start(text: str, width: int) -> str:
    return text[: _reach(text, 0, width)]


def _reach(text: str, at: int, width: int) -> int:
    """Return the end of the longest part that starts at ``at`` and is at most ``width`` cells wide."""
    used = 0
    for index in range(at, len(text)):
        used += _cells(text[index])
        if used > width:
            return index
    return len(text)


def _end(text: str, width: int) -> str:
    start = len(text) - len(_start(text[::-1], width))
    # Combining characters belong to the character that was left out.
    while 0 < start < len(text) and _cells(text[start]) == 0:
        start += 1
    return text[start:]


_AGE: Final = re.compile(r"([0-9]{1,9})([smhdw])|([0-9]{1,7})")
"""A number alone is days. With eight digits it would be a date."""
_UNITS: Final = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days", "w": "weeks"}
_AN_AGE: Final = "expected an age (90s, 30m, 12h, 7d, 2w; a number alone is days)"
_A_DATE: Final = "a date (2026-11-20, 2026-11-20T09:00+09:00)"


def time_or_age(given: str | int | datetime | timedelta) -> datetime | timedelta:
    """Parse a time or an age for argparse. A time without an offset is naive; `moment_of` adds the zone."""
    if isinstance(given, datetime):
        return given
    found = _parsed_age(given)
    if found is not None or isinstance(given, int | timedelta):
        return age(given)
    try:
        return datetime.fromisoformat(given)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{_AN_AGE} or {_A_DATE}, got {given!r}") from None


def age(given: str | int | timedelta) -> timedelta:
    """Parse an age for argparse."""
    found = _parsed_age(given)
    if found is None:
        raise argparse.ArgumentTypeError(f"{_AN_AGE}, got {given!r}")
    if not validation.is_age(found):
        raise argparse.ArgumentTypeError(f"an age is at most a hundred years, got {given!r}")
    return found


def _parsed_age(given: Any) -> timedelta | None:
    """Return a duration of any length, or ``None`` if the value is not in the form of an age."""
    if isinstance(given, timedelta):
        return given
    try:
        if type(given) is int:
            return timedelta(days=given)
        found = _AGE.fullmatch(given)
        if found is None:
            return None
        number, unit, days = found.groups()
        return timedelta(days=int(days)) if days else timedelta(**{_UNITS[unit]: int(number)})
    except OverflowError:
        return timedelta.max


def whole_number(given: str | int) -> int:
    """Parse a whole number. Raise `ValueError` for anything else, such as a float or a bool."""
    if type(given) not in (str, int):
        raise ValueError(f"expected a whole number, got {given!r}")
    return int(given)


def moment_of(value: datetime | timedelta, zone: tzinfo) -> datetime:
    """Return the moment that the argument names. An age counts back from now, and a time without an offset is
    in the given zone.
    """
    if isinstance(value, timedelta):
        return moments.now() - value
    return value.replace(tzinfo=zone) if value.tzinfo is None else value


_GAP: Final = "  "
_SMALLEST_WIDTH: Final = 40
_LONGEST_ID: Final = 40
"""The maximum width of an id, in cells. A UUID has 36."""

Style = Literal["bold", "dim", "red", "green", "yellow", "blue", "cyan"]

_CODES: Final[dict[str, int]] = {
    "bold": 1,
    "dim": 2,
    "red": 31,
    "green": 32,
    "yellow": 33,
    "blue": 34,
    "cyan": 36,
}
_STYLES: Final[dict[str, Style]] = {"info": "cyan", "waiting": "yellow", "good": "green", "bad": "red"}
STATUS_STYLES: Final = {status: _STYLES[tone] for status, tone in TONES.items()}


def terminal_width() -> int:
    """Return the width of the terminal: ``COLUMNS``, or the reported width, or 80 if it is unknown."""
    return max(shutil.get_terminal_size(fallback=(80, 24)).columns, _SMALLEST_WIDTH)


def has_width(stream: OutputWrapper) -> bool:
    """Return whether the lines of a stream have a width: in a terminal, or if ``COLUMNS`` is set."""
    # A pipe or a file gets whole cells, because a cut id can neither be found nor passed on.
    columns = os.environ.get("COLUMNS", "")
    return stream.isatty() or (columns.isdecimal() and int(columns) > 0)


@dataclass(frozen=True, slots=True)
class Layout:
    """The number of cells that a line may take (``None`` for any number), whether text is coloured, and
    whether long results and documents are printed as a whole.
    """

    width: int | None = None
    has_colours: bool = False
    is_whole: bool = False

    def coloured(self, text: str, *styles: Style | None) -> str:
        """Return visible text in colour, or unchanged if colours are off or there is no style."""
        codes = ";".join(str(_CODES[style]) for style in styles if style is not None)
        if not self.has_colours or not codes or not text:
            return text
        # Colour each line separately, because a pager resets the colour at the end of a line.
        return "\n".join(f"\x1b[{codes}m{line}\x1b[0m" if line else line for line in text.split("\n"))

    def fitted(self, line: str) -> str:
        return line if self.width is None else cut(line, self.width)


_UNLIMITED: Final = Layout()


def cell(value: Any) -> str:
    """Return a value as visible text on one line."""
    if value is None:
        return NOTHING
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, datetime):
        return moment(value)
    if isinstance(value, dict | list):
        return visible(json.dumps(value, ensure_ascii=False))
    return visible(str(value))


# --- Tables ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table. ``cut`` determines where a cell is cut; ``style`` receives the text of a cell.

    ``value`` returns the cell for a row; without it, the row is a sequence of cells. A cell of ids (``id``)
    is cut at its end, but keeps enough characters to distinguish it from the ids of other rows. A column that
    ``may_be_empty`` is left out if the first rows have no value for it.
    """

    heading: str
    value: Callable[[Any], Any] | None = None
    _: KW_ONLY
    cut: Literal["end", "id", "middle", "never"] = "end"
    right: bool = False
    minimum: int = 8
    is_optional: bool = False
    may_be_empty: bool = False
    style: Callable[[str], Style | None] | None = None

    def fitted(self, text: str, width: int) -> str:
        return cut_middle(text, width) if self.cut == "middle" else cut(text, width)

    def least_width(self, cells: Sequence[str], width: int) -> int:
        """Return the smallest width of the column if its widest cell takes ``width`` cells."""
        if self.cut == "never":
            return width
        least = self.minimum
        if self.cut == "id":
            neighbours = pairwise(sorted(set(cells)))
            # The id of a sub-session often begins with that of its parent, so no start of it is distinctive.
            apart = (pair for pair in neighbours if not pair[1].startswith(pair[0]))
            starts = (commonprefix(pair) for pair in apart)  # noqa: RUF071  of texts, not of paths
            least = max([least, *(min(width_of(start) + 2, _LONGEST_ID) for start in starts)])
        return min(width, least)


class Table:
    """A table that is printed in any number of parts. The first part determines the widths of the columns.

    No line is wider than ``width`` cells; ``None`` leaves every cell whole. The widest columns are shortened
    first. When all columns have their minimum width, optional ones are left out, beginning with the last.
    """

    def __init__(self, columns: Sequence[Column], layout: Layout = _UNLIMITED) -> None:
        self._columns = list(enumerate(columns))
        self._widths: dict[int, int] = {}
        self._layout = layout

    def lines(self, rows: Iterable[Any]) -> Iterator[str]:
        """Yield the lines of some rows, with the headings before the first part."""
        texts = [
            [cell(column.value(row) if column.value else row[index]) for index, column in self._columns]
            for row in rows
        ]
        if not self._widths:
            self._widths = self._fitted_widths(texts)
            yield self._line([column.heading for _, column in self._columns], lambda column, text: "bold")
        for row in texts:
            yield self._line(row, lambda column, text: column.style and column.style(text))

    def _fitted_widths(self, texts: Sequence[Sequence[str]]) -> dict[int, int]:
        """Return the widths of the columns that are shown, by index."""
        cells = {index: [row[index] for row in texts] for index, _ in self._columns}
        shown = {
            index: column
            for index, column in self._columns
            if not column.may_be_empty or any(text != NOTHING for text in cells[index])
        }
        widths = {
            index: max(map(width_of, (column.heading, *cells[index]))) for index, column in shown.items()
        }
        if self._layout.width is None:
            return widths
        least = {index: shown[index].least_width(cells[index], size) for index, size in widths.items()}
        optional = [index for index, column in shown.items() if column.is_optional]
        while optional and _width_of_line(least) > self._layout.width:
            del least[optional.pop()]
        available = self._layout.width - _width_of_line(dict.fromkeys(least, 0))
        # No column needs more than the available width, unless its minimum is larger.
        fitted = {index: max(min(widths[index], available), size) for index, size in least.items()}
        while sum(fitted.values()) > available:
            shrinkable = [index for index, size in least.items() if fitted[index] > size]
            if not shrinkable:
                break
            fitted[max(shrinkable, key=lambda index: fitted[index])] -= 1
        return fitted

    def _line(self, texts: Sequence[str], style_of: Callable[[Column, str], Style | None]) -> str:
        plain, coloured = [], []
        for index, size in self._widths.items():
            (_, column), text = self._columns[index], texts[index]
            shown = text if self._layout.width is None else column.fitted(text, size)
            plain.append(padded(shown, size, right=column.right))
            in_colour = self._layout.coloured(shown, style_of(column, text))
            coloured.append(plain[-1].replace(shown, in_colour, 1))
        line = _GAP.join(plain).rstrip()
        fitted = self._layout.fitted(line)
        # A line that is cut gets no colour, because the code that ends the colour would be cut off.
        return fitted if fitted != line else _GAP.join(coloured).rstrip()


def _width_of_line(widths: Mapping[int, int]) -> int:
    return sum(widths.values()) + len(_GAP) * (len(widths) - 1)


def table(columns: Sequence[Column], rows: Iterable[Any], layout: Layout = _UNLIMITED) -> str:
    """Return all rows of a `Table` as text."""
    return "\n".join(Table(columns, layout).lines(rows))


def pairs(values: Iterable[tuple[str, Any]], layout: Layout = _UNLIMITED) -> str:
    """Return names and values, one pair per line. A value that does not fit continues on the next line."""
    texts = [(name, cell(value)) for name, value in values]
    indent = max((width_of(name) for name, _ in texts), default=0) + len(_GAP)
    lines: list[str] = []
    for name, text in texts:
        pieces = [text] if layout.width is None else wrapped(text, max(layout.width - indent, 10)) or [""]
        lines.append(f"{layout.coloured(name, 'bold')}{' ' * (indent - width_of(name))}{pieces[0]}".rstrip())
        lines.extend(f"{' ' * indent}{piece}" for piece in pieces[1:])
    return "\n".join(lines)


# --- Bars --------------------------------------------------------------------------------------------

_EIGHTHS: Final = " ▏▎▍▌▋▊▉█"


def bar(value: float, *, maximum: float, width: int) -> str:
    """Return a bar of at most ``width`` cells, exact to an eighth. A value above 0 always shows a bar."""
    if not (value > 0 and maximum > 0) or math.isinf(value) or width < 1:
        return ""
    eighths = min(max(round(value / maximum * width * 8), 1), width * 8)
    whole, rest = divmod(eighths, 8)
    return _EIGHTHS[8] * whole + (_EIGHTHS[rest] if rest else "")


@dataclass
class ProgressBar:
    """A context manager that reports the progress of a loop on stderr, starting after one second.

    In a terminal it redraws one line, at most ten times a second. Elsewhere (such as in cron's log) it writes
    a line every ten seconds. The last state stays on the screen.
    """

    first_after: ClassVar[float] = 1.0
    again_on_terminal: ClassVar[float] = 0.1
    again_in_log: ClassVar[float] = 10.0

    write: Callable[[str], None]
    unit: str
    is_terminal: bool
    total: int | None = None
    is_silent: bool = False
    clock: Callable[[], float] = time.monotonic
    done: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self._started = self.clock()
        self._due = self._started + self.first_after
        self._was_shown = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if self._was_shown:
            self._show(end="\n")

    def update(self, done: int) -> None:
        """Report that ``done`` items have been processed so far."""
        self.done = done
        now = self.clock()
        if not self.is_silent and now >= self._due:
            self._due = now + (self.again_on_terminal if self.is_terminal else self.again_in_log)
            self._show(end="" if self.is_terminal else "\n")

    def _show(self, *, end: str) -> None:
        start = "\r" if self.is_terminal else ""
        # The padding erases the rest of a longer line.
        erase = "\x1b[K" if self.is_terminal else ""
        self.write(f"{start}{cut(self._line(), terminal_width() - 1)}{erase}{end}")
        self._was_shown = True

    def _line(self) -> str:
        rate = f"{self.done / max(self.clock() - self._started, 0.001):,.0f}/s"
        if not self.total:
            return f"{self.done:,} {self.unit}  {rate}"
        share = min(self.done / self.total, 1)
        counts = f"{self.done:,} of {self.total:,} {self.unit}  {rate}"
        if not self.is_terminal:
            return f"{share:.0%}  {counts}"
        drawn = padded(bar(share, maximum=1, width=24), 24)
        return f"▕{drawn}▏ {share:4.0%}  {counts}"
