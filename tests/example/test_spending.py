"""What the example's agents and recordings spend, as the ledger shows it."""

from __future__ import annotations

import json
import lzma
from decimal import Decimal
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from example_project.agent import Agent, AgentKind, Reply, ToolCall, answer_approval
from example_project.demo import demonstrate_agent
from example_project.events import Event
from example_project.spending import PRICED_AS
from example_project.transcripts import Transcript, read_transcripts, replay
from example_project.travel import PLANNER, start_trip
from helix_store.core.types import Message
from helix_store.core.usage import CallStats
from helix_store.stores import DatabaseUsageStore, Store
from helix_store.testing.usage.base import rolled_up
from tests.databases import CommittedDatabase

RECORDED = Path(__file__).resolve().parents[3] / "shared" / "data" / "tau-airline-trajectories.json.xz"

CHAT: list[Message] = [
    {"role": "user", "content": "One?"},
    {"role": "assistant", "content": None, "tool_calls": [{"id": "a"}, {"id": "b"}]},
    {"role": "tool", "tool_call_id": "a", "name": "search", "content": "found"},
    {"role": "tool", "tool_call_id": "b", "name": "search", "content": "Error: not found"},
    {"role": "assistant", "content": "Two."},
]


def _ignore(event: Event) -> None:
    pass


@pytest.fixture
def store(committed_db: CommittedDatabase) -> Store:
    return Store(committed_db.alias, tenant=committed_db.tenant)


@pytest.fixture
def usage(committed_db: CommittedDatabase) -> DatabaseUsageStore:
    return DatabaseUsageStore(committed_db.alias, tenant=committed_db.tenant)


def test_a_trip_and_its_adviser_add_up(store: Store, usage: DatabaseUsageStore) -> None:
    start_trip(store, "trip", title="Lisbon")
    Agent(store, PLANNER, report=_ignore).run("trip")
    answer_approval(store, "trip", approved=True)
    Agent(store, PLANNER, report=_ignore).run("trip")
    own, tree = rolled_up(usage, "trip"), rolled_up(usage, "trip", tree=True)
    assert {name: stats.calls for name, stats in tree.tool_stats.by_tool.items()} == {
        "ask_visa_adviser": 1,
        "book_trip": 1,
        "search_flights": 1,
        "search_hotels": 1,
    }
    assert list(tree.sub_agents) == ["visa-adviser"]
    assert (tree.session_count, len(usage.get_entries("trip", kinds=["tokens"]))) == (2, 4)
    adviser = rolled_up(usage, "trip.call-visa")
    assert own.tokens + adviser.tokens == tree.tokens == tree.tokens_by_model[PRICED_AS]
    assert 0 < adviser.tokens.total < own.tokens.total
    assert [entry.step_count for entry in usage.get_entries("trip", kinds=["tokens"])] == [1, 2, 3, 5]


def test_what_a_killed_worker_spent_counts_too(committed_db: CommittedDatabase, store: Store) -> None:
    killed, undisturbed, waiting = demonstrate_agent(
        store, committed_db.alias, report=lambda line, emphasis="none": None
    )
    assert killed.spent.tokens.total > undisturbed.spent.tokens.total > waiting.spent.tokens.total > 0


@pytest.mark.skipif(
    find_spec("genai_prices") is None, reason="genai-prices, the extra `prices`, is not installed"
)
def test_what_a_trip_spends_has_a_price(store: Store, usage: DatabaseUsageStore) -> None:
    start_trip(store, "trip", title="Lisbon")
    Agent(store, PLANNER, report=_ignore).run("trip")
    assert rolled_up(usage, "trip").cost_usd > Decimal(0)


def test_a_tool_that_fails_counts_as_a_failure(store: Store, usage: DatabaseUsageStore) -> None:
    class Model:
        def reply(self, history: Any) -> Reply:
            calls = [{"id": "call", "function": {"name": "break", "arguments": "{}"}}]
            return Reply({"role": "assistant", "tool_calls": calls}, {"total": 1})

    def fail(call: ToolCall) -> None:
        raise ConnectionError("The other side hung up.")

    store.new_session("session", agent_type="breaker")
    with pytest.raises(ConnectionError):
        Agent(store, AgentKind("breaker", Model(), {"break": fail}), report=_ignore).run("session")
    stats = rolled_up(usage).tool_stats.by_tool["break"]
    assert (stats.calls, stats.failures) == (1, 1)


def test_a_recorded_conversation_adds_up_however_often_it_is_replayed(
    store: Store, usage: DatabaseUsageStore
) -> None:
    read = [len(json.dumps(message)) for message in CHAT]
    for stored in (0, 2, 5, 5):
        replay(store.sessions, Transcript("chat", CHAT[:stored]))
        rollup = rolled_up(usage, "chat")
    assert rollup.tool_stats.by_tool == {"search": CallStats(calls=2, failures=1)}
    assert rollup.tokens.prompt == read[0] // 4 + sum(read[:4]) // 4
    assert rollup.tokens.completion == read[1] // 4 + read[4] // 4
    assert rollup.tokens.total == rollup.tokens.prompt + rollup.tokens.completion
    assert [entry.step_count for entry in usage.get_entries("chat")] == [1, 1, 1, 2]


@pytest.mark.skipif(not RECORDED.exists(), reason="the recorded trajectories are not beside the repository")
def test_recorded_trajectories_add_up_to_what_their_files_hold(
    store: Store, usage: DatabaseUsageStore, tmp_path: Path
) -> None:
    with lzma.open(RECORDED, "rt", encoding="utf-8") as stream:
        recorded = json.load(stream)[:20]
    path = tmp_path / "recorded.json"
    path.write_text(json.dumps(recorded))
    for transcript in read_transcripts(path):
        replay(store.sessions, transcript)
        results = [message for message in transcript.messages if message["role"] == "tool"]
        answers = [message for message in transcript.messages if message["role"] == "assistant"]
        rollup = rolled_up(usage, transcript.session_id)
        assert rollup.tool_stats.total_calls == len(results)
        assert rollup.entry_count == len(results) + len(answers)
    assert usage.query_usage(limit=1, agent_type="recorded").total == sum(
        message["role"] in ("tool", "assistant") for each in recorded for message in each["traj"]
    )
