"""Graphs that a caller runs inside its own transaction."""

from __future__ import annotations

import pytest
from asgiref.sync import async_to_sync
from django.db import transaction
from langchain_core.runnables import RunnableConfig

from example_project.frameworks.langgraph import travel_agent
from helix_store.contrib.langgraph import DjangoSaver
from helix_store.exceptions import OutsideTransaction
from helix_store.stores import DatabaseStateStore
from tests.databases import CommittedDatabase

TO_KYOTO = {"messages": [("user", "To Kyoto")]}
CONFIG: RunnableConfig = {"configurable": {"thread_id": "trip"}}


@pytest.fixture
def db(committed_db: CommittedDatabase, monkeypatch: pytest.MonkeyPatch) -> CommittedDatabase:
    """A thread that waits for the caller's rows gives up, so that the fault is an error and not a halt."""
    if committed_db.vendor == "postgresql":
        settings = committed_db.connection.settings_dict
        options = {**settings["OPTIONS"], "options": "-c lock_timeout=2000"}
        monkeypatch.setitem(settings, "OPTIONS", options)
    return committed_db


@pytest.mark.parametrize("has_session", [True, False], ids=["new session", "committed session"])
def test_a_graph_in_its_callers_transaction_is_refused(db: CommittedDatabase, has_session: bool) -> None:
    store = DatabaseStateStore(db.alias, tenant=db.tenant)
    graph = travel_agent(DjangoSaver(db.alias, tenant=db.tenant), "The train costs 90 euros.")
    if not has_session:
        store.create_session("trip", agent_type="langgraph")

    def invoke() -> None:
        with transaction.atomic(using=db.alias):
            if has_session:
                store.create_session("trip", agent_type="langgraph")
            graph.invoke(TO_KYOTO, CONFIG)

    with pytest.raises(OutsideTransaction):
        invoke()
    saver = DjangoSaver(db.alias, tenant=db.tenant)
    assert saver.get_tuple(CONFIG) is None


def test_an_async_graph_joins_the_transaction_of_its_caller(db: CommittedDatabase) -> None:
    saver = DjangoSaver(db.alias, tenant=db.tenant)
    graph = travel_agent(saver, "The train costs 90 euros.")
    with transaction.atomic(using=db.alias):
        waiting = async_to_sync(graph.ainvoke)(TO_KYOTO, CONFIG)
        assert waiting["__interrupt__"]
        transaction.set_rollback(True, using=db.alias)
    assert saver.get_tuple(CONFIG) is None


def test_a_graph_may_run_after_the_block(db: CommittedDatabase) -> None:
    store = DatabaseStateStore(db.alias, tenant=db.tenant)
    with transaction.atomic(using=db.alias):
        store.create_session("trip", agent_type="langgraph")
    saver = DjangoSaver(db.alias, tenant=db.tenant)
    travel_agent(saver, "The train costs 90 euros.").invoke(TO_KYOTO, CONFIG)
    assert saver.get_tuple(CONFIG) is not None
