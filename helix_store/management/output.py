"""Terminal output of commands: fitted tables, times, colours and bars. Stored text is always escaped."""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise
from os.path import commonprefix
from types import TracebackType
from typing import Any, Final, Literal, Self

from helix_store.management.text import cut, cut_middle, padded, visible, width_of, wrapped
from helix_store.reports.times import NOTHING, moment

__all__ = [
    "NOTHING",
    "Colours",
    "Column",
    "ProgressBar",
    "Style",
    "Table",
    "bar",
    "bars",
    "cell",
    "pairs",
    "status_style",
    "table",
    "terminal_width",
]

_GAP: Final = "  "
_SMALLEST_WIDTH: Final = 40
_LONGEST_ID: Final = 40
"""The maximum number of cells for an id. A UUID has 36."""

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
_STYLES_OF_STATUSES: Final[dict[str, Style]] = {
    "active": "cyan",
    "running": "cyan",
    "paused": "yellow",
    "interrupted": "yellow",
    "suspended_client_tool": "yellow",
    "suspended_awaiting_children": "yellow",
    "suspended_step_partial": "yellow",
    "completed": "green",
    "ended": "green",
    "failed": "red",
}


def terminal_width() -> int:
    """Return the width of the terminal: ``COLUMNS``, or the reported width, or 80 without a terminal."""
    return max(shutil.get_terminal_size(fallback=(80, 24)).columns, _SMALLEST_WIDTH)


# --- Colours -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Colours:
    """A function that colours a visible text, or returns it unchanged if colours are off."""

    is_on: bool

    def __call__(self, text: str, *styles: Style) -> str:
        if not self.is_on or not styles or not text:
            return text
        codes = ";".join(str(_CODES[style]) for style in styles)
        # Colour each line separately, because a pager resets the colour at the end of a line.
        return "\n".join(f"\x1b[{codes}m{line}\x1b[0m" if line else line for line in text.split("\n"))


_PLAIN: Final = Colours(is_on=False)


def status_style(status: str) -> Style | None:
    """Return the colour for the status of a session, run or stream."""
    return _STYLES_OF_STATUSES.get(status)


def cell(value: Any) -> str:
    """Return a value as visible text on one line."""
    if value is None:
        return NOTHING
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, datetime):
        return moment(value)
    return visible(str(value))


