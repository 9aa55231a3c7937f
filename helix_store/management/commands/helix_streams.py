"""``helix_streams``: list streams, follow one, and prune."""

from __future__ import annotations

import asyncio
import json
import shlex
from collections.abc import Iterator, Mapping
from contextlib import aclosing
from datetime import datetime
from typing import Any, Final

from django.core.management.base import CommandError

from helix_store.core import validation
from helix_store.core.streams import PrunedStreams, StoredChunk
from helix_store.core.types import StreamStatus
from helix_store.engine.database import Database
from helix_store.exceptions import InvalidPayload, StreamNotFound, StreamTruncated
from helix_store.management.base import PROBLEMS_FOUND, USAGE, StoreCommandWithParts, at_least
from helix_store.management.output import Column, status_style
from helix_store.management.session_argument import only_tenant
from helix_store.management.text import cut, visible
from helix_store.management.times import moment_of, project_zone, time_or_age
from helix_store.stores import DatabaseStreamManager
from helix_store.streams.listing import ListedStream, StreamList, WriterState, list_streams, tenants_of_stream
from helix_store.streams.pruning import prune_batches
from helix_store.streams.rules import PruneRequest
from helix_store.streams.tail import StreamTail

__all__ = ["Command"]

_LONGEST_PAGE: Final = 200
_COLUMNS: Final = (
    Column(heading="tenant", cut="middle"),
    Column(heading="stream", cut="id", minimum=36),
    Column(heading="status", cut="never", style=status_style),
    Column(heading="chunks", cut="never", right=True),
    Column(heading="last", cut="never", right=True),
    Column(heading="age", cut="never", right=True),
    Column(heading="writer", cut="middle", is_optional=True),
    Column(heading="lease", cut="never", is_optional=True, style=lambda text: _LEASE_STYLES.get(text)),
)
_LEASE_STYLES: Final[dict[str, Any]] = {WriterState.ALIVE.value: "cyan", WriterState.LOST.value: "red"}
_END_KEYS: Final = ("stream_id", "status", "last_sequence", "output", "error")


class Command(StoreCommandWithParts):
    help = "List streams, follow a stream, and remove old chunks."

    def add_parts(self, parts: Any) -> None:
        self._add_list(parts)
        self._add_tail(parts)
        self._add_prune(parts)

    # --- list

    def _add_list(self, parts: Any) -> None:
        parser = self.add_part(
            parts,
            "list",
            self._list,
            help="List streams, the newest first. The age is the time since the last change.",
            epilog="example: manage.py helix_streams list --status ended --limit 20",
        )
        parser.add_argument(
            "--status",
            choices=[status.value for status in StreamStatus],
            help="Only streams with this status.",
        )
        parser.add_argument(
            "--limit", type=at_least(1), default=50, help="At most this many streams (default: %(default)s)."
        )
        parser.add_argument("--cursor", help="Continue after a list with the same filters.")

    def _list(self, options: dict[str, Any]) -> None:
        # If the tenant was specified, it needs no column.
        first = 0 if options["tenant"] is None else 1
        self.write_list(
            "streams",
            _pages(options),
            columns=_COLUMNS[first:],
            row=lambda stream: _row(stream)[first:],
            to_dict=ListedStream.to_dict,
            form=options["format"],
        )

    # --- tail

    def _add_tail(self, parts: Any) -> None:
        parser = self.add_part(
            parts,
            "tail",
            self._tail,
            help=(
                "Print the chunks of a stream as they arrive, until it ends, fails or pauses. "
                "Ctrl-C prints the position to continue from."
            ),
            epilog="example: manage.py helix_streams tail trip-1 --from 1",
        )
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

    def _tail(self, options: dict[str, Any]) -> None:
        stream_id = options["stream_id"]
        tenant = _tenant_of(stream_id, options)
        streams = DatabaseStreamManager(options["database"], tenant=tenant)
        again = f"go on with: manage.py helix_streams tail {_name(stream_id, tenant)} --from"
        asyncio.run(self._print_stream(streams, again, options))

    async def _print_stream(
        self, streams: DatabaseStreamManager, again: str, options: Mapping[str, Any]
    ) -> None:
        tail = await StreamTail.of(streams, options["stream_id"], after=options["after"])
        if tail.removed and options["after"] is None:
            self.progress(f"The first {tail.removed:,} chunks were removed.")
        try:
            await self._print_chunks(tail, options)
        except StreamTruncated as exc:
            what = f"Chunks up to {exc.oldest - 1} were removed" if exc.oldest > 1 else "The stream was reset"
            raise CommandError(f"{what}; {again} {exc.oldest - 1}", returncode=PROBLEMS_FOUND) from exc
        except BaseException:
            self.progress(f"Stopped after sequence {tail.position}; {again} {tail.position}")
            raise
        if options["format"] == "json":
            end = {name: value for name, value in tail.info.to_dict().items() if name in _END_KEYS}
            self.write_text(json.dumps({"tenant": streams.tenant, "position": tail.position, **end}))
        is_at_end = tail.position >= tail.info.last_sequence
        if tail.info.status is StreamStatus.ACTIVE or not is_at_end:
            self.progress(f"Stopped after sequence {tail.position}; {again} {tail.position}")
        elif tail.info.status is StreamStatus.FAILED:
            error = visible(json.dumps(tail.info.error))
            raise CommandError(
                f"The stream failed after sequence {tail.position}: {error}", returncode=PROBLEMS_FOUND
            )
        else:
            self.progress(f"The stream is {tail.info.status.value}, after sequence {tail.position}.")

    async def _print_chunks(self, tail: StreamTail, options: Mapping[str, Any]) -> None:
        write = self._write_chunk_as_json if options["format"] == "json" else self._write_chunk
        async with aclosing(tail.chunks(follow=options["follow"], is_stopped=self.stop.is_set)) as chunks:
            async for stored in chunks:
                write(stored)

    def _write_chunk(self, stored: StoredChunk) -> None:
        rest = {name: value for name, value in stored.chunk.items() if name != "type"}
        values = " ".join(f"{name}={json.dumps(value, ensure_ascii=False)}" for name, value in rest.items())
        line = visible(f"{stored.sequence:>6}  {stored.chunk['type']}  {values}".rstrip())
        self.write_text(line if self.width is None else cut(line, self.width))

    def _write_chunk_as_json(self, stored: StoredChunk) -> None:
        self.write_text(json.dumps(stored.to_dict()))

    # --- prune

    def _add_prune(self, parts: Any) -> None:
        parser = self.add_part(
            parts,
            "prune",
            self._prune,
            help=(
                "Fail streams with a lost writer, and remove chunks of streams that ended too long ago, "
                "chunks whose retention is over, and surplus chunks. The streams stay."
            ),
            epilog="example: manage.py helix_streams prune --older-than 7d --keep-chunks 10000 --dry-run",
        )
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

    def _prune(self, options: dict[str, Any]) -> None:
        tenant = _tenant(options)
        older_than = options["older_than"]
        if isinstance(older_than, datetime):
            # An age is measured by the database's clock.
            older_than = moment_of(older_than, project_zone())
        request = PruneRequest.checked(
            older_than=older_than,
            keep_chunks=options["keep_chunks"],
            dry_run=options["dry_run"],
        )
        pruned = PrunedStreams(streams=0, chunks=0, failed=0)
        with self.progress_bar("chunks") as progress:
            for pruned in prune_batches(Database(options["database"], tenant or "", None), tenant, request):
                progress.update(pruned.chunks)
                if self.stop.is_set():
                    break
        if self.stop.is_set():
            self.progress(f"Stopped after {pruned.streams:,} streams; run it again to continue.")
        self.write_data(pruned.to_dict(), form=options["format"])


