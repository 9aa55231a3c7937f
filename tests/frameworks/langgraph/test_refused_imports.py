"""An import refuses what the saver could not read, and stores nothing of that session."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ormsgpack
import pytest
from langgraph.checkpoint.sqlite import SqliteSaver

from helix_store.contrib.langgraph import DjangoSaver, catalogue, register_types
from helix_store.exceptions import InvalidPayload
from helix_store.models import Session
from helix_store.transfer import ImportSummary
from tests.cells import for_each
from tests.databases import CommittedDatabase, delete_all_rows
from tests.frameworks.langgraph.graphs import config_of, put_chain
from tests.frameworks.langgraph.test_damaged_rows import REVIVED
from tests.frameworks.langgraph.test_imports import import_from
from tests.transfer.files import exported, imported, lines_of, written

RECORDS = ["langgraph_checkpoint", "langgraph_value", "langgraph_write"]


@pytest.fixture
def records(committed_db: CommittedDatabase) -> list[dict[str, Any]]:
    """The export of one thread with a checkpoint, a value and a write; nothing is stored any more."""
    saver = DjangoSaver(committed_db.alias, tenant=committed_db.tenant)
    (config,) = put_chain(saver, "thread", 1)
    saver.put_writes(config, [("log", [1])], "task")
    data = exported(committed_db)
    delete_all_rows(committed_db.alias)
    return lines_of(data)


def import_changed(
    db: CommittedDatabase, records: list[dict[str, Any]], record: str, **columns: Any
) -> ImportSummary:
    (line,) = [each for each in records if each["record"] == record]
    line.update(columns)
    summary, _ = imported(db, written(records))
    return summary


def is_empty(db: CommittedDatabase) -> bool:
    return not Session.objects.using(db.alias).filter(tenant=db.tenant).exists()


@pytest.mark.thorough
@for_each("kind", ["json", "pickle", "nonsense", "", "+aes", "msgpack+", "json+aes", "x\n"])
@for_each("record", RECORDS)
def test_a_type_that_no_reader_takes_is_refused(
    committed_db: CommittedDatabase, records: list[dict[str, Any]], record: str, kind: str
) -> None:
    summary = import_changed(committed_db, records, record, type=kind)
    (problem,) = summary.problems
    assert "/type" in problem.text
    assert is_empty(committed_db)


@for_each("kind", ["msgpack", "null", "bytes", "bytearray", "msgpack+aes"])
@for_each("record", RECORDS)
def test_the_types_of_the_serializers_of_langgraph_are_imported(
    committed_db: CommittedDatabase, records: list[dict[str, Any]], record: str, kind: str
) -> None:
    summary = import_changed(committed_db, records, record, type=kind)
    assert (summary.problems, summary.records[record]) == ([], 1)


@pytest.fixture
def own_type() -> Iterator[str]:
    yield "arrow+zstd"
    catalogue._registered.discard("arrow+zstd")


def test_a_type_of_a_serializer_of_the_project_is_imported_once_it_is_registered(
    committed_db: CommittedDatabase, records: list[dict[str, Any]], own_type: str
) -> None:
    assert import_changed(committed_db, records, "langgraph_value", type=own_type).problems
    register_types(own_type)
    assert import_changed(committed_db, records, "langgraph_value", type=own_type).problems == []
    with pytest.raises(InvalidPayload):
        register_types("two\nlines")


@for_each("versions", ["nonsense", "", "[1]", '{"log":1}', '{"log":null}', "null", "[" * 100_000])
def test_versions_that_would_break_every_list_are_refused(
    committed_db: CommittedDatabase, records: list[dict[str, Any]], versions: str
) -> None:
    summary = import_changed(committed_db, records, "langgraph_checkpoint", versions=versions)
    (problem,) = summary.problems
    assert "/versions" in problem.text
    assert is_empty(committed_db)


def test_a_saver_s_row_of_the_type_json_is_told_and_left(
    committed_db: CommittedDatabase, tmp_path: Path
) -> None:
    file = tmp_path / "checkpoints.sqlite"
    connection = sqlite3.connect(file, check_same_thread=False)
    theirs = SqliteSaver(connection)
    for thread_id in ("one", "two"):
        (config,) = put_chain(theirs, thread_id, 1)
        theirs.put_writes(config, [("log", [1]), ("other", [2])], "task")
    connection.execute(
        "UPDATE writes SET type = 'json', value = ? WHERE thread_id = 'one' AND idx = 0", [REVIVED]
    )
    connection.commit()
    ended = import_from("langgraph-sqlite", str(file), committed_db)
    connection.close()
    assert (ended.code, ended.data["imported"]) == (1, {"session": 2})
    assert ended.data["records"]["langgraph_write"] == 3
    assert ["of thread 'one'" in each and "/type" in each for each in ended.data["problems"]][:1] == [True]
    ours = DjangoSaver(committed_db.alias, tenant=committed_db.tenant)
    found = ours.get_tuple(config_of("one"))
    assert found is not None
    assert found.pending_writes == [("task", "other", [2])]


@for_each(
    ("change", "path"),
    [
        ({"v": "4"}, "/checkpoint/v"),
        ({"channel_versions": [1]}, "/checkpoint/channel_versions"),
        ({"channel_versions": {5: 1}}, "/checkpoint/channel_versions"),
        ({"channel_values": "log"}, "/checkpoint/channel_values"),
        ({"ts": 5}, "/checkpoint/ts"),
        ({"extra": {5: 10**19}}, None),
    ],
    ids=["v", "versions", "a number", "values", "ts", "more"],
)
def test_a_damaged_checkpoint_of_a_saver_is_told_and_left(
    committed_db: CommittedDatabase, tmp_path: Path, change: dict[str, Any], path: str | None
) -> None:
    file = tmp_path / "checkpoints.sqlite"
    connection = sqlite3.connect(file, check_same_thread=False)
    put_chain(SqliteSaver(connection), "thread", 2)
    newest = "checkpoint_id = (SELECT max(checkpoint_id) FROM checkpoints)"
    (data,) = connection.execute(f"SELECT checkpoint FROM checkpoints WHERE {newest}").fetchone()
    content = ormsgpack.unpackb(data, option=ormsgpack.OPT_NON_STR_KEYS) | {"v": 4} | change
    changed = ormsgpack.packb(content, option=ormsgpack.OPT_NON_STR_KEYS)
    connection.execute(f"UPDATE checkpoints SET checkpoint = ? WHERE {newest}", [changed])
    connection.commit()
    connection.close()
    ended = import_from("langgraph-sqlite", str(file), committed_db)
    assert (ended.code, ended.data["imported"]) == (0 if path is None else 1, {"session": 1})
    assert ended.data["records"]["langgraph_checkpoint"] == (2 if path is None else 1)
    assert [path in each for each in ended.data["problems"][:1]] == ([] if path is None else [True])
