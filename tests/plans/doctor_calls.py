"""The checks of the doctor: a page of rows is found by its keys, in tables of any size."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from django.db.models import Model

from helix_store.doctor import all_checks
from helix_store.doctor.findings import Check, Scope
from helix_store.doctor.invariants import PAYLOAD_CHECKS
from helix_store.engine.database import Database
from tests.plans.calls import PAGE, Call
from tests.plans.rows import World

__all__ = ["DOCTOR_CALLS"]

_ORDINARY: Final = "session-2030"
_FIRST: Final = 2_000


def _of_page(check: Check) -> Call:
    def make(world: World) -> Callable[[], object]:
        assert check.of is not None
        assert check.keyed is not None
        keyed, db = check.keyed, Database(world.database.alias, world.database.tenant)
        keys = _keys(world, check.of)
        return lambda: list(keyed(db, keys))

    model = "" if check.of is None else check.of.__name__
    return Call(f"doctor: {check.name} of {model}", make, sorts=10 * PAGE)


def _keys(world: World, model: type[Model]) -> list[int]:
    """A page after the busy sessions, which come first."""
    rows = model._base_manager.using(world.database.alias).order_by("pk")
    return list(rows.values_list("pk", flat=True)[_FIRST : _FIRST + PAGE])


def _of_one_session(check: Check) -> Call:
    def make(world: World) -> Callable[[], object]:
        db = Database(world.database.alias, world.database.tenant)
        scope = Scope(db, tenant=world.database.tenant, session_id=_ORDINARY)
        return lambda: list(check.run(scope))

    return Call(f"doctor: {check.name} of one session", make, sorts=PAGE)


DOCTOR_CALLS: Final = [
    *(_of_page(check) for check in all_checks() if check.of is not None),
    *(_of_one_session(check) for check in PAYLOAD_CHECKS),
]
