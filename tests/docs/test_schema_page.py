"""The page of the schema: a diagram and the columns of every table, as the models have them.

The text above the diagram is kept. This command writes the rest::

    HELIX_WRITE_SCHEMA=1 python -m pytest tests/docs/test_schema_page.py
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any, Final

from django.apps import apps
from django.db.models import Field, Model

from helix_store.models import Session
from tests.docs.test_examples import ROOT

COMMAND: Final = "HELIX_WRITE_SCHEMA=1 python -m pytest tests/docs/test_schema_page.py"
_PAGE: Final = ROOT / "docs" / "schema.md"
_TITLE: Final = "## Diagram\n"
_NARROW: Final = '%%{init: {"er": {"nodeSpacing": 15, "rankSpacing": 90, "minEntityHeight": 34}}}%%'
_TYPES: Final = {
    "BigAutoField": "bigint",
    "BigIntegerField": "bigint",
    "BooleanField": "boolean",
    "CharField": "varchar",
    "DateTimeField": "timestamptz",
    "FloatField": "double precision",
    "ForeignKey": "bigint",
    "IntegerField": "integer",
    "JSONField": "jsonb",
    "OneToOneField": "bigint",
    "SmallIntegerField": "smallint",
    "TextField": "text",
}


def test_the_page_of_the_schema_is_that_of_the_models() -> None:
    text = _PAGE.read_text()
    above = text[: text.index(_TITLE)]
    expected = above + "\n".join(_generated())
    if os.environ.get("HELIX_WRITE_SCHEMA", "0") not in {"", "0"}:
        _PAGE.write_text(expected)
    assert _PAGE.read_text() == expected, f"run {COMMAND}"


def _generated() -> Iterator[str]:
    models = sorted(apps.get_app_config("helix_store").get_models(), key=_name_of)
    yield _TITLE
    yield f"```mermaid\n{_NARROW}\nerDiagram\n    direction LR"
    for model in models:
        for field in _references(model):
            yield f"    {_name_of(field.related_model)} {_ends(field)} {_name_of(model)} : {field.column}"
    alone = [model for model in models if not _references(model) and model is not Session]
    yield from (f"    {_name_of(model)}" for model in alone)
    yield "```\n"
    yield "## Tables"
    for model in models:
        yield f"\n### {_name_of(model)}\n"
        yield "| column | type | null | refers to |\n|---|---|---|---|"
        for field in model._meta.local_fields:
            refers = f"`{_name_of(field.related_model)}`" if field.related_model else ""
            yield f"| `{field.column}` | {_type_of(field)} | {'yes' if field.null else ''} | {refers} |"
    yield ""


def _name_of(model: Any) -> str:
    return str(model._meta.db_table).removeprefix("helix_store_")


def _references(model: type[Model]) -> list[Any]:
    return [field for field in model._meta.local_fields if field.related_model]


def _ends(field: Any) -> str:
    """Return Mermaid's sign for one or perhaps one row, and for one or many rows that refer to it."""
    return ("|o" if field.null else "||") + "--" + ("o|" if field.unique else "o{")


def _type_of(field: Field[Any, Any]) -> str:
    kind = _TYPES[field.get_internal_type()]
    return f"{kind}({field.max_length})" if kind == "varchar" and field.max_length else kind
