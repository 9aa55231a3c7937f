"""What a thread keeps beside what the packaged clauses ask for."""

from __future__ import annotations

import asyncio
import threading
from typing import Any, NamedTuple
from uuid import UUID

import pytest
from django.db import connections, transaction
from django.test.utils import CaptureQueriesContext
from langgraph.checkpoint.base import empty_checkpoint
from langgraph.checkpoint.serde.jsonplus import JsonPlusSerializer

from helix_store.contrib.langgraph import DjangoSaver
from helix_store.contrib.langgraph.models import LangGraphCheckpoint, LangGraphValue, LangGraphWrite
from helix_store.core.limits import MAX_TITLE_BYTES
from helix_store.exceptions import InvalidPayload, InvalidQuery, LimitExceeded
from helix_store.models import Session
from helix_store.stores import DatabaseStateStore
from tests.cells import for_each
from tests.databases import CommittedDatabase
from tests.frameworks.langgraph.graphs import config_of, put, put_chain
from tests.processes import run_in_threads

TABLES = (LangGraphCheckpoint, LangGraphValue, LangGraphWrite)


class Point(NamedTuple):
    x: int


@pytest.fixture
def saver(committed_db: CommittedDatabase) -> DjangoSaver:
    return DjangoSaver(committed_db.alias, tenant=committed_db.tenant)


def _rows(db: CommittedDatabase) -> list[int]:
    return [model._base_manager.using(db.alias).filter(session__tenant=db.tenant).count() for model in TABLES]


def test_writes_of_a_task_may_come_before_their_thread(saver: DjangoSaver) -> None:
    config = config_of("new", "00000000-0000-6000-8000-000000000000")
    saver.put_writes(config, [("channel", "early")], "task", "path")
    saver.put_writes(config, [("channel", "late")], "task", "path")
    assert saver.get_tuple(config) is None
    checkpoint = empty_checkpoint()
    checkpoint["id"] = config["configurable"]["checkpoint_id"]
    saver.put(config_of("new"), checkpoint, {"source": "input", "step": -1, "parents": {}}, {})
    found = saver.get_tuple(config)
    assert found is not None
    assert found.pending_writes == [("task", "channel", "early")]


def _race(alias: str, tenant: str, number: int) -> None:
    saver = DjangoSaver(alias, tenant=tenant)
    saver.put_writes(config_of("raced", "checkpoint"), [("channel", number)], f"task-{number}")


def test_no_write_is_lost_when_many_create_the_thread(committed_db: CommittedDatabase) -> None:
    outcomes = run_in_threads(_race, [(committed_db.alias, committed_db.tenant, each) for each in range(8)])
    assert [outcome.error for outcome in outcomes] == [None] * 8
    assert _rows(committed_db) == [0, 0, 8]


def test_interrupts_are_replaced_and_other_writes_are_kept(saver: DjangoSaver) -> None:
    stored = put(saver, config_of("thread"))
    saver.put_writes(stored, [("channel", 1), ("__interrupt__", "a"), ("__interrupt__", "b")], "task")
    saver.put_writes(stored, [("channel", 2), ("__interrupt__", "c")], "task")
    found = saver.get_tuple(stored)
    assert found is not None
    assert found.pending_writes == [("task", "__interrupt__", "c"), ("task", "channel", 1)]


@for_each(
    "value",
    ["\x00", "é" * 400, b"\x00\xff", bytearray(b"\x00\xff"), float("inf"), [1, {"a": None}], "x" * 200],
)
def test_a_value_is_read_as_it_was_written(saver: DjangoSaver, value: Any) -> None:
    stored = put(saver, config_of("thread"), {"channel": value, "small": 1})
    saver.put_writes(stored, [("channel", value)], "task")
    found = saver.get_tuple(stored)
    assert found is not None
    assert found.checkpoint["channel_values"] == {"channel": value, "small": 1}
    assert found.pending_writes == [("task", "channel", value)]


def test_a_value_is_stored_once_for_all_checkpoints(
    saver: DjangoSaver, committed_db: CommittedDatabase
) -> None:
    first = put(saver, config_of("thread"), {"log": [1]}, new={"log": "1"})
    second = put(saver, first, {"log": [1], "n": 1}, new={"n": "1"}, versions={"log": "1"})
    assert _rows(committed_db) == [2, 1, 0]
    for config in (first, second):
        found = saver.get_tuple(config)
        assert found is not None
        assert found.checkpoint["channel_values"]["log"] == [1]


@for_each("thread_id", ["p" * 300 + "/session", "two\nlines", "~" + "0" * 32])
def test_an_id_that_no_session_can_have_is_a_thread(saver: DjangoSaver, thread_id: str) -> None:
    stored = put(saver, config_of(thread_id))
    assert stored["configurable"]["thread_id"] == thread_id
    (found,) = saver.list(None)
    assert found.config == stored


