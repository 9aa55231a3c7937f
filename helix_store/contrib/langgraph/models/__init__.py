"""The tables of LangGraph's checkpoints."""

from helix_store.contrib.langgraph.models.checkpoints import (
    LangGraphCheckpoint,
    LangGraphValue,
    LangGraphWrite,
)

__all__ = ["LangGraphCheckpoint", "LangGraphValue", "LangGraphWrite"]
