"""``helix_streams``: list streams, follow one, and prune."""

from __future__ import annotations

import asyncio
import json
import shlex
from collections.abc import Iterator, Mapping
from contextlib import aclosing
from datetime import datetime
from operator import attrgetter
from typing import Any, Final

from django.core.management.base import CommandError

from helix_store.core import validation
from helix_store.core.limits import MAX_BIGINT
from helix_store.core.payloads import decode
from helix_store.core.streams import PrunedStreams, StoredChunk, StreamInfo
from helix_store.core.types import StreamStatus
from helix_store.engine.database import Database
from helix_store.exceptions import StreamNotFound, StreamTruncated
from helix_store.management.base import StoreCommandWithParts, add_limit_argument, at_least, only_tenant
from helix_store.management.output import STATUS_STYLES, Column, moment_of, time_or_age, visible
from helix_store.reports.payloads import project_zone
from helix_store.stores import DatabaseStreamManager
from helix_store.streams.chunks import PruneRequest
from helix_store.streams.database import (
    ListedStream,
    StreamList,
    WriterState,
    list_streams,
    prune_batches,
    tenants_of_stream,
)

_LONGEST_PAGE: Final = 200
_COLUMNS: Final = (
    Column("tenant", attrgetter("tenant"), cut="middle"),
    Column("stream", attrgetter("stream_id"), cut="id", minimum=36),
    Column("status", attrgetter("status.value"), cut="never", style=STATUS_STYLES.get),
    Column("chunks", lambda stream: f"{stream.chunk_count:,}", cut="never", right=True),
    Column("last", lambda stream: f"{stream.last_sequence:,}", cut="never", right=True),
    Column("age", lambda stream: _age(stream.age_seconds), cut="never", right=True),
    Column("writer", lambda stream: f"{stream.agent_name} {stream.run_id}", cut="middle", is_optional=True),
    Column(
        "lease",
        lambda stream: "" if stream.writer is WriterState.NONE else stream.writer.value,
        cut="never",
        is_optional=True,
        style=lambda text: _LEASE_STYLES.get(text),
    ),
)
_LEASE_STYLES: Final[dict[str, Any]] = {WriterState.ALIVE.value: "cyan", WriterState.LOST.value: "red"}
_CHECK_SECONDS: Final = 0.2
"""The maximum time in seconds before a request to stop is noticed, if no chunk arrives."""
_END_KEYS: Final = ("stream_id", "status", "last_sequence", "output", "error")


