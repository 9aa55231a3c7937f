"""What a save adds to the ledger: the difference of `RunUsage`, by model, once."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

from asgiref.sync import async_to_sync
from pydantic_ai.conversation import Conversation
from pydantic_ai.usage import RunUsage

from helix_store.core.usage import UsageEntry, UsageRollup
from helix_store.stores import DatabaseUsageStore
from tests.databases import CommittedDatabase
from tests.frameworks.pydantic_ai.conversations import forked, saved, store_of, turn


def _ledger(database: CommittedDatabase) -> DatabaseUsageStore:
    return DatabaseUsageStore(database.alias, tenant=database.tenant)


def _rollup(database: CommittedDatabase, name: str) -> UsageRollup:
    rollup = _ledger(database).get_rollup(name)
    assert rollup is not None
    return rollup


def _tokens(database: CommittedDatabase, name: str) -> list[UsageEntry]:
    return _ledger(database).get_entries(name, kinds="tokens")


def _counts(database: CommittedDatabase, name: str) -> dict[str | None, int | float | None]:
    return {entry.name: entry.amount for entry in _ledger(database).get_entries(name, kinds="custom")}


def _save(database: CommittedDatabase, conversation: Conversation) -> None:
    async_to_sync(store_of(database).save)(conversation)


def test_each_save_records_what_its_runs_spent_by_model(committed_db: CommittedDatabase) -> None:
    conversation = saved(committed_db, "trip", "one")
    turn(conversation, "two", model="slow", tokens=100)
    turn(conversation, "three", model="slow", tokens=10)
    turn(conversation, "four", tokens=7)
    _save(committed_db, conversation)
    tokens = _tokens(committed_db, "trip")
    assert [(entry.model, entry.tokens and entry.tokens.prompt) for entry in tokens] == [
        ("fast", 5),
        ("slow", 110),
        ("fast", 7),
    ]
    assert _rollup(committed_db, "trip").tokens.prompt == conversation.usage.input_tokens


def test_a_save_without_a_run_records_nothing(committed_db: CommittedDatabase) -> None:
    conversation = saved(committed_db, "trip", "one")
    before = _ledger(committed_db).get_entries("trip")
    for _ in range(3):
        _save(committed_db, conversation)
    assert _ledger(committed_db).get_entries("trip") == before


def test_what_the_responses_do_not_say_belongs_to_the_last_model(committed_db: CommittedDatabase) -> None:
    conversation = Conversation(conversation_id="trip")
    turn(conversation, "one")
    # A rejected attempt of a fallback, as the run counts it and no message does.
    conversation.usage += RunUsage(input_tokens=90, cache_read_tokens=30, tool_calls=2, cost=Decimal("0.25"))
    _save(committed_db, conversation)
    (entry,) = _tokens(committed_db, "trip")
    assert entry.tokens is not None
    assert (entry.model, entry.tokens.prompt, entry.tokens.cached) == ("fast", 95, 30)
    assert entry.cost_usd == Decimal("0.25")
    assert _counts(committed_db, "trip") == {"requests": 1, "tool_calls": 2}


def test_tokens_with_a_price_of_their_own_are_counted_apart(committed_db: CommittedDatabase) -> None:
    conversation = Conversation(conversation_id="trip")
    turn(conversation, "one")
    spent: dict[str, Any] = {"input_tokens": 90, "cache_write_tokens": 30, "input_audio_tokens": 20}
    conversation.usage += RunUsage(**spent, output_tokens=10, output_audio_tokens=7)
    _save(committed_db, conversation)
    (entry,) = _tokens(committed_db, "trip")
    assert entry.tokens is not None
    kinds = (entry.tokens.cache_write, entry.tokens.audio_prompt, entry.tokens.audio_completion)
    assert kinds == (30, 20, 7)


def test_a_fork_does_not_spend_again(committed_db: CommittedDatabase) -> None:
    conversation = saved(committed_db, "trip", "one")
    fork = forked(committed_db, "trip", "fork")
    assert fork.usage == conversation.usage
    assert _ledger(committed_db).get_entries("fork") == []
    turn(fork, "two", tokens=11)
    _save(committed_db, fork)
    (entry,) = _tokens(committed_db, "fork")
    assert entry.tokens is not None
    assert (entry.tokens.prompt, entry.tokens.total) == (11, 12)


def test_usage_that_shrinks_is_not_taken_back(committed_db: CommittedDatabase) -> None:
    conversation = saved(committed_db, "trip", "one")
    conversation.usage = RunUsage()
    _save(committed_db, conversation)
    assert _rollup(committed_db, "trip").tokens.prompt == 5


def test_the_user_of_the_scope_is_billed(committed_db: CommittedDatabase) -> None:
    saved(committed_db, "trip", "one", scope="ada")
    page = _ledger(committed_db).query_usage(user_id="ada", agent_type="pydantic_ai", kinds="tokens")
    assert [entry.session_id for entry in page.entries] == ["trip"]
