"""A worker that charges cards in effects until it is killed, and the world that counts the charges."""

from __future__ import annotations

import os
import random
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from helix_store.core.types import TERMINAL_STATUSES
from helix_store.exceptions import (
    ConflictError,
    FencedOutError,
    LockLostError,
    SessionBusy,
    StoreBusy,
)
from helix_store.stores import DatabaseStateStore, SessionHandle, Turn

__all__ = ["CALLS", "World", "charge"]

CALLS: Final = 4
"""The effects of each session, one after the other."""
_TERM_MS: Final = 250


class DeclinedError(Exception):
    """The world refuses the charge, and says so."""


class LostError(Exception):
    """The world does not answer; the charge may have happened."""


@dataclass(frozen=True)
class World:
    """A service outside the database. One write to its file is a charge, which outlives any process."""

    path: Path

    def charge(self, key: str, *, is_idempotent: bool, chance: random.Random) -> str:
        draw = chance.random()
        if draw < 0.1:
            raise DeclinedError
        if draw < 0.15:
            raise LostError
        if not (is_idempotent and key in self.charges()):
            descriptor = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
            os.write(descriptor, f"{key}\n".encode())
            os.close(descriptor)
        if draw < 0.2:
            raise LostError
        return f"receipt of {key}"

    def charges(self) -> list[str]:
        return self.path.read_text().split() if self.path.exists() else []


def mode_of(session_id: str, number: int) -> str:
    """How the effect of this number is made: it must be the same for every worker."""
    return random.Random(f"{session_id} {number}").choice(("once", "retry", "reconcile", "both", "approval"))  # noqa: S311


def charge(alias: str, tenant: str, path: str, session_ids: list[str], seed: int) -> None:
    """Drive the sessions until each has made all of its effects; people settle nothing here."""
    chance = random.Random(seed)  # noqa: S311  the same draws for the same seed
    world = World(Path(path))
    store = DatabaseStateStore(alias, tenant=tenant)
    while open_ids := [each for each in session_ids if _is_open(store, each)]:
        session = store.session(chance.choice(open_ids))
        _approve(store, session.id)
        with (
            suppress(
                SessionBusy, StoreBusy, FencedOutError, LockLostError, ConflictError, DeclinedError, LostError
            ),
            session.turn(ttl=_TERM_MS) as turn,
        ):
            while turn.is_active:
                _work(session, turn, world, chance)


def _approve(store: DatabaseStateStore, session_id: str) -> None:
    """What a person does, so that a worker which is killed in between leaves nothing behind."""
    for call_id in _open_calls(store, session_id):
        store.submit_tool_result(session_id, call_id, approved=True, approval_id=call_id, actor="ann")


def _open_calls(store: DatabaseStateStore, session_id: str) -> list[str]:
    state = store.load_state(session_id)
    pending = {} if state is None else state.pending_client_tool_calls or {}
    return [call_id for call_id, call in pending.items() if "submitted_at" not in call]


def _is_open(store: DatabaseStateStore, session_id: str) -> bool:
    state = store.load_state(session_id)
    return state is not None and state.status not in TERMINAL_STATUSES


def _work(session: SessionHandle, turn: Turn, world: World, chance: random.Random) -> None:
    number = len(turn.messages())
    if number == CALLS:
        with turn.step() as step:
            step.finish()
        return
    effect_id, mode = f"effect-{number}", mode_of(session.id, number)
    options: dict[str, Any] = {"tool_name": "charge", "input": {"number": number}}
    if mode == "approval":
        options = {"approval": True}
        if not turn.results:
            with turn.step() as step:
                step.ask_approval(effect_id, "charge", {"number": number})
            return
    if mode in ("retry", "both"):
        options["retry"] = True
    if mode in ("reconcile", "both"):
        options["reconcile"] = lambda effect: _ask(world, effect, is_sure=mode == "reconcile")
    with turn.effect(effect_id, **options) as effect:
        if not effect.is_done:
            try:
                receipt = world.charge(effect.key, is_idempotent=mode in ("retry", "both"), chance=chance)
            except DeclinedError:
                effect.not_done("declined")
                raise
            effect.done(receipt)
    with turn.step() as step:
        step.say({"role": "tool", "tool_call_id": effect_id, "content": effect.result})


def _ask(world: World, effect: Any, *, is_sure: bool) -> None:
    if effect.key in world.charges():
        effect.done(f"receipt of {effect.key}")
    elif is_sure:
        effect.not_done("the service does not know it")
