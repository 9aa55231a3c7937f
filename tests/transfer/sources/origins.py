"""The tables of the two other stores, with the columns and constraints that their own set-up makes."""

from __future__ import annotations

import json
from typing import Any, Final

import psycopg
import pytest
from django.db import connections
from psycopg.sql import SQL, Identifier, Placeholder

from tests.databases import ALIASES

__all__ = ["NOON", "ObskuTables", "OriginSchema", "ZiroTable", "server_address"]

NOON: Final = 1_760_000_000_123

_OBSKU: Final = """
CREATE TABLE sessions (
    id text PRIMARY KEY, workspace_id text, title text, directory text NOT NULL,
    created_at bigint NOT NULL, updated_at bigint NOT NULL, metadata text);
CREATE INDEX ON sessions (workspace_id, updated_at DESC);
CREATE TABLE messages (
    id serial PRIMARY KEY, session_id text NOT NULL REFERENCES sessions (id) ON DELETE CASCADE,
    role text NOT NULL, content text, tool_calls text, tool_results text,
    tokens_in integer, tokens_out integer, created_at bigint NOT NULL);
CREATE INDEX ON messages (session_id, created_at);
CREATE TABLE checkpoints (
    id text PRIMARY KEY, session_id text NOT NULL REFERENCES sessions (id) ON DELETE CASCADE,
    namespace text NOT NULL DEFAULT '', parent_id text, version integer NOT NULL DEFAULT 1,
    step integer NOT NULL, node_id text, node_results text NOT NULL, pending_nodes text,
    cycle_state text, source text NOT NULL, created_at bigint NOT NULL,
    UNIQUE (session_id, namespace, version));
CREATE INDEX ON checkpoints (session_id, namespace, step);
CREATE TABLE entities (
    id text PRIMARY KEY, session_id text NOT NULL REFERENCES sessions (id) ON DELETE CASCADE,
    workspace_id text, name text NOT NULL, type text NOT NULL, attributes text, relationships text,
    created_at bigint NOT NULL, updated_at bigint NOT NULL, embedding bytea);
CREATE TABLE facts (
    id text PRIMARY KEY, workspace_id text, content text NOT NULL, confidence real DEFAULT 1.0,
    source_session_id text REFERENCES sessions (id) ON DELETE SET NULL,
    created_at bigint NOT NULL, embedding bytea);
"""

_ZIRO: Final = """
CREATE TABLE {table} (
    thread_id text NOT NULL, checkpoint_id text NOT NULL, snapshot jsonb NOT NULL,
    version integer NOT NULL, size_bytes integer NOT NULL,
    created_at timestamptz NOT NULL DEFAULT now(), PRIMARY KEY (thread_id, checkpoint_id))
"""


def server_address() -> dict[str, str]:
    """Where a PostgreSQL database of the tests is, in the words of libpq."""
    if "postgres" not in ALIASES:
        pytest.skip("HELIX_TEST_DATABASES leaves PostgreSQL out of this run, and the stores to read need it")
    settings = connections[ALIASES["postgres"]].settings_dict
    names = {"user": "USER", "password": "PASSWORD", "dbname": "NAME", "host": "HOST", "port": "PORT"}
    address = {name: settings["OPTIONS"].get(name) or settings[key] for name, key in names.items()}
    return {name: str(value) for name, value in address.items() if value}


class OriginSchema:
    """A schema in a database, to which each call writes and commits."""

    def __init__(self, store: str, dsn: str, schema: str) -> None:
        self.store = store
        self.dsn = dsn
        self.schema = schema
        self.connection = psycopg.connect(dsn, autocommit=True)
        self.connection.execute(SQL("CREATE SCHEMA {}").format(Identifier(schema)))
        self.connection.execute(SQL("SET search_path TO {}").format(Identifier(schema)))

    def drop(self) -> None:
        self.connection.execute(SQL("DROP SCHEMA {} CASCADE").format(Identifier(self.schema)))
        self.connection.close()

    def insert(self, table: str, *rows: dict[str, Any]) -> None:
        names = list(rows[0])
        statement = SQL("INSERT INTO {} ({}) VALUES ({})").format(
            Identifier(table.replace("%", "%%")),
            SQL(", ").join(map(Identifier, names)),
            SQL(", ").join(map(Placeholder, names)),
        )
        with self.connection.cursor() as cursor:
            cursor.executemany(statement, rows)


class ObskuTables(OriginSchema):
    """Rows with the values that a test leaves out."""

    def __init__(self, dsn: str, schema: str) -> None:
        super().__init__("obsku", dsn, schema)
        self.connection.execute(_OBSKU)

    def session(self, session_id: str, **columns: Any) -> None:
        row = {"id": session_id, "directory": "./", "created_at": NOON, "updated_at": NOON + 5}
        self.insert("sessions", {**row, **columns})

    def message(self, session_id: str, at: int = NOON, role: str = "user", **columns: Any) -> None:
        self.insert("messages", {"session_id": session_id, "role": role, "created_at": at, **columns})

    def checkpoint(self, session_id: str, checkpoint_id: str, version: int = 1, **columns: Any) -> None:
        row = {
            "id": checkpoint_id,
            "session_id": session_id,
            "version": version,
            "step": version,
            "node_results": "{}",
            "source": "loop",
            "created_at": NOON,
        }
        self.insert("checkpoints", {**row, **columns})


class ZiroTable(OriginSchema):
    def __init__(self, dsn: str, schema: str, table: str = "ziro_checkpoints") -> None:
        super().__init__("ziro", dsn, schema)
        self.table = table
        self.connection.execute(SQL(_ZIRO).format(table=Identifier(table)))

    def snapshot(self, thread_id: str, checkpoint_id: str, snapshot: Any = None, **columns: Any) -> None:
        snapshot = {"version": 2, "id": checkpoint_id} if snapshot is None else snapshot
        text = snapshot if isinstance(snapshot, str) else json.dumps(snapshot)
        row = {
            "thread_id": thread_id,
            "checkpoint_id": checkpoint_id,
            "snapshot": text,
            "version": 2,
            "size_bytes": len(text),
        }
        self.insert(self.table, {**row, **columns})
