"""`helix_import --from google-adk-sqlite` and `google-adk-postgres` read the tables of ADK's own services."""

from __future__ import annotations

import asyncio
import sqlite3
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

pytest.importorskip("google.adk", reason="Google ADK is not installed: pip install google-adk")

from google.adk.events.event import Event
from google.adk.events.event_actions import EventActions
from google.genai import types

from helix_store.contrib.google_adk import DjangoSessionService
from tests.commands.running import Ended, run
from tests.databases import CommittedDatabase
from tests.transfer.sources.origins import server_address

APP = "weather"


def database_service() -> Any:
    """ADK's service, which needs SQLAlchemy for asyncio."""
    pytest.importorskip("sqlalchemy.ext.asyncio", exc_type=ImportError)
    from google.adk.sessions.database_session_service import DatabaseSessionService

    return DatabaseSessionService


def import_from(store: str, address: str, database: CommittedDatabase, *arguments: str) -> Ended:
    options = ("--tenant", database.tenant, "--format", "json", *arguments)
    return run(database.alias, "helix_import", "--from", store, address, *options)


@pytest.fixture(params=["postgres", "sqlite", "own sqlite"])
def origin(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[str, str, Any]]:
    """The name of a source, its address, and a service of ADK there."""
    file = tmp_path / "adk.db"
    if request.param == "own sqlite":
        from google.adk.sessions.sqlite_session_service import SqliteSessionService

        yield "google-adk-sqlite", str(file), SqliteSessionService(str(file))
        return
    if request.param == "sqlite":
        yield "google-adk-sqlite", str(file), database_service()(f"sqlite+aiosqlite:///{file}")
        return
    service = database_service()
    from sqlalchemy import URL

    schema = f"adk_{uuid.uuid4().hex}"
    at: dict[str, Any] = server_address()
    dsn = psycopg.conninfo.make_conninfo(**at, options=f"-c search_path={schema}")
    url = URL.create(
        "postgresql+asyncpg",
        username=at["user"],
        password=at.get("password"),
        database=at["dbname"],
        query={"host": str(at["host"]), "port": str(at["port"])},
    )
    with psycopg.connect(**at, autocommit=True) as connection:
        connection.execute(f"CREATE SCHEMA {schema}")
        options = {"connect_args": {"server_settings": {"search_path": schema}}}
        yield "google-adk-postgres", dsn, service(url, **options)
        connection.execute(f"DROP SCHEMA {schema} CASCADE")


async def filled(service: Any) -> None:
    for user in ("ada", "grace"):
        state = {"app:shared": 1, "user:name": user, "own": [1, {"a": None}]}
        session = await service.create_session(app_name=APP, user_id=user, session_id="trip", state=state)
        for number in range(3):
            content = types.Content(role="user", parts=[types.Part(text=f"{user} {number} 日本")])
            actions = EventActions(state_delta={"n": number, "user:n": number})
            event = Event(author="user", invocation_id=f"i{number}", content=content, actions=actions)
            await service.append_event(session, event)
    await service.create_session(app_name=APP, user_id="ada", session_id="empty")


async def filled_and_closed(service: Any) -> None:
    await filled(service)
    await service.close()


async def contents(service: Any) -> dict[tuple[str, str], Any]:
    found = {}
    for user, name in (("ada", "trip"), ("grace", "trip"), ("ada", "empty")):
        session = await service.get_session(app_name=APP, user_id=user, session_id=name)
        assert session is not None
        events = [event.model_dump(mode="json", exclude_none=True) for event in session.events]
        found[user, name] = (session.state, round(session.last_update_time, 3), events)
    return found


def test_sessions_have_their_events_and_states(
    origin: tuple[str, str, Any], committed_db: CommittedDatabase
) -> None:
    store, address, theirs = origin

    async def fill() -> dict[tuple[str, str], Any]:
        await filled(theirs)
        found = await contents(theirs)
        if hasattr(theirs, "close"):
            await theirs.close()
        return found

    expected = asyncio.run(fill())
    ended = import_from(store, address, committed_db)
    counts = {"sessions": 3, "user_states": 2, "app_states": 1, "events": 6}
    assert (ended.code, ended.data["problems"], ended.data["left"]) == (0, [], {})
    assert ended.data["source"] == counts
    ours = DjangoSessionService(committed_db.alias, tenant=committed_db.tenant)
    assert asyncio.run(contents(ours)) == expected
    again = import_from(store, address, committed_db)
    assert (again.code, again.data["imported"], again.data["identical"]) == (0, {}, {"session": 6})

    async def go_on() -> None:
        session = await ours.get_session(app_name=APP, user_id="ada", session_id="trip")
        assert session is not None
        await ours.append_event(session, Event(author="user", invocation_id="more"))
        listed = await ours.list_sessions(app_name=APP, user_id="ada")
        assert {each.id for each in listed.sessions} == {"trip", "empty"}

    asyncio.run(go_on())


def test_what_has_no_place_here_is_told(committed_db: CommittedDatabase, tmp_path: Path) -> None:
    file = tmp_path / "adk.db"
    theirs = database_service()(f"sqlite+aiosqlite:///{file}")
    asyncio.run(filled_and_closed(theirs))
    with sqlite3.connect(file) as connection:
        connection.execute(
            "UPDATE events SET event_data = '{' WHERE invocation_id = 'i1' AND user_id = 'ada'"
        )
    connection.close()
    ended = import_from("google-adk-sqlite", str(file), committed_db)
    assert (ended.code, ended.data["left"]) == (1, {"events": 1})
    assert "Invalid value at /event_data" in " ".join(ended.data["problems"])


def test_tables_of_an_older_version_are_refused(committed_db: CommittedDatabase, tmp_path: Path) -> None:
    file = tmp_path / "old.db"
    with sqlite3.connect(file) as connection:
        for table in ("sessions", "events", "user_states", "app_states"):
            connection.execute(f"CREATE TABLE {table} (id TEXT, actions BLOB)")
    connection.close()
    ended = import_from("google-adk-sqlite", str(file), committed_db)
    assert ended.code != 0
    assert "adk migrate session" in str(ended)
