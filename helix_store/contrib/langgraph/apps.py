from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from helix_store.contrib import _frameworks

if TYPE_CHECKING:
    from helix_store.transfer.sources import ForeignSource, Origin


class LangGraphConfig(_frameworks.FrameworkConfig):
    name = "helix_store.contrib.langgraph"
    label = "helix_store_langgraph"
    verbose_name = "LangGraph"

    def ready(self) -> None:
        from helix_store.transfer.sources import register_source

        super().ready()
        register_source("langgraph-postgres", partial(_saver, "PostgresSaverSource"))
        register_source("langgraph-sqlite", partial(_saver, "SqliteSaverSource"))


def _saver(name: str, origin: Origin) -> ForeignSource:
    """Return one of the sources, which are imported on first use because they need LangGraph."""
    from helix_store.transfer.sources import SourceUnreadable

    try:
        from helix_store.contrib.langgraph import sources
    except ModuleNotFoundError as exc:
        reason = 'The source needs LangGraph: pip install "helix_store[langgraph]".'
        raise SourceUnreadable(reason) from exc
    source: ForeignSource = getattr(sources, name)(origin)
    return source
