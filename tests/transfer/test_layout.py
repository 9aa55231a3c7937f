"""Nothing is forgotten: every column of every table is exported, or it is said why not."""

from __future__ import annotations

from typing import Any

import pytest
from django.apps import apps
from django.db.models import Field, Model, UniqueConstraint

from helix_store.catalogue import declared, tables
from helix_store.catalogue.table import children_of_sessions
from helix_store.models import Checkpoint, CheckpointKind, UsageEntry
from helix_store.transfer.records import format_of, formats, parts_of, units
from tests.cells import for_each

MODELS = [
    model
    for model in apps.get_app_config("helix_store").get_models(include_auto_created=True)
    if model._meta.managed
]
COLUMNS = [
    pytest.param(model, field, id=f"{model.__name__}.{field.name}")
    for model in MODELS
    for field in model._meta.concrete_fields
]


@for_each("model", MODELS, ids=lambda model: model.__name__)
def test_every_table_is_declared(model: type[Model]) -> None:
    assert declared(model) in tables()


@for_each(("model", "field"), COLUMNS)
def test_every_column_is_exported_or_has_a_reason(model: type[Model], field: Field[Any, Any]) -> None:
    table = declared(model)
    is_exported = field.name in format_of(table).names or field.name == table.reference
    has_a_reason = bool(table.not_exported.get(field.name)) or field.name in table.implied
    assert is_exported != has_a_reason


def test_no_reason_is_left_of_a_column_that_is_gone() -> None:
    for table in tables():
        assert table.not_exported.keys() <= {field.name for field in table.model._meta.concrete_fields}


def test_every_table_of_a_session_is_a_part_of_it() -> None:
    children = {relation.related_model for relation in children_of_sessions()} | {UsageEntry}
    assert {part.format.model for part in parts_of(*tables("session"))} == children
    kinds = [part.only["kind"] for part in parts_of(declared(Checkpoint))]
    assert sorted(kinds) == sorted(CheckpointKind.values)


def test_every_record_stands_in_one_kind_of_unit_at_least() -> None:
    inside = frozenset(units()).union(*(unit.records for unit in units().values()))
    assert formats().keys() <= inside


def test_the_order_of_a_part_has_no_ties() -> None:
    for part in parts_of(*tables()):
        model = part.format.model
        constraints = [each for each in model._meta.constraints if isinstance(each, UniqueConstraint)]
        unique = [{*constraint.fields} for constraint in constraints]
        known = {part.format.parent.removesuffix("_id"), *part.only, *part.order}
        assert part.order[-1] == "id" or any(fields <= known for fields in unique)
