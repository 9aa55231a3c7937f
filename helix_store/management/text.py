"""Text in a terminal: stored text made safe, its width in cells, cutting and wrapping."""

from __future__ import annotations

import unicodedata
from typing import Final

ELLIPSIS: Final = "…"

_EMOJI_FORM: Final = "\ufe0f"
_JOINERS: Final = "\u200c\u200d"
_TAB: Final = " " * 4


def visible(text: str, *, keep: str = "") -> str:
    """Return text on one line, in which each character that a terminal obeys, refuses or hides is escaped.

    These are control characters (including newline and escape), bidirectional controls and other format
    characters, lone surrogates, and unassigned code points. The characters in ``keep`` are not escaped.
    """
    if text.isprintable():
        return text
    return "".join(
        char if char in keep or _is_shown(char) else char.encode("unicode_escape").decode("ascii")
        for char in text
    )


def _is_shown(char: str) -> bool:
    # Python considers every space except the ASCII one unprintable, including the ideographic space.
    return char.isprintable() or unicodedata.category(char) == "Zs"


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
        for piece in _wrapped_line(visible(line, keep=_JOINERS).rstrip(), room)
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
