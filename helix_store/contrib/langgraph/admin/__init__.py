"""Read-only pages of threads and of long-term memory. Lists read no payloads."""

from helix_store.contrib.langgraph.admin.checkpoints import CheckpointAdmin, ValueAdmin, WriteAdmin
from helix_store.contrib.langgraph.admin.memories import MemoryAdmin

__all__ = ["CheckpointAdmin", "MemoryAdmin", "ValueAdmin", "WriteAdmin"]
