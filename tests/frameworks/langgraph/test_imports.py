"""`helix_import --from langgraph-postgres` and `langgraph-sqlite` read what the savers have stored."""

from __future__ import annotations

import sqlite3
import uuid
from collections.abc import Iterator
from operator import add, iadd
from pathlib import Path
from typing import Annotated, Any, TypedDict

import pytest
from langchain_core.messages import AIMessage, HumanMessage
from langgraph.checkpoint.base import BaseCheckpointSaver
from langgraph.checkpoint.postgres import PostgresSaver
from langgraph.checkpoint.sqlite import SqliteSaver
from langgraph.graph import END, START, StateGraph
from langgraph.types import Command, interrupt
from psycopg import Connection
from psycopg.conninfo import make_conninfo
from psycopg.rows import dict_row

from helix_store.adapters import session_id_for
from helix_store.contrib.langgraph import DjangoSaver
from helix_store.models import Session
from tests.commands.running import Ended, run
from tests.databases import CommittedDatabase
from tests.transfer.sources.origins import server_address

LONG_ID = "project/" + "x" * 300
THREADS = ["one", "two", LONG_ID]


class State(TypedDict, total=False):
    count: int
    log: Annotated[list[Any], add]
    note: str
    answer: Any


def graph(saver: BaseCheckpointSaver[Any]) -> Any:
    """Three steps: the last one asks a person, and waits in an interrupt."""
    inner = StateGraph(State)
    inner.add_node("inside", lambda state: {"log": [AIMessage(f"inside {state['count']}", id="inner")]})
    inner.add_edge(START, "inside")
    builder = StateGraph(State)
    builder.add_node(
        "first", lambda state: {"count": 1, "note": "n" * 500, "log": [HumanMessage("a\x00b", id="1")]}
    )
    builder.add_node("nested", inner.compile())
    builder.add_node("ask", lambda state: {"answer": interrupt({"question": "go on?"})})
    builder.add_edge(START, "first")
    builder.add_edge("first", "nested")
    builder.add_edge("nested", "ask")
    builder.add_edge("ask", END)
    return builder.compile(checkpointer=saver)


def config_of(thread: str) -> Any:
    return {"configurable": {"thread_id": thread}}


def fill(saver: BaseCheckpointSaver[Any]) -> None:
    for thread in THREADS:
        graph(saver).invoke({"count": 0, "log": ["begun"]}, config_of(thread))
    graph(saver).invoke(Command(resume={"yes": True}), config_of("two"))


def import_from(store: str, address: str, database: CommittedDatabase, *arguments: str) -> Ended:
    options = ("--tenant", database.tenant, "--format", "json", *arguments)
    return run(database.alias, "helix_import", "--from", store, address, *options)


@pytest.fixture
def postgres_origin(django_db_setup: None) -> Iterator[tuple[str, Connection[Any]]]:
    """The connection string of an empty schema, and a connection of the saver's kind to it."""
    schema = f"saver_{uuid.uuid4().hex}"
    dsn = make_conninfo(**server_address(), options=f"-c search_path={schema}")
    with Connection.connect(dsn, autocommit=True, prepare_threshold=0, row_factory=dict_row) as connection:
        connection.execute(f"CREATE SCHEMA {schema}")
        yield dsn, connection
        connection.execute(f"DROP SCHEMA {schema} CASCADE")


def shown(saver: BaseCheckpointSaver[Any], thread: str) -> list[Any]:
    """All that a saver knows of a thread."""
    return [
        (
            found.config["configurable"]["checkpoint_ns"],
            found.config["configurable"]["checkpoint_id"],
            found.parent_config and found.parent_config["configurable"]["checkpoint_id"],
            found.checkpoint,
            found.metadata,
            sorted(found.pending_writes or [], key=repr),
        )
        for found in sorted(
            saver.list(config_of(thread)),
            key=lambda found: (
                found.config["configurable"]["checkpoint_ns"],
                found.config["configurable"]["checkpoint_id"],
            ),
        )
    ]


@pytest.fixture(params=["langgraph-postgres", "langgraph-sqlite"])
def origin(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[str, str, Any]]:
    """The name of a source, its address, and the framework's own saver on it with three threads."""
    if request.param == "langgraph-postgres":
        dsn, connection = request.getfixturevalue("postgres_origin")
        saver: Any = PostgresSaver(connection)
        saver.setup()
        fill(saver)
        yield request.param, dsn, saver
        return
    file = tmp_path / "checkpoints.sqlite"
    connection = sqlite3.connect(file, check_same_thread=False)
    saver = SqliteSaver(connection)
    fill(saver)
    yield request.param, str(file), saver
    connection.close()


def test_an_imported_thread_reads_as_the_saver_reads_it(
    committed_db: CommittedDatabase, origin: tuple[str, str, Any]
) -> None:
    store, address, theirs = origin
    ended = import_from(store, address, committed_db)
    assert (ended.code, ended.data["imported"], ended.data["problems"]) == (0, {"session": 3}, [])
    found, records = ended.data["source"], ended.data["records"]
    assert records["langgraph_checkpoint"] == found["checkpoints"]
    assert records["langgraph_write"] == found.get("checkpoint_writes", found.get("writes"))
    assert records["langgraph_value"] == found.get("checkpoint_blobs", found.get("values"))
    ours = DjangoSaver(committed_db.alias, tenant=committed_db.tenant)
    for thread in THREADS:
        expected = shown(theirs, thread)
        assert len(expected) >= 5
        assert shown(ours, thread) == expected
    rows = Session.objects.using(committed_db.alias).filter(tenant=committed_db.tenant)
    assert set(rows.values_list("session_id", "agent_type")) == {
        (session_id_for(thread), "langgraph") for thread in THREADS
    }


