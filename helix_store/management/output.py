"""What commands print: tables fitted to the terminal, times, colours, bars. Stored text is always escaped."""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from types import TracebackType
from typing import Any, Final, Literal, Self

from django.utils import timezone

from helix_store.management.text import cut, cut_middle, padded, visible, width_of, wrapped

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
    "epoch_moment",
    "moment",
    "pairs",
    "status_style",
    "table",
    "terminal_width",
]

NOTHING: Final = "-"

_GAP: Final = "  "
_SMALLEST_WIDTH: Final = 40
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)

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
    """The columns of the terminal: ``COLUMNS``, or what the terminal says, or 80 when there is none."""
    return max(shutil.get_terminal_size(fallback=(80, 24)).columns, _SMALLEST_WIDTH)


# --- Colours and times -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Colours:
    """Colours a text that is already visible, or leaves it as it is when it is off."""

    is_on: bool

    def __call__(self, text: str, *styles: Style) -> str:
        if not self.is_on or not styles or not text:
            return text
        codes = ";".join(str(_CODES[style]) for style in styles)
        # Per line: a pager forgets the colour at the end of one.
        return "\n".join(f"\x1b[{codes}m{line}\x1b[0m" if line else line for line in text.split("\n"))


_PLAIN: Final = Colours(is_on=False)


def status_style(status: str) -> Style | None:
    """The colour of a session's, run's or stream's status."""
    return _STYLES_OF_STATUSES.get(status)


def moment(value: datetime | None, *, seconds: bool = False) -> str:
    """A time in the project's time zone, with the zone: ``2026-11-22 11:22 UTC``."""
    if value is None:
        return NOTHING
    local = timezone.localtime(value)
    text = local.strftime("%Y-%m-%d %H:%M:%S" if seconds else "%Y-%m-%d %H:%M")
    offset = local.utcoffset()
    # "CST" has four meanings; an offset has one.
    return f"{text} {local.strftime('%z')[:3]}:{local.strftime('%z')[3:5]}" if offset else f"{text} UTC"


def epoch_moment(milliseconds: int | None, *, seconds: bool = False) -> str:
    """`moment` of epoch milliseconds; the number itself when no calendar has it."""
    if milliseconds is None:
        return NOTHING
    try:
        return moment(_EPOCH + timedelta(milliseconds=milliseconds), seconds=seconds)
    except OverflowError:
        return str(milliseconds)


def cell(value: Any) -> str:
    """A value as a visible text of one line."""
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
    """A column of a table. ``cut`` says where a cell gives way; ``style`` gets the text of a cell.

    A column that ``may_be_empty`` is left out when the first rows have no value for it.
    """

    heading: str
    cut: Literal["end", "middle", "never"] = "end"
    right: bool = False
    minimum: int = 8
    is_optional: bool = False
    may_be_empty: bool = False
    style: Callable[[str], Style | None] | None = None

    def fitted(self, text: str, width: int) -> str:
        return cut_middle(text, width) if self.cut == "middle" else cut(text, width)


class Table:
    """Rows below their headings, in any number of parts: the first part decides how wide the columns are.

    No line is wider than ``width`` cells; ``None`` leaves every cell whole. The widest columns give way.
    When all are at their minimum, optional columns are left out, the last one first.
    """

    def __init__(
        self, columns: Sequence[Column | str], *, width: int | None = None, colours: Colours = _PLAIN
    ) -> None:
        self._columns = [Column(heading=each) if isinstance(each, str) else each for each in columns]
        self._shown: list[int] = list(range(len(self._columns)))
        self._widths: list[int] = []
        self._width = width
        self._colours = colours

    def lines(self, rows: Iterable[Sequence[Any]]) -> Iterator[str]:
        """The lines of some rows; before the first ones that of the headings."""
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
        columns = [self._columns[index] for index in self._shown]
        fitted = _fitted_widths(columns, [self._widths[index] for index in self._shown], self._width)
        for index, size in zip(self._shown, fitted, strict=True):
            self._widths[index] = size

    def _least_width(self) -> int:
        least = [
            size if column.cut == "never" else min(size, column.minimum)
            for column, size in ((self._columns[index], self._widths[index]) for index in self._shown)
        ]
        return sum(least) + len(_GAP) * (len(least) - 1)

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
            # No colour in a line that is cut: the end of the colour would be cut off.
            return cut(line, self._width)
        return _GAP.join(coloured).rstrip()


def table(
    columns: Sequence[Column | str],
    rows: Iterable[Sequence[Any]],
    *,
    width: int | None = None,
    colours: Colours = _PLAIN,
) -> str:
    """All rows of a `Table`. A column given as text is cut at the end."""
    return "\n".join(Table(columns, width=width, colours=colours).lines(rows))


def _style_of(column: Column, text: str) -> Style | None:
    return None if column.style is None else column.style(text)


def _fitted_widths(columns: Sequence[Column], widths: Sequence[int], width: int) -> list[int]:
    """The widths of columns, the widest made narrower until all fit or all are at their minimum."""
    available = width - len(_GAP) * (len(columns) - 1)
    fitted = [
        min(size, available) if column.cut != "never" else size
        for column, size in zip(columns, widths, strict=True)
    ]
    while sum(fitted) > available:
        shrinkable = [
            index
            for index, column in enumerate(columns)
            if column.cut != "never" and fitted[index] > column.minimum
        ]
        if not shrinkable:
            break
        fitted[max(shrinkable, key=lambda index: fitted[index])] -= 1
    return fitted


def pairs(values: Iterable[tuple[str, Any]], *, width: int | None = None, colours: Colours = _PLAIN) -> str:
    """Names and values, one pair a line; a value that does not fit continues below itself."""
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
    """A bar of at most ``width`` cells, exact to an eighth; a value above 0 is never empty."""
    if not (value > 0 and maximum > 0) or math.isinf(value) or width < 1:
        return ""
    eighths = min(max(round(value / maximum * width * 8), 1), width * 8)
    whole, rest = divmod(eighths, 8)
    return _EIGHTHS[8] * whole + (_EIGHTHS[rest] if rest else "")


def bars(
    rows: Iterable[tuple[Any, float, Any]], *, width: int | None = None, colours: Colours = _PLAIN
) -> str:
    """A line for each label, value and text of the value, with a bar as long as the value is large."""
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
    """Says how far a loop is, on stderr; nothing before its first second is over.

    On a terminal it is one line that is drawn again, at most ten times a second. Elsewhere (a log of cron) it
    is a line every ten seconds. A context manager: the last state stays on the screen.
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
        """``count`` more are done."""
        self.update(self.done + count)

    def update(self, done: int) -> None:
        """``done`` are done altogether."""
        self.done = done
        now = self._clock()
        if not self._is_silent and now >= self._due:
            self._due = now + (self.again_on_terminal if self._is_terminal else self.again_in_log)
            self._show(end="" if self._is_terminal else "\n")

    def _show(self, *, end: str) -> None:
        start = "\r" if self._is_terminal else ""
        # Erases what is left of a longer line.
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