def _pages(options: Mapping[str, Any]) -> Iterator[StreamList]:
    left, cursor = options["limit"], options["cursor"]
    while left > 0:
        page = list_streams(
            using=options["database"],
            tenant=_tenant(options),
            status=options["status"],
            limit=min(left, _LONGEST_PAGE),
            cursor=cursor,
        )
        yield page
        left, cursor = left - len(page.streams), page.next_cursor
        if cursor is None:
            return


def _tenant(options: Mapping[str, Any]) -> str | None:
    tenant: str | None = options["tenant"]
    try:
        return None if tenant is None else validation.tenant(tenant)
    except InvalidPayload as exc:
        raise CommandError(f"--tenant: {exc.reason}.", returncode=USAGE) from exc


def _tenant_of(stream_id: str, options: Mapping[str, Any]) -> str:
    """Return the specified tenant, or the only one with such a stream. Raise `StreamNotFound`."""
    given = _tenant(options)
    if given is not None:
        return given
    try:
        tenants = tenants_of_stream(stream_id, using=options["database"])
    except InvalidPayload as exc:
        raise CommandError(
            f"{visible(stream_id)!r} is not a stream id: {exc.reason}.", returncode=USAGE
        ) from exc
    if not tenants:
        raise StreamNotFound(stream_id)
    return only_tenant(tenants, f"stream {visible(stream_id)}")


def _name(stream_id: str, tenant: str) -> str:
    """Return the arguments that select a stream, quoted for a shell."""
    named = shlex.quote(visible(stream_id))
    return f"{named} --tenant {shlex.quote(visible(tenant))}" if tenant else named


def _row(stream: ListedStream) -> list[Any]:
    return [
        stream.tenant,
        stream.stream_id,
        stream.status.value,
        f"{stream.chunk_count:,}",
        f"{stream.last_sequence:,}",
        _age(stream.age_seconds),
        f"{stream.agent_name} {stream.run_id}",
        "" if stream.writer is WriterState.NONE else stream.writer.value,
    ]


def _age(seconds: float) -> str:
    for unit, length in (("d", 86_400), ("h", 3_600), ("m", 60)):
        if seconds >= length:
            return f"{seconds // length:.0f}{unit}"
    return f"{seconds:.0f}s"
