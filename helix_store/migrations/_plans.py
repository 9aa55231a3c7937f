"""Changes to the plan of ``migrate`` before Django executes it."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, BinaryIO, Final
from weakref import WeakKeyDictionary, finalize

from django.core.files import locks
from django.db import connections
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.migrations.exceptions import IrreversibleError
from django.db.migrations.loader import MigrationLoader
from django.db.migrations.state import ProjectState, StateApps

from helix_store.migrations._operations import RefuseToLose, WithoutEffect

Plan = list[tuple[Any, bool]]
"""Migrations, and whether each is reversed. Each migration has its own list of operations."""

_LOCK_KEY: Final = int.from_bytes(hashlib.sha256(b"helix_store.migrate").digest()[:8], signed=True)
_turns: Final[WeakKeyDictionary[BaseDatabaseWrapper, finalize[..., Any]]] = WeakKeyDictionary()


def prepare_plan(
    using: str, plan: Plan | None = None, stdout: object = None, apps: StateApps | None = None, **kwargs: Any
) -> None:
    """Receive ``pre_migrate``: wait for other processes, skip what they have applied, refuse to lose rows.

    Django reads which migrations are missing before it applies them, so without a lock two processes that
    migrate a new database would both create its tables. The lock covers the migrations of all apps.
    """
    if plan is None or stdout is None or apps is None:
        return  # The signal was not sent by the command ``migrate``.
    connection = connections[using]
    _wait_for_a_turn(connection, stdout)
    _skip_what_is_done(plan, connection, apps)
    _refuse_to_lose(plan, connection, apps)


# --- One process at a time ---------------------------------------------------------------------------


def _wait_for_a_turn(connection: BaseDatabaseWrapper, stdout: object) -> None:
    """Take the lock of the database, and release it when the output of the command is no longer referenced.

    Django sends no signal when a migration fails. A command within this command shares the lock.
    """
    turn = _turns.get(connection)
    if turn is None or not turn.alive:
        lock = _lock_on_postgresql if connection.vendor == "postgresql" else _lock_beside_the_file
        turn = _turns[connection] = finalize(stdout, lock(connection))
        turn.atexit = False


def _lock_on_postgresql(connection: BaseDatabaseWrapper) -> Callable[[], object]:
    """Take an advisory lock in a transaction on a second connection, and return a function that releases it.

    This works behind a pooler in transaction mode, and the server releases the lock when the process ends.
    """
    second = connection.copy()
    # Otherwise a pool of one connection would have none left for the migrations.
    second.settings_dict["OPTIONS"].pop("pool", None)
    # The garbage collector may run in another thread.
    second.inc_thread_sharing()
    try:
        second.set_autocommit(False)
        with second.cursor() as cursor:
            cursor.execute(
                "SELECT set_config(name, '0', true) FROM pg_settings WHERE name IN ('lock_timeout', "
                "'statement_timeout', 'transaction_timeout', 'idle_in_transaction_session_timeout')"
            )
            cursor.execute("SELECT pg_advisory_xact_lock(%s)", [_LOCK_KEY])
    except BaseException:
        second.close()
        raise
    return second.close


def _lock_beside_the_file(connection: BaseDatabaseWrapper) -> Callable[[], object]:
    """Lock a file that exists as long as the lock does, and return a function that releases it."""
    with connection.cursor() as cursor:
        cursor.execute("PRAGMA database_list")
        path = next(path for _, name, path in cursor.fetchall() if name == "main")
    if not path:
        return lambda: None  # An in-memory database belongs to one process.
    path += "-migrate"
    while True:
        file = open(path, "ab")  # noqa: SIM115  it stays open as long as it is locked
        locks.lock(file, locks.LOCK_EX)
        # The process that held the lock has deleted the file.
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(file.fileno()), os.stat(path)):
                return partial(_delete, path, file)
        file.close()


def _delete(path: str, file: BinaryIO) -> None:
    with file, suppress(OSError):  # Windows cannot delete an open file: the next process locks it again.
        os.unlink(path)


# --- Migrations that other processes have applied ----------------------------------------------------


class _ReplaceState(WithoutEffect):
    """An operation that gives the first migration of a plan the state that Django built too early."""

    def __init__(self, states: list[ProjectState]) -> None:
        self.states = states

    def state_forwards(self, app_label: str, state: ProjectState) -> None:
        if self.states:
            vars(state).update(vars(self.states.pop()))


def _skip_what_is_done(plan: Plan, connection: BaseDatabaseWrapper, apps: StateApps) -> None:
    loader = MigrationLoader(connection)
    applied = loader.applied_migrations
    left = [
        (migration, is_backwards)
        for migration, is_backwards in plan
        if ((migration.app_label, migration.name) in applied) is is_backwards
    ]
    if left == plan:
        return
    plan[:] = left
    state = loader.project_state([key for key in applied if key in loader.graph.nodes])
    # The receivers of ``post_migrate`` get a copy of these models.
    vars(apps).update(vars(state.apps))
    # If the plan has a target, Django does not apply the migrations in the order of the plan.
    replacement = _ReplaceState([state])
    for migration, _ in plan:
        migration.operations.insert(0, replacement)


# --- No rows are lost --------------------------------------------------------------------------------


class _Refuse(WithoutEffect):
    """An operation that refuses to be reversed."""

    def __init__(self, error: IrreversibleError) -> None:
        self.error = error

    def database_backwards(self, *args: Any) -> None:
        raise self.error


def _refuse_to_lose(plan: Plan, connection: BaseDatabaseWrapper, apps: StateApps) -> None:
    """Refuse the whole plan if one of its migrations would refuse after others have been reversed."""
    losses = [
        f"{migration.name}: {loss}"
        for migration, is_backwards in plan
        if is_backwards
        for operation in migration.operations
        if isinstance(operation, RefuseToLose)
        and (loss := operation.loss(apps, migration.app_label, connection.alias))
    ]
    if not losses:
        return
    error = IrreversibleError(
        "\n".join(["Going back would delete data. No migration was reversed.", *losses])
    )
    if connection.in_atomic_block:
        raise error  # SQLite would never reach the operation: it changes no schema in a transaction.
    # With --fake, which the signal does not know about, no operation runs.
    plan[0][0].operations.append(_Refuse(error))
