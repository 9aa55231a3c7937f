"""A term that the caller rolls back: the next holder gets its token, but its lock ends nothing."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from datetime import timedelta
from typing import Final

import pytest
from django.db import connections

from helix_store import InMemoryStore, Lock, LockLostError, Store
from helix_store.core import moments
from helix_store.core.moments import as_utc
from tests.cells import for_each
from tests.databases import ALIASES, CommittedDatabase

AnyStore = Store | InMemoryStore

LONG: Final = 60_000


class _RolledBack(Exception):
    """The caller's own error."""


@pytest.fixture(params=["memory", *ALIASES])
def store(request: pytest.FixtureRequest) -> Iterator[AnyStore]:
    if request.param == "memory":
        yield InMemoryStore()
        return
    database: CommittedDatabase = request.getfixturevalue(f"{request.param}_db")
    yield Store(database.alias, tenant=database.tenant)


@contextmanager
def rolled_back(store: AnyStore, *, outer: AbstractContextManager[object] | None = None) -> Iterator[None]:
    """A block that is rolled back, by default a whole transaction."""
    with outer or nullcontext(), suppress(_RolledBack), store.transaction():
        yield
        raise _RolledBack


def acquired(store: AnyStore) -> Lock:
    lock = store.locks.acquire("session", ttl_ms=LONG)
    assert lock is not None
    return lock


BEGINS: Final[dict[str, Callable[[AnyStore], Lock]]] = {
    "acquire": acquired,
    "take_over": lambda store: store.locks.take_over("session", ttl_ms=LONG),
}


@for_each("begin", BEGINS)
@pytest.mark.parametrize("in_savepoint", [False, True])
def test_a_rolled_back_lock_ends_no_term_of_the_next_holder(
    store: AnyStore, begin: str, in_savepoint: bool
) -> None:
    with rolled_back(store, outer=store.transaction() if in_savepoint else None):
        former = BEGINS[begin](store)
        assert former.is_trusted()
    assert not former.is_trusted()
    # The same manager, so the same owner.
    holder = acquired(store)
    assert (holder.owner, holder.fencing_token) == (former.owner, former.fencing_token)
    with pytest.raises(LockLostError):
        former.refresh()
    assert not former.release()
    assert not former.is_trusted()
    assert holder.is_trusted()
    assert holder.refresh() == holder.expires_at
    assert store.locks.is_locked("session")
    assert holder.release()


@pytest.mark.parametrize("in_savepoint", [False, True])
def test_a_committed_lock_is_trusted(store: AnyStore, in_savepoint: bool) -> None:
    with store.transaction(), store.transaction() if in_savepoint else nullcontext():
        lock = acquired(store)
        assert lock.is_trusted()
    assert lock.is_trusted()
    assert lock.refresh() == lock.expires_at
    assert lock.release()
    assert not lock.is_trusted()


def test_a_savepoint_that_is_rolled_back_later_leaves_an_older_term_alone(store: AnyStore) -> None:
    with store.transaction():
        lock = acquired(store)
        with rolled_back(store):
            assert lock.is_trusted()
        assert lock.is_trusted()
    assert lock.is_trusted()


def test_a_rolled_back_refresh_does_not_extend_trust(store: AnyStore) -> None:
    lock = store.locks.acquire("session", ttl_ms=200)
    assert lock is not None
    with rolled_back(store):
        lock.refresh(LONG)
        assert lock.is_trusted()
    is_held = True
    while is_held:
        # Check in this order, because a lock that is free now may be held later.
        is_held = store.locks.is_locked("session")
        assert is_held or not lock.is_trusted()


def test_a_rolled_back_refresh_leaves_the_ttl_and_the_end_as_they_were(store: AnyStore) -> None:
    lock = acquired(store)
    before = lock.expires_at
    with rolled_back(store):
        shorter = lock.refresh(50)
        assert (lock.ttl_ms, lock.expires_at) == (50, shorter)
    assert (lock.ttl_ms, lock.expires_at) == (LONG, before)
    assert lock.refresh() >= before
    with store.transaction():
        longer = lock.refresh(2 * LONG)
        with rolled_back(store):
            lock.refresh(50)
    assert (lock.ttl_ms, lock.expires_at) == (2 * LONG, longer)
    assert lock.release()
    assert (lock.ttl_ms, lock.expires_at) == (2 * LONG, longer)


def test_a_lock_remembers_only_what_a_rollback_may_leave(store: AnyStore) -> None:
    lock = acquired(store)
    for _ in range(3):
        with store.transaction():
            lock.refresh()
            with rolled_back(store):
                lock.refresh()
    with store.transaction():
        lock.refresh()
        assert len(lock._windows) == 3


def test_a_turn_whose_lock_was_rolled_back_writes_nothing(store: AnyStore) -> None:
    session = store.new_session("session", agent_type="agent")
    turn = session.turn(ttl=LONG)
    with rolled_back(store):
        turn.__enter__()
    holder = acquired(store)
    assert holder.fencing_token == turn.fencing_token
    with pytest.raises(LockLostError) as lost, turn.step():
        pass
    turn.__exit__(lost.type, lost.value, lost.tb)
    assert holder.refresh()
    assert session.load().step_count == 0


def test_a_refresh_that_waits_for_a_longer_one_keeps_the_ttl_that_a_rollback_leaves(store: AnyStore) -> None:
    """As that of a keep-alive does: it sends the newest TTL, which is then rolled back."""
    lock = acquired(store)
    refreshed = threading.Event()

    def refresh() -> None:
        lock.refresh()
        refreshed.set()
        connections.close_all()

    with rolled_back(store):
        lock.refresh(10 * LONG)
        # The name of a thread of the store's own: it may wait for a block.
        thread = threading.Thread(target=refresh, name="helix_store keep-alive of a test")
        thread.start()
        assert not refreshed.wait(0.3)
        assert lock.ttl_ms == 10 * LONG
    thread.join(LONG / 1000)
    assert refreshed.is_set()
    (info,) = store.locks.get_active_locks()
    assert lock.ttl_ms == LONG
    assert info.expires_at == lock.expires_at < as_utc(moments.now()) + timedelta(milliseconds=2 * LONG)
