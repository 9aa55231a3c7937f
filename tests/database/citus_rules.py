"""What the planner of Citus refuses, found in a statement without a cluster.

A volatile function is refused beside a table. A write may call a stable one, which the entry node evaluates,
but not in CASE, COALESCE or RETURNING, and not with a column. An INSERT ... SELECT is run on the entry node,
so that the node with the tables meets a query in its RETURNING without knowing the tables.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cache
from typing import Final, NamedTuple

from django.db import connections
from django.db.backends.base.base import BaseDatabaseWrapper

from tests.database.analysed import Node, analysed
from tests.database.separate import fetch

__all__ = ["refusals"]

_SELECT: Final = "1"
_FIRST_OF_USERS: Final = 16_384
"""The lowest number of a table that is none of the server's own, which are not distributed."""
_FUNCTION_OF: Final = {
    "FUNCEXPR": "funcid",
    "OPEXPR": "opfuncid",
    "DISTINCTEXPR": "opfuncid",
    "NULLIFEXPR": "opfuncid",
    "SCALARARRAYOPEXPR": "opfuncid",
    "AGGREF": "aggfnoid",
    "WINDOWFUNC": "winfnoid",
}
_CALLS: Final = {*_FUNCTION_OF, "COERCEVIAIO"}
_TYPE_OF: Final = {
    "VAR": "vartype",
    "CONST": "consttype",
    "PARAM": "paramtype",
    "FUNCEXPR": "funcresulttype",
    "OPEXPR": "opresulttype",
    "RELABELTYPE": "resulttype",
    "COERCEVIAIO": "resulttype",
}


def refusals(connection: BaseDatabaseWrapper, text: str, *, is_bound: bool = False) -> set[str]:
    """Why Citus may refuse a statement, or run it on another clock than that of the entry node."""
    query = analysed(connection, text, is_bound=is_bound)
    if not any(int(node.text("relid")) >= _FIRST_OF_USERS for node in _tables(query)):
        return set()
    found = {f"volatile: {name}" for name in _names(connection, query.nodes(), "v")}
    if query.text("commandType") != _SELECT:
        found |= {f"not immutable: {name}" for name in _names(connection, _constant_places(query), "s")}
    found |= {"several writes" for cte in query.nodes_of("cteList") if _writes(cte)}
    if query.text("commandType") == "3" and any(node.name == "ROWMARKCLAUSE" for node in query.nodes()):
        found.add("row lock in an INSERT")
    if query.text("commandType") == "3" and any(
        node.name == "SUBLINK" for node in query.nodes_of("returningList")
    ):
        found.add("query in the RETURNING of an INSERT")
    return found


def _tables(query: Node) -> Iterator[Node]:
    return (node for node in query.nodes() if node.name == "RANGETBLENTRY")


def _writes(node: Node) -> bool:
    return node.name == "QUERY" and node.text("commandType") != _SELECT


def _constant_places(query: Node) -> Iterator[Node]:
    """What has to be immutable in a write."""
    for node in query.nodes():
        if node.name.startswith(("CASE", "COALESCE")):
            yield from node.nodes()
        elif node.name in _CALLS and any(each.name == "VAR" for each in node.nodes()):
            yield node
    yield from query.nodes_of("returningList")


def _names(connection: BaseDatabaseWrapper, nodes: Iterable[Node], volatility: str) -> set[str]:
    """The names of the functions of this volatility that are called."""
    catalog = _catalog(connection.alias)
    found: set[str] = set()
    for node in nodes:
        if node.name == "SQLVALUEFUNCTION" and volatility == "s":
            found.add("CURRENT_TIMESTAMP")
        for function in _functions(catalog, node):
            name, its_volatility = catalog.functions[function]
            found |= {name} if its_volatility == volatility else set()
    return found


class _Catalog(NamedTuple):
    functions: dict[str, tuple[str, str]]
    """Name and volatility."""
    conversions: dict[str, tuple[str, str]]
    """The functions that read a type from text, and write it as text."""


@cache
def _catalog(alias: str) -> _Catalog:
    functions = fetch(connections[alias], "SELECT oid::text, proname, provolatile FROM pg_proc")
    types = fetch(
        connections[alias], "SELECT oid::text, typinput::oid::text, typoutput::oid::text FROM pg_type"
    )
    return _Catalog(
        {oid: (name, kind) for oid, name, kind in functions}, {oid: (i, o) for oid, i, o in types}
    )


def _functions(catalog: _Catalog, node: Node) -> Iterator[str]:
    if name := _FUNCTION_OF.get(node.name):
        yield node.text(name)
    elif node.name == "COERCEVIAIO":
        yield catalog.conversions[node.text("resulttype")][0]
        (argument,) = node.fields["arg"]
        source = catalog.conversions.get(argument.text(_TYPE_OF.get(argument.name, "resulttype")))
        if source is not None:
            yield source[1]
