"""LangGraph: checkpoints in `DjangoSaver`, long-term memory in `DjangoStore`, usage by `UsageRecorder`."""

from typing import TYPE_CHECKING

from helix_store.contrib._frameworks import lazily

if TYPE_CHECKING:
    from helix_store.contrib.langgraph.catalogue import register_types
    from helix_store.contrib.langgraph.chat import chat_answer
    from helix_store.contrib.langgraph.saver import DjangoSaver
    from helix_store.contrib.langgraph.store import DjangoStore
    from helix_store.contrib.langgraph.usage import UsageRecorder

__all__ = ["DjangoSaver", "DjangoStore", "UsageRecorder", "chat_answer", "register_types"]

__getattr__ = lazily(
    __name__,
    "LangGraph",
    "langgraph",
    stored=("DjangoSaver", "DjangoStore"),
    DjangoSaver="saver",
    DjangoStore="store",
    UsageRecorder="usage",
    chat_answer="chat",
    register_types="catalogue",
)
