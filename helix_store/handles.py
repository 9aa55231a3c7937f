"""Public import path of handles."""

from helix_store.stores import OpenEffect, SessionHandle, Step, Turn

__all__ = ["OpenEffect", "SessionHandle", "Step", "Turn"]
