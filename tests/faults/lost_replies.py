"""One public call of the stores whose COMMIT is lost, beside the same call with a sound connection."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from django.apps import apps
from django.db.models import ForeignKey, Model
from django.test.utils import override_settings

from helix_store.exceptions import HelixStoreError
from helix_store.models.fields import MomentField
from tests.database.counted_calls import CALLS, Faces
from tests.databases import CommittedDatabase, fresh_tenant
from tests.faults.proxy import Cut, FaultyProxy
from tests.faults.stored_rows import compared_fields

__all__ = ["Outcome", "masked", "outcome_of", "rows_of"]

DIRECT: Final = "postgres"
"""The alias of the database without the proxy."""
_RANDOM: Final = re.compile(
    r"tenant-[0-9a-f]{32}|-t\d{13}-[0-9a-f]{6}|[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}\b|[0-9a-f]{16,}"
    r"|-?\b\d{12,}\b|datetime\.datetime\((?:[^()]|\([^()]*\))*\)|0x[0-9a-f]+|\b\d{4}-\d\d-\d\d[T ][\d:.+-]+"
    r"|\bid=\d+|\bposition=\d+|token'?:? \d+"
    # The call that staged a change, in the mark that it was promoted or discarded.
    r"|'operation_id': '[\w-]{12}', 'digest': ''"
)


@dataclass(frozen=True)
class Outcome:
    """What a call answered, and every row of the tenant afterwards, without random ids and times."""

    answer: str
    rows: Counter[str]
    commits: int


def outcome_of(
    database: CommittedDatabase,
    proxy: FaultyProxy,
    face: str,
    call: str,
    *,
    fast: bool,
    cut: tuple[Cut, int] | None = None,
    restarts: bool = False,
) -> Outcome:
    """Make a call in a new tenant. ``cut`` breaks its commit of a number, counted from 0.

    With ``restarts``, the server then no longer knows earlier transactions by their numbers, as after a
    restart.
    """
    made = CommittedDatabase(alias=database.alias, tenant=fresh_tenant())
    with override_settings(HELIX_STORE={"FAST_PATHS": fast}):
        invoke = CALLS[face][call](Faces(made))
        before = proxy.commits
        if cut is not None:
            kind, number = cut
            proxy.arm(kind, after=number, meanwhile=partial(_forget_numbers, database) if restarts else None)
        try:
            answer = repr(invoke())
        except HelixStoreError as exc:
            answer = f"{type(exc).__name__}: {exc}"
    if cut is not None:
        proxy.wait_for_cut()
    return Outcome(masked(answer), rows_of(made), proxy.commits - before)


def _forget_numbers(database: CommittedDatabase) -> None:
    """Reset the statistics whose age tells a server from the one before a restart (`engine.statement`)."""
    with CommittedDatabase(alias=DIRECT, tenant=database.tenant).connection.cursor() as cursor:
        cursor.execute("SELECT pg_stat_reset_shared('bgwriter')")


def rows_of(database: CommittedDatabase) -> Counter[str]:
    """Every row of the tenant, without random ids and times."""
    rows: Counter[str] = Counter()
    for model in apps.get_app_config("helix_store").get_models():
        for path in ("tenant", "session__tenant", "stream__tenant"):
            if _has(model, path):
                found = model._default_manager.using(database.alias).filter(**{path: database.tenant})
                rows.update(_row(row) for row in found)
                break
    return rows


def _has(model: type[Model], path: str) -> bool:
    return path.partition("__")[0] in {field.name for field in model._meta.concrete_fields}


def _row(row: Model) -> str:
    shown: dict[str, Any] = {}
    for field in compared_fields(type(row)):
        value = getattr(row, field.attname)
        if field.primary_key or isinstance(field, MomentField | ForeignKey) or field.name == "base_id":
            value = value is not None
        shown[field.attname] = value
    return masked(f"{type(row).__name__} {shown}")


def masked(text: str) -> str:
    return _RANDOM.sub("*", text)
