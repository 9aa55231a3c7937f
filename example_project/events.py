"""What agents report while they work. Without models, so that a process can import it first of all."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["Event", "Report"]


@dataclass(frozen=True)
class Event:
    """Something an agent did; ``kind`` is ``model``, ``staged``, ``step``, ``paused`` or ``finished``."""

    kind: str
    agent_type: str
    step_id: str
    text: str

    def __str__(self) -> str:
        return f"{self.agent_type} {self.step_id}: {self.text}"


Report = Callable[[Event], None]
