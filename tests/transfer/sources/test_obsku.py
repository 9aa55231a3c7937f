"""``helix_import --from obsku``: what each row becomes, and that nothing is lost silently."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from helix_store.checkpointers import GraphCheckpointStore
from helix_store.core.types import CheckpointSource
from helix_store.core.validation import milliseconds_to_datetime
from helix_store.stores import DatabaseStateStore
from tests.cells import for_each
from tests.databases import CommittedDatabase
from tests.invariants import broken_invariants
from tests.transfer.sources.origins import NOON, ObskuTables
from tests.transfer.sources.running import import_from, import_problems

SECOND = 1_000
CALLS = [{"name": "scan", "toolUseId": "call-1", "input": {"port": 80}}]
RESULTS = [{"content": "open", "toolUseId": "call-1", "status": "success"}]


@pytest.fixture
def graph(committed_db: CommittedDatabase) -> GraphCheckpointStore:
    return GraphCheckpointStore(committed_db.alias, tenant=committed_db.tenant)


def date(text: str) -> dict[str, str]:
    return {"__type": "Date", "value": text}


def test_a_session_keeps_its_columns_and_times(
    obsku: ObskuTables, committed_db: CommittedDatabase, graph: GraphCheckpointStore
) -> None:
    metadata = {"started": date("2026-01-31T12:00:00.123Z"), "tags": {"__type": "Set", "value": ["b", "a"]}}
    obsku.session("s-1", workspace_id="w", title="Scan é", directory="./x é", metadata=json.dumps(metadata))
    obsku.session("s-2", title="", workspace_id="")
    data = import_from(obsku, committed_db).data
    assert data["imported"] == {"session": 2}
    assert data["is_complete"]
    found = graph.get_session("s-1")
    assert found is not None
    assert (found.directory, found.title, found.workspace_id) == ("./x é", "Scan é", "w")
    assert found.metadata == {
        "started": datetime(2026, 1, 31, 12, 0, 0, 123_000, tzinfo=UTC),
        "tags": {"a", "b"},
    }
    assert found.created_at == milliseconds_to_datetime(NOON)
    assert found.updated_at == milliseconds_to_datetime(NOON + 5)
    other = graph.get_session("s-2")
    assert other is not None
    assert (other.title, other.workspace_id, other.metadata) == ("", "", None)
    assert broken_invariants(committed_db) == []


def test_messages_keep_their_content_time_and_order(
    obsku: ObskuTables, committed_db: CommittedDatabase, graph: GraphCheckpointStore
) -> None:
    obsku.session("s")
    obsku.message("s", NOON + SECOND, "assistant", tool_calls=json.dumps(CALLS), tokens_in=7, tokens_out=0)
    obsku.message("s", NOON + SECOND, "tool", tool_results=json.dumps(RESULTS))
    obsku.message("s", NOON, "user", content="first in time \udc00".replace("\udc00", "é"))
    obsku.message("s", NOON + 2 * SECOND, "assistant", content="")
    import_from(obsku, committed_db)
    messages = graph.get_messages("s")
    assert [message.role for message in messages] == ["user", "assistant", "tool", "assistant"]
    first, calls, results, last = messages
    assert (first.content, first.tool_calls, first.tokens_in) == ("first in time é", None, None)
    assert (calls.content, calls.tool_calls, calls.tokens_in, calls.tokens_out) == (None, CALLS, 7, 0)
    assert results.tool_results == RESULTS
    assert last.content == ""
    assert [each.id for each in messages] == sorted(each.id for each in messages)
    # Those of one millisecond are a microsecond apart, so that no page by time ends between them.
    assert first.created_at == milliseconds_to_datetime(NOON)
    assert calls.created_at == milliseconds_to_datetime(NOON + SECOND)
    assert results.created_at == calls.created_at + timedelta(microseconds=1)
    assert graph.get_messages("s", before=results.created_at, limit=1) == [calls]


def test_checkpoints_keep_ids_versions_parents_and_results(
    obsku: ObskuTables, committed_db: CommittedDatabase, graph: GraphCheckpointStore
) -> None:
    results = {
        "plan": {"status": "completed", "output": {"__type": "Map", "value": [[1, date("2026-01-31")]]}},
        "fix": {"status": "Skipped"},
        "raw": {"status": "failed", "error": "e", "output": {"__type": "Buffer", "value": "AP8="}},
    }
    cycle = {"backEdge": "B->A", "iteration": 2}
    obsku.session("s")
    obsku.checkpoint("s", "c-1", 1, node_results=json.dumps(results), pending_nodes='["scan"]')
    obsku.checkpoint("s", "c-2", 2, step=0, parent_id="c-1", cycle_state=json.dumps(cycle), node_id="scan")
    obsku.checkpoint("s", "c-3", 2, namespace="sub", source="interrupt", created_at=NOON + 1)
    import_from(obsku, committed_db)
    newest, second, first = graph.list_checkpoints("s")
    assert first.node_results == {
        "plan": {"status": "completed", "output": {1: datetime(2026, 1, 31, tzinfo=UTC)}},
        "fix": {"status": "skipped"},
        "raw": {"status": "failed", "error": "e", "output": b"\x00\xff"},
    }
    assert (first.checkpoint_id, first.pending_nodes, first.version, first.step) == ("c-1", ["scan"], 1, 1)
    assert (second.parent_id, second.step, second.node_id, second.cycle_state) == ("c-1", 0, "scan", cycle)
    assert (newest.namespace, newest.version, newest.source) == ("sub", 2, CheckpointSource.INTERRUPT)
    assert newest.created_at == milliseconds_to_datetime(NOON + 1)
    assert graph.get_checkpoint("c-2") == second
    assert graph.get_latest_checkpoint("s") == newest
    assert broken_invariants(committed_db) == []


def test_a_fork_has_the_messages_up_to_its_checkpoint(
    obsku: ObskuTables, committed_db: CommittedDatabase, graph: GraphCheckpointStore
) -> None:
    obsku.session("s")
    for number in range(4):
        obsku.message("s", NOON + number, content=str(number))
    obsku.checkpoint("s", "c", created_at=NOON + 1)
    import_from(obsku, committed_db)
    fork = graph.fork("c")
    assert [message.content for message in graph.get_messages(fork.session_id)] == ["0", "1"]


def test_an_imported_session_is_continued(
    obsku: ObskuTables, committed_db: CommittedDatabase, graph: GraphCheckpointStore
) -> None:
    obsku.session("s", title="old")
    obsku.message("s", content="before")
    obsku.checkpoint("s", "c", 7)
    import_from(obsku, committed_db)
    graph.add_message("s", role="user", content="after")
    assert graph.save_checkpoint("s", step=8, parent_id="c").version == 8
    assert [message.content for message in graph.get_messages("s")] == ["before", "after"]
    continued = graph.continue_latest()
    assert continued is not None
    assert continued.session.session_id == "s"
    state = DatabaseStateStore(committed_db.alias, tenant=committed_db.tenant).load_state("s")
    assert state is not None
    assert (state.message_count, state.custom_state, state.stream_id) == (2, {}, "s")
    assert broken_invariants(committed_db) == []


def test_the_rows_of_both_sides_are_counted(obsku: ObskuTables, committed_db: CommittedDatabase) -> None:
    obsku.session("a")
    obsku.session("b")
    obsku.message("a")
    obsku.message("a")
    obsku.checkpoint("b", "c")
    data = import_from(obsku, committed_db).data
    assert data["source"] == {"sessions": 2, "messages": 2, "checkpoints": 1, "entities": 0, "facts": 0}
    assert data["left"] == {}
    # A session has a state beside its checkpoints.
    assert data["records"] == {"session": 2, "message": 2, "checkpoint": 3}


# --- Faults of the source --------------------------------------------------------------------------


MESSAGE_FAULTS: list[tuple[dict[str, Any], str]] = [
    ({"tool_calls": "[{"}, "/tool_calls: it is not JSON"),
    ({"tool_calls": "NaN"}, "/tool_calls: it is not JSON"),
    ({"tool_calls": "[" * 100_000}, "/tool_calls: it is not JSON, or nested too deeply"),
    ({"tool_results": '[{"a": {"__type": 5}}]'}, "/tool_results/0/a: its __type is not a string"),
    ({"tool_results": '{"__type": "Date"}'}, "/tool_results: a Date needs a value"),
    ({"tool_results": '{"__type": "Date", "value": "+275760-09-13T00:00:00.000Z"}'}, "a Date needs a time"),
    ({"tool_results": '{"__type": "Date", "value": "2026-02-30"}'}, "a Date needs a time"),
    ({"tool_results": '{"__type": "Buffer", "value": "AP8"}'}, "a Buffer needs base64"),
    ({"tool_results": '{"__type": "Buffer", "value": "A*P8="}'}, "a Buffer needs base64"),
    ({"tool_results": '{"__type": "Map", "value": [[1]]}'}, "a Map needs an array of pairs"),
    ({"tool_results": '{"__type": "Set", "value": {}}'}, "a Set needs an array"),
    ({"role": "developer"}, "/role: expected one of user"),
    ({"created_at": 2**62}, "/created_at: it is not a time"),
    ({"tokens_in": -1}, "/tokens_in: expected a whole number"),
    ({"content": "x" * 1_100_000}, "max_message_bytes is 1048576"),
]


@pytest.mark.thorough
@for_each(("columns", "reason"), MESSAGE_FAULTS, ids=lambda value: str(value)[:40])
def test_a_message_with_a_fault_is_left_and_told_by_its_id(
    obsku: ObskuTables,
    committed_db: CommittedDatabase,
    graph: GraphCheckpointStore,
    columns: dict[str, Any],
    reason: str,
) -> None:
    obsku.session("s")
    obsku.message("s", content="sound")
    obsku.message("s", **{"at": NOON, **_renamed(columns)})
    obsku.message("s", NOON + 1, content="sound too")
    data = import_problems(obsku, committed_db)
    (problem,) = data["problems"]
    assert problem.startswith("message '2' of session 's' is left out: ")
    assert reason in problem
    assert (data["source"]["messages"], data["left"]) == (3, {"messages": 1})
    assert [message.content for message in graph.get_messages("s")] == ["sound", "sound too"]
    assert broken_invariants(committed_db) == []


def _renamed(columns: dict[str, Any]) -> dict[str, Any]:
    return {"at" if name == "created_at" else name: value for name, value in columns.items()}


CHECKPOINT_FAULTS: list[tuple[dict[str, Any], str]] = [
    ({"node_results": '{"a": {"status": "done"}}'}, "/node_results/a/status: expected one of pending"),
    ({"node_results": "[]"}, "/node_results: expected a dict"),
    ({"node_results": "oops"}, "/node_results: it is not JSON"),
    ({"pending_nodes": '"a"'}, "/pending_nodes: expected a list"),
    ({"source": "manual"}, "/source: expected one of"),
    ({"version": 0}, "/version: expected a whole number from 1"),
    ({"step": -1}, "/step: expected a whole number from 0"),
    ({"namespace": "x" * 300}, "/namespace: expected 1 to 255 characters"),
    ({"id": ""}, "/checkpoint_id: expected 1 to 255 characters"),
]


@pytest.mark.thorough
@for_each(("columns", "reason"), CHECKPOINT_FAULTS, ids=lambda value: str(value)[:40])
def test_a_checkpoint_with_a_fault_is_left_and_told_by_its_id(
    obsku: ObskuTables,
    committed_db: CommittedDatabase,
    graph: GraphCheckpointStore,
    columns: dict[str, Any],
    reason: str,
) -> None:
    obsku.session("s")
    obsku.checkpoint("s", "sound", 5)
    obsku.checkpoint("s", "faulty", **{"version": 6, **columns})
    data = import_problems(obsku, committed_db)
    (problem,) = data["problems"]
    assert problem.startswith(f"checkpoint {columns.get('id', 'faulty')!r} of session 's' is left out: ")
    assert reason in problem
    assert data["left"] == {"checkpoints": 1}
    assert [each.checkpoint_id for each in graph.list_checkpoints("s")] == ["sound"]


def test_a_parent_that_does_not_exist_is_kept(
    obsku: ObskuTables, committed_db: CommittedDatabase, graph: GraphCheckpointStore
) -> None:
    obsku.session("s")
    obsku.checkpoint("s", "a", 1, parent_id="gone")
    obsku.checkpoint("s", "b", 2, parent_id="gone too", source="fork")
    obsku.checkpoint("s", "c", 3, parent_id="b")
    assert import_from(obsku, committed_db).data["problems"] == []
    assert [each.parent_id for each in graph.list_checkpoints("s")] == ["b", "gone too", "gone"]


def test_what_obsku_can_write_but_not_read_is_imported(
    obsku: ObskuTables, committed_db: CommittedDatabase, graph: GraphCheckpointStore
) -> None:
    obsku.session("s")
    obsku.message("s", tool_calls='[{"name": "x"}]')
    assert import_from(obsku, committed_db).data["problems"] == []
    assert graph.get_messages("s")[0].tool_calls == [{"name": "x"}]


@for_each(
    ("value", "becomes"),
    [
        ({"__type": "Set", "value": [{"a": 1}]}, [{"a": 1}]),
        ({"__type": "Set", "value": [1, True]}, [1, True]),
        ({"__type": "Map", "value": [[[1], "x"]]}, [[[1], "x"]]),
    ],
)
def test_a_collection_that_python_does_not_have_becomes_a_list_and_is_told(
    obsku: ObskuTables, committed_db: CommittedDatabase, graph: GraphCheckpointStore, value: Any, becomes: Any
) -> None:
    obsku.session("s", metadata=json.dumps({"all": value}))
    (problem,) = import_problems(obsku, committed_db)["problems"]
    assert problem.startswith(f"session 's': the {value['__type']} at /metadata/all becomes a list")
    session = graph.get_session("s")
    assert session is not None
    assert session.metadata == {"all": becomes}


def test_what_only_looks_like_a_tag_is_kept(
    obsku: ObskuTables, committed_db: CommittedDatabase, graph: GraphCheckpointStore
) -> None:
    metadata = {"a": {"__type": "Other", "value": [1]}, "b": {"$set": [1]}, "c": "\x00\ud800"}
    obsku.session("s", metadata=json.dumps(metadata))
    assert import_from(obsku, committed_db).code == 0
    session = graph.get_session("s")
    assert session is not None
    assert session.metadata == metadata


@for_each("metadata", ["{", "[1]", '{"__type": "Date"}'])
def test_metadata_with_a_fault_is_left_and_the_session_imported(
    obsku: ObskuTables, committed_db: CommittedDatabase, graph: GraphCheckpointStore, metadata: str
) -> None:
    obsku.session("s", metadata=metadata)
    (problem,) = import_problems(obsku, committed_db)["problems"]
    assert problem.startswith("the metadata of session 's' is left out: ")
    session = graph.get_session("s")
    assert session is not None
    assert session.metadata is None


@for_each("columns", [{"id": "a\nb"}, {"title": "x" * 5_000}, {"created_at": 2**62}])
def test_a_session_with_a_fault_is_left_with_all_of_its_rows(
    obsku: ObskuTables, committed_db: CommittedDatabase, graph: GraphCheckpointStore, columns: dict[str, Any]
) -> None:
    session_id = columns.get("id", "s")
    obsku.session(**{"session_id": session_id, **columns})
    obsku.message(session_id)
    obsku.checkpoint(session_id, "c")
    obsku.session("sound")
    data = import_problems(obsku, committed_db)
    (problem,) = data["problems"]
    assert problem.startswith(f"session {session_id!r} is left out: ")
    assert data["left"] == {"sessions": 1, "messages": 1, "checkpoints": 1}
    assert [each.session_id for each in graph.list_sessions()] == ["sound"]


def test_only_whole_sessions_are_imported_if_asked_for(
    obsku: ObskuTables, committed_db: CommittedDatabase, graph: GraphCheckpointStore
) -> None:
    obsku.session("faulty")
    obsku.message("faulty", content="sound")
    obsku.message("faulty", tool_calls="{")
    obsku.session("sound")
    obsku.message("sound")
    data = import_problems(obsku, committed_db, "--only-whole")
    assert data["problems"][1] == "session 'faulty' is left out: problems in its rows: 1"
    assert data["left"] == {"sessions": 1, "messages": 2}
    assert [each.session_id for each in graph.list_sessions()] == ["sound"]
    # The fault is corrected, and the same command brings the rest.
    obsku.connection.execute("UPDATE messages SET tool_calls = NULL")
    again = import_from(obsku, committed_db, "--only-whole")
    assert (again.code, again.data["imported"], again.data["identical"]) == (
        0,
        {"session": 1},
        {"session": 1},
    )


def test_entities_and_facts_are_counted_and_never_lost_silently(
    obsku: ObskuTables, committed_db: CommittedDatabase
) -> None:
    obsku.session("s")
    entity = {"session_id": "s", "name": "n", "type": "host", "created_at": NOON, "updated_at": NOON}
    obsku.insert("entities", {"id": "e-1", **entity}, {"id": "e-2", **entity})
    obsku.insert("facts", {"id": "f-1", "content": "it is open", "created_at": NOON})
    data = import_problems(obsku, committed_db)
    assert data["problems"] == [
        "entities: 2 left out, because there is no such table here",
        "facts: 1 left out, because there is no such table here",
    ]
    assert data["imported"] == {"session": 1}
    accepted = import_from(obsku, committed_db, "--leave-tables")
    assert (accepted.code, accepted.err, accepted.data["problems"]) == (0, "", [])
    for counts in (data, accepted.data):
        assert counts["left"] == {"entities": 2, "facts": 1}
        assert counts["source"] == {
            "sessions": 1, "messages": 0, "checkpoints": 0, "entities": 2, "facts": 1,
        }  # fmt: skip


def test_rows_of_no_session_are_told(obsku: ObskuTables, committed_db: CommittedDatabase) -> None:
    obsku.session("s")
    obsku.connection.execute("ALTER TABLE messages DROP CONSTRAINT messages_session_id_fkey")
    obsku.message("nowhere")
    data = import_problems(obsku, committed_db)
    assert data["problems"] == ["messages: 1 left out, which belong to no session"]
    assert (data["source"]["messages"], data["left"]) == (1, {"messages": 1})
