"""`helix_import --from openai-agents-sqlite` reads what the sessions of the SDK have stored."""

from __future__ import annotations

import asyncio
import json
import sqlite3
import uuid
from pathlib import Path
from typing import Any

import psycopg
from agents import SQLiteSession
from agents.extensions.memory import AdvancedSQLiteSession
from psycopg.conninfo import make_conninfo

from helix_store.adapters import session_id_for
from helix_store.items import ItemLog
from helix_store.models import Session
from tests.commands.running import Ended, run
from tests.databases import CommittedDatabase
from tests.transfer.sources.origins import server_address

LONG_ID = "project:" + "x" * 300


def import_from(file: Path, database: CommittedDatabase, *arguments: str) -> Ended:
    options = ("--tenant", database.tenant, "--format", "json", *arguments)
    return run(database.alias, "helix_import", "--from", "openai-agents-sqlite", str(file), *options)


def lane(database: CommittedDatabase, session_id: str, branch: str = "main") -> list[Any]:
    log = ItemLog(session_id_for(session_id), branch, using=database.alias, tenant=database.tenant)
    return [item.payload for item in log.tail()]


def user(text: str) -> Any:
    return {"role": "user", "content": text}


def test_sessions_have_their_items_in_order(committed_db: CommittedDatabase, tmp_path: Path) -> None:
    file = tmp_path / "sessions.db"

    async def filled(session_id: str) -> list[Any]:
        theirs = SQLiteSession(session_id, file)
        for number in range(3):
            await theirs.add_items([user(f"{session_id} {number} a\x00b 日本"), user("again"), user("again")])
        found = await theirs.get_items()
        theirs.close()
        return list(found)

    expected = {session_id: asyncio.run(filled(session_id)) for session_id in ("a", "b", LONG_ID)}
    dry = import_from(file, committed_db, "--dry-run")
    assert (dry.code, dry.data["source"]) == (0, {"agent_sessions": 3, "items": 27, "turn_usage": 0})
    assert not Session.objects.using(committed_db.alias).filter(tenant=committed_db.tenant).exists()
    ended = import_from(file, committed_db)
    assert (ended.code, ended.data["imported"], ended.data["records"]["item"]) == (0, {"session": 3}, 27)
    assert {session_id: lane(committed_db, session_id) for session_id in expected} == expected
    again = import_from(file, committed_db)
    assert (again.code, again.data["imported"], again.data["identical"]) == (0, {}, {"session": 3})
    rows = Session.objects.using(committed_db.alias).filter(tenant=committed_db.tenant)
    assert set(rows.values_list("agent_type", flat=True)) == {"openai_agents"}


def test_each_branch_is_a_lane(committed_db: CommittedDatabase, tmp_path: Path) -> None:
    file = tmp_path / "branches.db"

    async def filled() -> dict[str, list[Any]]:
        theirs = AdvancedSQLiteSession(session_id="s", db_path=file, create_tables=True)
        await theirs.add_items([user("one"), {"role": "assistant", "content": "1"}, user("two")])
        await theirs.create_branch_from_turn(2, "other")
        await theirs.add_items([user("another")])
        await theirs.switch_to_branch("main")
        await theirs.add_items([user("three")])
        found = {branch: list(await theirs.get_items(branch_id=branch)) for branch in ("main", "other")}
        theirs.close()
        return found

    expected = asyncio.run(filled())
    assert (len(expected["main"]), len(expected["other"])) == (4, 3)
    ended = import_from(file, committed_db)
    assert (ended.code, ended.data["problems"], ended.data["records"]["item"]) == (0, [], 7)
    assert {branch: lane(committed_db, "s", branch) for branch in expected} == expected


