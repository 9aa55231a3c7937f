"""``migrate`` that is killed at any statement is completed by the next run, and every row is there."""

from __future__ import annotations

import itertools
import os
import re
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import pytest
from django.apps import apps
from django.core.management import call_command
from django.db import connections
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.migrations.loader import MigrationLoader
from django.db.migrations.recorder import MigrationRecorder

from helix_store.stores import DatabaseLockManager, DatabaseStateStore, DatabaseUsageStore
from helix_store.testing.state_store.samples import commit_step, contents, messages
from helix_store.testing.usage.base import tokens
from tests.database.separate import separate_connection
from tests.databases import CommittedDatabase
from tests.faults.campaign import Trial, campaign
from tests.faults.restores import Restorable
from tests.invariants import broken_invariants
from tests.processes import WorkerDied, WorkerProcess

_COMMIT: Final = "COMMIT"
_SESSIONS: Final = ("top", "leaf")
_PARENTS: Final = {"leaf": "top"}
_POINTS: Final = range(8, 40)
"""A run is killed at one of these statements and commits, counted from its begin."""
_FORWARDS: Final = [
    ("helix_store",),
    *(
        (config.label,)
        for config in apps.get_app_configs()
        if config.label.startswith("helix_store_") and config.models_module is not None
    ),
]
_KILLS: Final = 2
_PATIENCE_SECONDS: Final = 120.0


@contextmanager
def observed(connection: BaseDatabaseWrapper, observe: Callable[[str], None]) -> Iterator[None]:
    """Inside, ``observe`` is called before each statement and each commit."""

    def execute(run: Any, sql: str, params: Any, many: bool, context: Any) -> Any:
        observe(sql)
        return run(sql, params, many, context)

    def commit() -> None:
        observe(_COMMIT)
        sound()

    sound = connection._commit  # type: ignore[attr-defined]  # of Django, which sends COMMIT with it
    private: Any = connection
    private._commit = commit
    try:
        with connection.execute_wrapper(execute):
            yield
    finally:
        del private._commit


def killer(last: int) -> Callable[[str], None]:
    """Kills this process instead of the statement or commit with this number."""
    numbers = itertools.count()

    def observe(sql: str) -> None:
        if next(numbers) == last:
            os.kill(os.getpid(), signal.SIGKILL)

    return observe


def migrate_until(settings: dict[str, Any], targets: Sequence[tuple[str, ...]], last: int) -> None:
    with separate_connection(**settings) as connection, observed(connection, killer(last)):
        for target in targets:
            call_command("migrate", *target, database=connection.alias, verbosity=0)


def fill(store: DatabaseStateStore, alias: str, tenant: str) -> None:
    """Trees, messages, steps that are deltas, usage and locks: what an older schema has a place for."""
    for session_id in _SESSIONS:
        store.create_session(session_id, agent_type="agent", parent_session_id=_PARENTS.get(session_id))
        for number in range(1, 4):
            commit_step(store, session_id, number, append=messages(2), custom_state={"n": [number] * 50})
        DatabaseUsageStore(alias, tenant=tenant).record_entry(tokens(session_id))
        lock = DatabaseLockManager(alias, tenant=tenant).acquire(session_id)
        assert lock is not None
        lock.release()


def everything(alias: str, tenant: str) -> dict[str, Any]:
    store, usage = DatabaseStateStore(alias, tenant=tenant), DatabaseUsageStore(alias, tenant=tenant)
    found = {name: (contents(store, name), usage.get_entries(name)) for name in _SESSIONS}
    listed = [head.session_id for head in store.list_sessions().sessions]
    return {**found, "listed": listed, "tables": connections[alias].introspection.table_names()}


def applied(alias: str) -> list[str]:
    """The migrations of the app, in their order."""
    loader = MigrationLoader(connections[alias])
    found = loader.applied_migrations.keys() & loader.graph.nodes.keys()
    return sorted(name for app, name in found if app == "helix_store")


def killed_run(alias: str, targets: Sequence[tuple[str, ...]], trial: Trial) -> bool:
    """Migrate in another process, and return whether it was killed before its end."""
    settings = connections[alias].settings_dict
    connections[alias].close()
    run = WorkerProcess(migrate_until, settings, targets, trial.chance.choice(_POINTS))
    outcome = run.outcome(_PATIENCE_SECONDS)
    was_killed = isinstance(outcome.error, WorkerDied)
    if not was_killed:
        outcome.unwrap()
    trial.count("kills" if was_killed else "ended before its kill")
    return was_killed


def kill_migrations(database: Restorable, tenant: str, trial: Trial) -> None:
    """Take the schema back to one that the trial chooses, and migrate in runs that are killed."""
    alias = database.worker
    store = DatabaseStateStore(alias, tenant=tenant)
    fill(store, alias, tenant)
    before, newest = everything(alias, tenant), applied(alias)
    # Few migrations more often than many: those take longest.
    count = int(trial.chance.triangular(1, len(newest), 1))
    oldest = newest[-1 - count]
    killed_run(alias, [("helix_store", oldest)], trial)
    call_command("migrate", "helix_store", oldest, database=alias, verbosity=0)
    for _ in range(_KILLS):
        if not killed_run(alias, _FORWARDS, trial):
            break
        done = len(applied(alias))
        trial.count(f"killed before {newest[done] if done < len(newest) else 'the end of the frameworks'}")
    call_command("migrate", database=alias, verbosity=0)
    assert applied(alias) == newest
    after = everything(alias, tenant)
    assert after == before, f"from {oldest}"
    assert broken_invariants(CommittedDatabase(alias=alias, tenant=tenant)) == []


@pytest.mark.campaign
def test_a_killed_migration_is_completed_by_the_next_run(
    committed_db: CommittedDatabase, restorable: Restorable
) -> None:
    name = "sqlite" if committed_db.vendor == "sqlite" else "postgres"
    with campaign("killed_migrations", name, sizes=(1, 20, 500)) as made:
        made.run(lambda trial: kill_migrations(restorable, f"{committed_db.tenant}-{trial.seed}", trial))
    assert made.counts["kills"], made.counts


def test_a_migration_is_recorded_in_the_transaction_that_changes_the_schema(restorable: Restorable) -> None:
    connection = connections[restorable.worker]
    statements: list[str] = []
    newest, before = applied(connection.alias)[-1], applied(connection.alias)[-2]
    with observed(connection, statements.append):
        for target in (before, newest):
            call_command("migrate", "helix_store", target, database=connection.alias, verbosity=0)
    call_command("migrate", database=connection.alias, verbosity=0)
    parts = "\n".join(statements).split(f"{_COMMIT}\n")
    changes = [part for part in parts if re.search(r"^(CREATE|ALTER|DROP) (TABLE|INDEX)", part, re.MULTILINE)]
    assert len(changes) >= 2
    assert [part for part in changes if MigrationRecorder.Migration._meta.db_table not in part] == []
