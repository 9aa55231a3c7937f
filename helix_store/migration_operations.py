"""Migration operations that the numbered migrations share."""

from __future__ import annotations

from typing import Any

from django.db import migrations
from django.db.migrations.exceptions import IrreversibleError
from django.db.models import Q

__all__ = ["refuse_to_lose"]


def refuse_to_lose(model_name: str, *columns: str) -> migrations.RunPython:
    """An operation that does nothing forwards, and backwards refuses while a column holds a value."""

    def check(apps: Any, schema_editor: Any) -> None:
        model = apps.get_model("helix_store", model_name)
        holds_a_value = Q()
        for column in columns:
            holds_a_value |= Q(**{f"{column}__isnull": False})
        kept = model._base_manager.using(schema_editor.connection.alias).filter(holds_a_value).count()
        if kept:
            raise IrreversibleError(
                f"{kept} rows of {model_name} hold {', '.join(columns)}, which going back would lose. "
                "Resume, finish or delete them first."
            )

    return migrations.RunPython(migrations.RunPython.noop, check, elidable=False)
