"""Incidents of other stores in payloads, timers, locks, streams and recovery. Each docstring names one."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any, Final

import pytest
from asgiref.sync import async_to_sync, sync_to_async
from django.db import DataError, transaction
from django.test.utils import CaptureQueriesContext

from helix_store.cleanup import expired_session_cleanup
from helix_store.core import moments
from helix_store.core.types import RunStatus, SessionStatus, StreamStatus
from helix_store.exceptions import FencedOutError
from helix_store.stores import DatabaseLockManager, DatabaseStateStore, DatabaseStreamManager
from helix_store.testing.state_store.samples import loaded, message
from tests.database.separate import execute, fetch, separate_connection
from tests.databases import CommittedDatabase
from tests.museum.naive import NaiveRows, without_nul

SHORT_MS: Final = 20
PATIENCE_SECONDS: Final = 30.0


def store_of(database: CommittedDatabase) -> DatabaseStateStore:
    return DatabaseStateStore(database.alias, tenant=database.tenant)


def locks_of(database: CommittedDatabase, alias: str | None = None) -> DatabaseLockManager:
    return DatabaseLockManager(alias or database.alias, tenant=database.tenant)


def streams_of(database: CommittedDatabase, **options: Any) -> DatabaseStreamManager:
    return DatabaseStreamManager(database.alias, tenant=database.tenant, **options)


async def until(condition: Callable[[], Awaitable[object]]) -> None:
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not await condition():  # noqa: ASYNC110  another process or the clock makes it true
            await asyncio.sleep(0.005)


def test_p10_no_text_of_a_model_aborts_a_run_or_is_changed(
    naive: NaiveRows, committed_db: CommittedDatabase
) -> None:
    """OpenMAIC#1493, kodus-ai PR 1683, ARTEX#112, agency-lang PR 1030"""
    texts = ["a\x00b", "half an emoji \ud83d", "the text \\u0000"]
    with pytest.raises((DataError, UnicodeEncodeError)):
        naive.append_texts("messages", texts)
    with pytest.raises(json.JSONDecodeError):
        json.loads(without_nul(texts[2]))

    store = store_of(committed_db)
    store.create_session("s", agent_type="agent")
    store.append_messages("s", [message(text) for text in texts])
    assert [each["content"] for each in store.iter_messages("s")] == texts


def test_p11_a_timer_that_was_due_while_no_worker_ran_fires(
    naive: NaiveRows, committed_db: CommittedDatabase
) -> None:
    """vercel/workflow#679"""
    now = moments.now().timestamp()
    naive.append("timers", "approval", at=now - 60)
    # The worker starts now, and looks an hour later.
    assert naive.due("timers", now, now + 3_600) == []

    store = store_of(committed_db)
    store.create_session("s", agent_type="agent")
    call = {"tool_name": "ask", "deadline": 1_000 * (int(now) - 60), "on_expiry": {"result": "no answer"}}
    store.add_pending_tool_calls("s", {"call": call})
    assert expired_session_cleanup(state_store=store).defaults_applied == 1
    assert store.take_tool_results("s")["call"]["result"] == "no answer"


def test_p12_a_lock_of_a_client_that_is_gone_is_free_after_its_term(
    postgres_db: CommittedDatabase,
) -> None:
    """authentik#23876, pgbouncer#102, pgdog#1407"""
    take = "SELECT pg_try_advisory_lock(4711)"
    settings = postgres_db.connection.settings_dict
    with separate_connection(**settings) as pooled, separate_connection(**settings) as other:
        # The client goes; the pool keeps its connection.
        assert fetch(pooled, take) == [(True,)]
        assert locks_of(postgres_db, pooled.alias).acquire("job", ttl_ms=SHORT_MS) is not None

        assert fetch(other, "SELECT pg_advisory_unlock(4711)") == [(False,)]
        assert fetch(other, take) == [(False,)]
        assert locks_of(postgres_db, other.alias).wait_acquire("job", timeout_ms=30_000)


