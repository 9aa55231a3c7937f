"""LangGraph: `DjangoSaver` keeps its checkpoints, and `DjangoStore` its long-term memory."""

from typing import TYPE_CHECKING

from helix_store.contrib._lazy import lazily

if TYPE_CHECKING:
    from helix_store.contrib.langgraph.saver import DjangoSaver
    from helix_store.contrib.langgraph.store import DjangoStore

__all__ = ["DjangoSaver", "DjangoStore"]

__getattr__ = lazily(
    __name__,
    "LangGraph",
    "langgraph",
    DjangoSaver="saver",
    DjangoStore="store",
)
