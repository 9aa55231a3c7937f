"""All public calls of a state store in one class."""

from __future__ import annotations

from helix_store.sessions.calls.checkpoints import CheckpointCalls
from helix_store.sessions.calls.messages import MessageCalls
from helix_store.sessions.calls.sessions import SessionCalls
from helix_store.sessions.calls.steps import StepCalls
from helix_store.sessions.calls.waiting import WaitingCalls


class StateStoreBase(SessionCalls, MessageCalls, StepCalls, CheckpointCalls, WaitingCalls):
    """The state store of the contract; subclasses pass the back end."""