def test_p13_a_reader_finds_the_chunks_that_its_dead_listener_missed(
    postgres_db: CommittedDatabase, postgres_naive: NaiveRows
) -> None:
    """graphile-worker#541, pg-boss#850, oban#832"""
    with separate_connection(**postgres_db.connection.settings_dict) as listening:
        execute(listening, "LISTEN museum")
        # As a pooler does when it lends the connection to another client.
        execute(listening, "DISCARD ALL")
        postgres_naive.append("jobs", "work")
        execute(postgres_db.connection, "NOTIFY museum")
        assert list(listening.connection.notifies(timeout=0.2, stop_after=1)) == []
    assert postgres_naive.values("jobs") == ["work"]

    streams = streams_of(postgres_db, poll_interval=0.05)

    async def read() -> None:
        await streams.create_writer("stream", "run", "agent")
        reader = await streams.create_resumable_reader("stream")
        assert reader is not None
        reading = asyncio.create_task(anext(reader))
        await until(lambda: sync_to_async(_end_listeners)(postgres_db))
        await sync_to_async(streams.write_sync)("stream", [{"type": "work"}])
        async with asyncio.timeout(PATIENCE_SECONDS):
            assert (await reading).chunk == {"type": "work"}
        await reader.aclose()

    async_to_sync(read)()


def _end_listeners(database: CommittedDatabase) -> int:
    """End the connections that listen, and return their number."""
    with database.second_connection() as connection:
        ended = fetch(
            connection,
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
            " WHERE query LIKE 'LISTEN%%' AND datname = current_database()",
        )
    return len(ended)


def test_p14_a_transaction_that_writes_to_a_stream_sends_no_notification(
    postgres_db: CommittedDatabase, postgres_naive: NaiveRows
) -> None:
    """recall.ai: LISTEN/NOTIFY does not scale"""

    def notifications_in(write: Callable[[], object]) -> list[str]:
        with CaptureQueriesContext(postgres_db.connection) as sent, transaction.atomic(postgres_db.alias):
            write()
        return [each["sql"] for each in sent if "notify" in each["sql"].lower()]

    def write_naively() -> None:
        postgres_naive.append("stream", "chunk")
        execute(postgres_db.connection, "NOTIFY museum")

    streams = streams_of(postgres_db)
    async_to_sync(streams.create_writer)("stream", "run", "agent")
    assert len(notifications_in(write_naively)) == 1
    assert notifications_in(lambda: streams.write_sync("stream", [{"type": "t"}])) == []


def test_p15_readers_of_a_writer_that_died_are_told(
    naive: NaiveRows, committed_db: CommittedDatabase
) -> None:
    """AutoGPT PR 11877"""
    naive.append("stream", "chunk", at=1)
    assert [naive.values("stream")[1:] for _ in range(3)] == [[], [], []]

    streams = streams_of(committed_db, writer_lease=0.02)

    async def read() -> tuple[list[int], StreamStatus]:
        writer = await streams.create_writer("stream", "run", "agent")
        await writer.write({"type": "chunk"})
        reader = await streams.create_resumable_reader("stream")
        assert reader is not None
        reading = asyncio.create_task(_sequences(reader))

        async def is_found() -> bool:
            return (await streams.prune(older_than=None)).failed > 0

        await until(is_found)
        return await reading, reader.status

    assert async_to_sync(read)() == ([1], StreamStatus.FAILED)


async def _sequences(reader: Any) -> list[int]:
    async with asyncio.timeout(PATIENCE_SECONDS):
        return [stored.sequence async for stored in reader]


def test_p16_a_new_worker_of_the_same_name_continues_the_work_of_a_crashed_one(
    naive: NaiveRows, committed_db: CommittedDatabase
) -> None:
    """solid_queue#422, oban#862"""
    naive.append("job", {"worker": "host-1"})
    living = {"host-1"}
    assert [job for job in naive.values("job") if job["worker"] not in living] == []

    store, locks = store_of(committed_db), locks_of(committed_db)
    store.create_session("s", agent_type="agent")
    crashed = locks.acquire("s", owner="host-1", ttl_ms=SHORT_MS)
    assert crashed is not None
    store.start_run("s", "run-1", fencing_token=crashed.fencing_token)

    successor = locks.wait_acquire("s", owner="host-1", timeout_ms=30_000)
    store.start_run("s", "run-2", fencing_token=successor.fencing_token)
    assert loaded(store, "s").status is SessionStatus.ACTIVE
    assert {run.run_id: run.status for run in store.list_runs("s")} == {
        "run-1": RunStatus.INTERRUPTED,
        "run-2": RunStatus.RUNNING,
    }
    with pytest.raises(FencedOutError):
        store.append_messages("s", [message("late")], fencing_token=crashed.fencing_token)
