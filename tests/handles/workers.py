"""What a worker of these tests does: a turn whose steps follow from what is stored, in any process."""

from __future__ import annotations

from multiprocessing.synchronize import Event
from typing import Any, Final

from helix_store.handles import SessionHandle, Turn
from helix_store.stores import DatabaseStateStore

__all__ = ["STEPS", "drive", "open_session", "pause_in_a_step", "take_turn"]

STEPS: Final = 6
_PATIENCE_SECONDS: Final = 60.0


def open_session(alias: str, tenant: str, session_id: str) -> SessionHandle:
    return DatabaseStateStore(alias, tenant=tenant).session(session_id)


def drive(turn: Turn) -> None:
    """Make the steps that are missing; the last one asks a person."""
    while turn.is_active:
        number = turn.state.step_count + 1
        history = len(turn.messages())
        turn.tokens(model="script", prompt=history, completion=1)
        with turn.step() as step:
            step.say({"role": "assistant", "content": f"step {number} after {history} messages"})
            for call in ("a", "b"):
                step.stage(f"{call}-{number}", merge_changes={"calls": [f"{call}-{number}"]})
            step.state.custom_state["last"] = number
            step.say({"role": "tool", "content": f"result {number}"})
            if number == STEPS:
                step.wait_for({"approval": {"tool_name": "book", "approval_id": "approval"}})


def take_turn(alias: str, tenant: str, session_id: str, begun: Event | None = None) -> dict[str, Any]:
    """A whole turn; ``begun`` is set when nothing but the turn is left to do."""
    session = open_session(alias, tenant, session_id)
    session.load()
    if begun is not None:
        begun.set()
    with session.turn() as turn:
        drive(turn)
    return {"steps": session.load().step_count}


def pause_in_a_step(alias: str, tenant: str, session_id: str, inside: Event, goes_on: Event) -> None:
    """A turn with a short term that tells when it is in a step, and then waits."""
    with open_session(alias, tenant, session_id).turn(ttl=400) as turn, turn.step() as step:
        step.say({"role": "assistant", "content": "late"})
        step.state.title = "late"
        inside.set()
        assert goes_on.wait(_PATIENCE_SECONDS)
