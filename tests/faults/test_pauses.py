"""A holder that stands still for longer than its term writes nothing over its successor.

The write is released before the successor has the lock, after it, or stands still at any moment in between;
in one statement and in the portable form; for every public call that takes a fencing token.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Iterator
from enum import Enum
from typing import Final

import pytest

from helix_store.exceptions import ConflictError, FencedOutError, StoreBusy
from helix_store.stores import DatabaseLockManager, Lock
from tests.cells import for_each
from tests.database.separate import separate_connection
from tests.databases import CommittedDatabase
from tests.faults.campaign import Trial, campaign
from tests.faults.crew import pause, until
from tests.faults.guarded import CALLS, SESSION, Place, calls_with_a_token, everything_in, prepare
from tests.faults.paused_holders import Holder

pytestmark = pytest.mark.usefixtures("machine")

_LONGEST_WRITE_SECONDS: Final = 0.004
_MESSAGES: Final = [{"role": "user", "content": "of the successor"}]


class Release(Enum):
    """When the holder's first write goes on."""

    BEFORE = "before the successor has the lock"
    AFTER = "after the successor has written"
    AMID = "from any moment of the write"


KINDS: Final = list(itertools.product(CALLS, Release, (True, False)))
random.Random(0).shuffle(KINDS)  # noqa: S311  neighbouring seeds are to differ


@pytest.fixture
def successor_alias(committed_db: CommittedDatabase) -> Iterator[str]:
    """Where SQLite would wait for the one write transaction, the successor gives up at once."""
    settings = committed_db.connection.settings_dict
    if committed_db.vendor == "sqlite":
        settings = {**settings, "OPTIONS": {**settings["OPTIONS"], "timeout": 0}}
    with separate_connection(**settings) as connection:
        yield connection.alias


@pytest.fixture
def holder(committed_db: CommittedDatabase) -> Iterator[Holder]:
    with Holder(committed_db.alias) as holder:
        yield holder


def pause_once(
    place: Place, successor_alias: str, holder: Holder, trial: Trial, *, has_fence: bool = True
) -> None:
    """Pause a holder past its term in one kind of write, let a successor write, and let the holder go on."""
    name, release, is_fast = KINDS[trial.seed % len(KINDS)]
    prepare(place, name)
    unwritten = everything_in(place)
    token = holder.acquire(place.tenant)
    locks = DatabaseLockManager(successor_alias, tenant=place.tenant, default_ttl_ms=60_000)

    def write() -> None:
        holder.write(place.tenant, name, token if has_fence else None, is_fast=is_fast)

    lock: Lock | None = None
    if release is Release.AMID:
        write()
        pause(trial.chance.uniform(0, _LONGEST_WRITE_SECONDS))
        try:
            stand_still(holder, locks)
        except StoreBusy:
            # It was stopped while it changed the index of SQLite's WAL. Until it goes on, nobody can read.
            trial.count("stopped in the index of the WAL")
        else:
            lock = acquired_by(locks)
            trial.count("the takeover waited" if lock is None else "taken over amid the write")
            taken_over = everything_in(place)
        holder.go_on()
        first = holder.outcome()
        if lock is not None:
            assert everything_in(place) == taken_over, f"{name} wrote after the takeover"
            assert (first is None) == (taken_over != unwritten), f"{name} ended in {first!r}"
    else:
        stand_still(holder, locks)
        if release is Release.BEFORE:
            holder.go_on()
            write()
            assert holder.outcome() is None
            assert everything_in(place) != unwritten
            stand_still(holder, locks)
        first = None
    if lock is None:
        until(lambda: not locks.is_locked(SESSION), "the end of the term")
        lock = acquired_by(locks)
    assert lock is not None
    assert lock.fencing_token > token
    place.state.append_messages(SESSION, _MESSAGES, fencing_token=lock.fencing_token)
    of_the_successor = everything_in(place)
    holder.go_on()
    write()
    last = holder.outcome()
    assert everything_in(place) == of_the_successor, f"{name} wrote over the successor"
    require_refusal(name, last, token, lock.fencing_token)
    trial.count(f"released {release.value}")
    trial.count("refused", 1 + (release is Release.AMID and first is not None))


def stand_still(holder: Holder, locks: DatabaseLockManager) -> None:
    holder.stop()
    until(lambda: not locks.is_locked(SESSION), "the end of the term")


def acquired_by(locks: DatabaseLockManager) -> Lock | None:
    """The lock, or ``None`` while a write that has passed its fence holds the takeover off."""
    try:
        return locks.acquire(SESSION)
    except StoreBusy:
        return None


def require_refusal(name: str, error: Exception | None, token: int, newest: int) -> None:
    if name == "sessions: resume" and isinstance(error, ConflictError):
        # A session that was resumed is not suspended any more, whatever the token.
        return
    assert isinstance(error, FencedOutError), f"{name} ended in {error!r}"
    assert (error.token, error.current_token) == (token, newest)


@pytest.mark.campaign
def test_a_holder_that_stood_still_writes_nothing_over_its_successor(
    committed_db: CommittedDatabase, successor_alias: str, holder: Holder
) -> None:
    def trial(trial: Trial) -> None:
        place = Place(committed_db.alias, f"{committed_db.tenant}-{trial.seed}")
        try:
            pause_once(place, successor_alias, holder, trial)
        except BaseException:
            # It may stand still, or owe an answer.
            holder.start_again()
            raise

    name = "sqlite" if committed_db.vendor == "sqlite" else "postgres"
    with campaign("pauses", name, sizes=(30, 1_000, 10_000)) as made:
        made.run(trial)
    assert made.counts["refused"] >= made.trials, made.counts


def test_every_public_call_that_takes_a_token_is_paused() -> None:
    assert set(CALLS) == calls_with_a_token()


@for_each("release", Release)
def test_a_write_without_its_fence_is_found(
    committed_db: CommittedDatabase, successor_alias: str, holder: Holder, release: Release
) -> None:
    seed = KINDS.index(("sessions: save_state", release, True))
    place = Place(committed_db.alias, committed_db.tenant)
    with pytest.raises(AssertionError, match="wrote"):
        pause_once(place, successor_alias, holder, Trial(seed, Counter()), has_fence=False)
