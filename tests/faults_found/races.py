"""Forced schedules: a transaction holds a row until every writer waits for it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

from django.db import connections, transaction
from django.db.models import Model

from helix_store.models import Session
from tests.database.separate import fetch, separate_connection
from tests.databases import CommittedDatabase
from tests.processes import Outcome

__all__ = ["Writers", "held", "held_session", "until", "until_backends_wait"]

_PATIENCE_SECONDS: Final = 20.0


class Writers:
    """Calls that run at one moment, each in a thread and on a connection of its own."""

    def __init__(self, calls: Sequence[Callable[[], Any]]) -> None:
        self._outcomes: dict[int, Outcome] = {}
        start = threading.Barrier(len(calls))
        self._threads = [
            threading.Thread(target=self._run, args=(index, call, start), daemon=True)
            for index, call in enumerate(calls)
        ]
        for thread in self._threads:
            thread.start()

    def outcomes(self) -> list[Outcome]:
        """Wait for every call."""
        deadline = time.monotonic() + _PATIENCE_SECONDS
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        assert not any(thread.is_alive() for thread in self._threads), "a writer did not end"
        return [self._outcomes[index] for index in range(len(self._threads))]

    def _run(self, index: int, call: Callable[[], Any], start: threading.Barrier) -> None:
        try:
            start.wait(_PATIENCE_SECONDS)
            self._outcomes[index] = Outcome(value=call())
        except Exception as exc:  # noqa: BLE001  the error is the outcome
            self._outcomes[index] = Outcome(error=exc)
        finally:
            connections.close_all()


@contextmanager
def held(database: CommittedDatabase, model: type[Model], **row: Any) -> Iterator[str]:
    """Lock one row of the tenant in a transaction that commits at the end; yields the alias it runs on."""
    with separate_connection(**database.connection.settings_dict) as connection:
        connection.ensure_connection()
        with transaction.atomic(using=connection.alias):
            rows = model._default_manager.using(connection.alias).filter(tenant=database.tenant, **row)
            assert len(rows.select_for_update()) == 1
            yield connection.alias


@contextmanager
def held_session(database: CommittedDatabase, session_id: str) -> Iterator[str]:
    with held(database, Session, session_id=session_id) as alias:
        yield alias


def until_backends_wait(database: CommittedDatabase, count: int) -> None:
    """Wait until this number of backends wait for a lock of another transaction."""
    until(
        lambda: (
            fetch(
                database.connection,
                "SELECT count(*) FROM pg_stat_activity"
                " WHERE datname = current_database() AND wait_event_type = 'Lock'",
            )
            == [(count,)]
        ),
        f"{count} backends do not wait for a lock",
    )


def until(condition: Callable[[], bool], otherwise: str) -> None:
    """Ask until it is so."""
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while not condition():
        assert time.monotonic() < deadline, otherwise
        time.sleep(0.002)
