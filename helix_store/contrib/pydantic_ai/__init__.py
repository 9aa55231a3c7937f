"""Pydantic AI: `DjangoConversationStore` keeps its conversations in sessions."""

from typing import TYPE_CHECKING

from helix_store.contrib._frameworks import lazily

if TYPE_CHECKING:
    from helix_store.contrib.pydantic_ai.store import DjangoConversationStore

__all__ = ["DjangoConversationStore"]

__getattr__ = lazily(
    __name__,
    "Pydantic AI",
    "pydantic-ai",
    stored=("DjangoConversationStore",),
    DjangoConversationStore="store",
)
