"""Calls that users of LangGraph's own savers and stores make by habit."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
from django.core.exceptions import ImproperlyConfigured

from helix_store.contrib.langgraph import DjangoSaver, DjangoStore
from tests.databases import CommittedDatabase

CLASSES = pytest.mark.parametrize("kind", [DjangoSaver, DjangoStore])


@CLASSES
def test_it_can_be_set_up_and_opened(committed_db: CommittedDatabase, kind: Any) -> None:
    with kind(using=committed_db.alias) as opened:
        opened.setup()
        assert type(opened) is kind


@CLASSES
def test_it_can_be_set_up_and_opened_in_async_code(committed_db: CommittedDatabase, kind: Any) -> None:
    async def use() -> None:
        async with kind(using=committed_db.alias) as opened:
            await opened.setup()
            assert type(opened) is kind

    asyncio.run(use())


@CLASSES
def test_a_connection_string_is_refused_with_the_way_out(kind: Any) -> None:
    with pytest.raises(ImproperlyConfigured, match=r"DATABASES.*using=\"default\""):
        kind.from_conn_string("postgresql://localhost/app")


def test_the_thread_that_sweeps_is_not_started_but_may_be_asked_for(
    committed_db: CommittedDatabase, caplog: pytest.LogCaptureFixture
) -> None:
    store = DjangoStore(using=committed_db.alias, ttl={"default_ttl": 60})

    async def use() -> None:
        await store.start_ttl_sweeper(sweep_interval_minutes=5)
        await store.stop_ttl_sweeper(timeout=5)

    threads = threading.active_count()
    store.start_ttl_sweeper()
    assert threading.active_count() == threads
    assert store.stop_ttl_sweeper()
    asyncio.run(use())
    warnings = [message for message in caplog.messages if "cleanup_expired_sessions" in message]
    assert len(warnings) == 2
