"""Clients of one session, which record what they do and what they are told."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any, Final

from helix_store.core.contracts import LockManager, StateStore, UsageStore
from helix_store.core.types import SessionState, StatusConflict, UsageKind
from helix_store.core.usage import UsageEntry, UsageSource
from tests.faults.history import Event, History

__all__ = ["SESSION", "client", "read", "run_interleaved"]

SESSION: Final = "session"
_KINDS: Final = ("step", "fenced", "fenced", "append", "status", "read", "acquire")
_STATUSES: Final = ("active", "running", "paused")


def client(
    store: StateStore,
    locks: LockManager,
    history: History,
    number: int,
    seed: int,
    calls: int,
    *,
    usage: UsageStore | None = None,
) -> Iterator[None]:
    """Make calls, and pause where another client may come in between."""
    chance = random.Random(seed * 1000 + number)  # noqa: S311  the same calls for the same seed
    items = iter(range(number * 1_000_000, (number + 1) * 1_000_000))
    token: int | None = None
    for _ in range(calls):
        kind = chance.choice([*_KINDS, *(["usage"] if usage else [])])
        if kind == "acquire":
            token = _acquire(locks, history, f"client-{number}") or token
        elif kind in ("step", "fenced"):
            state = _load(store, history)
            yield
            if state is None:
                continue
            added = [next(items), next(items)]
            with history.calling("step", items=added, expected_version=state.version) as event:
                state.custom_state["list"] = [*state.custom_state["list"], *added]
                event.token = token if kind == "fenced" else None
                event.version = store.save_state_and_promote_staging(
                    SESSION,
                    state,
                    [_message(item) for item in added],
                    {"step_id": f"{number}-{added[0]}", "step_count": state.step_count + 1},
                    expected_version=state.version,
                    fencing_token=event.token,
                ).new_version
        elif kind == "append":
            added = [next(items), next(items)]
            with history.calling("append", items=added) as event:
                event.count = store.append_messages(SESSION, [_message(item) for item in added])
        elif kind == "usage" and usage is not None:
            added = [next(items)]
            with history.calling("usage", items=added):
                usage.record_entry(_entry(added[0]))
        elif kind == "status":
            _set_status(store, history, chance)
        else:
            read(store, history)
        yield


def _acquire(locks: LockManager, history: History, owner: str) -> int | None:
    with history.calling("acquire") as event:
        locks.force_release(SESSION)
        lock = locks.acquire(SESSION, owner=owner)
        event.token = None if lock is None else lock.fencing_token
    return event.token


def _set_status(store: StateStore, history: History, chance: random.Random) -> None:
    expected, status = chance.sample(_STATUSES, 2)
    with history.calling("status", expected=[expected], status=status) as event:
        answer: Any = store.compare_and_set_status(SESSION, [expected], status)
        if isinstance(answer, StatusConflict):
            event.result, event.status = "fail", str(answer.current_status.value)
        else:
            event.version = answer.new_version


def _message(item: int) -> dict[str, Any]:
    return {"role": "user", "content": item}


def _entry(item: int) -> UsageEntry:
    return UsageEntry(
        kind=UsageKind.CUSTOM,
        id=f"entry-{item}",
        session_id=SESSION,
        step_count=0,
        timestamp=1_900_000_000_000,
        source=UsageSource(type="agent", name="agent"),
        type="call",
        name="call",
        amount=item,
    )


def _load(store: StateStore, history: History) -> SessionState | None:
    """The state, or ``None`` where the database does not answer."""
    state: SessionState | None = None
    with history.calling("read") as event:
        state = store.load_state(SESSION)
        assert state is not None
        event.version, event.status = state.version, state.status.value
        event.read_list = list(state.custom_state["list"])
    return state


def read(store: StateStore, history: History, usage: UsageStore | None = None) -> Event:
    with history.calling("read") as event:
        state = store.load_state(SESSION)
        assert state is not None
        event.version, event.status = state.version, state.status.value
        event.read_list = state.custom_state["list"]
        event.read_messages = [message["content"] for message in store.get_messages(SESSION).messages]
        if usage is not None:
            event.read_entries = [int(entry.amount or 0) for entry in usage.get_entries(SESSION)]
    return event


def run_interleaved(clients: list[Iterator[None]], seed: int) -> None:
    """Let the clients go on in an order that the seed chooses, one at a time."""
    chance = random.Random(seed)  # noqa: S311  the same order for the same seed
    waiting = list(clients)
    while waiting:
        chosen = chance.choice(waiting)
        if next(chosen, waiting) is waiting:
            waiting.remove(chosen)
