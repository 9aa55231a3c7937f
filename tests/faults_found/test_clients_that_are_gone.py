"""A client that is gone in the middle of a transaction holds its session until the server notices.

To the server, a dead host is a client that sends nothing more and does not hang up.
"""

from __future__ import annotations

import pytest
from django.db import transaction

from helix_store.exceptions import StoreBusy
from helix_store.models import Session
from helix_store.stores import DatabaseStateStore
from tests.database.separate import execute, fetch, wait_until_the_server_hangs_up
from tests.databases import CommittedDatabase


def test_the_limit_of_the_docs_gives_back_the_session_of_a_dead_host(postgres_db: CommittedDatabase) -> None:
    store = DatabaseStateStore(postgres_db.alias, tenant=postgres_db.tenant)
    store.create_session("chat", agent_type="agent")

    def write(patience: str) -> None:
        with transaction.atomic(postgres_db.alias):
            execute(postgres_db.connection, f"SET LOCAL lock_timeout = '{patience}'")
            store.append_messages("chat", [{"role": "user", "content": "Are you there?"}])

    with postgres_db.second_connection() as gone:
        gone.set_autocommit(False)
        locked = f"SELECT session_id FROM {Session._meta.db_table} WHERE tenant = %s FOR UPDATE"
        assert fetch(gone, locked, postgres_db.tenant) == [("chat",)]
        with pytest.raises(StoreBusy):
            write("100ms")
        execute(gone, "SET LOCAL idle_in_transaction_session_timeout = '500ms'")
        write("30s")
        wait_until_the_server_hangs_up(gone)
