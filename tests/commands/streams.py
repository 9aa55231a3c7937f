"""Streams for the tests of ``helix_streams``, and the command itself."""

from __future__ import annotations

from io import StringIO
from typing import Any

from asgiref.sync import async_to_sync
from django.core.management import call_command

from helix_store.stores import DatabaseStreamManager

__all__ = ["run", "write"]


def run(alias: str, *arguments: str, **options: Any) -> tuple[str, str]:
    """What the command writes to stdout and to stderr."""
    out, err = options.pop("stdout", StringIO()), StringIO()
    call_command("helix_streams", *arguments, "--database", alias, stdout=out, stderr=err, **options)
    return out.getvalue(), err.getvalue()


def write(
    alias: str,
    stream_id: str,
    count: int,
    *,
    tenant: str = "",
    end: str | None = "end",
    lease: float | None = None,
) -> None:
    """A stream with so many chunks, which is ended, failed, paused, or stays active with a writer."""

    async def writing() -> None:
        streams = DatabaseStreamManager(alias, tenant=tenant, writer_lease=lease)
        writer = await streams.create_writer(stream_id, "run-1", "travel")
        await writer.write_many(
            [{"type": "text", "text": f"part {number}"} for number in range(1, count + 1)]
        )
        if end == "end":
            await streams.end_stream(stream_id, {"answer": 42})
        elif end == "fail":
            await streams.fail_stream(stream_id, {"code": "broken", "message": "no\x1b[2Jmodel"})
        elif end == "pause":
            await streams.pause_stream(stream_id)

    async_to_sync(writing)()
