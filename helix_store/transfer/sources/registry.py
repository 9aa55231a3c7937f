"""The stores that an import can read, by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from helix_store.transfer.sources.foreign import ForeignSource, Origin
from helix_store.transfer.sources.obsku import ObskuSource
from helix_store.transfer.sources.ziro import ZiroSource

SOURCES: Final[dict[str, Callable[[Origin], ForeignSource]]] = {
    "obsku": ObskuSource,
    "ziro": ZiroSource,
}


def register_source(name: str, source: Callable[[Origin], ForeignSource]) -> None:
    """Register another store that ``helix_import --from`` can read. Call this in ``AppConfig.ready()``."""
    SOURCES[name] = source
