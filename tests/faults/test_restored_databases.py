"""A worker that lives on while its database goes back in time, and the tokens are raised then."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Final

import pytest
from django.db import connections
from django.db.models import F

from helix_store.exceptions import (
    FencedOutError,
    HelixStoreError,
    LockLostError,
    StaleStateError,
    StoreUnavailable,
)
from helix_store.models import Lock as LockRow
from helix_store.stores import DatabaseLockManager, DatabaseStateStore, Lock
from helix_store.testing.state_store.samples import full_session
from tests.databases import CommittedDatabase
from tests.faults.campaign import Trial, campaign
from tests.faults.guarded import CALLS, SESSION, Place, everything_in, prepare
from tests.faults.restores import Restorable, restorable_sqlite

_MOST_TERMS: Final = 3
RAISED_BY: Final = 1_000_000
KINDS: Final = list(CALLS)
random.Random(0).shuffle(KINDS)  # noqa: S311  neighbouring seeds are to differ


def take_terms(alias: str, tenant: str, count: int) -> Lock | None:
    """So many terms of the lock, in each of which a step is made. The last one is held."""
    locks = DatabaseLockManager(alias, tenant=tenant)
    store = DatabaseStateStore(alias, tenant=tenant)
    lock = None
    for _ in range(count):
        lock = locks.take_over(SESSION, owner=alias)
        make_a_step(store, alias, lock.fencing_token)
    return lock


def make_a_step(store: DatabaseStateStore, said: str, token: int | None) -> None:
    state = store.load_state(SESSION)
    assert state is not None
    state.custom_state["said"] = said
    step = {"step_id": "restored", "step_count": state.step_count + 1}
    message = {"role": "user", "content": said}
    store.save_state_and_promote_staging(SESSION, state, [message], step, fencing_token=token)


def raise_tokens(alias: str) -> None:
    """What docs/not-promised.md says to do after a restore."""
    LockRow.objects.using(alias).update(token=F("token") + RAISED_BY)


def refusal(call: Callable[[], object]) -> HelixStoreError | None:
    """The error of a call, or ``None`` where it did its work."""
    try:
        call()
    except HelixStoreError as exc:
        return exc
    return None


def restore_once(database: Restorable, tenant: str, trial: Trial) -> None:
    """Take terms of a worker back, raise the tokens, perhaps let a successor in, and let the worker go on."""
    name = KINDS[trial.seed % len(KINDS)]
    place = Place(database.worker, tenant)
    prepare(Place(database.worker, tenant), name)
    # Of a name that nobody had locked there is no token to raise.
    kept = trial.chance.randint(1, _MOST_TERMS)
    take_terms(database.worker, tenant, kept)
    database.remember()
    lock = take_terms(database.worker, tenant, trial.chance.randint(1, _MOST_TERMS))
    state = place.state.load_state(SESSION)
    assert lock is not None
    assert state is not None
    database.restore()
    raise_tokens(database.successor)
    taken = trial.seed % 3
    take_terms(database.successor, tenant, taken)
    newest = kept + RAISED_BY + taken
    seen = Place(database.successor, tenant)
    version = seen.state.load_state(SESSION).version  # type: ignore[union-attr]  # it is there
    before = everything_in(seen)
    # PostgreSQL has ended the worker's connection: it is told so once, and not that anything was written.
    lost = refusal(lambda: place.state.load_state(SESSION))
    assert lost is None or isinstance(lost, StoreUnavailable), repr(lost)
    trial.count("the connection was lost", lost is not None)

    fenced_out = refusal(lambda: CALLS[name](place, lock.fencing_token))
    assert isinstance(fenced_out, FencedOutError), f"{name} ended in {fenced_out!r}"
    assert (fenced_out.token, fenced_out.current_token) == (lock.fencing_token, newest)
    if version == state.version:
        trial.count("the version is not told apart")
    else:
        stale = refusal(lambda: place.state.save_state(SESSION, state, expected_version=state.version))
        assert isinstance(stale, StaleStateError), repr(stale)
    assert isinstance(refusal(lock.refresh), LockLostError)
    assert lock.release() is False
    assert everything_in(seen) == before, f"{name} wrote with a token of the time that was taken back"
    trial.count("a successor has the lock" if taken else "nobody has the lock")


@pytest.mark.campaign
def test_a_worker_is_fenced_out_of_a_database_that_was_restored(
    committed_db: CommittedDatabase, restorable: Restorable
) -> None:
    name = "sqlite" if committed_db.vendor == "sqlite" else "postgres"
    sizes = (6, 200, 6_000) if name == "sqlite" else (2, 30, 600)
    with campaign("restored_databases", name, sizes=sizes) as made:
        made.run(lambda trial: restore_once(restorable, f"{committed_db.tenant}-{trial.seed}", trial))
    assert made.counts["a successor has the lock"], made.counts


def test_a_worker_is_fenced_out_once_it_opens_the_sqlite_file_that_took_the_place_of_its_own(
    sqlite_db: CommittedDatabase, tmp_path: Path
) -> None:
    file = tmp_path / "moved.sqlite3"
    with restorable_sqlite(file) as database:
        worker, successor = Place(database.worker, "tenant"), Place(database.successor, "tenant")
        full_session(worker.state, SESSION)
        take_terms(database.worker, "tenant", 1)
        database.remember()
        lock = take_terms(database.worker, "tenant", 2)
        assert lock is not None
        connections[database.successor].close()
        file.with_suffix(".kept").replace(file)
        for companion in ("-wal", "-shm"):
            Path(f"{file}{companion}").unlink()
        # Into a file that no longer has a name: SQLite does not notice.
        make_a_step(worker.state, "lost", lock.fencing_token)
        raise_tokens(database.successor)
        take_terms(database.successor, "tenant", 1)
        before = everything_in(successor)
        connections[database.worker].close()
        fenced_out = refusal(lambda: make_a_step(worker.state, "stale", lock.fencing_token))
        assert isinstance(fenced_out, FencedOutError), repr(fenced_out)
        assert everything_in(successor) == before
        assert everything_in(worker) == before
