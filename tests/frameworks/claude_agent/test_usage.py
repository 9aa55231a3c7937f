"""What the ledger has of transcripts of Claude Agent SDK."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

from helix_store import DatabaseUsageStore
from helix_store.contrib.claude_agent import DjangoSessionStore
from tests.databases import CommittedDatabase
from tests.frameworks.claude_agent.conftest import NewStore
from tests.frameworks.claude_agent.test_transcripts import KEY, SUB, answered, rows_of, said


def usage_store(db: CommittedDatabase) -> DatabaseUsageStore:
    return DatabaseUsageStore(db.alias, tenant=db.tenant)


async def test_what_the_models_spent_is_in_the_ledger_once(
    store: DjangoSessionStore, committed_db: CommittedDatabase
) -> None:
    await store.append(KEY, [said("hi", "u"), answered("m1", "a", output=1), answered("m1", "b", output=20)])
    await store.append(KEY, [answered("m1", "b"), answered("m1", "c")])
    await store.append(SUB, [answered("m2", "d", output=30, model="claude-haiku-4-5")])
    usage = usage_store(committed_db)
    rollup = await usage.aget_rollup(store.session_id_of(KEY))
    assert rollup is not None
    assert (rollup.entry_count, rollup.tokens.prompt, rollup.tokens.cached) == (2, 230, 200)
    assert (rollup.tokens.completion, rollup.tokens.total) == (50, 280)
    assert set(rollup.tokens_by_model) == {"claude-opus-4-6", "claude-haiku-4-5"}
    entries = await usage.aget_entries(store.session_id_of(KEY))
    assert {entry.timestamp for entry in entries} == {1_795_168_800_000}


async def test_tokens_written_to_a_cache_have_their_own_price(
    store: DjangoSessionStore, committed_db: CommittedDatabase
) -> None:
    """A million tokens for Claude Opus 4.6: 5 dollars, 6.25 if they are cached, 10 if for an hour."""
    for lifetime in ("5m", "1h"):
        entry = answered(f"m{lifetime}", lifetime, output=0)
        entry["message"]["usage"] |= {
            "input_tokens": 0,
            "cache_read_input_tokens": 0,
            "cache_creation_input_tokens": 1_000_000,
            "cache_creation": {f"ephemeral_{lifetime}_input_tokens": 1_000_000},
        }
        await store.append(KEY, [entry])
    entries = await usage_store(committed_db).aget_entries(store.session_id_of(KEY))
    counts = [(each.tokens.prompt, each.tokens.cache_write) for each in entries if each.tokens]
    assert counts == [(1_000_000, 1_000_000)] * 2
    assert [entry.cost_usd for entry in entries] == [Decimal("6.25"), 10]


async def test_a_response_in_several_batches_is_recorded_with_its_last_usage(
    store: DjangoSessionStore, committed_db: CommittedDatabase
) -> None:
    fork: Any = {**KEY, "session_id": "fork"}
    await store.append(KEY, [answered("m1", "a", output=1)])
    await store.append(KEY, [answered("m1", "b", output=500)])
    await store.append(KEY, [answered("m1", "c", output=2)])
    await store.append(fork, [answered("m1", "d", output=900)])
    usage = usage_store(committed_db)
    rollup = await usage.aget_rollup(store.session_id_of(KEY))
    assert rollup is not None
    assert (rollup.entry_count, rollup.tokens.completion) == (1, 500)
    assert await usage.aget_entries(store.session_id_of(fork)) == []


async def test_damaged_usage_does_not_stop_an_append(
    store: DjangoSessionStore, committed_db: CommittedDatabase
) -> None:
    good = answered("m1", "a")["message"]
    damaged: list[Any] = [
        {"type": "assistant", "message": {**good, "usage": usage, **more}}
        for usage, more in [
            (None, {}),
            ({"input_tokens": "7", "output_tokens": -1}, {}),
            ({"input_tokens": 2**70}, {}),
            ({"input_tokens": 1}, {"model": "\x00"}),
            ({"input_tokens": 1}, {"id": "i" * 300}),
            ({"input_tokens": 0, "output_tokens": 0}, {"model": "<synthetic>"}),
        ]
    ]
    await store.append(KEY, [*damaged, answered("m1", "b", timestamp="yesterday")])
    rollup = await usage_store(committed_db).aget_rollup(store.session_id_of(KEY))
    assert rollup is not None
    assert rollup.entry_count == 1
    loaded = await store.load(KEY)
    assert loaded is not None
    assert len(loaded) == 7


async def test_a_store_can_leave_the_ledger_alone(
    new_store: NewStore, committed_db: CommittedDatabase
) -> None:
    store = new_store(tenant=committed_db.tenant, record_usage=False)
    await store.append(KEY, [answered("m1", "a")])
    assert (await rows_of(committed_db))["usage"] == 0
