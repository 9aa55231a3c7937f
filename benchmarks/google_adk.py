"""``python -m benchmarks.google_adk``: `DjangoSessionService` beside ADK's own service for databases.

On one server, each service creates the sessions of an app, appends an event to each, and lists them. A
session has state of its own, of its user and of the app.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Final

from google.adk.events.event import Event
from google.adk.events.event_actions import EventActions
from google.adk.sessions import BaseSessionService, DatabaseSessionService
from google.genai import types

from benchmarks.server import benchmark_server, connection_url, create_database

__all__: list[str] = []

_APP: Final = "travel"
_USERS: Final = 100


def _named(number: int) -> dict[str, str]:
    return {"app_name": _APP, "user_id": f"user-{number % _USERS}", "session_id": f"session-{number}"}


async def _create(service: BaseSessionService, count: int) -> None:
    for number in range(count):
        state = {"app:theme": "dark", "user:home": "Porto", "budget": number}
        await service.create_session(**_named(number), state=state)


async def _append(service: BaseSessionService, count: int) -> None:
    for number in range(count):
        session = await service.get_session(**_named(number))
        assert session is not None
        content = types.Content(role="user", parts=[types.Part(text="x" * 1_000)])
        actions = EventActions(state_delta={"budget": number + 1})
        await service.append_event(session, Event(author="user", content=content, actions=actions))


async def _list(service: BaseSessionService, count: int) -> None:
    listed = await service.list_sessions(app_name=_APP)
    assert len(listed.sessions) == count


async def _measured(service: BaseSessionService, count: int) -> dict[str, float]:
    calls: tuple[tuple[str, Callable[[BaseSessionService, int], Awaitable[None]]], ...] = (
        ("create_session", _create),
        ("get_session + append_event", _append),
        ("list_sessions", _list),
    )
    seconds = {}
    for name, call in calls:
        start = time.perf_counter()
        await call(service, count)
        seconds[name] = time.perf_counter() - start
    return seconds


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sessions", type=int, default=10_000, help="sessions of the app")
    count = parser.parse_args().sessions
    with benchmark_server() as cluster:
        create_database(cluster, "default")
        create_database(cluster, "peers", is_empty=True)
        from helix_store.contrib.google_adk import DjangoSessionService

        url = connection_url("peers", scheme="postgresql+asyncpg")

        async def both() -> tuple[dict[str, float], dict[str, float]]:
            async with DatabaseSessionService(url) as official:
                return await _measured(DjangoSessionService(), count), await _measured(official, count)

        ours, theirs = asyncio.run(both())
    for name in ours:
        print(f"{name:<28} {ours[name]:8.2f} s   DatabaseSessionService {theirs[name]:8.2f} s")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
