"""Claude Agent SDK: `DjangoSessionStore` keeps its transcripts in sessions."""

from typing import TYPE_CHECKING

from helix_store.contrib._lazy import lazily

if TYPE_CHECKING:
    from helix_store.contrib.claude_agent.store import DjangoSessionStore

__all__ = ["DjangoSessionStore"]

__getattr__ = lazily(
    __name__,
    "Claude Agent SDK",
    "claude-agent",
    DjangoSessionStore="store",
)
