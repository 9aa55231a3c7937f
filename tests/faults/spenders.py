"""Processes that take turns in sessions with budgets until they have taken their steps, or are killed."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable
from decimal import Decimal
from enum import IntEnum, auto
from multiprocessing.connection import Connection
from typing import Any, Final, NamedTuple

from helix_store.budgets import Balance
from helix_store.core.types import SessionState
from helix_store.counters import Spender, keys_of
from helix_store.exceptions import (
    BudgetExceeded,
    ConflictError,
    FencedOutError,
    LockLostError,
    SessionBusy,
    StoreBusy,
)
from helix_store.models import BudgetCounter, Lock, Session
from helix_store.stores import SessionHandle, Store, Turn

__all__ = ["MOST_TOKENS", "SESSIONS", "TERM_MS", "Tally", "Told", "dollars", "spend", "tokens_of"]

TERM_MS: Final = 5_000
"""Longer than any pause of a worker that lives: a worker that loses its lock has still spent its estimate."""
MOST_TOKENS: Final = 100
_TOKENS_OF_A_DOLLAR: Final = 1_000

SESSIONS: Final[dict[str, dict[str, Any]]] = {
    f"{root}{child}": {"user_id": user, "agent_type": f"type-{number % 2}"}
    for root, user in (("red", "ada"), ("green", "bob"), ("blue", "ada"))
    for number, child in enumerate(("", "-1", "-2", "-3", "-4", "-5"))
}
"""Three trees, whose roots are first, of two users and two agent types."""

_ACTIONS: Final = ("commit",) * 6 + ("fail", "fail", "lose")
_MOST_STEPS_OF_A_TURN: Final = 10
_LONGEST_STEP_SECONDS: Final = 0.003
_LONGEST_LOSS_SECONDS: Final = 0.05
_PAUSE_SECONDS: Final = 0.005


class Tally(IntEnum):
    """The elements of an array in shared memory, which outlives its worker."""

    STEPS = 0
    COMMITTED = auto()
    FAILED = auto()
    LOST = auto()
    REFUSED = auto()
    BUSY = auto()
    TOLD = auto()
    """Tokens of steps that have ended, which the ledger contains."""
    UNSURE = auto()
    """Tokens of steps that may be in the ledger."""
    LATE = auto()
    """Tokens that steps have recorded after they had lost their lock, and with it their hold."""
    SPENDING = auto()
    """Tokens of the open step."""
    IN_A_STEP = auto()
    SESSION = auto()
    """The number of the session whose lock the worker has, from 1."""


class Told(NamedTuple):
    """A fault that a worker has seen. An excess over a limit is given in tokens."""

    text: str
    excess: int = 0


class Failed(Exception):
    """The step fails."""


def dollars(tokens: int) -> Decimal:
    return Decimal(tokens) / _TOKENS_OF_A_DOLLAR


def spend(alias: str, tenant: str, seed: int, steps: int, tally: Any, ear: Connection) -> None:
    """Take turns until the tally has so many steps."""
    # Each lost lock is logged.
    logging.getLogger("helix_store").setLevel(logging.CRITICAL)
    worker = _Worker(Store(alias, tenant=tenant), seed, tally, ear.send)
    while tally[Tally.STEPS] < steps:
        worker.take_a_turn(steps - tally[Tally.STEPS])


class _Worker:
    def __init__(self, store: Store, seed: int, tally: Any, tell: Callable[[Told], None]) -> None:
        self.store = store
        self.chance = random.Random(seed)  # noqa: S311  the same draws for the same seed
        self.tally = tally
        self.tell = tell

    def take_a_turn(self, most_steps: int) -> None:
        number = self.chance.randrange(len(SESSIONS))
        session = self.store.session([*SESSIONS][number])
        try:
            with session.turn(
                ttl=TERM_MS, estimate_usd=dollars(MOST_TOKENS), estimate_tokens=MOST_TOKENS
            ) as turn:
                self.tally[Tally.SESSION] = number + 1
                for _ in range(min(most_steps, self.chance.randint(1, _MOST_STEPS_OF_A_TURN))):
                    self._take_a_step(session, turn)
        except (SessionBusy, FencedOutError, LockLostError, StoreBusy, ConflictError):
            pass
        finally:
            self.tally[Tally.SESSION] = 0
        time.sleep(self.chance.uniform(0, _PAUSE_SECONDS))

    def _take_a_step(self, session: SessionHandle, turn: Turn) -> None:
        tally, action = self.tally, self.chance.choice(_ACTIONS)
        estimate = MOST_TOKENS
        given: dict[str, Any] = {}
        if self.chance.random() < 0.8:
            estimate = self.chance.randint(1, MOST_TOKENS)
            given = {"estimate_usd": dollars(estimate), "estimate_tokens": estimate}
        tokens = estimate if self.chance.random() < 0.5 else self.chance.randint(0, estimate)
        if action == "lose":
            # Whoever has lost the lock has no hold. What it spends is still recorded, and may be too much.
            tokens = 0
        try:
            with turn.step(**given) as step:
                tally[Tally.IN_A_STEP] = 1
                self._require_within_limits(turn.state)
                time.sleep(self.chance.uniform(0, _LONGEST_STEP_SECONDS))
                tally[Tally.SPENDING] = tokens
                turn.tokens(model="model", prompt=tokens, cost_usd=dollars(tokens))
                step.say({"role": "assistant", "content": "answer"})
                if action == "lose":
                    self.store.locks.force_release(session.id)
                    time.sleep(self.chance.uniform(0, _LONGEST_LOSS_SECONDS))
                elif not self._held(turn) and self._has_lock(turn):
                    self.tell(Told(f"{session.id} has lost its hold in its step"))
                if action == "fail":
                    raise Failed
            outcome, recorded = Tally.COMMITTED, Tally.TOLD
        except Failed:
            outcome, recorded = Tally.FAILED, Tally.TOLD
        except BudgetExceeded:
            tally[Tally.REFUSED] += 1
            raise
        except (FencedOutError, LockLostError):
            self._ended(Tally.LOST, Tally.LATE)
            raise
        except (StoreBusy, ConflictError):
            self._ended(Tally.BUSY, Tally.UNSURE)
            raise
        self._ended(outcome, recorded)
        self._require_within_limits(turn.state)
        is_active, held = turn.is_active, self._held(turn)
        if is_active != bool(held) and self._has_lock(turn):
            # Only a turn that goes on has reserved its next step.
            self.tell(Told(f"{session.id} holds {held} after its step, and is active: {is_active}"))

    def _ended(self, outcome: Tally, recorded: Tally) -> None:
        tally = self.tally
        tally[outcome] += 1
        tally[Tally.STEPS] += 1
        # Whoever is killed between the two has its tokens in both: they only bound the sum.
        tally[recorded] += tally[Tally.SPENDING]
        tally[Tally.SPENDING] = tally[Tally.IN_A_STEP] = 0

    def _require_within_limits(self, state: SessionState) -> None:
        """Read every budget of a session in one statement, with what the session itself holds."""
        spender = Spender(state.root_session_id or state.session_id, state.user_id, state.agent_type)
        for balance in self.store.budgets._backend.balances(keys_of(spender)):
            excess = _excess(balance)
            if excess > 0:
                self.tell(Told(f"a worker found {balance}", excess))

    def _has_lock(self, turn: Turn) -> bool:
        """Return whether nobody has broken the lock of a turn: that of a worker which was killed just after
        its turn may be broken when the next turn of the session has begun.
        """
        locks = Lock.objects.using(self.store.alias).filter(tenant=self.store.tenant, name=turn.session.id)
        return locks.filter(token=turn.fencing_token or 0).exists()

    def _held(self, turn: Turn) -> dict[str, Any]:
        """Return what a turn holds, by the name of the budget."""
        alias, tenant = self.store.alias, self.store.tenant
        sessions = Session.objects.using(alias).filter(tenant=tenant, session_id=turn.session.id)
        key = str(sessions.values_list("pk", flat=True).get())
        rows = BudgetCounter.objects.using(alias).filter(tenant=tenant)
        return {
            name: holds[key]
            for name, holds in rows.values_list("name", "holds")
            if holds.get(key, [None])[0] == turn.fencing_token
        }


def _excess(balance: Balance) -> int:
    limits = balance.definition
    used = balance.spent + balance.held
    return max(
        0 if limits.limit_tokens is None else used.tokens - limits.limit_tokens,
        0 if limits.limit_usd is None else tokens_of(used.usd - limits.limit_usd),
    )


def tokens_of(units: int) -> int:
    """Return dollars in their smallest unit as tokens, rounded up."""
    return -(-units * _TOKENS_OF_A_DOLLAR // 10**12)