class Command(StoreCommandWithParts):
    help = "List streams, follow a stream, and remove old chunks."

    def add_parts(self) -> None:
        parser = self.add_part("list", self._list, example="--status ended --limit 20")
        parser.add_argument(
            "--status",
            choices=[status.value for status in StreamStatus],
            help="Only streams with this status.",
        )
        add_limit_argument(parser, "streams", default=50)
        parser.add_argument("--cursor", help="Continue a list with the same filters at its next_cursor.")

        parser = self.add_part("tail", self._tail, example="trip-1 --from 1")
        parser.add_argument("stream_id", metavar="ID")
        parser.add_argument(
            "--from",
            dest="after",
            type=at_least(0),
            metavar="N",
            help="Only chunks after this sequence, the last one seen (default: from the oldest chunk).",
        )
        parser.add_argument(
            "--no-follow", action="store_false", dest="follow", help="Print the existing chunks, and stop."
        )

        example = "--older-than 7d --keep-chunks 10000 --dry-run"
        parser = self.add_part("prune", self._prune, example=example)
        parser.add_argument(
            "--older-than",
            type=time_or_age,
            metavar="TIME",
            help="Remove all chunks of streams that ended before this date or age, such as 7d.",
        )
        parser.add_argument(
            "--keep-chunks",
            type=at_least(0),
            metavar="N",
            help="Remove all but the newest N chunks of every other stream.",
        )
        parser.add_argument("--dry-run", action="store_true", help="Only count.")

    def _list(self, options: dict[str, Any]) -> None:
        """List streams, newest first. The age is the time since the last change."""
        # If the tenant was specified, it needs no column of its own.
        first = 0 if options["tenant"] is None else 1
        self.write_list("streams", _pages(options), columns=_COLUMNS[first:], to_dict=ListedStream.to_dict)

    def _tail(self, options: dict[str, Any]) -> None:
        """Print the chunks of a stream as they arrive, until it ends, fails or pauses. Ctrl-C prints the
        position to continue from.
        """
        stream_id = options["stream_id"]
        tenant = _tenant_of(stream_id, options)
        streams = DatabaseStreamManager(options["database"], tenant=tenant)
        again = f"continue with: manage.py helix_streams tail {_name(stream_id, tenant)} --from"
        asyncio.run(self._print_stream(streams, again, options))

    async def _print_stream(
        self, streams: DatabaseStreamManager, again: str, options: Mapping[str, Any]
    ) -> None:
        stream_id, position = options["stream_id"], options["after"]
        info = await _info(streams, stream_id)
        if position is None:
            position = info.last_sequence - info.chunk_count
            if position:
                self.progress(f"The first {position:,} chunks were removed.")
        last = MAX_BIGINT if options["follow"] else info.last_sequence
        try:
            reader = await streams.create_resumable_reader(stream_id, from_sequence=position)
            if reader is None:
                raise StreamNotFound(stream_id)
            if position < last:
                async with aclosing(reader.texts(heartbeat=_CHECK_SECONDS)) as texts:
                    async for stored in texts:
                        if stored is not None:
                            self._write_chunk(StoredChunk(decode(stored.text), stored.sequence))
                            position = stored.sequence
                        if self.stop.is_set() or position >= last:
                            break
            info = await _info(streams, stream_id)
        except StreamTruncated as exc:
            what = f"Chunks up to {exc.oldest - 1} were removed" if exc.oldest > 1 else "The stream was reset"
            raise CommandError(f"{what}; {again} {exc.oldest - 1}") from exc
        except BaseException:
            self.progress(f"Stopped after sequence {position}; {again} {position}")
            raise
        if self.is_json:
            end = {name: value for name, value in info.to_dict().items() if name in _END_KEYS}
            self.write_text(json.dumps({"tenant": streams.tenant, "position": position, **end}))
        is_at_end = position >= info.last_sequence
        if info.status is StreamStatus.ACTIVE or not is_at_end:
            self.progress(f"Stopped after sequence {position}; {again} {position}")
        elif info.status is StreamStatus.FAILED:
            error = visible(json.dumps(info.error))
            raise CommandError(f"The stream failed after sequence {position}: {error}")
        else:
            self.progress(f"The stream is {info.status.value}, after sequence {position}.")

    def _write_chunk(self, stored: StoredChunk) -> None:
        text = json.dumps(stored.to_dict()) if self.is_json else self.layout.fitted(_line(stored))
        self.write_text(text)

    def _prune(self, options: dict[str, Any]) -> None:
        """Mark streams with a lost writer as failed, and remove chunks of streams that ended too long ago,
        chunks past their retention, and surplus chunks. The streams themselves are kept.
        """
        tenant = None if options["tenant"] is None else validation.tenant(options["tenant"])
        self.look_for_tenant(options)
        older_than = options["older_than"]
        if isinstance(older_than, datetime):
            # The age is measured by the database's clock.
            older_than = moment_of(older_than, project_zone())
        request = PruneRequest.checked(
            older_than=older_than,
            keep_chunks=options["keep_chunks"],
            dry_run=options["dry_run"],
        )
        batches = prune_batches(Database(options["database"], tenant or "", None), tenant, request)
        empty = PrunedStreams(streams=0, chunks=0, failed=0)
        pruned = self.run_batches(batches, empty, unit="chunks", done=attrgetter("chunks"))
        if self.stop.is_set():
            self.progress(f"Stopped after {pruned.streams:,} streams; run it again to continue.")
        self.write_data(pruned.to_dict())


def _pages(options: Mapping[str, Any]) -> Iterator[StreamList]:
    left, cursor = options["limit"], options["cursor"]
    while left > 0:
        page = list_streams(
            using=options["database"],
            tenant=options["tenant"],
            status=options["status"],
            limit=min(left, _LONGEST_PAGE),
            cursor=cursor,
        )
        yield page
        left, cursor = left - len(page.streams), page.next_cursor
        if cursor is None:
            return


def _tenant_of(stream_id: str, options: Mapping[str, Any]) -> str:
    """Return the specified tenant, or the only one with such a stream. Raise `StreamNotFound`."""
    if options["tenant"] is not None:
        return str(options["tenant"])
    tenants = tenants_of_stream(stream_id, using=options["database"])
    if not tenants:
        raise StreamNotFound(stream_id)
    return only_tenant(tenants, f"stream {visible(stream_id)}")


async def _info(streams: DatabaseStreamManager, stream_id: str) -> StreamInfo:
    info = await streams.get_info(stream_id)
    if info is None:
        raise StreamNotFound(stream_id)
    return info


def _name(stream_id: str, tenant: str) -> str:
    """Return the arguments that select a stream, quoted for a shell."""
    named = shlex.quote(visible(stream_id))
    return f"{named} --tenant {shlex.quote(visible(tenant))}" if tenant else named


def _line(stored: StoredChunk) -> str:
    rest = {name: value for name, value in stored.chunk.items() if name != "type"}
    values = " ".join(f"{name}={json.dumps(value, ensure_ascii=False)}" for name, value in rest.items())
    return visible(f"{stored.sequence:>6}  {stored.chunk['type']}  {values}".rstrip())


def _age(seconds: float) -> str:
    for unit, length in (("d", 86_400), ("h", 3_600), ("m", 60)):
        if seconds >= length:
            return f"{seconds // length:.0f}{unit}"
    return f"{seconds:.0f}s"
