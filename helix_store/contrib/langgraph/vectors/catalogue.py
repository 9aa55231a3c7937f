"""The table of vectors in the catalogue."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

from helix_store.catalogue import AppTable
from helix_store.contrib.langgraph.vectors.models import LangGraphVector
from helix_store.exceptions import InvalidPayload

_NUMBER: Final = r"-?\d+(\.\d+)?(e[+-]?\d+)?"
_VECTOR: Final = re.compile(rf"\[{_NUMBER}(,{_NUMBER})*\]")


def _check_vector(columns: Mapping[str, Any]) -> None:
    if not _VECTOR.fullmatch(columns["embedding"]):
        raise InvalidPayload(path="embedding", reason="expected numbers, as in [0.5,1]")


TABLES: Final = (
    AppTable(
        LangGraphVector,
        # It sorts after the record of a memory, because an import must store that first.
        record="langgraph_memory_vector",
        order=("namespace", "key", "path"),
        parent="tenant",
        reads=None,
        check_import=_check_vector,
    ),
)
