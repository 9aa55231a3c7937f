"""The SQL of streams. An append is one statement on PostgreSQL, and two on SQLite.

The update of the head locks it until the commit, so the sequences it hands out become visible in order.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from django.db.backends.base.base import BaseDatabaseWrapper

from helix_store.engine.clocks import CLOCKS
from helix_store.models import Stream, StreamChunk

__all__ = ["StreamStatements", "stream_statements"]


@dataclass(frozen=True, slots=True)
class StreamStatements:
    """Parameters are named."""

    open: str
    advance: str
    """Number the chunks to come; returns key and last sequence of a stream that takes chunks."""
    append: str | None
    """The same together with the chunks, in one statement; ``None`` where that is not possible."""
    renew: str
    release: str
    settle: str
    page: str
    """A head with the chunks of a range, or with one empty chunk; nothing for an unknown stream."""
    joined_page: str | None
    """The same in one row: the first sequence, and the payloads joined by line breaks, which none contains.

    Handing over many rows takes longer than finding them. ``None`` where text cannot be joined in order.
    """
    fail_lost: str
    lost: str


def stream_statements(connection: BaseDatabaseWrapper) -> StreamStatements:
    quote = connection.ops.quote_name
    return _statements(connection.vendor, quote(Stream._meta.db_table), quote(StreamChunk._meta.db_table))


@cache
def _statements(vendor: str, stream: str, chunk: str) -> StreamStatements:
    # Table names are our own, and every value is a parameter.
    clock = CLOCKS[vendor]
    lease_end = clock.in_milliseconds.replace("%s", "%(lease_ms)s")
    keep_end = clock.in_milliseconds.replace("%s", "%(keep_ms)s")
    row = "tenant = %(tenant)s AND stream_id = %(stream_id)s"
    takes_chunks = f"{row} AND status = 'active'"
    advance = f"""
        UPDATE {stream} SET
            last_sequence = last_sequence + %(count)s,
            updated_at = {clock.now},
            writer_id = COALESCE(CAST(%(writer_id)s AS varchar), writer_id),
            lease_expires_at = CASE
                WHEN CAST(%(writer_id)s AS varchar) IS NULL AND lease_expires_at IS NULL THEN NULL
                ELSE {lease_end} END
        WHERE {takes_chunks}
        RETURNING id, last_sequence"""
    append = joined_page = None
    skip_busy = ""
    if vendor == "postgresql":
        append = f"""
            WITH head AS ({advance}), written AS (
                INSERT INTO {chunk} (stream_id, sequence, payload)
                SELECT head.id, head.last_sequence - %(count)s + part.number, part.payload
                FROM head, unnest(%(texts)s::text[]) WITH ORDINALITY AS part(payload, number)
            )
            SELECT id, last_sequence FROM head"""
        joined_page = f"""
            SELECT stream.id, generation, status, last_sequence, floor, first_sequence, payloads
            FROM {stream} AS stream CROSS JOIN LATERAL (
                SELECT min(sequence) AS first_sequence,
                    string_agg(payload, chr(10) ORDER BY sequence) AS payloads
                FROM {chunk}
                WHERE stream_id = stream.id AND sequence > %(after)s AND sequence <= %(last)s
            ) AS chunks
            WHERE stream.{row.replace("AND ", "AND stream.")}"""
        skip_busy = "FOR NO KEY UPDATE SKIP LOCKED"
    of_tenant = "(CAST(%(tenant)s AS varchar) IS NULL OR tenant = %(tenant)s)"
    is_lost = f"status = 'active' AND lease_expires_at <= {clock.now} AND {of_tenant}"
    return StreamStatements(
        open=f"""
            INSERT INTO {stream} AS known
                (tenant, stream_id, status, last_sequence, floor, generation, is_emptied,
                 run_id, agent_name, writer_id, lease_expires_at, created_at, updated_at)
            VALUES (%(tenant)s, %(stream_id)s, 'active', 0, 0, 0, %(no)s,
                    %(run_id)s, %(agent_name)s, %(writer_id)s, {lease_end}, {clock.now}, {clock.now})
            ON CONFLICT (tenant, stream_id) DO UPDATE SET
                run_id = excluded.run_id, agent_name = excluded.agent_name,
                writer_id = excluded.writer_id, lease_expires_at = excluded.lease_expires_at,
                updated_at = excluded.updated_at
            WHERE known.status = 'active'
            RETURNING id""",
        advance=advance,
        append=append,
        joined_page=joined_page,
        renew=f"""
            UPDATE {stream} SET writer_id = %(writer_id)s, lease_expires_at = {lease_end}
            WHERE {takes_chunks} RETURNING id""",
        release=f"""
            UPDATE {stream} SET lease_expires_at = NULL
            WHERE {row} AND writer_id = %(writer_id)s RETURNING id""",
        settle=f"""
            UPDATE {stream} SET
                status = %(status)s, output = %(output)s, error = %(error)s, lease_expires_at = NULL,
                updated_at = {clock.now},
                ended_at = CASE WHEN %(is_over)s THEN {clock.now} END,
                keep_until = CASE WHEN %(is_kept)s THEN {keep_end} END,
                is_emptied = %(no)s
            WHERE id = %(key)s""",
        page=f"""
            SELECT stream.id, stream.generation, stream.status, stream.last_sequence, stream.floor,
                   chunk.sequence, chunk.payload
            FROM {stream} AS stream LEFT JOIN {chunk} AS chunk
                ON chunk.stream_id = stream.id
                AND chunk.sequence > %(after)s AND chunk.sequence <= %(last)s
            WHERE stream.{row.replace("AND ", "AND stream.")}
            ORDER BY chunk.sequence""",
        fail_lost=f"""
            UPDATE {stream} SET
                status = 'failed', error = %(error)s, lease_expires_at = NULL,
                ended_at = {clock.now}, updated_at = {clock.now}, is_emptied = %(no)s
            WHERE id IN (SELECT id FROM {stream} WHERE {is_lost} ORDER BY id LIMIT %(limit)s {skip_busy})
            RETURNING id, last_sequence""",
        lost=f"SELECT count(*) FROM {stream} WHERE {is_lost}",
    )
