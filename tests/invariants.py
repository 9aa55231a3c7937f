"""What must hold for every session, read straight from the tables: the invariants of the doctor."""

from __future__ import annotations

from collections.abc import Iterator

from helix_store.doctor.findings import Fault, Scope
from helix_store.doctor.invariants import INVARIANTS
from helix_store.engine.database import Database
from tests.databases import CommittedDatabase

__all__ = ["broken_in_database", "broken_invariants"]


def broken_invariants(database: CommittedDatabase) -> list[str]:
    """Return one line per fault in the rows of the test's tenant; an empty list when all is well."""
    scope = Scope(Database(database.alias, database.tenant), tenant=database.tenant)
    return [f"{fault.sample}: {fault.rule_id}" for fault in _faults(scope)]


def broken_in_database(alias: str) -> list[tuple[str, str]]:
    """Return the tenant and one line for each fault in a whole database."""
    return [
        (fault.sample.tenant or "", f"{fault.sample}: {fault.rule_id}")
        for fault in _faults(Scope(Database(alias, ""), page_size=1_000))
    ]


def _faults(scope: Scope) -> Iterator[Fault]:
    for check in INVARIANTS:
        for page in check.run(scope):
            yield from page
