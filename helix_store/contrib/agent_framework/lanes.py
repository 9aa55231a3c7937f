"""The lanes that hold what the adapter stores in a session."""

from typing import Final

MESSAGES: Final = "agent_framework/messages/"
"""The beginning of the lane of messages, which ends with the ``source_id`` of the history provider."""

SESSION: Final = "agent_framework/session"
CHECKPOINTS: Final = "agent_framework/checkpoints"
CHECKPOINT_HEADS: Final = "agent_framework/checkpoint_heads"
