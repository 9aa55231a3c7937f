"""Paths of patch operations: RFC 6901 pointers and Immer's arrays of keys and indexes."""

from __future__ import annotations

import re
from typing import Any, Final, TypeAlias

__all__ = ["Refused", "Segment", "is_same_or_inside", "list_index", "member_name", "read_path", "shown"]

Segment: TypeAlias = str | int

_REFUSED_SEGMENTS: Final = frozenset({"__proto__", "constructor", "prototype"})
"""Python does not mind them, but states are read by JavaScript clients too, where they reach a prototype."""

_LARGEST_INDEX: Final = 10**15
_INDEX: Final = re.compile("0|[1-9][0-9]{0,14}")
_BROKEN_ESCAPE: Final = re.compile("~(?![01])")
_SHOWN_CHARACTERS: Final = 60


class Refused(ValueError):
    """Why an operation cannot be applied; the caller adds which one it was."""


def read_path(path: Any) -> list[Segment]:
    """Split a path into its segments; an empty list is the whole document."""
    if isinstance(path, str):
        segments = _pointer_segments(path)
    elif isinstance(path, list):
        segments = path
        for segment in segments:
            if type(segment) is int:
                if not 0 <= segment < _LARGEST_INDEX:
                    raise Refused("an index in the path is negative or too large")
            elif type(segment) is not str:
                raise Refused("a path array holds only keys (text) and indexes (whole numbers)")
    else:
        raise Refused("a path is a JSON pointer or an array of keys and indexes")
    for segment in segments:
        if segment in _REFUSED_SEGMENTS:
            raise Refused(f"{shown(segment)} is not allowed in a path")
    return segments


def is_same_or_inside(segments: list[Segment], parent: list[Segment]) -> bool:
    """Whether a path is ``parent`` or leads into it, whichever form each is written in."""
    return [str(segment) for segment in segments[: len(parent)]] == [str(segment) for segment in parent]


def list_index(segment: Segment, end: int) -> int:
    """The index below ``end`` that a segment names.

    Text must be the digits JavaScript itself would print: it would take "01", "-1" or "x" for another
    index than the writer meant.
    """
    if isinstance(segment, str):
        if not _INDEX.fullmatch(segment):
            raise Refused(f"{shown(segment)} is not an array index")
        segment = int(segment)
    if segment >= end:
        raise Refused(f"index {segment} is outside the array")
    return segment


def member_name(segment: Segment) -> str:
    """The object member that a segment names. A number is refused: its writer expected an array."""
    if isinstance(segment, int):
        raise Refused(f"index {segment} leads into an object; its members are named by text")
    return segment


def shown(segment: Segment) -> str:
    """A segment as error messages show it: printable and short."""
    text = repr(segment)
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}…"


def _pointer_segments(pointer: str) -> list[Segment]:
    if pointer == "":
        return []
    if not pointer.startswith("/"):
        raise Refused("a JSON pointer is empty or starts with '/'")
    if _BROKEN_ESCAPE.search(pointer):
        raise Refused("'~' in a JSON pointer is followed by '0' or '1'")
    return [segment.replace("~1", "/").replace("~0", "~") for segment in pointer.split("/")[1:]]
