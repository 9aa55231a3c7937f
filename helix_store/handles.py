"""Public import path of handles."""

from helix_store.stores import SessionHandle, Step, Turn

__all__ = ["SessionHandle", "Step", "Turn"]
