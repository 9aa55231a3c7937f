"""A fix takes the lock of its session, and an examination takes the memory of a page."""

from __future__ import annotations

import tracemalloc

import pytest

from helix_store.doctor import diagnose
from helix_store.exceptions import HelixStoreError
from helix_store.items import ItemLog
from helix_store.stores import DatabaseStateStore
from tests.databases import CommittedDatabase
from tests.doctor.planting import execute

MESSAGES, BYTES = 600, 60_000


@pytest.mark.thorough
def test_a_fix_waits_for_a_writer_of_the_session(postgres_db: CommittedDatabase) -> None:
    store = DatabaseStateStore(postgres_db.alias, tenant=postgres_db.tenant)
    store.create_session("busy", agent_type="agent")
    execute(postgres_db, "UPDATE [session] SET message_count = 7 WHERE id = [=busy]")
    with postgres_db.second_connection() as writer, writer.cursor() as cursor:
        writer.set_autocommit(False)
        table = "helix_store_session"
        cursor.execute(f"SELECT id FROM {table} WHERE tenant = %s FOR NO KEY UPDATE", [postgres_db.tenant])
        execute(postgres_db, "SET lock_timeout = '100ms'")
        (finding,) = diagnose(using=postgres_db.alias, tenant=postgres_db.tenant).findings
        assert (finding.id, finding.fixed) == ("message-count-off", 0)
        with pytest.raises(HelixStoreError):
            diagnose(using=postgres_db.alias, tenant=postgres_db.tenant, fix=True)
        writer.rollback()
    (finding,) = diagnose(using=postgres_db.alias, tenant=postgres_db.tenant, fix=True).findings
    assert finding.fixed == 1


@pytest.mark.thorough
def test_a_long_session_is_examined_in_the_memory_of_a_page(committed_db: CommittedDatabase) -> None:
    store = DatabaseStateStore(committed_db.alias, tenant=committed_db.tenant)
    store.create_session("long", agent_type="agent")
    message = {"role": "user", "content": "x" * BYTES}
    for _ in range(MESSAGES // 100):
        store.append_messages("long", [message] * 100)
    diagnose(using=committed_db.alias, tenant=committed_db.tenant)
    tracemalloc.start()
    try:
        diagnosis = diagnose(using=committed_db.alias, tenant=committed_db.tenant)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert diagnosis.findings == []
    assert peak < MESSAGES * BYTES / 3, peak


def test_a_lane_of_more_items_than_a_page_is_examined(committed_db: CommittedDatabase) -> None:
    store = DatabaseStateStore(committed_db.alias, tenant=committed_db.tenant)
    store.create_session("session", agent_type="agent")
    log = ItemLog("session", "lane", using=committed_db.alias, tenant=committed_db.tenant)
    log.append([{"number": number} for number in range(120)])
    assert diagnose(using=committed_db.alias, tenant=committed_db.tenant).findings == []