# --- Tables ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """A column of a table. ``cut`` selects where a cell is shortened; ``style`` receives the text of a cell.

    A cell of ids (``id``) is cut at its end, but keeps enough to be told apart from the other rows' ids. A
    column that ``may_be_empty`` is left out if the first rows have no value for it.
    """

    heading: str
    cut: Literal["end", "id", "middle", "never"] = "end"
    right: bool = False
    minimum: int = 8
    is_optional: bool = False
    may_be_empty: bool = False
    style: Callable[[str], Style | None] | None = None

    def fitted(self, text: str, width: int) -> str:
        return cut_middle(text, width) if self.cut == "middle" else cut(text, width)


class Table:
    """A table in any number of parts. The first part determines the widths of the columns.

    No line is wider than ``width`` cells; ``None`` leaves every cell whole. The widest columns are cut first.
    When all columns are at their minimum, optional ones are left out, starting with the last.
    """

    def __init__(
        self, columns: Sequence[Column | str], *, width: int | None = None, colours: Colours = _PLAIN
    ) -> None:
        self._columns = [Column(heading=each) if isinstance(each, str) else each for each in columns]
        self._shown: list[int] = list(range(len(self._columns)))
        self._widths: list[int] = []
        self._minimums: list[int] = []
        self._width = width
        self._colours = colours

    def lines(self, rows: Iterable[Sequence[Any]]) -> Iterator[str]:
        """Yield the lines of some rows, with the headings before the first part."""
        texts = [[cell(value) for value in row] for row in rows]
        if not self._widths:
            self._lay_out(texts)
            headings = [column.heading for column in self._columns]
            yield self._line(headings, lambda column, text: "bold")
        for row in texts:
            yield self._line(row, _style_of)

    def _lay_out(self, texts: Sequence[Sequence[str]]) -> None:
        self._widths = [
            max(width_of(text) for text in (column.heading, *(row[index] for row in texts)))
            for index, column in enumerate(self._columns)
        ]
        self._minimums = [
            _least_width(column, [row[index] for row in texts], self._widths[index])
            for index, column in enumerate(self._columns)
        ]
        self._shown = [
            index
            for index, column in enumerate(self._columns)
            if not column.may_be_empty or any(row[index] != NOTHING for row in texts)
        ]
        if self._width is None:
            return
        optional = [index for index in self._shown if self._columns[index].is_optional]
        while optional and self._least_width() > self._width:
            self._shown.remove(optional.pop())
        fitted = _fitted_widths(
            [self._widths[index] for index in self._shown],
            [self._minimums[index] for index in self._shown],
            self._width,
        )
        for index, size in zip(self._shown, fitted, strict=True):
            self._widths[index] = size

    def _least_width(self) -> int:
        return sum(self._minimums[index] for index in self._shown) + len(_GAP) * (len(self._shown) - 1)

    def _line(self, texts: Sequence[str], style_of: Callable[[Column, str], Style | None]) -> str:
        plain, coloured = [], []
        for index in self._shown:
            column, text, size = self._columns[index], texts[index], self._widths[index]
            shown = text if self._width is None else column.fitted(text, size)
            style = style_of(column, text)
            plain.append(padded(shown, size, right=column.right))
            coloured.append(
                plain[-1] if style is None else plain[-1].replace(shown, self._colours(shown, style), 1)
            )
        line = _GAP.join(plain).rstrip()
        if self._width is not None and width_of(line) > self._width:
            # A line that is cut gets no colour, because the end of the colour would be cut off.
            return cut(line, self._width)
        return _GAP.join(coloured).rstrip()


def table(
    columns: Sequence[Column | str],
    rows: Iterable[Sequence[Any]],
    *,
    width: int | None = None,
    colours: Colours = _PLAIN,
) -> str:
    """Return all rows of a `Table` as text. A column given as a string is cut at its end."""
    return "\n".join(Table(columns, width=width, colours=colours).lines(rows))


def _style_of(column: Column, text: str) -> Style | None:
    return None if column.style is None else column.style(text)


def _least_width(column: Column, cells: Sequence[str], width: int) -> int:
    """Return the smallest width of a column whose widest cell takes ``width`` cells."""
    if column.cut == "never":
        return width
    least = column.minimum
    if column.cut == "id":
        neighbours = pairwise(sorted(set(cells)))
        # A sub-session's id often begins with its parent's id, so no start distinguishes the two.
        apart = (pair for pair in neighbours if not pair[1].startswith(pair[0]))
        starts = (commonprefix(pair) for pair in apart)  # noqa: RUF071  of texts, not of paths
        least = max([least, *(min(width_of(start) + 2, _LONGEST_ID) for start in starts)])
    return min(width, least)


def _fitted_widths(widths: Sequence[int], minimums: Sequence[int], width: int) -> list[int]:
    """Return column widths: narrow the widest until all columns fit or are at their minimum."""
    available = width - len(_GAP) * (len(widths) - 1)
    # No column needs more than the available width, unless its minimum is larger.
    fitted = [max(min(size, available), least) for size, least in zip(widths, minimums, strict=True)]
    while sum(fitted) > available:
        shrinkable = [index for index, least in enumerate(minimums) if fitted[index] > least]
        if not shrinkable:
            break
        fitted[max(shrinkable, key=lambda index: fitted[index])] -= 1
    return fitted


def pairs(values: Iterable[tuple[str, Any]], *, width: int | None = None, colours: Colours = _PLAIN) -> str:
    """Return names and values, one pair per line. A value that does not fit continues below itself."""
    texts = [(name, cell(value)) for name, value in values]
    indent = max((width_of(name) for name, _ in texts), default=0) + len(_GAP)
    lines: list[str] = []
    for name, text in texts:
        pieces = [text] if width is None else wrapped(text, max(width - indent, 10)) or [""]
        lines.append(f"{colours(name, 'bold')}{' ' * (indent - width_of(name))}{pieces[0]}".rstrip())
        lines.extend(f"{' ' * indent}{piece}" for piece in pieces[1:])
    return "\n".join(lines)


# --- Bars --------------------------------------------------------------------------------------------

_EIGHTHS: Final = " ▏▎▍▌▋▊▉█"


def bar(value: float, *, maximum: float, width: int) -> str:
    """Return a bar of at most ``width`` cells, exact to an eighth. A value above 0 is never empty."""
    if not (value > 0 and maximum > 0) or math.isinf(value) or width < 1:
        return ""
    eighths = min(max(round(value / maximum * width * 8), 1), width * 8)
    whole, rest = divmod(eighths, 8)
    return _EIGHTHS[8] * whole + (_EIGHTHS[rest] if rest else "")


def bars(
    rows: Iterable[tuple[Any, float, Any]], *, width: int | None = None, colours: Colours = _PLAIN
) -> str:
    """Return a line for each label, value and text, with a bar in proportion to the value."""
    drawn = [(cell(label), value, cell(text)) for label, value, text in rows]
    limit = width or 120
    texts = max((width_of(text) for _, _, text in drawn), default=0)
    labels = max((width_of(label) for label, _, _ in drawn), default=0)
    if width is not None:
        labels = min(labels, max((limit - texts) // 2, 8))
    room = max(limit - labels - texts - 2 * len(_GAP), 1)
    maximum = max((value for _, value, _ in drawn), default=0)
    lines = []
    for label, value, text in drawn:
        drawn_bar = bar(value, maximum=maximum, width=room)
        name = padded(cut_middle(label, labels), labels)
        lines.append(
            f"{name}{_GAP}{padded(text, texts, right=True)}{_GAP}{colours(drawn_bar, 'cyan')}".rstrip()
        )
    return "\n".join(lines)


class ProgressBar:
    """A context manager that reports the progress of a loop on stderr, beginning after one second.

    In a terminal it redraws one line, at most ten times a second. Elsewhere (such as in cron's log) it writes
    a line every ten seconds. The last state stays on the screen.
    """

    first_after: float = 1.0
    again_on_terminal: float = 0.1
    again_in_log: float = 10.0

    def __init__(
        self,
        write: Callable[[str], None],
        *,
        unit: str,
        is_terminal: bool,
        total: int | None = None,
        is_silent: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.done = 0
        self.total = total
        self.unit = unit
        self._write = write
        self._is_silent = is_silent
        self._is_terminal = is_terminal
        self._clock = clock
        self._started = clock()
        self._due = self._started + self.first_after
        self._was_shown = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._was_shown:
            self._show(end="\n")

    def advance(self, count: int = 1) -> None:
        """Report that ``count`` more items are done."""
        self.update(self.done + count)

    def update(self, done: int) -> None:
        """Report that ``done`` items are done in total."""
        self.done = done
        now = self._clock()
        if not self._is_silent and now >= self._due:
            self._due = now + (self.again_on_terminal if self._is_terminal else self.again_in_log)
            self._show(end="" if self._is_terminal else "\n")

    def _show(self, *, end: str) -> None:
        start = "\r" if self._is_terminal else ""
        # The padding erases the rest of a longer line.
        erase = "\x1b[K" if self._is_terminal else ""
        self._write(f"{start}{cut(self._line(), terminal_width() - 1)}{erase}{end}")
        self._was_shown = True

    def _line(self) -> str:
        seconds = max(self._clock() - self._started, 0.001)
        rate = self.done / seconds
        if not self.total:
            return f"{self.done:,} {self.unit}  {rate:,.0f}/s  {_duration(seconds)}"
        share = min(self.done / self.total, 1)
        left = f"  {_duration((self.total - self.done) / rate)} left" if rate and share < 1 else ""
        counts = f"{self.done:,} of {self.total:,} {self.unit}  {rate:,.0f}/s{left}"
        if not self._is_terminal:
            return f"{share:.0%}  {counts}"
        drawn = padded(bar(share, maximum=1, width=24), 24)
        return f"▕{drawn}▏ {share:4.0%}  {counts}"


def _duration(seconds: float) -> str:
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02} min"
