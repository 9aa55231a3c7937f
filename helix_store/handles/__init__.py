"""The short way: a session handle, its steps and its turns."""

from helix_store.handles.session import SessionHandle
from helix_store.handles.step import Step
from helix_store.handles.turn import Turn

__all__ = ["SessionHandle", "Step", "Turn"]
