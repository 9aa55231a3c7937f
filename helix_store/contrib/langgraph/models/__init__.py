"""The tables of LangGraph's data, which do not import LangGraph."""

from helix_store.contrib.langgraph.models.checkpoints import (
    LangGraphCheckpoint,
    LangGraphValue,
    LangGraphWrite,
)
from helix_store.contrib.langgraph.models.memories import LangGraphMemory

__all__ = ["LangGraphCheckpoint", "LangGraphMemory", "LangGraphValue", "LangGraphWrite"]
