"""What the original packages wrote and read, compared field by field with what is read here after an import.

They are installed for the test run alone. Without node, npm or the registry these tests are skipped; those
beside them write the same tables.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from helix_store.checkpointers import GraphCheckpointStore, SnapshotCheckpointer
from helix_store.core.validation import datetime_to_milliseconds
from tests.databases import CommittedDatabase
from tests.invariants import broken_invariants
from tests.transfer.sources.npm import install, run_script
from tests.transfer.sources.origins import OriginSchema
from tests.transfer.sources.running import import_from, import_problems

Rows = list[dict[str, Any]]
OpenSchema = Callable[[str], OriginSchema]


@pytest.fixture(scope="session")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return install(tmp_path_factory.mktemp("npm"))


@pytest.fixture
def new_schema(server: str, schema: str) -> Iterator[OpenSchema]:
    opened: list[OriginSchema] = []

    def new(store: str) -> OriginSchema:
        opened.append(OriginSchema(store, server, schema))
        return opened[-1]

    yield new
    for each in opened:
        each.drop()


def python(value: Any) -> Any:
    """What a value of JavaScript is here, by the tags that the script prints."""
    match value:
        case {"__type": "Date", "value": text}:
            return datetime.fromisoformat(text)
        case {"__type": "Map", "value": pairs}:
            return {key: python(item) for key, item in pairs}
        case {"__type": "Set", "value": items}:
            return {python(item) for item in items}
        case {"__type": "Buffer", "value": text}:
            return base64.b64decode(text)
        case dict():
            return {key: python(item) for key, item in value.items()}
        case list():
            return [python(item) for item in value]
    return value


def fields(row: dict[str, Any], *names: str) -> dict[str, Any]:
    """Fields of the original, where ``undefined`` is ``None``."""
    return {name: python(row.get(name)) for name in names}


STATUS = {"Complete": "completed"}


def node_results(results: dict[str, Any]) -> dict[str, Any]:
    """A status has one word here."""
    return {
        node: {**python(result), "status": STATUS.get(result["status"], result["status"])}
        for node, result in results.items()
    }


@pytest.mark.thorough
def test_every_field_that_obsku_reads_is_read_by_the_graph_store(
    packages: Path, new_schema: OpenSchema, committed_db: CommittedDatabase
) -> None:
    origin = new_schema("obsku")
    written = run_script(packages, "obsku.mjs", origin.schema, dsn=origin.dsn)
    summary = import_problems(origin, committed_db)
    assert summary["left"] == {"entities": 1, "facts": 1}
    assert summary["source"] == {
        "sessions": 4, "messages": 5 + 4 + 2, "checkpoints": 4, "entities": 1, "facts": 1,
    }  # fmt: skip
    graph = GraphCheckpointStore(committed_db.alias, tenant=committed_db.tenant)
    assert len(graph.list_sessions()) == len(written["sessions"]) == summary["imported"]["session"]
    for original in written["sessions"]:
        row = original["session"]
        session = graph.get_session(row["id"])
        assert session is not None
        assert fields(
            row, "id", "directory", "title", "workspaceId", "metadata", "createdAt", "updatedAt"
        ) == {
            "id": session.session_id,
            "directory": session.directory,
            "title": session.title,
            "workspaceId": session.workspace_id,
            "metadata": session.metadata,
            "createdAt": datetime_to_milliseconds(session.created_at),
            "updatedAt": datetime_to_milliseconds(session.updated_at),
        }
        if row["id"] != written["poisoned"]:
            assert_same_messages(graph, row["id"], original["messages"])
        assert_same_checkpoints(graph, row["id"], original["checkpoints"])
    assert broken_invariants(committed_db) == []


def assert_same_messages(
    graph: GraphCheckpointStore, session_id: str, original: list[dict[str, Any]]
) -> None:
    # The original does not order messages of one millisecond.
    ordered = sorted(original, key=lambda row: (row["createdAt"], row["id"]))
    names = ("role", "content", "toolCalls", "toolResults", "tokensIn", "tokensOut", "createdAt")
    assert [fields(row, *names) for row in ordered] == [
        {
            "role": message.role,
            "content": message.content,
            "toolCalls": message.tool_calls,
            "toolResults": message.tool_results,
            "tokensIn": message.tokens_in,
            "tokensOut": message.tokens_out,
            "createdAt": datetime_to_milliseconds(message.created_at),
        }
        for message in graph.get_messages(session_id)
    ]


def assert_same_checkpoints(graph: GraphCheckpointStore, session_id: str, original: Rows) -> None:
    names = (
        "id", "sessionId", "namespace", "parentId", "version", "step", "nodeId", "pendingNodes", "cycleState",
        "source", "createdAt",
    )  # fmt: skip
    assert {
        row["id"]: {**fields(row, *names), "nodeResults": node_results(row["nodeResults"])}
        for row in original
    } == {
        each.checkpoint_id: {
            "id": each.checkpoint_id,
            "sessionId": each.session_id,
            "namespace": each.namespace,
            "parentId": each.parent_id,
            "version": each.version,
            "step": each.step,
            "nodeId": each.node_id,
            "nodeResults": each.node_results,
            "pendingNodes": each.pending_nodes,
            "cycleState": each.cycle_state,
            "source": each.source.value,
            "createdAt": datetime_to_milliseconds(each.created_at),
        }
        for each in graph.list_checkpoints(session_id)
    }


@pytest.mark.thorough
def test_a_session_that_obsku_cannot_read_any_more_is_read_after_the_import(
    packages: Path, new_schema: OpenSchema, committed_db: CommittedDatabase
) -> None:
    origin = new_schema("obsku")
    written = run_script(packages, "obsku.mjs", origin.schema, dsn=origin.dsn)
    (original,) = (
        each["messages"] for each in written["sessions"] if each["session"]["id"] == written["poisoned"]
    )
    assert "toolCalls" in original["error"]
    import_from(origin, committed_db)
    graph = GraphCheckpointStore(committed_db.alias, tenant=committed_db.tenant)
    before, poison = graph.get_messages(written["poisoned"])
    assert (before.content, poison.tool_calls) == ("before", [{"name": "x"}])


@pytest.mark.thorough
def test_every_field_that_ziro_reads_is_read_by_the_snapshot_checkpointer(
    packages: Path, new_schema: OpenSchema, committed_db: CommittedDatabase
) -> None:
    origin = new_schema("ziro")
    written = run_script(packages, "ziro.mjs", origin.schema, "snaps", dsn=origin.dsn)
    ended = import_from(origin, committed_db, "--table", "snaps")
    assert (ended.code, ended.err) == (0, "")
    assert ended.data["source"] == {"snapshots": 50}
    assert ended.data["imported"] == {"session": 3}
    snapshots = SnapshotCheckpointer(committed_db.alias, tenant=committed_db.tenant)
    names = ("id", "threadId", "agentSnapshotVersion", "sizeBytes", "createdAt")
    for original in written["threads"]:
        thread_id = original["threadId"]
        assert [fields(meta, *names) for meta in original["list"]] == [
            {
                "id": meta.id,
                "threadId": meta.thread_id,
                "agentSnapshotVersion": meta.agent_snapshot_version,
                "sizeBytes": meta.size_bytes,
                "createdAt": meta.created_at.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            }
            for meta in snapshots.list(thread_id)
        ]
        for checkpoint_id, snapshot in original["snapshots"].items():
            assert snapshots.get(thread_id, checkpoint_id) == snapshot
        assert snapshots.get(thread_id) == original["newest"]
    # In one millisecond the original returns any of them as the newest.
    assert [meta.id for meta in snapshots.list("one millisecond")] == written["written"][::-1]
    assert broken_invariants(committed_db) == []