def test_no_thread_is_named_none(saver: DjangoSaver, committed_db: CommittedDatabase) -> None:
    nobodys: Any = None
    for call in (
        lambda: put(saver, config_of(nobodys)),
        lambda: saver.get_tuple(config_of(nobodys)),
        lambda: saver.copy_thread("thread", nobodys),
        lambda: saver.delete_thread(nobodys),
    ):
        with pytest.raises(InvalidPayload) as refused:
            call()
        assert refused.value.path == "/thread_id"
    assert not Session.objects.using(committed_db.alias).filter(tenant=committed_db.tenant).exists()


def test_what_cannot_be_stored_is_refused_and_stores_nothing(
    saver: DjangoSaver, committed_db: CommittedDatabase
) -> None:
    with pytest.raises(InvalidPayload):
        put(saver, config_of("nul\x00"))
    with pytest.raises(LimitExceeded):
        put(saver, config_of("thread", namespace="n" * 851))
    with pytest.raises(LimitExceeded):
        put(saver, config_of("thread"), {"channel": b"x" * (8 * 1024 * 1024 + 1)})
    with pytest.raises(InvalidPayload):
        saver.put_writes(config_of("thread"), [("channel", 1)], "task")
    assert _rows(committed_db) == [0, 0, 0]
    assert not Session.objects.using(committed_db.alias).filter(tenant=committed_db.tenant).exists()


def test_the_session_of_a_thread_has_its_user_and_title(
    saver: DjangoSaver, committed_db: CommittedDatabase
) -> None:
    put(saver, {**config_of("thread"), "metadata": {"user_id": "ada", "title": "A trip"}})
    state = DatabaseStateStore(committed_db.alias, tenant=committed_db.tenant).load_state("thread")
    assert state is not None
    assert (state.agent_type, state.user_id, state.title) == ("langgraph", "ada", "A trip")


@for_each(
    ("given", "stored"),
    [(42, "42"), (UUID(int=1), "00000000-0000-0000-0000-000000000001"), (True, None), ("", None)],
)
def test_the_user_of_a_thread_may_be_a_key_of_django(
    saver: DjangoSaver, committed_db: CommittedDatabase, given: Any, stored: str | None
) -> None:
    config = config_of("thread")
    put(saver, {"configurable": {**config["configurable"], "user_id": given}})
    state = DatabaseStateStore(committed_db.alias, tenant=committed_db.tenant).load_state("thread")
    assert state is not None
    assert state.user_id == stored


def test_a_title_that_no_session_can_have_is_refused_for_a_known_thread_too(saver: DjangoSaver) -> None:
    put(saver, config_of("thread"))
    with pytest.raises(LimitExceeded):
        put(saver, {**config_of("thread"), "metadata": {"title": "t" * (MAX_TITLE_BYTES + 1)}})


def test_a_tenant_does_not_see_the_threads_of_another(
    saver: DjangoSaver, committed_db: CommittedDatabase
) -> None:
    put(saver, config_of("thread"))
    other = DjangoSaver(committed_db.alias, tenant=f"{committed_db.tenant}-2")
    assert other.get_tuple(config_of("thread")) is None
    assert list(other.list(None)) == []


@for_each(
    ("wanted", "count"),
    [
        ({"step": 1}, 1),
        ({"step": 1.0}, 1),
        ({"step": "1"}, 0),
        ({"flag": True}, 3),
        ({"flag": 1}, 0),
        ({"nested": {"a": [1, "x"]}}, 3),
        ({"nested": {}}, 0),
        ({"absent": 1}, 0),
        ({"source": "loop", "step": 2}, 1),
        ({"a' OR '1'='1": "x"}, 0),
        ({'quote"d': "yes"}, 3),
    ],
)
def test_a_filter_compares_members_of_the_metadata(
    saver: DjangoSaver, wanted: dict[str, Any], count: int
) -> None:
    put_chain(saver, "thread", 3, flag=True, nested={"a": [1, "x"]}, **{'quote"d': "yes"})
    assert len(list(saver.list(config_of("thread"), filter=wanted))) == count


@for_each(
    "value",
    [b"x", float("nan"), {"a": {1}}, [Point], "x" * 8_193, [[[[[[[["deep"]]]]]]]]],
    ids=["bytes", "nan", "set", "type", "long", "deep"],
)
def test_a_filter_that_cannot_be_compared_is_refused_and_matches_nothing(
    saver: DjangoSaver, value: Any
) -> None:
    put_chain(saver, "thread", 1, nested={"a": []})
    with pytest.raises(InvalidQuery) as refused:
        list(saver.list(config_of("thread"), filter={"nested": value, "step": 0}))
    assert refused.value.path == "/filter/nested"


@for_each("checkpoint_id", ["1f\x00", "1f\udc00", 7])
def test_a_list_before_what_is_no_id_is_refused(saver: DjangoSaver, checkpoint_id: Any) -> None:
    put_chain(saver, "thread", 1)
    with pytest.raises(InvalidPayload) as refused:
        list(saver.list(config_of("thread"), before={"configurable": {"checkpoint_id": checkpoint_id}}))
    assert refused.value.path == "/before/configurable/checkpoint_id"


