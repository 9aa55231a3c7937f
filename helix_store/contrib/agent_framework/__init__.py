"""Microsoft Agent Framework: history, sessions and workflow checkpoints as items. It has no tables."""

from typing import TYPE_CHECKING

from helix_store.contrib._frameworks import lazily

if TYPE_CHECKING:
    from helix_store.contrib.agent_framework.sessions import (
        DjangoAgentSessions,
        DjangoCheckpointStorage,
        DjangoHistoryProvider,
        DjangoSessionStore,
    )

__all__ = ["DjangoAgentSessions", "DjangoCheckpointStorage", "DjangoHistoryProvider", "DjangoSessionStore"]

__getattr__ = lazily(
    __name__,
    "Microsoft Agent Framework",
    "agent-framework",
    DjangoCheckpointStorage="sessions",
    DjangoHistoryProvider="sessions",
    DjangoAgentSessions="sessions",
    DjangoSessionStore="sessions",
)
