"""LangGraph's own savers as sources of ``helix_import``. Their modules are imported at the first use."""

from __future__ import annotations

from helix_store.transfer.sources import ForeignSource, Origin, SourceUnreadable, register_source

__all__ = ["register_sources"]

_MISSING = 'The source needs LangGraph: pip install "helix_store[langgraph]".'


def register_sources() -> None:
    register_source("langgraph-postgres", _postgres)
    register_source("langgraph-sqlite", _sqlite)


def _postgres(origin: Origin) -> ForeignSource:
    try:
        from helix_store.contrib.langgraph.sources.postgres import PostgresSaverSource
    except ModuleNotFoundError as exc:
        raise SourceUnreadable(_MISSING) from exc
    return PostgresSaverSource(origin)


def _sqlite(origin: Origin) -> ForeignSource:
    try:
        from helix_store.contrib.langgraph.sources.sqlite import SqliteSaverSource
    except ModuleNotFoundError as exc:
        raise SourceUnreadable(_MISSING) from exc
    return SqliteSaverSource(origin)
