"""LangGraph's own savers as sources of ``helix_import``. Their modules are imported at the first use."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib import import_module

from helix_store.transfer.sources import ForeignSource, Origin, SourceUnreadable, register_source

__all__ = ["register_sources"]


def register_sources() -> None:
    register_source("langgraph-postgres", partial(_source, "postgres", "PostgresSaverSource"))
    register_source("langgraph-sqlite", partial(_source, "sqlite", "SqliteSaverSource"))


def _source(module: str, name: str, origin: Origin) -> ForeignSource:
    try:
        source: Callable[[Origin], ForeignSource] = getattr(import_module(f"{__name__}.{module}"), name)
    except ModuleNotFoundError as exc:
        reason = 'The source needs LangGraph: pip install "helix_store[langgraph]".'
        raise SourceUnreadable(reason) from exc
    return source(origin)
