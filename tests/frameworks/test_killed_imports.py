"""An import of a framework's tables that is killed is completed by the next one; nothing is doubled."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import sqlite3
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from agents.extensions.memory import AdvancedSQLiteSession
from django.db import connections
from django.db.models import Model
from langgraph.checkpoint.postgres import PostgresSaver
from langgraph.checkpoint.sqlite import SqliteSaver

from helix_store.catalogue import registered_tables
from helix_store.models import Item, Session
from tests.commands.running import Ended, run
from tests.databases import CommittedDatabase, fresh_tenant
from tests.frameworks.langgraph.test_imports import fill, postgres_origin
from tests.invariants import broken_invariants
from tests.processes import WorkerDied, WorkerProcess

__all__ = ["postgres_origin"]

Origin = tuple[str, str]
"""The name of a source and its address."""


@pytest.fixture(params=["langgraph-postgres", "langgraph-sqlite", "openai-agents-sqlite"])
def origin(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Origin]:
    """Tables that the framework itself has made and filled: three threads or sessions."""
    file = tmp_path / "origin.sqlite"
    if request.param == "langgraph-postgres":
        dsn, connection = request.getfixturevalue("postgres_origin")
        saver = PostgresSaver(connection)
        saver.setup()
        fill(saver)
        yield request.param, dsn
        return
    if request.param == "langgraph-sqlite":
        theirs = sqlite3.connect(file, check_same_thread=False)
        fill(SqliteSaver(theirs))
        theirs.close()
    else:
        asyncio.run(_fill_sessions(file))
    yield request.param, str(file)


async def _fill_sessions(file: Path) -> None:
    for session_id in ("a", "b", "c"):
        session = AdvancedSQLiteSession(session_id=session_id, db_path=file, create_tables=True)
        for number in range(5):
            await session.add_items([{"role": "user", "content": f"{session_id} {number}"}])
        await session.create_branch_from_turn(3, "other")
        await session.add_items([{"role": "user", "content": "another"}])
        session.close()


class Writes:
    """Counts the statements that write; kills this process before or after one of them."""

    def __init__(self, last: int | None = None, *, after: bool = False) -> None:
        self.number = 0
        self._last = last
        self._after = after

    def __call__(self, execute: Any, sql: str, params: Any, many: bool, context: Any) -> Any:
        if not sql.lstrip().startswith(("INSERT", "UPDATE", "WITH")):
            return execute(sql, params, many, context)
        self.number += 1
        if self.number == self._last and not self._after:
            os.kill(os.getpid(), signal.SIGKILL)
        result = execute(sql, params, many, context)
        if self.number == self._last:
            os.kill(os.getpid(), signal.SIGKILL)
        return result


def import_from(alias: str, tenant: str, origin: Origin, writes: Writes) -> Ended:
    with connections[alias].execute_wrapper(writes):
        return run(alias, "helix_import", "--from", *origin, "--tenant", tenant, "--format", "json")


def import_and_die(alias: str, tenant: str, origin: Origin, last: int, after: bool) -> None:
    import_from(alias, tenant, origin, Writes(last, after=after))


def rows_of(alias: str, tenant: str) -> Counter[str]:
    """The number of rows of each session of a tenant in the tables that an import fills."""
    models: list[type[Model]] = [Item, *(table.model for table in registered_tables("session"))]
    rows: Counter[str] = Counter()
    for session_id in Session.objects.using(alias).filter(tenant=tenant).values_list("session_id", flat=True):
        rows[session_id] += 1
    for model in models:
        found = model._base_manager.using(alias).filter(session__tenant=tenant)
        for session_id in found.values_list("session__session_id", flat=True):
            rows[f"{model.__name__} of {session_id}"] += 1
    return rows


@pytest.mark.parametrize("seed", range(2))
def test_a_killed_import_is_completed_by_the_next_one(
    committed_db: CommittedDatabase, origin: Origin, seed: int
) -> None:
    alias, tenant = committed_db.alias, committed_db.tenant
    whole, writes = fresh_tenant(), Writes()
    assert import_from(alias, whole, origin, writes).code == 0
    expected = rows_of(alias, whole)
    assert len(expected) >= 6
    chosen = random.Random(seed)  # noqa: S311  a point, no secret
    last, after = chosen.randint(1, writes.number), chosen.random() < 0.5
    worker = WorkerProcess(import_and_die, alias, tenant, origin, last, after)
    assert isinstance(worker.outcome().error, WorkerDied)

    # What is stored of a session is all of it.
    stored = rows_of(alias, tenant)
    sessions = Session.objects.using(alias).filter(tenant=tenant).count()
    assert sessions < 3
    assert stored == Counter(
        {name: n for name, n in expected.items() if name.rpartition(" of ")[2] in stored}
    )
    assert broken_invariants(committed_db) == []

    ended = import_from(alias, tenant, origin, Writes())
    assert (ended.code, ended.data["problems"]) == (0, [])
    assert ended.data["imported"] == {"session": 3 - sessions}
    assert ended.data["identical"] == ({"session": sessions} if sessions else {})
    assert rows_of(alias, tenant) == expected
    assert broken_invariants(committed_db) == []
