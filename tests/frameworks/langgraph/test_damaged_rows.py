"""A row that cannot be read is an `IntegrityFault` of its checkpoint, and of no other one."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from typing import Any

import pytest
from langchain_core.messages import AIMessage
from langgraph.checkpoint.serde.jsonplus import JsonPlusSerializer

from helix_store.contrib.langgraph import DjangoSaver, DjangoStore
from helix_store.contrib.langgraph.models import (
    LangGraphCheckpoint,
    LangGraphMemory,
    LangGraphValue,
    LangGraphWrite,
)
from helix_store.doctor import diagnose
from helix_store.exceptions import IntegrityFault
from tests.cells import for_each
from tests.databases import CommittedDatabase
from tests.frameworks.langgraph.graphs import config_of, put, put_chain

REVIVED = json.dumps(
    {
        "lc": 1,
        "type": "constructor",
        "id": ["langchain", "schema", "messages", "AIMessage"],
        "kwargs": {"content": "built", "type": "ai"},
    }
).encode()
"""An object that langchain_core builds when it is read as the type ``json``."""

DAMAGES: dict[str, Any] = {
    "a body of the type pickle": (LangGraphCheckpoint, {"type": "pickle"}),
    "a body that is cut": (LangGraphCheckpoint, {"body": b"\x83\xa4"}),
    "a body that is no document": (LangGraphCheckpoint, {"type": "null", "body": b""}),
    "a body of other documents": (
        LangGraphCheckpoint,
        {"body": b"\x83\xaacheckpoint\x01\xa8metadata\x02\xa6values\x03"},
    ),
    "a value of the type json": (LangGraphValue, {"type": "json", "blob": REVIVED}),
    "a value of an unknown type": (LangGraphValue, {"type": "nonsense"}),
    "a value that is cut": (LangGraphValue, {"blob": b"\xdc"}),
    "a write of the type pickle": (LangGraphWrite, {"type": "pickle"}),
    "a write that is cut": (LangGraphWrite, {"blob": b"\xdc"}),
}


@pytest.fixture
def saver(committed_db: CommittedDatabase) -> DjangoSaver:
    return DjangoSaver(committed_db.alias, tenant=committed_db.tenant)


def damage(db: CommittedDatabase, model: Any, **columns: Any) -> None:
    """Change the one row that the thread ``damaged`` has of a model."""
    rows = model._base_manager.using(db.alias).filter(
        session__tenant=db.tenant, session__session_id="damaged"
    )
    assert rows.update(**columns) == 1


@pytest.fixture(params=list(DAMAGES.values()), ids=list(DAMAGES))
def damaged(request: pytest.FixtureRequest, committed_db: CommittedDatabase, saver: DjangoSaver) -> Any:
    """The config of a checkpoint of which one row is damaged, between two threads that are whole."""
    put_chain(saver, "older", 1)
    (config,) = put_chain(saver, "damaged", 1)
    saver.put_writes(config, [("log", [1])], "task")
    put_chain(saver, "newer", 1)
    model, columns = request.param
    damage(committed_db, model, **columns)
    return config


def test_a_damaged_checkpoint_is_a_fault_that_names_it(saver: DjangoSaver, damaged: Any) -> None:
    with pytest.raises(IntegrityFault) as fault:
        saver.get_tuple(damaged)
    assert damaged["configurable"]["checkpoint_id"] in str(fault.value)
    assert fault.value.__context__ is None


def test_a_list_of_all_threads_leaves_a_damaged_checkpoint_out(
    saver: DjangoSaver, damaged: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.ERROR, logger="helix_store"):
        found = list(saver.list(None))
    assert [each.config["configurable"]["thread_id"] for each in found] == ["newer", "older"]
    assert [each.config["configurable"]["thread_id"] for each in saver.list(None, limit=2)] == [
        "newer",
        "older",
    ]
    assert damaged["configurable"]["checkpoint_id"] in caplog.text


def test_the_threads_that_are_whole_are_read_and_listed(saver: DjangoSaver, damaged: Any) -> None:
    for thread_id in ("older", "newer"):
        assert saver.get_tuple(config_of(thread_id)) is not None
        assert len(list(saver.list(config_of(thread_id)))) == 1


@pytest.mark.parametrize("damaged", [DAMAGES["a body that is cut"]], indirect=True)
def test_a_list_of_a_thread_raises_where_it_reaches_the_damaged_checkpoint(
    saver: DjangoSaver, damaged: Any
) -> None:
    newest = put(saver, damaged, {"log": [2]}, new={"log": "2"})
    listed = saver.list(config_of("damaged"))
    assert next(listed).config == newest
    with pytest.raises(IntegrityFault):
        next(listed)


@pytest.mark.parametrize("damaged", [DAMAGES["a body that is cut"]], indirect=True)
def test_a_damaged_ancestor_of_a_delta_is_a_fault(saver: DjangoSaver, damaged: Any) -> None:
    newest = put(saver, damaged, {})
    with pytest.raises(IntegrityFault) as fault:
        saver.get_delta_channel_history(config=newest, channels=["log"])
    assert damaged["configurable"]["checkpoint_id"] in str(fault.value)


@pytest.mark.parametrize("damaged", [DAMAGES["a write that is cut"]], indirect=True)
def test_a_damaged_write_of_a_delta_is_a_fault(saver: DjangoSaver, damaged: Any) -> None:
    with pytest.raises(IntegrityFault):
        saver.get_delta_channel_history(config=put(saver, damaged, {}), channels=["log"])


@pytest.mark.parametrize("damaged", [DAMAGES["a body that is cut"]], indirect=True)
def test_a_thread_that_cannot_be_pruned_keeps_no_other_from_it(
    saver: DjangoSaver, damaged: Any, committed_db: CommittedDatabase
) -> None:
    damage(committed_db, LangGraphCheckpoint, has_deltas=True)
    put_chain(saver, "long", 3)
    with pytest.raises(IntegrityFault):
        saver.prune(["damaged", "long"])
    assert len(list(saver.list(config_of("long")))) == 1


def test_an_error_of_a_service_that_the_serializer_asks_is_no_fault(
    committed_db: CommittedDatabase, saver: DjangoSaver
) -> None:
    class Unreachable(JsonPlusSerializer):
        def loads_typed(self, data: tuple[str, bytes]) -> Any:
            raise ConnectionError("the service of the keys cannot be reached")

    put_chain(saver, "thread", 1)
    keyed = DjangoSaver(committed_db.alias, tenant=committed_db.tenant, serde=Unreachable())
    for read in (lambda: keyed.get_tuple(config_of("thread")), lambda: list(keyed.list(None))):
        with pytest.raises(ConnectionError):
            read()


@pytest.mark.parametrize("clone", [lambda saver: saver, lambda saver: saver.with_allowlist({("a", "B")})])
def test_the_type_json_builds_no_object_of_langchain(
    committed_db: CommittedDatabase, saver: DjangoSaver, clone: Callable[[DjangoSaver], DjangoSaver]
) -> None:
    (config,) = put_chain(saver, "damaged", 1)
    damage(committed_db, LangGraphValue, type="json", blob=REVIVED)
    with pytest.raises(IntegrityFault):
        clone(saver).get_tuple(config)
    # A serializer that the application chooses reads what it is asked to.
    own = DjangoSaver(committed_db.alias, tenant=committed_db.tenant, serde=JsonPlusSerializer())
    found = own.get_tuple(config)
    assert found is not None
    assert isinstance(found.checkpoint["channel_values"]["log"], AIMessage)


# --- Long-term memory ------------------------------------------------------------------------------


def test_a_search_leaves_a_damaged_memory_out(
    committed_db: CommittedDatabase, caplog: pytest.LogCaptureFixture
) -> None:
    store = DjangoStore(using=committed_db.alias, tenant=committed_db.tenant)
    for key in ("one", "two", "three"):
        store.put(("users",), key, {"kind": "note", "number": len(key)})
    rows = LangGraphMemory.objects.using(committed_db.alias).filter(tenant=committed_db.tenant, key="two")
    assert rows.update(value='{"kind":"note"') == 1
    for wanted in (None, {"kind": "note"}, {"number": {"$gt": 0}}):
        found = store.search(("users",), filter=wanted)
        assert [item.key for item in found] == ["three", "one"]
    assert "two" in caplog.text
    with pytest.raises(IntegrityFault):
        store.get(("users",), "two")


# --- The doctor ------------------------------------------------------------------------------------


@pytest.mark.thorough
@for_each("model", [LangGraphCheckpoint, LangGraphValue, LangGraphWrite])
def test_the_doctor_finds_rows_of_a_type_that_the_saver_does_not_read(
    empty_db: CommittedDatabase, model: Any
) -> None:
    saver = DjangoSaver(empty_db.alias, tenant=empty_db.tenant)
    for thread_id in ("damaged", "encrypted"):
        (config,) = put_chain(saver, thread_id, 1)
        saver.put_writes(config, [("log", [1])], "task")
    damage(empty_db, model, type="pickle")
    rows = model._base_manager.using(empty_db.alias)
    assert rows.filter(session__session_id="encrypted").update(type="msgpack+aes") == 1
    (finding,) = diagnose(using=empty_db.alias).findings
    assert "'pickle'" in str(finding)
    assert "damaged" in str(finding)