def test_a_graph_goes_on_where_the_saver_left_it(
    committed_db: CommittedDatabase, origin: tuple[str, str, Any]
) -> None:
    store, address, _ = origin
    assert import_from(store, address, committed_db).code == 0
    ours = graph(DjangoSaver(committed_db.alias, tenant=committed_db.tenant))
    for thread in ("one", LONG_ID):
        assert ours.get_state(config_of(thread)).next == ("ask",)
        ended = ours.invoke(Command(resume="yes"), config_of(thread))
        assert (ended["answer"], ended["count"], ended["log"][1].content) == ("yes", 1, "a\x00b")
    assert ours.get_state(config_of("two")).values["answer"] == {"yes": True}


def test_a_delta_channel_has_its_snapshots_after_the_import(
    committed_db: CommittedDatabase, postgres_origin: tuple[str, Connection[Any]]
) -> None:
    delta = pytest.importorskip("langgraph.channels.delta")
    channel: Any = Annotated[list[str], delta.DeltaChannel(iadd, snapshot_frequency=4)]
    dsn, connection = postgres_origin
    theirs = PostgresSaver(connection)
    theirs.setup()
    builder = StateGraph(TypedDict("Deltas", {"log": channel}))  # type: ignore[operator]  # its field is Any
    builder.add_node("say", lambda state: {"log": [f"step {len(state['log'])}"]})
    builder.add_edge(START, "say")
    for turn in range(3):
        builder.compile(checkpointer=theirs).invoke({"log": [f"turn {turn}"]}, config_of("one"))
    assert import_from("langgraph-postgres", dsn, committed_db).code == 0
    ours = DjangoSaver(committed_db.alias, tenant=committed_db.tenant)
    for found in list(theirs.list(config_of("one"))):
        expected = theirs.get_delta_channel_history(config=found.config, channels=["log"])
        assert ours.get_delta_channel_history(config=found.config, channels=["log"]) == expected


@pytest.mark.thorough
def test_a_second_import_stores_nothing(
    committed_db: CommittedDatabase, origin: tuple[str, str, Any]
) -> None:
    store, address, theirs = origin
    dry = import_from(store, address, committed_db, "--dry-run")
    assert (dry.code, dry.data["imported"], dry.data["source"]["checkpoints"] > 15) == (0, {}, True)
    assert not Session.objects.using(committed_db.alias).filter(tenant=committed_db.tenant).exists()
    first = import_from(store, address, committed_db)
    again = import_from(store, address, committed_db)
    assert (again.code, again.data["imported"], again.data["identical"]) == (0, {}, {"session": 3})
    assert again.data["source"] == first.data["source"] == dry.data["source"]
    # A thread that went on since is no identical one, and is told, not overwritten.
    graph(theirs).invoke(Command(resume="late"), config_of("one"))
    late = import_from(store, address, committed_db)
    assert (late.code, late.data["identical"]) == (1, {"session": 2})
    assert ["differs" in problem for problem in late.data["problems"]] == [True]


def test_a_row_that_cannot_be_read_is_told_and_left(committed_db: CommittedDatabase, tmp_path: Path) -> None:
    file = tmp_path / "checkpoints.sqlite"
    connection = sqlite3.connect(file, check_same_thread=False)
    fill(SqliteSaver(connection))
    connection.execute(
        "UPDATE checkpoints SET checkpoint = x'c1' WHERE thread_id = 'one' AND checkpoint_ns <> ''"
    )
    connection.execute("UPDATE checkpoints SET type = 'pickle' WHERE thread_id = 'two'")
    connection.execute("INSERT INTO writes VALUES ('', '', 'c', 't', '', 0, 'ch', 'msgpack', x'01')")
    connection.commit()
    ended = import_from("langgraph-sqlite", str(file), committed_db)
    assert ended.out, ended.err
    assert (ended.code, ended.data["imported"]) == (1, {"session": 2})
    problems = " ".join(ended.data["problems"])
    assert (
        "of thread 'one' is left out: Invalid value at /checkpoint: it is not a readable object" in problems
    )
    assert "thread 'two' is left out" in problems
    assert "only msgpack can be imported" in problems
    assert "thread '' is left out" in problems
    connection.close()


def test_a_file_that_is_missing_or_no_database_is_told(
    committed_db: CommittedDatabase, tmp_path: Path
) -> None:
    missing = import_from("langgraph-sqlite", str(tmp_path / "missing"), committed_db)
    assert missing.code != 0
    assert "There is no file" in missing.err
    other = tmp_path / "text"
    other.write_text("no database " * 100)
    assert "The source cannot be read" in import_from("langgraph-sqlite", str(other), committed_db).err
    assert not (tmp_path / "missing").exists()


@pytest.mark.parametrize(("option", "told"), [("--schema", "has no schemas"), ("--table", "are fixed")])
def test_a_name_that_a_file_has_not_is_refused(
    committed_db: CommittedDatabase, tmp_path: Path, option: str, told: str
) -> None:
    file = tmp_path / "checkpoints.sqlite"
    with SqliteSaver.from_conn_string(str(file)) as saver:
        fill(saver)
    refused = import_from("langgraph-sqlite", str(file), committed_db, option, "another")
    assert refused.code != 0
    assert told in refused.err
    assert "Traceback" not in refused.err
    assert not Session.objects.using(committed_db.alias).filter(tenant=committed_db.tenant).exists()
