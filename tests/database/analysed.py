"""A statement as PostgreSQL analyses it: the tree of the query, with the functions that it calls.

PostgreSQL stores the body of an SQL function as such a tree, so it is asked to make one of the statement.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final

from django.db import transaction
from django.db.backends.base.base import BaseDatabaseWrapper

__all__ = ["Node", "analysed"]

_TOKEN: Final = re.compile(r"[{}()]|(?:\\.|[^\s{}()\\])+")
_PLACEHOLDER: Final = re.compile(r"%(?:\((\w+)\)s|(s)|(%))")
_BODY: Final = "SELECT prosqlbody::text FROM pg_proc WHERE oid = 'pg_temp.analysed'::regproc"
_TYPES: Final = "SELECT parameter_types::text[] FROM pg_prepared_statements WHERE name = 'analysed'"


@dataclass
class Node:
    """``{NAME :field value …}``; the values of a field are texts, nodes and lists."""

    name: str
    fields: dict[str, list[Any]] = field(default_factory=dict)

    def text(self, name: str) -> str:
        (value, *_) = self.fields.get(name) or ["0"]
        return value if isinstance(value, str) else ""

    def nodes(self) -> Iterator[Node]:
        """This node, and all nodes in it."""
        yield self
        for values in self.fields.values():
            yield from _nodes_in(values)

    def nodes_of(self, name: str) -> Iterator[Node]:
        yield from _nodes_in(self.fields.get(name, []))


def _nodes_in(value: Any) -> Iterator[Node]:
    if isinstance(value, Node):
        yield from value.nodes()
    elif isinstance(value, list):
        for each in value:
            yield from _nodes_in(each)


def analysed(connection: BaseDatabaseWrapper, text: str, *, is_bound: bool = False) -> Node:
    """The tree of a statement with placeholders of a driver, or bound: with the values in their place."""
    with transaction.atomic(using=connection.alias), connection.cursor() as cursor:
        numbered = text if is_bound else _numbered(text)
        cursor.execute(f"PREPARE analysed AS {numbered}")
        cursor.execute(_TYPES)
        (types,) = cursor.fetchone()
        cursor.execute("DEALLOCATE analysed")
        cursor.execute(
            f"CREATE FUNCTION pg_temp.analysed({', '.join(types)}) RETURNS void LANGUAGE sql "
            f"BEGIN ATOMIC {numbered}; END"
        )
        cursor.execute(_BODY)
        (body,) = cursor.fetchone()
        cursor.execute("DROP FUNCTION pg_temp.analysed")
    return next(node for node in _nodes_in(_parsed(body)) if node.name == "QUERY")


def _numbered(text: str) -> str:
    numbers: dict[str, int] = {}

    def number(match: re.Match[str]) -> str:
        if match[3]:
            return "%"
        name = match[1] or f"position {len(numbers)}"
        return f"${numbers.setdefault(name, len(numbers) + 1)}"

    return _PLACEHOLDER.sub(number, text)


def _parsed(text: str) -> list[Any]:
    return _values(iter(_TOKEN.findall(text)), end="")


def _values(tokens: Iterator[str], *, end: str) -> list[Any]:
    values: list[Any] = []
    for token in tokens:
        if token == end:
            break
        if token == "(":
            values.append(_values(tokens, end=")"))
        elif token == "{":
            values.append(_node(next(tokens), _values(tokens, end="}")))
        else:
            values.append(token)
    return values


def _node(name: str, values: list[Any]) -> Node:
    node = Node(name)
    current: list[Any] = []
    for value in values:
        if isinstance(value, str) and value.startswith(":"):
            current = node.fields[value[1:]] = []
        else:
            current.append(value)
    return node
