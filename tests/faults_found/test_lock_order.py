"""Taking a lock over and writing under it in one block, while a former holder writes: no deadlock."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any, Final

import pytest
from django.db import connections, transaction

from helix_store.core.types import SessionState, StepInfo
from helix_store.exceptions import FencedOutError
from helix_store.stores import DatabaseLockManager, DatabaseStateStore, Lock
from tests.cells import for_each
from tests.database.separate import execute, separate_connection
from tests.databases import CommittedDatabase
from tests.faults_found.races import Writers, until, until_backends_wait

STATE: Final = SessionState(session_id="s", agent_type="t")

GUARDED: Final[dict[str, Callable[[DatabaseStateStore, int], Any]]] = {
    "save_state_and_promote_staging": lambda store, token: store.save_state_and_promote_staging(
        "s", STATE, [], StepInfo("step", 1), fencing_token=token
    ),
    "append_messages": lambda store, token: store.append_messages(
        "s", [{"role": "user"}], fencing_token=token
    ),
    "compare_and_set_status": lambda store, token: store.compare_and_set_status(
        "s", ["active"], "active", fencing_token=token
    ),
}


@pytest.fixture
def store(postgres_forms: CommittedDatabase) -> DatabaseStateStore:
    store = DatabaseStateStore(postgres_forms.alias, tenant=postgres_forms.tenant)
    store.create_session("s", agent_type="t")
    return store


@pytest.fixture
def former(postgres_forms: CommittedDatabase, store: DatabaseStateStore) -> Lock:
    """A lock on the session whose term is over."""
    locks = DatabaseLockManager(postgres_forms.alias, tenant=postgres_forms.tenant)
    lock = locks.acquire("s", ttl_ms=50)
    assert lock is not None
    until(lambda: not locks.is_locked("s"), "the term does not end")
    return lock


def version(store: DatabaseStateStore) -> int:
    state = store.load_state("s")
    assert state is not None
    return state.version


def notice_deadlocks_first(alias: str) -> None:
    """Let this transaction be the one that the server gives up, and soon."""
    execute(connections[alias], "SET LOCAL deadlock_timeout = '20ms'")


@pytest.mark.thorough
@for_each("victim", ["successor", "former holder"])
@for_each("late", GUARDED)
@for_each("write", GUARDED)
def test_a_takeover_and_a_write_in_one_block_do_not_deadlock_with_a_former_holder(
    postgres_forms: CommittedDatabase,
    store: DatabaseStateStore,
    former: Lock,
    write: str,
    late: str,
    victim: str,
) -> None:
    def write_late() -> None:
        with transaction.atomic(using=postgres_forms.alias):
            if victim == "former holder":
                # It waits for a while before there is anything to notice.
                execute(connections[postgres_forms.alias], "SET LOCAL deadlock_timeout = '500ms'")
            GUARDED[late](store, former.fencing_token)

    with separate_connection(**postgres_forms.connection.settings_dict) as connection:
        where: dict[str, Any] = {"using": connection.alias, "tenant": postgres_forms.tenant}
        with transaction.atomic(using=connection.alias):
            if victim == "successor":
                notice_deadlocks_first(connection.alias)
            successor = DatabaseLockManager(**where).acquire("s")
            assert successor is not None
            writers = Writers([write_late])
            until_backends_wait(postgres_forms, 1)
            GUARDED[write](DatabaseStateStore(**where), successor.fencing_token)
    (outcome,) = writers.outcomes()
    assert isinstance(outcome.error, FencedOutError), outcome
    assert (outcome.error.token, outcome.error.current_token) == (1, 2)
    assert version(store) == 2


@for_each("is_in_block", [True, False], ids=["in a block", "alone"])
@for_each("write", GUARDED)
def test_a_former_holder_whose_write_is_under_way_keeps_the_lock_from_the_next_one(
    postgres_forms: CommittedDatabase,
    store: DatabaseStateStore,
    former: Lock,
    write: str,
    is_in_block: bool,
) -> None:
    with separate_connection(**postgres_forms.connection.settings_dict) as connection:
        where: dict[str, Any] = {"using": connection.alias, "tenant": postgres_forms.tenant}
        others, locks = DatabaseStateStore(**where), DatabaseLockManager(**where)
        with transaction.atomic(using=postgres_forms.alias):
            GUARDED[write](store, former.fencing_token)
            with transaction.atomic(using=connection.alias) if is_in_block else nullcontext():
                assert locks.acquire("s") is None
        with transaction.atomic(using=connection.alias) if is_in_block else nullcontext():
            successor = locks.acquire("s")
            assert successor is not None
            GUARDED[write](others, successor.fencing_token)
        with pytest.raises(FencedOutError):
            GUARDED[write](store, former.fencing_token)
    assert version(store) == 3


@pytest.mark.thorough
@for_each("write", GUARDED)
def test_writers_and_takeovers_in_blocks_never_meet_in_a_deadlock(
    postgres_forms: CommittedDatabase, store: DatabaseStateStore, write: str
) -> None:
    locks = DatabaseLockManager(postgres_forms.alias, tenant=postgres_forms.tenant)

    def take_over_and_write() -> int:
        writes, token = 0, 0
        for _ in range(10):
            with transaction.atomic(using=postgres_forms.alias):
                notice_deadlocks_first(postgres_forms.alias)
                lock = locks.acquire("s", ttl_ms=1)
                token = token if lock is None else lock.fencing_token
                if lock is not None:
                    GUARDED[write](store, token)
                    writes += 1
            if token:
                try:
                    GUARDED[write](store, token)
                except FencedOutError:
                    continue
                writes += 1
        return writes

    writers = Writers([partial(take_over_and_write)] * 4)
    written = sum(outcome.unwrap() for outcome in writers.outcomes())
    assert version(store) == 1 + written
