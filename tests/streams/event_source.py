"""A client of server-sent events on a plain socket: what it received, and where it would go on."""

from __future__ import annotations

import asyncio
import json
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Self

__all__ = ["EventSource", "Received"]


@dataclass(frozen=True)
class Received:
    """One event; ``event`` is ``message`` when the server named none."""

    event: str
    id: str | None
    data: Any


@dataclass
class EventSource:
    """One open response; ``comments`` counts its heartbeats."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    comments: int = 0
    _body: bytes = b""
    _is_whole: bool = False

    @classmethod
    async def open(cls, port: int, path: str, *, last_event_id: str | None = None) -> Self:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        lines = [f"GET {path} HTTP/1.1", "Host: 127.0.0.1", "Accept: text/event-stream"]
        if last_event_id is not None:
            lines.append(f"Last-Event-ID: {last_event_id}")
        writer.write("\r\n".join([*lines, "", ""]).encode())
        source = cls(reader, writer)
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        first, *rest = head.strip().split("\r\n")
        source.status = int(first.split(" ")[1])
        source.headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in rest)}
        return source

    async def next(self) -> Received | None:
        """The next event; ``None`` when the server has closed the response."""
        while True:
            block = await self._block()
            if block is None:
                return None
            fields = dict(line.split(": ", 1) for line in block.split("\n") if not line.startswith(":"))
            if "data" in fields:
                event = fields.get("event", "message")
                return Received(event, fields.get("id"), json.loads(fields["data"]))
            self.comments += 1

    async def all(self) -> list[Received]:
        """Every event until the server closes the response."""
        events = []
        while (event := await self.next()) is not None:
            events.append(event)
        return events

    async def close(self) -> None:
        self.writer.close()
        with suppress(ConnectionError):
            await self.writer.wait_closed()

    async def _block(self) -> str | None:
        if length := self.headers.pop("content-length", None):
            self._body = await self.reader.readexactly(int(length))
            self._is_whole = True
        while b"\n\n" not in self._body:
            if self._is_whole:
                return None
            size = int((await self.reader.readuntil(b"\r\n")).strip() or b"0", 16)
            if size == 0:
                return None
            self._body += await self.reader.readexactly(size)
            await self.reader.readexactly(2)
        block, _, self._body = self._body.partition(b"\n\n")
        return block.decode()
