"""A row that no store of its framework could have written is left out of an import, alone and by name."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Any, Final

import ormsgpack
import pytest
from langgraph.checkpoint.sqlite import SqliteSaver

from tests.cells import for_each
from tests.commands.running import Ended, run
from tests.databases import CommittedDatabase
from tests.frameworks.langgraph.graphs import put_chain

_NOT_TEXT: Final = "CAST(x'ff7b7d' AS TEXT)"
_NESTED: Final = ormsgpack.packb(
    {
        "v": 4,
        "ts": "2026-01-31T12:00:00+00:00",
        "channel_versions": {"log": "1"},
        "channel_values": {"log": ["here"]},
    }
).replace(ormsgpack.packb("here"), b"\x91" * 300 + b"\xc0")
"""A checkpoint with a list that can be read, and is nested too deeply to be written."""

_OPENAI: Final = """
    CREATE TABLE agent_sessions (session_id TEXT PRIMARY KEY, created_at TEXT, updated_at TEXT);
    CREATE TABLE agent_messages (id INTEGER PRIMARY KEY, session_id TEXT, message_data TEXT, created_at TEXT);
    INSERT INTO agent_sessions VALUES ('a', '2026-01-31', '2026-01-31'), ('b', '2026-01-31', '2026-01-31');
    INSERT INTO agent_messages VALUES (1, 'a', '{}', '2026-01-31'), (2, 'b', '{}', '2026-01-31');"""
_ADK: Final = """
    CREATE TABLE sessions (
        app_name TEXT, user_id TEXT, id TEXT, state TEXT, create_time REAL, update_time REAL);
    CREATE TABLE user_states (app_name TEXT, user_id TEXT, state TEXT, update_time REAL);
    CREATE TABLE app_states (app_name TEXT, state TEXT, update_time REAL);
    CREATE TABLE events (id TEXT, app_name TEXT, user_id TEXT, session_id TEXT, invocation_id TEXT,
        timestamp REAL, event_data TEXT);
    INSERT INTO sessions VALUES ('app', 'a', 's', '{}', 1, 1), ('app', 'b', 's', '{}', 1, 1);
    INSERT INTO user_states VALUES ('app', 'a', '{}', 1);
    INSERT INTO app_states VALUES ('app', '{}', 1);
    INSERT INTO events VALUES ('e', 'app', 'a', 's', 'i', 1, '{}'), ('e', 'app', 'b', 's', 'i', 1, '{}');"""

_THREAD: Final = {"checkpoints": 1, "values": 1, "writes": 1}


def make(store: str, file: Path) -> None:
    """Write two sessions, ``a`` and ``b``, in the tables of a framework."""
    connection = sqlite3.connect(file, check_same_thread=False)
    if store == "langgraph-sqlite":
        saver = SqliteSaver(connection)
        for thread_id in ("a", "b"):
            (config,) = put_chain(saver, thread_id, 1)
            saver.put_writes(config, [("log", [1])], "task")
    else:
        connection.executescript(_OPENAI if store == "openai-agents-sqlite" else _ADK)
    connection.commit()
    connection.close()


def import_from(store: str, file: Path, database: CommittedDatabase) -> Ended:
    options = ("--tenant", database.tenant, "--format", "json")
    return run(database.alias, "helix_import", "--from", store, str(file), *options)


@pytest.mark.thorough
@for_each(
    ("store", "table", "change", "values", "imported", "left"),
    [
        ("openai-agents-sqlite", "agent_messages", f"message_data = {_NOT_TEXT}", [], 2, {"items": 1}),
        (
            "openai-agents-sqlite",
            "agent_sessions",
            f"updated_at = {_NOT_TEXT}",
            [],
            1,
            {"agent_sessions": 1, "items": 1},
        ),
        ("google-adk-sqlite", "events", "event_data = x'ff'", [], 4, {"events": 1}),
        ("google-adk-sqlite", "events", f"id = {_NOT_TEXT}", [], 4, {"events": 1}),
        ("google-adk-sqlite", "sessions", f"id = {_NOT_TEXT}", [], 3, {"sessions": 1, "events": 1}),
        ("google-adk-sqlite", "sessions", "user_id = NULL", [], 3, {"sessions": 1, "events": 1}),
        ("google-adk-sqlite", "user_states", "app_name = NULL", [], 3, {"user_states": 1}),
        ("google-adk-sqlite", "app_states", "app_name = NULL", [], 3, {"app_states": 1}),
        ("langgraph-sqlite", "checkpoints", "thread_id = x'ff'", [], 1, _THREAD),
        ("langgraph-sqlite", "checkpoints", f"checkpoint_id = {_NOT_TEXT}", [], 1, _THREAD),
        ("langgraph-sqlite", "checkpoints", "metadata = ?", ['{"n": 18446744073709551616}'], 1, _THREAD),
        ("langgraph-sqlite", "checkpoints", "metadata = ?", [r'{"\ud800": 1}'], 1, _THREAD),
        (
            "langgraph-sqlite",
            "checkpoints",
            "checkpoint = ?",
            [_NESTED],
            1,
            {"checkpoints": 1, "writes": 1},
        ),
        ("langgraph-sqlite", "writes", "value = 'text'", [], 2, {"writes": 1}),
        ("langgraph-sqlite", "writes", "value = 5", [], 2, {"writes": 1}),
    ],
)
def test_a_damaged_row_is_told_and_left_and_the_others_are_imported(
    committed_db: CommittedDatabase,
    tmp_path: Path,
    store: str,
    table: str,
    change: str,
    values: list[Any],
    imported: int,
    left: dict[str, int],
) -> None:
    file = tmp_path / "origin.sqlite"
    make(store, file)
    connection = sqlite3.connect(file)
    first = f"rowid = (SELECT min(rowid) FROM {table})"
    connection.execute(f"UPDATE {table} SET {change} WHERE {first}", values)
    connection.commit()
    connection.close()
    ended = import_from(store, file, committed_db)
    assert (ended.code, ended.data["imported"], ended.data["left"]) == (1, {"session": imported}, left)
    again = import_from(store, file, committed_db)
    assert (again.data["imported"], again.data["identical"]) == ({}, {"session": imported})
