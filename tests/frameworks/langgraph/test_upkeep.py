"""Copying, pruning and deleting threads, also those with channels that are stored as deltas."""

from __future__ import annotations

from typing import Any

import pytest
from django.db import transaction

from helix_store.contrib.langgraph import DjangoSaver
from helix_store.contrib.langgraph.models import LangGraphCheckpoint, LangGraphValue, LangGraphWrite
from helix_store.exceptions import InvalidPayload
from helix_store.stores import DatabaseStateStore
from tests.database.separate import separate_connection
from tests.databases import CommittedDatabase
from tests.faults_found.races import Writers, until_backends_wait
from tests.frameworks.langgraph.graphs import config_of, put, put_chain

TABLES = (LangGraphCheckpoint, LangGraphValue, LangGraphWrite)


@pytest.fixture
def saver(committed_db: CommittedDatabase) -> DjangoSaver:
    return DjangoSaver(committed_db.alias, tenant=committed_db.tenant)


def _ids(saver: DjangoSaver, thread_id: str = "thread", **filters: Any) -> list[str]:
    return [
        each.checkpoint["id"] for each in saver.list({"configurable": {"thread_id": thread_id}}, **filters)
    ]


def _id(config: Any) -> str:
    return str(config["configurable"]["checkpoint_id"])


def _count(db: CommittedDatabase, model: Any) -> int:
    return int(model._base_manager.using(db.alias).filter(session__tenant=db.tenant).count())


def test_keep_latest_keeps_what_the_newest_checkpoint_needs(
    saver: DjangoSaver, committed_db: CommittedDatabase
) -> None:
    chain = put_chain(saver, "thread", 4)
    for config in chain:
        saver.put_writes(config, [("log", 1)], "task")
    not_stored_yet = config_of("thread", "ffffffff-0000-6000-8000-000000000000")
    saver.put_writes(not_stored_yet, [("log", 2)], "task")
    put_chain(saver, "other", 2)
    saver.prune(["thread", "unknown"])
    saver.prune(["thread"])
    assert _ids(saver) == [_id(chain[-1])]
    (found,) = saver.list(config_of("thread"))
    assert found.parent_config is None
    assert found.pending_writes == [("task", "log", 1)]
    assert found.checkpoint["channel_values"] == {"log": [0, 1, 2, 3]}
    # Two values and two checkpoints of the other thread; the write that came before its checkpoint.
    assert [_count(committed_db, model) for model in TABLES] == [3, 3, 2]


def test_the_call_of_a_subgraph_goes_with_its_checkpoint(saver: DjangoSaver) -> None:
    first, second = put_chain(saver, "thread", 2)
    past = put(saver, config_of("thread", namespace="child:1"), parents={"": _id(first)})
    current = put(saver, config_of("thread", namespace="child:2"), parents={"": _id(second)})
    early = put(saver, config_of("thread", namespace="child:3"), parents={"": "not stored yet"})
    lasting = put(saver, config_of("thread", namespace="child"), parents={"": _id(first)})
    saver.prune(["thread"])
    kept = {_id(each) for each in (second, current, early, lasting)}
    assert set(_ids(saver)) == kept
    assert saver.get_tuple(past) is None


def test_a_strategy_must_be_known(saver: DjangoSaver) -> None:
    with pytest.raises(InvalidPayload):
        saver.prune(["thread"], strategy="keep_all")
    with pytest.raises(InvalidPayload):
        saver.prune("thread")


def test_the_values_of_other_runs_stay(saver: DjangoSaver, committed_db: CommittedDatabase) -> None:
    first = put(saver, config_of("thread"), {"log": [1]}, new={"log": "1"}, run_id="one")
    second = put(saver, first, {"log": [1], "x": []}, new={"x": "1"}, versions={"log": "1"}, run_id="two")
    saver.put_writes(first, [("log", 1)], "task")
    saver.delete_for_runs(["one", "unknown"])
    (found,) = saver.list(config_of("thread"))
    assert found.config == second
    assert found.checkpoint["channel_values"] == {"log": [1], "x": []}
    assert [_count(committed_db, model) for model in (LangGraphValue, LangGraphWrite)] == [2, 0]
    saver.delete_for_runs(["two"])
    assert _count(committed_db, LangGraphValue) == 0


