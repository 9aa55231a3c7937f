"""Events that agents report. Imports no models, so that a new process can import it before setup."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["Event", "Report"]


@dataclass(frozen=True)
class Event:
    """An action of an agent.

    ``kind`` is ``model``, ``staged``, ``acted``, ``step``, or the end of a turn: ``paused``, ``finished`` or
    ``stopped``.
    """

    kind: str
    agent_type: str
    step_id: str
    text: str

    def __str__(self) -> str:
        return f"{self.agent_type} {self.step_id}: {self.text}"


Report = Callable[[Event], None]