def test_a_list_reads_one_statement_for_each_page(
    saver: DjangoSaver, committed_db: CommittedDatabase, settings: Any
) -> None:
    chain = put_chain(saver, "thread", 7)
    expected = [each["configurable"]["checkpoint_id"] for each in reversed(chain)]
    configs: list[Any] = [config_of("thread"), {"configurable": {"thread_id": "thread"}}, None]
    for config in configs:
        assert [each.checkpoint["id"] for each in saver.list(config)] == expected
        settings.HELIX_STORE = {**settings.HELIX_STORE, "PAGE_SIZE": 3}
        with CaptureQueriesContext(committed_db.connection) as captured:
            found = list(saver.list(config))
        assert [each.checkpoint["id"] for each in found] == expected
        assert [each.checkpoint["channel_values"]["log"] for each in found][-2:] == [[0, 1], [0]]
        assert len(captured) == 3
        assert [each.checkpoint["id"] for each in saver.list(config, limit=4)] == expected[:4]
        assert list(saver.list(config, limit=0)) == []
        before = list(saver.list(config, before=chain[2]))
        assert [each.checkpoint["id"] for each in before] == expected[-2:]


def test_a_write_is_one_statement_on_postgresql(postgres_db: CommittedDatabase) -> None:
    saver = DjangoSaver(postgres_db.alias, tenant=postgres_db.tenant)
    stored = put(saver, config_of("thread"), {"log": [1]})
    with CaptureQueriesContext(postgres_db.connection) as captured:
        stored = put(saver, stored, {"log": [1, 2], "other": {}}, new={"log": "2", "other": "1"})
        saver.put_writes(stored, [("log", 3), ("other", {"a": 1})], "task")
        found = saver.get_tuple(config_of("thread"))
    assert len(captured) == 3
    assert found is not None
    assert found.checkpoint["channel_values"] == {"log": [1, 2], "other": {}}
    assert found.pending_writes == [("task", "log", 3), ("task", "other", {"a": 1})]


def test_a_write_joins_the_callers_transaction(saver: DjangoSaver, committed_db: CommittedDatabase) -> None:
    class GivenUp(Exception):
        pass

    stored = put(saver, config_of("thread"))

    def write_and_give_up() -> None:
        with transaction.atomic(using=committed_db.alias):
            put(saver, stored, {"log": [1]})
            saver.put_writes(stored, [("log", 1)], "task")
            raise GivenUp

    with pytest.raises(GivenUp):
        write_and_give_up()
    assert _rows(committed_db) == [1, 0, 0]


def test_a_thread_of_a_graph_keeps_no_connection(saver: DjangoSaver, committed_db: CommittedDatabase) -> None:
    is_open: list[bool] = []

    def run() -> None:
        stored = put(saver, config_of("thread"))
        saver.put_writes(stored, [("log", 1)], "task")
        listed = saver.list(config_of("thread"))
        next(listed)
        is_open.append(connections[committed_db.alias].connection is not None)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert is_open == [False]


def test_unknown_types_are_not_built_by_default(saver: DjangoSaver, committed_db: CommittedDatabase) -> None:
    stored = put(saver, config_of("thread"), {"point": Point(1)})
    found = saver.get_tuple(stored)
    assert found is not None
    assert not isinstance(found.checkpoint["channel_values"]["point"], Point)
    for open_saver in (
        DjangoSaver(committed_db.alias, tenant=committed_db.tenant, allow=[(__name__, "Point")]),
        DjangoSaver(
            committed_db.alias,
            tenant=committed_db.tenant,
            serde=JsonPlusSerializer(allowed_msgpack_modules=[(__name__, "Point")]),
        ),
        saver.with_allowlist({(__name__, "Point")}),
    ):
        found = open_saver.get_tuple(stored)
        assert found is not None
        assert found.checkpoint["channel_values"]["point"] == Point(1)


async def test_a_cancelled_task_learns_of_it_after_its_write(
    saver: DjangoSaver, committed_db: CommittedDatabase
) -> None:
    stored = await asyncio.to_thread(put, saver, config_of("thread"))
    task = asyncio.create_task(saver.aput_writes(stored, [("log", 1)], "task"))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    found = await saver.aget_tuple(stored)
    assert found is not None
    assert found.pending_writes == [("task", "log", 1)]


def test_deleting_the_session_deletes_its_thread(saver: DjangoSaver, committed_db: CommittedDatabase) -> None:
    (stored,) = put_chain(saver, "thread", 1)
    saver.put_writes(stored, [("log", 1)], "task")
    assert _rows(committed_db) == [1, 1, 1]
    DatabaseStateStore(committed_db.alias, tenant=committed_db.tenant).delete_session("thread")
    for model in TABLES:
        orphans = model._base_manager.using(committed_db.alias).exclude(
            session_id__in=Session.objects.using(committed_db.alias).values("pk")
        )
        assert not orphans.exists()
