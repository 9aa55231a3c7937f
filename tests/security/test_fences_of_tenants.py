"""The locks of one tenant fence nobody out in another one."""

from __future__ import annotations

import pytest
from django.test.utils import CaptureQueriesContext, override_settings

from helix_store.locks import Lock
from helix_store.stores import DatabaseLockManager
from tests.cells import for_each
from tests.databases import CommittedDatabase, fresh_tenant
from tests.faults.guarded import CALLS, SESSION, Place, prepare


def lock_with_token(alias: str, tenant: str, token: int) -> Lock:
    locks = DatabaseLockManager(alias, tenant=tenant)
    for _ in range(token - 1):
        locks.take_over(SESSION)
    return locks.take_over(SESSION)


def statements_of(database: CommittedDatabase, name: str, token: int) -> int:
    """Make a guarded call in a new tenant, and return the number of its statements."""
    place = Place(database.alias, fresh_tenant())
    prepare(place, name)
    lock = lock_with_token(place.alias, place.tenant, token)
    with CaptureQueriesContext(database.connection) as captured:
        CALLS[name](place, lock.fencing_token)
    return len(captured)


@pytest.mark.thorough
@for_each("is_fast", [True, False], ids=["fast", "portable"], shared=True)
@for_each("name", CALLS, shared=True)
def test_a_newer_token_of_another_tenant_refuses_no_write_and_slows_none_down(
    committed_db: CommittedDatabase, name: str, is_fast: bool
) -> None:
    """What one statement refuses is tried again in several, so that their number tells."""
    neighbour = lock_with_token(committed_db.alias, fresh_tenant(), 2)
    with override_settings(HELIX_STORE={"FAST_PATHS": is_fast}):
        older = statements_of(committed_db, name, neighbour.fencing_token - 1)
        newer = statements_of(committed_db, name, neighbour.fencing_token + 1)
    assert older == newer
