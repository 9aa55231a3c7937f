"""Async calls that are cancelled at each statement end first, and leave nothing open."""

from __future__ import annotations

import asyncio
import functools
import inspect
import os
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Final, TypeVar

import pytest
from asgiref.sync import SyncToAsync
from django.db import connections, transaction
from django.test.utils import override_settings
from psycopg.pq import TransactionStatus

from helix_store import conf
from helix_store.engine import async_twins
from tests.database.counted_calls import CALLS, CLASSES, Faces
from tests.databases import CommittedDatabase, close_connections, fresh_tenant
from tests.faults.campaign import Trial, campaign
from tests.faults.crew import until
from tests.faults.lost_replies import rows_of
from tests.streams.background import wait_for_background_threads

_PATIENCE_SECONDS: Final = 30.0
_TURNS_OF_THE_LOOP: Final = 20
_ASYNC_THREADS: Final = (0, 2)

R = TypeVar("R")
AsyncCall = Callable[[], Coroutine[Any, Any, object]]


class Barrier:
    """Holds the statement of a number, counted from 0, until it is let go."""

    def __init__(self, number: int) -> None:
        self._left = number
        self.loop = asyncio.get_running_loop()
        self.reached = asyncio.Event()
        self.let_go = threading.Event()

    def __call__(self, execute: Callable[..., Any], *statement: Any) -> Any:
        self._left -= 1
        if self._left == -1:
            self.loop.call_soon_threadsafe(self.reached.set)
            assert self.let_go.wait(_PATIENCE_SECONDS), "the statement was not let go"
        return execute(*statement)


def async_form(face: str, call: str, faces: Faces) -> AsyncCall | None:
    """The async twin of a call that `CALLS` makes by its method."""
    invoke = CALLS[face][call](faces)
    bound = invoke.func if isinstance(invoke, functools.partial) else invoke
    given = (invoke.args, invoke.keywords) if isinstance(invoke, functools.partial) else ((), {})
    owner, name = getattr(bound, "__self__", None), getattr(bound, "__name__", "")
    if not isinstance(owner, CLASSES[face]):
        return None
    twin = getattr(owner, f"a{name}", None)
    return None if twin is None else functools.partial(twin, *given[0], **given[1])


def in_every_thread(call: Callable[[], R]) -> list[R]:
    """Make a call in Django's thread for synchronous code, or in each thread of ``ASYNC_THREADS``."""
    count = conf.async_threads()
    executor = async_twins._pools.get()(count) if count else SyncToAsync.single_thread_executor
    together = threading.Barrier(count or 1)

    def in_one() -> R:
        together.wait(_PATIENCE_SECONDS)
        return call()

    calls = [executor.submit(in_one) for _ in range(together.parties)]
    return [each.result() for each in calls]


def prepared(alias: str, call: str) -> AbstractContextManager[object]:
    """A block for the rows that a call needs: one transaction, because a commit for each row would take long.

    An effect cannot begin in a transaction, so the calls of effects are prepared in commits of their own.
    """
    return nullcontext() if "effect" in call else transaction.atomic(using=alias)


@contextmanager
def installed(alias: str, barrier: Barrier) -> Iterator[None]:
    """Install the barrier on the connections of async calls."""

    def wrappers() -> list[Any]:
        return connections[alias].execute_wrappers

    in_every_thread(lambda: wrappers().append(barrier))
    try:
        yield
    finally:
        in_every_thread(lambda: wrappers().remove(barrier))


def is_clean(alias: str) -> bool:
    """Whether the connection of this thread can be used again: no transaction is open, no reply is due."""
    connection = connections[alias]
    native = connection.connection
    if connection.in_atomic_block or connection.run_on_commit or native is None:
        return not (connection.in_atomic_block or connection.run_on_commit)
    if connection.vendor == "sqlite":
        return not native.in_transaction
    return bool(native.info.transaction_status == TransactionStatus.IDLE)


