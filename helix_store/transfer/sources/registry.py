"""The stores that an import can read, by name. A new one is one entry here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from helix_store.transfer.sources.foreign import ForeignSource
from helix_store.transfer.sources.obsku import ObskuSource
from helix_store.transfer.sources.origin import Origin
from helix_store.transfer.sources.ziro import ZiroSource

__all__ = ["SOURCES"]

SOURCES: Final[dict[str, Callable[[Origin], ForeignSource]]] = {
    "obsku": ObskuSource,
    "ziro": ZiroSource,
}
