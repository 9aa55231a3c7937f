"""Calls of threads for which a caller in ``atomic()`` waits: they end soon, and blame the right block."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from django.db import connections, transaction

from helix_store import OutsideTransaction
from helix_store.stores import DatabaseStateStore
from tests.cells import Cells
from tests.databases import CommittedDatabase

_SECONDS = 10.0
_USER = {"role": "user", "content": "…"}

FIRST_CALLS: dict[str, Callable[[DatabaseStateStore], Any]] = {
    "append": lambda store: store.append_messages("held", [_USER]),
    "post": lambda store: store.post_message("held", _USER),
    "count": lambda store: store.increment_step_count("held"),
    "interrupt": lambda store: store.request_interrupt("held"),
    "delete": lambda store: store.delete_session("held"),
    "create": lambda store: store.create_session("created in the block", agent_type="test"),
}


@pytest.fixture
def store(committed_db: CommittedDatabase) -> DatabaseStateStore:
    return DatabaseStateStore(using=committed_db.alias, tenant=committed_db.tenant)


class InThread(threading.Thread):
    """A call in a new thread of the project's own, which has no connection yet."""

    def __init__(self, call: Callable[[], Any]) -> None:
        super().__init__(daemon=True)
        self._call = call
        self.outcome = "waits"
        self.start()

    def run(self) -> None:
        try:
            self._call()
            self.outcome = "stored"
        except Exception as exc:  # noqa: BLE001  # whatever it is, the test looks at it
            self.outcome = type(exc).__name__
        finally:
            connections.close_all()


@pytest.mark.thorough
def test_the_first_call_of_a_thread_does_not_wait_for_its_caller(
    committed_db: CommittedDatabase, store: DatabaseStateStore
) -> None:
    store.create_session("held", agent_type="test")
    with Cells() as cells:
        for name, call in FIRST_CALLS.items():
            with cells.check(name), transaction.atomic(using=committed_db.alias):
                store.append_messages("held", [_USER])
                store.create_session("created in the block", agent_type="test")
                thread = InThread(partial(call, store))
                thread.join(_SECONDS)
                transaction.set_rollback(True, using=committed_db.alias)
                assert thread.outcome == OutsideTransaction.__name__


def test_a_thread_with_the_ident_of_a_refused_one_is_another_thread(
    committed_db: CommittedDatabase, store: DatabaseStateStore
) -> None:
    if committed_db.vendor == "sqlite":
        pytest.skip(
            "SQLite has one writer, so that a block refuses every thread that its own thread waits for"
        )
    store.create_session("held", agent_type="test")
    store.create_session("free", agent_type="test")
    with transaction.atomic(using=committed_db.alias):
        store.append_messages("held", [_USER])
        refused = InThread(lambda: store.append_messages("held", [_USER]))
        refused.join(_SECONDS)
        assert refused.outcome == OutsideTransaction.__name__
        for _ in range(50):
            another = InThread(lambda: store.append_messages("free", [_USER]))
            another.join(_SECONDS)
            assert another.outcome == "stored"
            if another.ident == refused.ident:
                break
        else:
            pytest.skip("the system has not given the ident to another thread")
