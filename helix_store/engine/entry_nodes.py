"""Checks of the Citus settings in ``DATABASES``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from django.db import connections
from django.db.backends.base.base import BaseDatabaseWrapper

from helix_store import conf


class CitusProblem(NamedTuple):
    alias: str
    problem: str
    hint: str


def citus_problems(aliases: Sequence[str]) -> Iterator[CitusProblem]:
    """Yield the reasons why the form for Citus does not work, or is not safe, in some of these databases.
    Sequences, advisory locks and notifications belong to one node, so every process must reach the tables of
    an alias through the same node.
    """
    nodes: dict[tuple[Any, ...], tuple[str, Any]] = {}
    for alias in aliases:
        settings = connections[alias].settings_dict
        if settings.get("HELIX_STORE_CITUS", False) not in (True, False):
            yield CitusProblem(alias, "the value is neither True nor False", "Write True or False.")
        if not conf.is_citus(settings):
            continue
        if connections[alias].vendor != "postgresql":
            yield CitusProblem(alias, "the database is not PostgreSQL", "Remove the key.")
        if conf.row_level_security():
            yield CitusProblem(
                alias,
                "the policies of ROW_LEVEL_SECURITY are checked on the node with the tables, which does not "
                "know the tenant",
                "Use a schema for each group of tenants instead, or remove one of the two settings.",
            )
        options = settings["OPTIONS"]
        host = options.get("host") or options.get("hostaddr") or settings["HOST"]
        node = f"{host}:{options.get('port') or settings['PORT']}"
        hint = "Name one node, the same one in every process: the coordinator."
        if "," in node:
            yield CitusProblem(alias, "it has several hosts: ids and locks are those of one node", hint)
        tables = (settings["NAME"], settings["USER"], options.get("options"))
        other, other_node = nodes.setdefault(tables, (alias, node))
        if other_node != node:
            yield CitusProblem(
                alias, f"it has the tables of {other!r} and reaches them through another node", hint
            )


def has_undeclared_citus(connection: BaseDatabaseWrapper) -> bool:
    """Return whether the extension is installed in a database whose entry does not declare this."""
    if conf.is_citus(connection.settings_dict):
        return False
    with connection.cursor() as cursor:
        cursor.execute("SELECT EXISTS (SELECT 1 FROM pg_catalog.pg_extension WHERE extname = 'citus')")
        (found,) = cursor.fetchone()
    return bool(found)