def test_a_file_that_two_kinds_of_sessions_have_written_keeps_one_order(
    committed_db: CommittedDatabase, tmp_path: Path
) -> None:
    file = tmp_path / "mixed.db"
    added: list[Any] = []

    async def add(theirs: SQLiteSession, count: int) -> None:
        for _ in range(count):
            added.append(user(f"item {len(added)}"))
            await theirs.add_items([added[-1]])
        theirs.close()

    async def fill() -> None:
        await add(SQLiteSession("other", file), 2)
        added.clear()
        await add(SQLiteSession("s", file), 3)
        await add(AdvancedSQLiteSession(session_id="s", db_path=file, create_tables=True), 4)
        await add(SQLiteSession("s", file), 2)

    asyncio.run(fill())
    ended = import_from(file, committed_db)
    assert (ended.code, ended.data["problems"]) == (0, [])
    assert lane(committed_db, "s") == added


def test_sessions_of_sqlalchemy_on_postgresql_have_their_items_in_order(
    committed_db: CommittedDatabase, django_db_setup: None
) -> None:
    """The tables and their columns are those that ``SQLAlchemySession`` makes."""
    schema = f"agents_{uuid.uuid4().hex}"
    dsn = make_conninfo(**server_address(), options=f"-c search_path={schema}")
    expected = {name: [user(f"{name} {number} 日本") for number in range(4)] for name in ("a", LONG_ID)}
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute(f"CREATE SCHEMA {schema}")
        connection.execute(
            """
            CREATE TABLE agent_sessions (
                session_id VARCHAR PRIMARY KEY,
                created_at TIMESTAMP WITHOUT TIME ZONE DEFAULT CURRENT_TIMESTAMP NOT NULL,
                updated_at TIMESTAMP WITHOUT TIME ZONE DEFAULT CURRENT_TIMESTAMP NOT NULL);
            CREATE TABLE agent_messages (
                id SERIAL PRIMARY KEY,
                session_id VARCHAR NOT NULL REFERENCES agent_sessions (session_id) ON DELETE CASCADE,
                message_data TEXT NOT NULL,
                created_at TIMESTAMP WITHOUT TIME ZONE DEFAULT CURRENT_TIMESTAMP NOT NULL);"""
        )
        for name, items in expected.items():
            connection.execute("INSERT INTO agent_sessions (session_id) VALUES (%s)", [name])
            for item in items:
                values = [name, json.dumps(item, separators=(",", ":"))]
                connection.execute(
                    "INSERT INTO agent_messages (session_id, message_data) VALUES (%s, %s)", values
                )
        connection.execute(
            "UPDATE agent_messages SET message_data = '{' WHERE id = (SELECT max(id) FROM agent_messages)"
        )
        options = ("--tenant", committed_db.tenant, "--format", "json")
        ended = run(committed_db.alias, "helix_import", "--from", "openai-agents-postgres", dsn, *options)
        again = run(committed_db.alias, "helix_import", "--from", "openai-agents-postgres", dsn, *options)
        connection.execute(f"DROP SCHEMA {schema} CASCADE")
    expected[LONG_ID].pop()
    assert {name: lane(committed_db, name) for name in expected} == expected
    assert (ended.code, ended.data["left"], ended.data["imported"]) == (1, {"items": 1}, {"session": 2})
    assert (again.data["imported"], again.data["identical"]) == ({}, {"session": 2})


def test_what_has_no_place_here_is_told(committed_db: CommittedDatabase, tmp_path: Path) -> None:
    file = tmp_path / "damaged.db"
    theirs = AdvancedSQLiteSession(session_id="s", db_path=file, create_tables=True)
    asyncio.run(theirs.add_items([user("one"), user("two")]))
    theirs.close()
    with sqlite3.connect(file) as connection:
        connection.execute("UPDATE agent_messages SET message_data = '{' WHERE id = 1")
        connection.execute(
            "INSERT INTO turn_usage (session_id, branch_id, user_turn_number) VALUES ('s', 'main', 1)"
        )
    connection.close()
    ended = import_from(file, committed_db)
    assert (ended.code, ended.data["left"]) == (1, {"items": 1, "turn_usage": 1})
    told = " ".join(ended.data["problems"])
    assert "item '1' of session 's' is left out: Invalid value at /message_data" in told
    assert "turn_usage: 1 left out" in told
    assert lane(committed_db, "s") == [user("two")]
    accepted = import_from(file, committed_db, "--leave-tables")
    assert len(accepted.data["problems"]) == 1
