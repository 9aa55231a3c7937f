"""Transactions over several sessions: calls of the store in a block of the caller, which commits or not."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Final

from django.db import connections, transaction

from helix_store.exceptions import HelixStoreError
from helix_store.stores import DatabaseStateStore
from tests.faults.anomalies import Append, Read, Transaction

__all__ = ["SESSIONS", "Place", "create_sessions", "lists_at_the_end", "transactions"]

SESSIONS: Final = ("a", "b", "c")
_ROLLED_BACK: Final = 0.2
_OF_MESSAGES: Final = ("read messages", "append message")
_KINDS: Final = (*_OF_MESSAGES, "read state", "append to state")


@dataclass(frozen=True)
class Place:
    """Where transactions run, with which isolation level, and with which faults planted in the store."""

    alias: str
    tenant: str
    level: str | None = None
    outside: str | None = None
    """An alias on which messages are appended instead, so not in the block of the caller."""
    ignores_versions: bool = False

    @property
    def store(self) -> DatabaseStateStore:
        return DatabaseStateStore(self.alias, tenant=self.tenant)

    @property
    def appending(self) -> DatabaseStateStore:
        return replace(self, alias=self.outside or self.alias).store


class _RolledBack(Exception):
    """The caller leaves its block without a commit."""


def create_sessions(place: Place) -> None:
    for session_id in SESSIONS:
        place.store.create_session(session_id, agent_type="agent", custom_state={"list": []})


def transactions(place: Place, number: int, seed: int, count: int) -> list[Transaction]:
    """Make transactions one after the other."""
    chance = random.Random(seed * 1000 + number)  # noqa: S311  the same transactions for the same seed
    items = iter(range(number * 1_000_000, (number + 1) * 1_000_000))
    return [_transaction(place, chance, items) for _ in range(count)]


def _transaction(place: Place, chance: random.Random, items: Iterator[int]) -> Transaction:
    # A block that had changed a state would wait for itself when it appended outside.
    kinds = chance.choices(_OF_MESSAGES if place.outside else _KINDS, k=chance.randint(2, 5))
    sessions = chance.choices(SESSIONS, k=len(kinds))
    # Locks in one order: a deadlock would only cost time.
    locked = iter(sorted(each for kind, each in zip(kinds, sessions, strict=True) if "append" in kind))
    made = Transaction()
    try:
        with transaction.atomic(using=place.alias):
            if place.level is not None:
                with connections[place.alias].cursor() as cursor:
                    cursor.execute(f"SET TRANSACTION ISOLATION LEVEL {place.level}")
            for kind, session_id in zip(kinds, sessions, strict=True):
                _call(place, kind, next(locked) if "append" in kind else session_id, items, made)
            if chance.random() < _ROLLED_BACK:
                raise _RolledBack
    except (HelixStoreError, _RolledBack):
        made.result = "fail"
    else:
        made.result = "ok"
    return made


def _call(place: Place, kind: str, session_id: str, items: Iterator[int], made: Transaction) -> None:
    if kind == "read messages":
        made.operations.append(Read(f"messages {session_id}", _messages(place, session_id)))
    elif kind == "append message":
        item = next(items)
        place.appending.append_messages(session_id, [{"role": "user", "content": item}])
        made.operations.append(Append(f"messages {session_id}", item))
    else:
        state = _state(place, session_id)
        made.operations.append(Read(f"state {session_id}", tuple(state.custom_state["list"])))
        if kind == "append to state":
            item = next(items)
            state.custom_state["list"].append(item)
            expected = None if place.ignores_versions else state.version
            place.store.save_state(session_id, state, expected_version=expected)
            made.operations.append(Append(f"state {session_id}", item))


def _state(place: Place, session_id: str) -> Any:
    state = place.store.load_state(session_id)
    assert state is not None
    return state


def _messages(place: Place, session_id: str) -> tuple[int, ...]:
    return tuple(message["content"] for message in place.store.get_messages(session_id).messages)


def lists_at_the_end(place: Place) -> dict[str, list[int]]:
    return {
        **{f"messages {each}": [*_messages(place, each)] for each in SESSIONS},
        **{f"state {each}": [*_state(place, each).custom_state["list"]] for each in SESSIONS},
    }