async def cancelled(alias: str, call: AsyncCall, number: int) -> bool:
    """Cancel a call at a statement; ``False`` if it sends fewer statements."""
    barrier = Barrier(number)
    with installed(alias, barrier):
        task = asyncio.ensure_future(call())
        reached = asyncio.ensure_future(barrier.reached.wait())
        await asyncio.wait([task, reached], return_when=asyncio.FIRST_COMPLETED)
        if not barrier.reached.is_set():
            reached.cancel()
            await task
            return False
        try:
            task.cancel()
            for _ in range(_TURNS_OF_THE_LOOP):
                await asyncio.sleep(0)
            was_told_early = task.done()
            # Once more: the first cancellation must not be all that it withstands.
            task.cancel()
        finally:
            barrier.let_go.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not was_told_early, "the caller was told before the call had ended"
        assert asyncio.all_tasks() == {asyncio.current_task()}
        assert all(in_every_thread(lambda: is_clean(alias))), "the call left its connection half-way"
        return True


@functools.cache
def twins() -> tuple[tuple[str, str], ...]:
    """The calls with an async twin, by face and name."""
    return tuple(
        (face, call)
        for face in CLASSES
        for call in CALLS[face]
        if hasattr(CLASSES[face], f"a{call.partition(' ')[0]}")
    )


def resources(database: CommittedDatabase) -> tuple[int, int]:
    """Threads and open files, once the threads of streams have ended."""
    close_connections()
    wait_for_background_threads(database.alias)
    return threading.active_count(), len(os.listdir("/proc/self/fd"))


def client_backends(database: CommittedDatabase) -> int:
    """The connections that the server serves in this database, the one that asks among them."""
    if database.vendor != "postgresql":
        return 0
    with connections[database.alias].cursor() as cursor:
        cursor.execute(
            "SELECT count(*) FROM pg_stat_activity"
            " WHERE datname = current_database() AND backend_type = 'client backend'"
        )
        (number,) = cursor.fetchone()
    close_connections()
    return int(number)


@pytest.mark.campaign
def test_a_cancelled_call_ends_before_its_caller_is_told(committed_db: CommittedDatabase) -> None:
    sound: dict[tuple[str, str, bool], Any] = {}

    def cancel_one(trial: Trial) -> None:
        face, call = twins()[trial.seed * 61 % len(twins())]
        fast = trial.chance.choice([True, False])
        threads = trial.chance.choice(_ASYNC_THREADS)
        prepared_with = {"FAST_PATHS": fast}
        with override_settings(HELIX_STORE={**prepared_with, "ASYNC_THREADS": threads}):
            expected = sound.get((face, call, fast))
            if expected is None:
                made = CommittedDatabase(alias=committed_db.alias, tenant=fresh_tenant())
                CALLS[face][call](Faces(made))()
                expected = sound[face, call, fast] = rows_of(made)
            number = 0
            while True:
                made = CommittedDatabase(alias=committed_db.alias, tenant=fresh_tenant())
                # Threads of ASYNC_THREADS are not part of the preparation's transaction.
                with override_settings(HELIX_STORE=prepared_with), prepared(made.alias, call):
                    form = async_form(face, call, Faces(made))
                if form is None:
                    trial.count("not called by its method")
                    return
                was_cancelled = asyncio.run(cancelled(made.alias, form, number))
                found = rows_of(made)
                assert found == expected, (face, call, fast, number, found - expected, expected - found)
                if not was_cancelled:
                    return
                trial.count(f"cancelled, {face}")
                trial.count(f"cancelled on threads of ASYNC_THREADS = {threads}")
                number += 1

    before = resources(committed_db)
    backends = client_backends(committed_db)
    name = "sqlite" if committed_db.vendor == "sqlite" else "postgres"
    with campaign("cancellations", name, sizes=(20, 300, 20_000)) as made:
        made.run(cancel_one)
    after = resources(committed_db)
    assert after[1] <= before[1] + 2, (before, after)
    assert after[0] <= before[0] + 2, (before, after)
    # The server ends the process of a connection a moment after its client has closed it.
    until(lambda: client_backends(committed_db) <= backends, f"{backends} connections are left")


def test_every_async_twin_of_the_faces_is_cancelled_by_the_campaign() -> None:
    public = {
        (face, name.removeprefix("a"))
        for face, kind in CLASSES.items()
        for name, member in inspect.getmembers(kind, inspect.iscoroutinefunction)
        if name.startswith("a") and hasattr(kind, name.removeprefix("a"))
    }
    assert public - {(face, call.partition(" ")[0]) for face, call in twins()} == set()
