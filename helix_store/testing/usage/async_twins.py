"""Tests that async methods have the same results and errors as the synchronous ones."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from asgiref.sync import async_to_sync

from helix_store.core.contracts import UsageStore
from helix_store.exceptions import (
    InvalidPayload,
    InvalidQuery,
    SessionNotFound,
)
from helix_store.testing.usage.base import (
    EVERY_KIND,
    NOON,
    UsageTests,
    rolled_up,
    tokens,
)

__all__ = ["AsyncUsageContract"]


class AsyncUsageContract(UsageTests):
    def test_twins_do_what_their_methods_do(self, usage: UsageStore) -> None:
        async def work(store: Any) -> None:
            entry_id = await store.arecord_entry(tokens(prompt=7))
            assert len(await store.arecord_entries(EVERY_KIND)) == len(EVERY_KIND)
            assert await store.aexists("session")
            entries = await store.aget_entries("session", kinds=["tokens"])
            assert entry_id in [entry.id for entry in entries]
            rollup = await store.aget_rollup("session", include_sub_agents=True)
            assert rollup.entry_count == len(EVERY_KIND) + 1
            page = await store.aquery_usage(limit=3, order="asc")
            assert (len(page.entries), page.total) == (3, len(EVERY_KIND) + 1)
            series = await store.atimeseries(date_from=NOON, date_to=NOON + 1, group_by="kind")
            assert [bucket.group for bucket in series] == ["custom", "subagent", "tokens", "tool"]
            assert await store.adelete("session") == len(EVERY_KIND) + 1

        async_to_sync(work)(usage)
        assert usage.query_usage().total == 0

    def test_twins_raise_the_errors_of_their_methods(self, usage: UsageStore) -> None:
        store: Any = usage
        with pytest.raises(SessionNotFound):
            async_to_sync(store.arecord_entry)(tokens("nobody"))
        with pytest.raises(InvalidPayload):
            async_to_sync(store.arecord_entries)([tokens(prompt=-1)])
        with pytest.raises(InvalidQuery):
            async_to_sync(store.aquery_usage)(limit=0)
        assert usage.query_usage().total == 0

    def test_calls_gathered_in_one_loop_all_count(self, usage: UsageStore) -> None:
        store: Any = usage

        async def work() -> None:
            await asyncio.gather(*(store.arecord_entry(tokens(prompt=1)) for _ in range(8)))

        async_to_sync(work)()
        assert rolled_up(usage).tokens.prompt == 8
