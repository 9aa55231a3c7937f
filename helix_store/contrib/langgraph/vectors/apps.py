from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

from django.apps import AppConfig

_NUMBER: Final = r"-?\d+(\.\d+)?(e[+-]?\d+)?"
_VECTOR: Final = re.compile(rf"\[{_NUMBER}(,{_NUMBER})*\]")


class LangGraphVectorsConfig(AppConfig):
    name = "helix_store.contrib.langgraph.vectors"
    label = "helix_store_langgraph_vectors"
    verbose_name = "LangGraph vectors"
    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        from helix_store.catalogue import AppTable, register_table
        from helix_store.contrib.langgraph.vectors.models import LangGraphVector

        register_table(
            AppTable(
                LangGraphVector,
                # It sorts after the record of a memory, which an import must store first.
                record="langgraph_memory_vector",
                order=("namespace", "key", "path"),
                parent="tenant",
                reads=None,
                check_import=_check_vector,
            )
        )


def _check_vector(columns: Mapping[str, Any]) -> None:
    from helix_store.exceptions import InvalidPayload

    if not _VECTOR.fullmatch(columns["embedding"]):
        raise InvalidPayload(path="embedding", reason="expected numbers, as in [0.5,1]")
