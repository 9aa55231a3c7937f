"""An agent that writes its answer word by word into a stream."""

from __future__ import annotations

import threading
from typing import Final

from example_project.answers import Answer
from helix_store.core.ids import new_id

__all__ = ["ANSWER", "start_answering"]

ANSWER: Final = (
    "A flight from Lisbon to Oslo takes about four hours, so the early one leaves you the afternoon. "
    "It departs at 07:40, and there is a seat at the window. The fare is 189 euros with one bag; the late "
    "flight costs 30 euros less, but arrives after the last train into the city. I would take the early one."
)


def start_answering() -> str:
    """Create a stream, start an agent that answers into it in the background, and return its id."""
    answer = Answer(f"live-{new_id()}", agent_name="travel")
    threading.Thread(target=_give, args=[answer], daemon=True).start()
    return answer.stream_id


def _give(answer: Answer) -> None:
    answer.speak(ANSWER)
    answer.end({"answer": ANSWER})
