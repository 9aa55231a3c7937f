"""LangGraph in the tables of this app."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from helix_store.contrib.langgraph.saver import DjangoSaver
    from helix_store.contrib.langgraph.store import DjangoStore

__all__ = ["DjangoSaver", "DjangoStore"]

_MODULES: Final = {
    "DjangoSaver": "helix_store.contrib.langgraph.saver",
    "DjangoStore": "helix_store.contrib.langgraph.store",
}


def __getattr__(name: str) -> Any:
    """Import a class at its first use: the app is installed also where LangGraph is not."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(import_module(_MODULES[name]), name)
    except ModuleNotFoundError as exc:
        if exc.name is None or exc.name.startswith("helix_store"):
            raise
        raise ImportError(f'{name} needs LangGraph: pip install "helix_store[langgraph]"') from exc
