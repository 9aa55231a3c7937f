"""Every row of a tenant, read straight from the tables; the same with times and random ids masked."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

from django.apps import apps
from django.core.exceptions import FieldDoesNotExist
from django.db import connections
from django.db.models import Field, ForeignKey, Model

from helix_store.catalogue import registered_tables
from helix_store.models.fields import CallIdField, CallIdsField
from tests.databases import close_connections
from tests.streams.background import wait_for_background_threads

__all__ = ["MODELS", "Rows", "beside", "compared_fields", "masked", "rows_of"]

Rows = dict[str, list[str]]


def _models() -> list[type[Model]]:
    own = apps.get_app_config("helix_store").get_models(include_auto_created=True)
    found = [*own, *(table.model for table in registered_tables())]
    return [model for model in dict.fromkeys(found) if model._meta.managed]


MODELS: Final = _models()


def _tenant_of(model: type[Model]) -> str:
    """The path from a table to the column of the tenant."""
    try:
        model._meta.get_field("tenant")
    except FieldDoesNotExist:
        for field in model._meta.concrete_fields:
            if isinstance(field, ForeignKey) and field.name in ("session", "stream", "root"):
                return f"{field.name}__{_tenant_of(field.related_model)}"
        raise
    return "tenant"


def compared_fields(model: type[Model]) -> list[Field[Any, Any]]:
    """The columns of a table without the ids of calls, which are random."""
    fields = [field for field in model._meta.concrete_fields if not field.generated]
    return [field for field in fields if not isinstance(field, CallIdField | CallIdsField)]


_PATHS: Final = {model: _tenant_of(model) for model in MODELS}


@functools.cache
def _selects(alias: str) -> dict[str, tuple[str, int]]:
    """The text that reads each table, and how often it takes the tenant."""
    selects = {}
    for model, path in _PATHS.items():
        names = [field.attname for field in compared_fields(model)]
        chosen = model._base_manager.using(alias).filter(**{path: ""}).order_by("pk")
        sql, parameters = chosen.values_list(*names).query.sql_with_params()
        selects[f"{model._meta.label} {','.join(names)}"] = (sql, len(parameters))
    return selects


def rows_of(alias: str, tenant: str) -> Rows:
    rows = {}
    with connections[alias].cursor() as cursor:
        for label, (sql, count) in _selects(alias).items():
            cursor.execute(sql, [tenant] * count)
            if found := cursor.fetchall():
                name, _, columns = label.partition(" ")
                rows[name] = [repr(dict(zip(columns.split(","), row, strict=True))) for row in found]
    return rows


@contextmanager
def beside(alias: str) -> Iterator[str]:
    """The alias of another connection to a database: it sees what is committed, and has no fault."""
    other = f"beside-{alias}"
    connections.settings[other] = {**connections[alias].settings_dict}
    try:
        yield other
    finally:
        # Threads have connections of their own: those of async calls, and that of notifications.
        wait_for_background_threads(other)
        close_connections()
        del connections[other]
        del connections.settings[other]


# --- What differs from one world to the next -------------------------------------------------------

_KEYS: Final = re.compile(r"'(id|base_key|\w+_id|base|root|session|stream)': (\d+)")
_MASKS: Final[list[tuple[re.Pattern[str], str | Callable[[re.Match[str]], str]]]] = [
    (re.compile(r"datetime\.datetime\((?:[^()]|\([^()]*\))*\)"), "T"),
    (re.compile(r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(\.\d+)?(\+00:00|Z|-05:00)?"), "T"),
    (re.compile(r"-t\d{13}-[0-9a-f]{6}"), "-t0-000000"),
    (re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}"), "U"),
    (re.compile(r"[0-9a-f]{32,64}"), "H"),
    (re.compile(r"\b1\d{12}\b"), "0"),
    (re.compile(r"\b1[6-9]\d{8}\.\d+\b"), "0"),
    (re.compile(r"0x[0-9a-f]+"), "0x0"),
    (re.compile(r"\bid=\d+"), "id=K"),
    (re.compile(r"\bStoredItem\(position=\d+"), "StoredItem(position=K"),
    # The position of a turn, in the id of its usage.
    (re.compile(r"(?<='openai-agents\.chat\.main\.)\d+"), "K"),
    # The call that staged a change, in the mark that it was promoted or discarded.
    (re.compile(r"(?<='operation_id': ')[\w-]{12}(?=', 'digest': '')"), "C"),
    # The token of a claim grows by a random number.
    (re.compile(r"(?<='claim_token': )\d+"), "N"),
    # An acquisition whose reply was lost begins another term in its place.
    (re.compile(r"(<Lock '[^']*' token |'owner': '[^']*', 'token': |'fencing_token': )\d+"), r"\1N"),
]


def masked(text: str) -> str:
    text = _KEYS.sub(lambda match: f"'{match[1]}': K", text)
    for pattern, mask in _MASKS:
        text = pattern.sub(mask, text)
    return text
