"""The conversation as readable text: messages with their role, tool calls and tool results."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from helix_store.core.transcript import Part, Turn
from helix_store.management.output import Colours, Style, cell
from helix_store.management.text import wrapped

__all__ = ["capped", "conversation"]

_INDENT: Final = "    "
_RESULT_INDENT: Final = "      "
_LINES_OF_RESULT: Final = 12
_UNLIMITED: Final = 10**9
_STYLES: Final[dict[str, Style]] = {"user": "cyan", "assistant": "green", "system": "yellow", "tool": "blue"}


def conversation(turns: Iterable[Turn], *, width: int | None, colours: Colours) -> Iterator[str]:
    """Yield one block of text per message, with its sequence number and role above it.

    A result is printed below its call. Long results are cut, unless ``width`` is ``None``.
    """
    for turn in turns:
        lines = [colours(f"{turn.sequence}  {cell(turn.role)}", "bold", *_style(turn.role))]
        for own in turn.parts:
            lines.extend(_lines(own.part, width, colours))
            if own.result is not None:
                lines.extend(_result_lines(own.result, width, colours))
        yield "\n".join(lines)


def capped(lines: Sequence[str], limit: int | None) -> list[str]:
    """Return the first lines, followed by the number of lines that were left out."""
    if limit is None or len(lines) <= limit:
        return list(lines)
    indent = lines[0][: len(lines[0]) - len(lines[0].lstrip())]
    return [*lines[: limit - 1], f"{indent}… {len(lines) - limit + 1} more lines; --wide prints them"]


def _style(role: str) -> list[Style]:
    return [_STYLES[role]] if role in _STYLES else []


def _lines(part: Part, width: int | None, colours: Colours) -> list[str]:
    room = width or _UNLIMITED
    if part.kind == "result":
        return _result_lines(part, width, colours)
    if part.kind == "thinking":
        return [colours(line, "dim") for line in wrapped(part.text, room, indent=_INDENT)]
    if part.kind == "call":
        text = f"→ {part.name}({part.text})"
        lines = capped(wrapped(text, room, indent=_INDENT), _limit(width))
        return [colours(line, "yellow") for line in lines]
    if part.kind in ("file", "other"):
        return capped(wrapped(f"[{part.name}] {part.text}", room, indent=_INDENT), _limit(width))
    return wrapped(part.text, room, indent=_INDENT)


def _result_lines(part: Part, width: int | None, colours: Colours) -> list[str]:
    mark = "✗" if part.is_error else "←"
    name = f"{part.name}: " if part.name else ""
    lines = wrapped(f"{mark} {name}{part.text}", width or _UNLIMITED, indent=_RESULT_INDENT)
    return [
        colours(line, "red") if part.is_error else colours(line, "blue")
        for line in capped(lines, _limit(width))
    ]


def _limit(width: int | None) -> int | None:
    return None if width is None else _LINES_OF_RESULT
