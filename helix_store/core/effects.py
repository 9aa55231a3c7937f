"""Effects: calls of the world outside the database, stored before and after they happen."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from hashlib import sha256
from typing import Any, Literal, TypeAlias

from helix_store.core.approvals import canonical_json
from helix_store.core.payloads import Page, Serializable

__all__ = ["Effect", "EffectPage", "EffectState", "Reconcile", "effect_key"]

EffectState: TypeAlias = Literal["started", "done", "not_done", "unknown"]


@dataclass(kw_only=True)
class Effect(Serializable):
    """One effect of a session, as it is stored.

    ``key`` is the idempotency key to pass to the service that is called. ``state`` is ``unknown`` also for an
    effect whose worker has started it and is gone. ``attempt`` counts from 1. ``actors`` are the people who
    have approved the effect, and the one who has settled it. ``error`` is the exception of the last attempt
    as in a `Run`, or ``{"reason": …}`` for an effect that was not done.

    Example::

        for effect in store.sessions.list_effects("trip"):
            print(effect.tool_name, effect.state, effect.attempt, effect.result)
    """

    session_id: str
    id: str
    key: str
    sequence: int
    tool_name: str
    input: Any
    attempt: int
    state: EffectState
    result: Any
    error: dict[str, Any] | None
    actors: list[str]
    run_id: str | None
    step_count: int | None
    started_at: datetime
    ended_at: datetime | None

    @property
    def is_done(self) -> bool:
        """True if the effect has happened and its result is stored."""
        return self.state == "done"


Reconcile: TypeAlias = Callable[[Any], Any]
"""A function that asks the service whether an effect happened, and calls `done` or `not_done`; or neither, if
the service cannot tell.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class EffectPage(Serializable, Page[Effect]):
    """One page of a session's effects, in the order in which they were first entered.

    Example::

        page = store.sessions.list_effects("trip", states=["unknown"], limit=20)
        for effect in page:
            print(effect.id, effect.tool_name, effect.error)
    """

    items: list[Effect]
    next_cursor: str | None


def effect_key(tenant: str, session_id: str, effect_id: str) -> str:
    """Return the hex SHA-256 of an effect's names, which is the same in every database that holds it."""
    return sha256(
        canonical_json([tenant, session_id, effect_id]).encode("utf-8", "surrogatepass")
    ).hexdigest()
