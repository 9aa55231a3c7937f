"""Imports from another store, as the command runs them."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any, Final

from tests.commands.running import Ended, run
from tests.databases import CommittedDatabase
from tests.transfer.sources.origins import OriginSchema

__all__ = ["import_from", "import_problems"]


_PROGRESS: Final = re.compile(r"^ *\d+%  .*\n", re.MULTILINE)
"""A line for each second: how many there are depends on the machine."""


def import_from(origin: OriginSchema, database: CommittedDatabase, *arguments: str) -> Ended:
    """``helix_import --from`` into the tenant of a test, without its lines of progress."""
    ended = run(
        database.alias,
        "helix_import",
        "--from",
        origin.store,
        origin.dsn,
        "--schema",
        origin.schema,
        "--tenant",
        database.tenant,
        "--format",
        "json",
        *arguments,
    )
    return replace(ended, err=_PROGRESS.sub("", ended.err))


def import_problems(origin: OriginSchema, database: CommittedDatabase, *arguments: str) -> dict[str, Any]:
    """The summary of an import that ends with exit code 1, and tells its problems on stderr too."""
    ended = import_from(origin, database, *arguments)
    assert ended.code == 1
    data: dict[str, Any] = ended.data
    *told, last = ended.err.splitlines()
    assert told == data["problems"]
    assert last == f"{len(told)} problems were found."
    return data
