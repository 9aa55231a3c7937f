"""Claude Agent SDK: `DjangoClaudeSessions` keeps its transcripts in sessions."""

from typing import TYPE_CHECKING

from helix_store.contrib._frameworks import lazily

if TYPE_CHECKING:
    from helix_store.contrib.claude_agent.store import DjangoClaudeSessions, DjangoSessionStore

__all__ = ["DjangoClaudeSessions", "DjangoSessionStore"]

__getattr__ = lazily(
    __name__,
    "Claude Agent SDK",
    "claude-agent",
    stored=("DjangoClaudeSessions", "DjangoSessionStore"),
    DjangoClaudeSessions="store",
    DjangoSessionStore="store",
)
