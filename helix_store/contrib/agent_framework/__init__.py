"""Microsoft Agent Framework: history, sessions and workflow checkpoints as items. It has no tables."""

from typing import TYPE_CHECKING

from helix_store.contrib._lazy import lazily

if TYPE_CHECKING:
    from helix_store.contrib.agent_framework.checkpoints import DjangoCheckpointStorage
    from helix_store.contrib.agent_framework.history import DjangoHistoryProvider
    from helix_store.contrib.agent_framework.sessions import DjangoAgentSessions, DjangoSessionStore

__all__ = ["DjangoAgentSessions", "DjangoCheckpointStorage", "DjangoHistoryProvider", "DjangoSessionStore"]

__getattr__ = lazily(
    __name__,
    "Microsoft Agent Framework",
    "agent-framework",
    DjangoCheckpointStorage="checkpoints",
    DjangoHistoryProvider="history",
    DjangoAgentSessions="sessions",
    DjangoSessionStore="sessions",
)
