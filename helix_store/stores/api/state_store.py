"""All calls of a state store in one class, whatever remembers underneath."""

from __future__ import annotations

from helix_store.stores.api.checkpoints import CheckpointCalls
from helix_store.stores.api.messages import MessageCalls
from helix_store.stores.api.runs import RunCalls
from helix_store.stores.api.sessions import SessionCalls
from helix_store.stores.api.steps import StepCalls
from helix_store.stores.api.suspension import SuspensionCalls
from helix_store.stores.api.tool_calls import ToolCallCalls

__all__ = ["StateStoreBase"]


class StateStoreBase(
    SessionCalls, MessageCalls, StepCalls, CheckpointCalls, RunCalls, ToolCallCalls, SuspensionCalls
):
    """The state store of the contract; a subclass brings the back end."""
