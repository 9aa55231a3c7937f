"""What the planner of Citus refuses, found in a statement without a cluster.

The rules are those of `helix_store.engine.citus`. They are stricter than the planner: it takes a function
that is stable in some places.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

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
    volatile, stable = _volatilities(connection, query)
    found = {f"volatile: {name}" for name in volatile}
    if query.text("commandType") != _SELECT:
        found |= {f"not immutable: {name}" for name in stable}
    found |= {"several writes" for cte in query.nodes_of("cteList") if _writes(cte)}
    if query.text("commandType") == "3" and any(node.name == "ROWMARKCLAUSE" for node in query.nodes()):
        found.add("row lock in an INSERT")
    return found


def _tables(query: Node) -> Iterator[Node]:
    return (node for node in query.nodes() if node.name == "RANGETBLENTRY")


def _writes(node: Node) -> bool:
    return node.name == "QUERY" and node.text("commandType") != _SELECT


def _volatilities(connection: BaseDatabaseWrapper, query: Node) -> tuple[set[str], set[str]]:
    """The names of the volatile and of the stable functions."""
    rows = fetch(
        connection,
        "SELECT proname, provolatile FROM pg_proc WHERE oid = ANY(%s::oid[])",
        list(_functions(connection, query.nodes())),
    )
    found = {letter: {name for name, volatility in rows if volatility == letter} for letter in ("v", "s")}
    now = {"CURRENT_TIMESTAMP" for node in query.nodes() if node.name == "SQLVALUEFUNCTION"}
    return found["v"], found["s"] | now


def _functions(connection: BaseDatabaseWrapper, nodes: Iterable[Node]) -> Iterator[str]:
    for node in nodes:
        if name := _FUNCTION_OF.get(node.name):
            yield node.text(name)
        elif node.name == "COERCEVIAIO":
            (argument,) = node.fields["arg"]
            source = argument.text(_TYPE_OF.get(argument.name, "resulttype"))
            ((reads, writes),) = fetch(
                connection,
                "SELECT (SELECT typinput::oid FROM pg_type WHERE oid = %s::oid),"
                " (SELECT typoutput::oid FROM pg_type WHERE oid = %s::oid)",
                node.text("resulttype"),
                source,
            )
            yield from (str(each) for each in (reads, writes) if each)
