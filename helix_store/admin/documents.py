"""A JSON document as a foldable tree, shown partly or as a whole, and a search in it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from math import inf
from typing import Any, Final

from django.utils.html import format_html, format_html_join
from django.utils.safestring import SafeString
from django.utils.translation import gettext as _
from django.utils.translation import ngettext

from helix_store.admin.elements import note, printable
from helix_store.core.payload_faults import join_path
from helix_store.reports.comparison import Change
from helix_store.reports.payloads import json_start

MISSING: Final = object()

_NODES: Final = 1_500
_CHILDREN: Final = 200
_DEPTH: Final = 24
_TEXT: Final = 500
_PATH: Final = 300
_CHANGES: Final = 200
_VALUE: Final = 600
_OPEN: Final = 40
"""The largest number of nodes that a document may have to be shown unfolded."""


@dataclass(slots=True)
class _Bounds:
    """The limits on what is shown of a document. ``left`` is the number of nodes that may still be shown."""

    left: float = _NODES
    children: float = _CHILDREN
    depth: float = _DEPTH
    text: float = _TEXT
    path: int | None = _PATH

    def take(self) -> bool:
        self.left -= 1
        return self.left >= 0


def tree(value: Any) -> SafeString:
    """Return the document with its objects and arrays folded, unless it is short."""
    bounds = _Bounds()
    is_open = _count(value, _OPEN) < _OPEN
    shown = _node(value, bounds, 0, is_open)
    rest = note(_("The rest is not shown here; the download has everything.")) if bounds.left < 0 else ""
    return format_html('<div class="helix-tree">{}{}</div>', shown, rest)


def whole_tree(value: Any) -> SafeString:
    """Return the whole document, with nothing folded or cut. The caller must know that it is short."""
    shown = _node(value, _Bounds(inf, inf, inf, inf, None), 0, True)
    return format_html('<div class="helix-tree">{}</div>', shown)


def _count(value: Any, limit: int) -> int:
    """Count the nodes of a document, up to a limit."""
    waiting, count = [value], 0
    while waiting and count < limit:
        count += 1
        node = waiting.pop()
        if isinstance(node, dict):
            waiting.extend(list(node.values())[:limit])
        elif isinstance(node, list):
            waiting.extend(node[:limit])
    return count


def _node(value: Any, bounds: _Bounds, depth: int, is_open: bool) -> SafeString:
    if not isinstance(value, dict | list) or not value:
        kind = "text" if isinstance(value, str) else "value"
        return format_html('<code class="helix-{}-leaf">{}</code>', kind, short(value, bounds.text))
    if depth == bounds.depth:
        return format_html('<code class="helix-value">{}</code>', printable(json_start(value, _TEXT)[0]))
    items: Iterator[tuple[Any, Any]] = iter(value.items() if isinstance(value, dict) else enumerate(value))
    rows = []
    for index, (key, child) in enumerate(items):
        if index == bounds.children or not bounds.take():
            rows.append((note(_("… %d more") % (len(value) - index)),))
            break
        rows.append((_row(key, child, bounds, depth + 1, is_open),))
    count = len(value)
    size = (
        ngettext("%d key", "%d keys", count)
        if isinstance(value, dict)
        else ngettext("%d item", "%d items", count)
    ) % count
    return format_html(
        "<details{}><summary>{}</summary><ul>{}</ul></details>",
        " open" if is_open or depth == 0 else "",
        size,
        format_html_join("", "<li>{}</li>", rows),
    )


def _row(key: Any, child: Any, bounds: _Bounds, depth: int, is_open: bool) -> SafeString:
    name = printable(str(key))
    shown = name[: bounds.path]
    if shown != name:
        shown += "…"
    kind = "key" if isinstance(key, str) else "index"
    return format_html(
        '<span class="helix-{}">{}</span> {}', kind, shown, _node(child, bounds, depth, is_open)
    )


def short(value: Any, limit: float = _TEXT) -> str:
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
