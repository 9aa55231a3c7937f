"""Graphs and swarms of Strands: the usage of each response of their agents is recorded once."""

from __future__ import annotations

from typing import Any

import pytest
from strands import Agent
from strands.multiagent import GraphBuilder, Swarm
from strands.session import RepositorySessionManager

from example_project.frameworks.strands import ScriptedModel, weather
from helix_store import DatabaseUsageStore
from helix_store.contrib.strands import DjangoSessionRepository
from tests.databases import CommittedDatabase

TOKENS_OF_A_RUN = 110 + 1 + 110 + 3
"""An agent asks for the weather with one message, and answers with three."""


def agent(name: str) -> Agent:
    return Agent(name=name, model=ScriptedModel(), tools=[weather], callback_handler=None)


def manager(db: CommittedDatabase, **options: Any) -> Any:
    repository = DjangoSessionRepository(db.alias, **{"tenant": db.tenant, **options})
    return RepositorySessionManager(session_id="trip", session_repository=repository)


def graph(session_manager: Any = None, *, last: Any = None, graph_id: str = "plan") -> Any:
    builder = GraphBuilder()
    builder.add_node(agent("first"), "first")
    builder.add_node(last or agent("last"), "last")
    builder.add_edge("first", "last")
    builder.set_entry_point("first")
    builder.set_graph_id(graph_id)
    builder.set_max_node_executions(9)
    if session_manager is not None:
        builder.set_session_manager(session_manager)
    return builder.build()


def recorded(db: CommittedDatabase) -> tuple[int, int]:
    """The number of entries and of tokens."""
    rollup = DatabaseUsageStore(db.alias, tenant=db.tenant).get_rollup("trip")
    return (0, 0) if rollup is None else (rollup.entry_count, rollup.tokens.total)


def test_each_response_of_a_graph_is_recorded_once(committed_db: CommittedDatabase) -> None:
    plan = graph(manager(committed_db))
    plan("How is the weather?")
    assert recorded(committed_db) == (4, 2 * TOKENS_OF_A_RUN)
    plan("And now?")
    count, tokens = recorded(committed_db)
    assert count == 8
    assert tokens > 4 * TOKENS_OF_A_RUN


def test_a_graph_in_another_process_adds_its_own_usage(committed_db: CommittedDatabase) -> None:
    for _ in range(2):
        graph(manager(committed_db))("How is the weather?")
    assert recorded(committed_db) == (8, 4 * TOKENS_OF_A_RUN)


def test_the_usage_of_a_nested_graph_is_recorded(committed_db: CommittedDatabase) -> None:
    graph(manager(committed_db), last=graph(graph_id="inner"))("How is the weather?")
    assert recorded(committed_db) == (6, 3 * TOKENS_OF_A_RUN)


def test_each_response_of_a_swarm_is_recorded_once(committed_db: CommittedDatabase) -> None:
    swarm = Swarm([agent("first"), agent("second")], session_manager=manager(committed_db))
    swarm("How is the weather?")
    assert recorded(committed_db) == (2, TOKENS_OF_A_RUN)
    swarm("And now?")
    assert recorded(committed_db) == (4, 2 * TOKENS_OF_A_RUN)


def test_without_a_model_nothing_is_recorded(committed_db: CommittedDatabase) -> None:
    graph(manager(committed_db, model=None))("How is the weather?")
    assert recorded(committed_db) == (0, 0)


@pytest.mark.parametrize("kind", ["graph", "swarm"])
def test_the_user_of_a_graph_is_the_user_of_its_usage(committed_db: CommittedDatabase, kind: str) -> None:
    session_manager = manager(committed_db, user_id="ada")
    multi_agent: Any = (
        graph(session_manager) if kind == "graph" else Swarm([agent("a")], session_manager=session_manager)
    )
    multi_agent("How is the weather?")
    ledger = DatabaseUsageStore(committed_db.alias, tenant=committed_db.tenant)
    assert len(ledger.query_usage(user_id="ada").entries) == recorded(committed_db)[0]
