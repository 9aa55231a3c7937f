"""The difference of two JSON documents, and a search in one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any, Final

from helix_store.admin.elements import printable
from helix_store.core.payload_faults import join_path
from helix_store.reports.comparison import Change
from helix_store.reports.payloads import json_start

MISSING: Final = object()

_TEXT: Final = 500
_CHANGES: Final = 200
_VALUE: Final = 600


def short(value: Any, limit: int = _TEXT) -> str:
    text, is_cut = json_start(value, limit)
    return printable(text) + ("…" if is_cut else "")


def difference(changes: Iterable[Change]) -> dict[str, Any]:
    """Return the first changes between two documents for the template that shows a difference."""
    found = list(islice(changes, _CHANGES + 1))
    return {
        "has_more": len(found) > _CHANGES,
        "lines": [
            {
                "op": change.op,
                "path": printable(change.path),
                "before": None if change.op == "add" else short(change.before, _VALUE),
                "after": None if change.op == "remove" else short(change.after, _VALUE),
            }
            for change in found[:_CHANGES]
        ],
    }


def matches(value: Any, term: str) -> Iterator[tuple[str, str]]:
    """Yield the places whose key or plain value contains a string, as JSON pointers, and the values there."""
    wanted = term.casefold()
    waiting: list[tuple[str, Any, Any]] = [("", None, value)]
    while waiting:
        path, key, node = waiting.pop()
        if any(wanted in text.casefold() for text in _searched(key, node)):
            yield path, short(node)
        if isinstance(node, dict):
            waiting.extend((join_path(path, name), name, child) for name, child in reversed(node.items()))
        elif isinstance(node, list):
            last = len(node) - 1
            waiting.extend((join_path(path, last - i), None, child) for i, child in enumerate(reversed(node)))


def _searched(key: Any, node: Any) -> Iterator[str]:
    """Yield the strings at a place that a search examines."""
    if isinstance(key, str):
        yield key
    if isinstance(node, str):
        yield node
    elif not isinstance(node, dict | list):
        yield json_start(node, _TEXT)[0]


def at(value: Any, path: str) -> Any:
    """Return the value that a JSON pointer refers to, or `MISSING`."""
    if not path:
        return value
    if not path.startswith("/"):
        return MISSING
    for segment in path[1:].split("/"):
        name = segment.replace("~1", "/").replace("~0", "~")
        if isinstance(value, dict) and name in value:
            value = value[name]
        elif isinstance(value, list) and name.isascii() and name.isdigit() and len(name) < 10:
            if int(name) >= len(value):
                return MISSING
            value = value[int(name)]
        else:
            return MISSING
    return value
