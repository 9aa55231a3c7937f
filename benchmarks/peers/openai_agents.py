"""The OpenAI Agents SDK's SQLAlchemySession: messages alone, neither state nor checkpoint."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

from agents.extensions.memory import SQLAlchemySession
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from benchmarks.operations import Operation
from benchmarks.payloads import message
from benchmarks.server import connection_url
from benchmarks.sessions import sessions_of

__all__ = ["AddItems", "create_tables"]


class AddItems(Operation):
    """Two messages of 1 KB per call; one event loop and one engine for all calls of a worker."""

    def __init__(self, worker: int) -> None:
        self.loop = asyncio.new_event_loop()
        self.engine = _engine()
        self.sessions = [SQLAlchemySession(name, engine=self.engine) for name in sessions_of(worker)]
        self.items: list[Any] = [message(1), message(2)]
        self.numbers = itertools.count(1)
        self.last = 0

    def run(self, count: int) -> None:
        self.loop.run_until_complete(self._add(count))

    async def _add(self, count: int) -> None:
        for _ in range(count):
            self.last = next(self.numbers)
            await self.sessions[self.last % len(self.sessions)].add_items(self.items)

    def check(self) -> None:
        session = self.sessions[self.last % len(self.sessions)]
        assert self.loop.run_until_complete(session.get_items(limit=2)) == self.items

    def close(self) -> None:
        self.loop.run_until_complete(self.engine.dispose())
        self.loop.close()


def create_tables() -> None:
    asyncio.run(_create_tables())


async def _create_tables() -> None:
    engine = _engine()
    items: list[Any] = [message(1)]
    await SQLAlchemySession("first", engine=engine, create_tables=True).add_items(items)
    await engine.dispose()


def _engine() -> AsyncEngine:
    return create_async_engine(connection_url("peers", scheme="postgresql+asyncpg"))
