"""Reads with ``HELIX_STORE_CITUS``: they were unprepared queries of the ORM, at three times the cost."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import pytest

from helix_store.stores import DatabaseStateStore
from tests.database.separate import fetch
from tests.databases import CommittedDatabase

READS: Final[dict[str, Callable[[DatabaseStateStore], Any]]] = {
    "load_state": lambda store: store.load_state("s"),
    "get_messages": lambda store: store.get_messages("s"),
    "get_latest_checkpoint": lambda store: store.get_latest_checkpoint("s"),
}


@pytest.mark.parametrize("name", READS)
def test_a_read_of_one_statement_is_prepared(
    postgres_db: CommittedDatabase, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    connection = postgres_db.connection
    connection.close()  # Another test may have prepared statements on it.
    monkeypatch.setitem(connection.settings_dict, "HELIX_STORE_CITUS", True)
    store = DatabaseStateStore(postgres_db.alias, tenant=postgres_db.tenant)
    store.create_session("s", agent_type="t")
    store.append_messages("s", [{"role": "user"}])
    assert fetch(connection, "SELECT count(*) FROM pg_prepared_statements") == [(0,)]
    READS[name](store)
    assert fetch(connection, "SELECT count(*) FROM pg_prepared_statements") == [(1,)]
