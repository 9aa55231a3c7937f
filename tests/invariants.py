"""What must hold for every session, read straight from the tables: the invariants of the doctor."""

from __future__ import annotations

from helix_store.doctor.invariants import INVARIANTS
from helix_store.doctor.scope import Scope
from helix_store.engine.database import Database
from tests.databases import CommittedDatabase

__all__ = ["broken_invariants"]


def broken_invariants(database: CommittedDatabase) -> list[str]:
    """One line per fault in the rows of the test's tenant; empty when all is well."""
    scope = Scope(Database(database.alias, database.tenant), tenant=database.tenant)
    return [
        f"{fault.sample}: {fault.rule_id}"
        for check in INVARIANTS
        for page in check.run(scope)
        for fault in page
    ]
