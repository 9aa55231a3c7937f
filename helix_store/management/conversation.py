"""The conversation as readable text: messages with their role, tool calls and tool results."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from helix_store.core.transcript import Part, Turn
from helix_store.management.output import Layout, Style, cell
from helix_store.management.text import wrapped

_INDENT: Final = "    "
_RESULT_INDENT: Final = "      "
_LINES_OF_RESULT: Final = 12
_UNLIMITED: Final = 10**9
_STYLES: Final[dict[str, Style]] = {"user": "cyan", "assistant": "green", "system": "yellow", "tool": "blue"}


def conversation(turns: Iterable[Turn], layout: Layout) -> Iterator[str]:
    """Yield one block of text per message, with its sequence number and role above it.

    A result is printed below its call. Long results are cut, unless the width is ``None``.
    """
    for turn in turns:
        lines = [layout.coloured(f"{turn.sequence}  {cell(turn.role)}", "bold", *_style(turn.role))]
        for own in turn.parts:
            lines.extend(_lines(own.part, layout))
            if own.result is not None:
                lines.extend(_result_lines(own.result, layout))
        yield "\n".join(lines)


def capped(lines: Sequence[str], limit: int | None) -> list[str]:
    """Return the first lines, followed by the number of lines that were left out."""
    if limit is None or len(lines) <= limit:
        return list(lines)
    indent = lines[0][: len(lines[0]) - len(lines[0].lstrip())]
    return [*lines[: limit - 1], f"{indent}… {len(lines) - limit + 1} more lines; --wide prints them"]


def _style(role: str) -> list[Style]:
    return [_STYLES[role]] if role in _STYLES else []


def _lines(part: Part, layout: Layout) -> list[str]:
    room = layout.width or _UNLIMITED
    if part.kind == "result":
        return _result_lines(part, layout)
    if part.kind == "thinking":
        return [layout.coloured(line, "dim") for line in wrapped(part.text, room, indent=_INDENT)]
    if part.kind == "call":
        text = f"→ {part.name}({part.text})"
        lines = capped(wrapped(text, room, indent=_INDENT), _limit(layout))
        return [layout.coloured(line, "yellow") for line in lines]
    if part.kind in ("file", "other"):
        return capped(wrapped(f"[{part.name}] {part.text}", room, indent=_INDENT), _limit(layout))
    return wrapped(part.text, room, indent=_INDENT)


def _result_lines(part: Part, layout: Layout) -> list[str]:
    mark = "✗" if part.is_error else "←"
    name = f"{part.name}: " if part.name else ""
    lines = wrapped(f"{mark} {name}{part.text}", layout.width or _UNLIMITED, indent=_RESULT_INDENT)
    style: Style = "red" if part.is_error else "blue"
    return [layout.coloured(line, style) for line in capped(lines, _limit(layout))]


def _limit(layout: Layout) -> int | None:
    return None if layout.width is None else _LINES_OF_RESULT
