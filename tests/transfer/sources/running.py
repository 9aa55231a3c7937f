"""Imports from another store, as the command runs them."""

from __future__ import annotations

from typing import Any

from tests.commands.running import Ended, run
from tests.databases import CommittedDatabase
from tests.transfer.sources.origins import OriginSchema

__all__ = ["import_from", "import_problems"]


def import_from(origin: OriginSchema, database: CommittedDatabase, *arguments: str) -> Ended:
    """``helix_import --from`` into the tenant of a test."""
    return run(
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


def import_problems(origin: OriginSchema, database: CommittedDatabase, *arguments: str) -> dict[str, Any]:
    """The summary of an import that ends with exit code 1, and tells its problems on stderr too."""
    ended = import_from(origin, database, *arguments)
    assert ended.code == 1
    data: dict[str, Any] = ended.data
    *told, last = ended.err.splitlines()
    assert told == data["problems"]
    assert last == f"{len(told)} problems were found."
    return data
