"""The databases that a command runs on, one after the other, and the output of each."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from django.core.management.base import CommandParser, OutputWrapper
from django.db import connections

from helix_store.engine.aliases import alias_of, app_aliases
from helix_store.exceptions import InvalidQuery
from helix_store.management.text import visible

__all__ = ["OutputOfEach", "add_database_arguments", "chosen_databases"]


def add_database_arguments(parser: CommandParser) -> None:
    parser.add_argument(
        "--database",
        action="append",
        metavar="ALIAS",
        help="Alias of the database (default: the one that the stores use); may be repeated.",
    )
    parser.add_argument(
        "--all-databases", action="store_true", help="Every database that the app is migrated to."
    )


def chosen_databases(options: Mapping[str, Any]) -> list[str]:
    """Return the selected aliases without duplicates, by default the tenant's alias. Raise `InvalidQuery`."""
    given = options["database"] or []
    if options.get("all_databases"):
        if given:
            raise InvalidQuery("Choose --database or --all-databases.", path="database")
        return app_aliases()
    aliases = [given] if isinstance(given, str) else list(dict.fromkeys(given))
    aliases = aliases or [alias_of(options.get("tenant") or "")]
    for alias in aliases:
        if alias not in connections:
            raise InvalidQuery(f"There is no database {alias!r} in DATABASES.", path="database")
    return aliases


class OutputOfEach:
    """An output that names the database. With several, the JSON is one object with the aliases as keys."""

    def __init__(self, out: OutputWrapper, *, is_json: bool) -> None:
        self._out = out
        self._is_json = is_json
        self._count = 0
        self._is_empty = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._out, name)

    def write(self, text: str) -> None:
        self._is_empty = False
        self._out.write(text, ending="")

    def begin(self, alias: str) -> None:
        self._fill()
        if self._is_json:
            self._out.write(f"{', ' if self._count else '{'}{json.dumps(alias)}: ", ending="")
        else:
            self._out.write(f"{chr(10) if self._count else ''}database {visible(alias)}")
        self._count, self._is_empty = self._count + 1, True

    def end(self) -> None:
        self._fill()
        if self._is_json:
            self._out.write("}")

    def _fill(self) -> None:
        """Write ``null`` for a command that failed without output."""
        if self._count and self._is_empty and self._is_json:
            self._out.write("null")