def test_a_copy_is_a_thread_of_its_own(saver: DjangoSaver) -> None:
    chain = put_chain(saver, "thread", 3)
    saver.put_writes(chain[-1], [("log", 1)], "task")
    long_id = "copy/" * 100
    saver.copy_thread("thread", long_id)
    saver.copy_thread("thread", long_id)
    saver.copy_thread("unknown", "nothing")
    saver.delete_thread("thread")
    copied = list(saver.list(config_of(long_id)))
    assert [each.checkpoint["id"] for each in copied] == [_id(each) for each in reversed(chain)]
    assert copied[0].pending_writes == [("task", "log", 1)]
    assert copied[0].checkpoint["channel_values"] == {"log": [0, 1, 2]}
    assert {each.config["configurable"]["thread_id"] for each in saver.list(None)} == {long_id}


def test_a_copy_belongs_to_the_user_of_its_source(
    saver: DjangoSaver, committed_db: CommittedDatabase
) -> None:
    put(saver, {**config_of("thread"), "metadata": {"user_id": "ada", "title": "A trip"}})
    put(saver, {**config_of("other"), "metadata": {"user_id": "bob"}})
    saver.copy_thread("thread", "copy")
    saver.copy_thread("thread", "other")
    store = DatabaseStateStore(committed_db.alias, tenant=committed_db.tenant)
    copied, other = store.load_state("copy"), store.load_state("other")
    assert copied is not None
    assert other is not None
    assert (copied.user_id, copied.title) == ("ada", "A trip")
    assert (other.user_id, other.title) == ("bob", None)


def test_a_copy_waits_for_the_deletion_of_its_source_and_creates_nothing(
    postgres_db: CommittedDatabase,
) -> None:
    """It created a session without checkpoints, with the user and the title of the deleted one."""
    tenant = postgres_db.tenant
    saver = DjangoSaver(postgres_db.alias, tenant=tenant)
    put(saver, {**config_of("thread"), "metadata": {"user_id": "ada", "title": "A trip"}})
    with (
        separate_connection(**postgres_db.connection.settings_dict) as connection,
        transaction.atomic(using=connection.alias),
    ):
        DjangoSaver(connection.alias, tenant=tenant).delete_thread("thread")
        writers = Writers([lambda: saver.copy_thread("thread", "copy")])
        until_backends_wait(postgres_db, 1)
    (outcome,) = writers.outcomes()
    assert outcome.error is None
    assert DatabaseStateStore(postgres_db.alias, tenant=tenant).list_sessions().sessions == []


def test_deleting_a_thread_keeps_the_session_of_the_application(
    saver: DjangoSaver, committed_db: CommittedDatabase
) -> None:
    store = DatabaseStateStore(committed_db.alias, tenant=committed_db.tenant)
    store.create_session("thread", agent_type="assistant")
    put_chain(saver, "thread", 2)
    saver.delete_thread("thread")
    assert store.session_exists("thread")
    assert _ids(saver) == []
    put_chain(saver, "own", 2)
    saver.delete_thread("own")
    assert not store.session_exists("own")


def test_a_branch_of_a_session_is_a_copy_of_its_thread(
    saver: DjangoSaver, committed_db: CommittedDatabase
) -> None:
    store = DatabaseStateStore(committed_db.alias, tenant=committed_db.tenant)
    store.create_session("thread", agent_type="assistant")
    chain = put_chain(saver, "thread", 2)
    store.branch_session("thread", new_session_id="branch")
    assert _ids(saver, "branch") == [_id(each) for each in reversed(chain)]
