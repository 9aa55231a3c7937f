"""A JSON document as a foldable tree, bounded in nodes and in bytes; and what of it matches a search."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from django.utils.html import format_html, format_html_join
from django.utils.safestring import SafeString
from django.utils.translation import gettext as _
from django.utils.translation import ngettext

from helix_store.admin.elements import json_start, note, printable
from helix_store.core.payload_faults import join_path

__all__ = ["MISSING", "Match", "at", "matches", "tree"]

MISSING: Final = object()

_NODES: Final = 1_500
_CHILDREN: Final = 200
_DEPTH: Final = 24
_TEXT: Final = 500
_PATH: Final = 300
_OPEN: Final = 40
"""Nodes of a document that is shown unfolded."""


@dataclass(frozen=True, slots=True)
class Match:
    """A place of a document, as a JSON pointer, and what is there."""

    path: str
    value: str


class _Budget:
    """The nodes that may still be shown."""

    def __init__(self, nodes: int) -> None:
        self.left = nodes

    def take(self) -> bool:
        self.left -= 1
        return self.left >= 0


def tree(value: Any) -> SafeString:
    """The document with its objects and arrays folded, unless it is short."""
    budget = _Budget(_NODES)
    is_open = _count(value, _OPEN) < _OPEN
    shown = _node(value, budget, 0, is_open)
    rest = note(_("The rest is not shown here; the download has everything.")) if budget.left < 0 else ""
    return format_html('<div class="helix-tree">{}{}</div>', shown, rest)


def _count(value: Any, limit: int) -> int:
    """The nodes of a document, counted up to a limit."""
    waiting, count = [value], 0
    while waiting and count < limit:
        count += 1
        node = waiting.pop()
        if isinstance(node, dict):
            waiting.extend(list(node.values())[:limit])
        elif isinstance(node, list):
            waiting.extend(node[:limit])
    return count


def _node(value: Any, budget: _Budget, depth: int, is_open: bool) -> SafeString:
    if not isinstance(value, dict | list) or not value:
        return _leaf(value)
    if depth == _DEPTH:
        return format_html('<code class="helix-value">{}</code>', printable(json_start(value, _TEXT)[0]))
    items: Iterator[tuple[Any, Any]] = iter(value.items() if isinstance(value, dict) else enumerate(value))
    rows = []
    for index, (key, child) in enumerate(items):
        if index == _CHILDREN or not budget.take():
            rows.append((note(_("… %d more") % (len(value) - index)),))
            break
        rows.append((_row(key, child, budget, depth + 1, is_open),))
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


def _row(key: Any, child: Any, budget: _Budget, depth: int, is_open: bool) -> SafeString:
    name = printable(str(key))
    shown = f"{name[:_PATH]}…" if len(name) > _PATH else name
    kind = "key" if isinstance(key, str) else "index"
    return format_html(
        '<span class="helix-{}">{}</span> {}', kind, shown, _node(child, budget, depth, is_open)
    )


def _leaf(value: Any) -> SafeString:
    kind = "text" if isinstance(value, str) else "value"
    return format_html('<code class="helix-{}-leaf">{}</code>', kind, _short(value))


def _short(value: Any) -> str:
    text, is_cut = json_start(value, _TEXT)
    return printable(text) + ("…" if is_cut else "")


def matches(value: Any, term: str, limit: int) -> list[Match]:
    """The first places whose key or plain value contains a text, in the order of the document."""
    wanted = term.casefold()
    found: list[Match] = []
    waiting: list[tuple[str, Any, Any]] = [("", None, value)]
    while waiting and len(found) < limit:
        path, key, node = waiting.pop()
        if any(wanted in text.casefold() for text in _searched(key, node)):
            found.append(Match(path, _short(node)))
        if isinstance(node, dict):
            waiting.extend((join_path(path, name), name, child) for name, child in reversed(node.items()))
        elif isinstance(node, list):
            last = len(node) - 1
            waiting.extend((join_path(path, last - i), None, child) for i, child in enumerate(reversed(node)))
    return found


def _searched(key: Any, node: Any) -> Iterator[str]:
    """The texts of a place in which a search looks."""
    if isinstance(key, str):
        yield key
    if isinstance(node, str):
        yield node
    elif not isinstance(node, dict | list):
        yield json_start(node, _TEXT)[0]


def at(value: Any, path: str) -> Any:
    """What a JSON pointer leads to, or `MISSING`."""
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
