"""The SQL of streams, which uses only the database's clock.

The update of the head locks it until the commit, so readers see sequences in commit order. All
conditions of a write are on that row, so that PostgreSQL checks them again after a wait.
"""

from __future__ import annotations

from typing import Final

from helix_store.engine.clocks import CITUS, POSTGRESQL, SQLITE, Clock, with_clock
from helix_store.engine.expressions import tenants_with
from helix_store.engine.statement import Statement, table
from helix_store.models import Stream, StreamChunk

_STREAM: Final = table(Stream)
_CHUNK: Final = table(StreamChunk)

STREAM_BY_ID: Final = "tenant = %(tenant)s AND stream_id = %(stream_id)s"
_ACTIVE: Final = f"{STREAM_BY_ID} AND status = 'active'"
_LOCK_ACTIVE: Final = f"SELECT id FROM {_STREAM} WHERE {_ACTIVE} FOR NO KEY UPDATE"

# --- Writers ---------------------------------------------------------------------------------------


def _insert(clock: Clock) -> str:
    return f"""
        INSERT INTO {_STREAM} AS known
            (tenant, stream_id, status, last_sequence, floor, generation, is_emptied,
             run_id, agent_name, writer_id, lease_expires_at, created_at, updated_at)
        VALUES (%(tenant)s, %(stream_id)s, 'active', 0, 0, 0, FALSE,
                %(run_id)s, %(agent_name)s, %(writer_id)s, {clock.after("lease_ms")},
                {clock.now}, {clock.now})
        ON CONFLICT (tenant, stream_id)"""


def _open(clock: Clock) -> str:
    return f"""{_insert(clock)} DO UPDATE SET
            run_id = excluded.run_id, agent_name = excluded.agent_name,
            writer_id = excluded.writer_id, lease_expires_at = excluded.lease_expires_at,
            updated_at = excluded.updated_at
        WHERE known.status = 'active'
        RETURNING id"""


OPEN: Final = Statement(
    _open(POSTGRESQL),
    _open(SQLITE),
    # The row exists after the first statement, so the lease begins after any wait for the row.
    citus=(f"{_insert(CITUS)} DO NOTHING", _LOCK_ACTIVE, _open(CITUS)),
)
"""Create the stream, or give the lease of an active stream to another writer."""


def _advance(clock: Clock) -> str:
    return f"""
        UPDATE {_STREAM} SET
            last_sequence = last_sequence + %(count)s,
            updated_at = {clock.now},
            writer_id = COALESCE(CAST(%(writer_id)s AS varchar), writer_id),
            lease_expires_at = CASE
                WHEN CAST(%(writer_id)s AS varchar) IS NULL AND lease_expires_at IS NULL THEN NULL
                ELSE {clock.after("lease_ms")} END
        WHERE {_ACTIVE}
        RETURNING id, last_sequence"""


_CALL_ID: Final = "CASE WHEN part.number = 1 THEN %(call_id)s END"

APPEND: Final = Statement(
    f"""
    WITH head AS ({_advance(POSTGRESQL)}), written AS (
        INSERT INTO {_CHUNK} (stream_id, sequence, payload, call_id)
        SELECT head.id, head.last_sequence - %(count)s + part.number, part.payload, {_CALL_ID}
        FROM head, unnest(%(texts)s::text[]) WITH ORDINALITY AS part(payload, number)
    )
    SELECT id, last_sequence FROM head"""
)
"""`ADVANCE` and `INSERT_CHUNKS` in one statement, for PostgreSQL. ``texts`` is a list."""

ADVANCE: Final = with_clock(_advance, locks=_LOCK_ACTIVE)
"""Take the sequences of new chunks and renew the lease. It returns nothing if the stream is not active."""

INSERT_CHUNKS: Final = Statement(
    postgresql=f"""
        INSERT INTO {_CHUNK} (stream_id, sequence, payload, call_id)
        SELECT %(key)s, %(before)s + part.number, part.payload, {_CALL_ID}
        FROM json_array_elements_text(%(texts)s::json) WITH ORDINALITY AS part(payload, number)""",
    sqlite=f"""
        INSERT INTO {_CHUNK} (stream_id, sequence, payload, call_id)
        SELECT %(key)s, %(before)s + 1 + part.key, part.value,
            CASE WHEN part.key = 0 THEN %(call_id)s END
        FROM json_each(%(texts)s) AS part""",
)
"""Store chunks under the sequences after ``before``.

``texts`` is a JSON array, so that one statement text serves any number of rows.
"""

RENEW: Final = with_clock(
    lambda clock: (
        f"""
        UPDATE {_STREAM} SET writer_id = %(writer_id)s, lease_expires_at = {clock.after("lease_ms")}
        WHERE {_ACTIVE} RETURNING id"""
    ),
    locks=_LOCK_ACTIVE,
)

RELEASE: Final = Statement(
    f"""
    UPDATE {_STREAM} SET lease_expires_at = NULL
    WHERE {STREAM_BY_ID} AND writer_id = %(writer_id)s RETURNING id"""
)

SET_STATUS: Final = with_clock(
    lambda clock: (
        f"""
        UPDATE {_STREAM} SET
            status = %(status)s, output = %(output)s, error = %(error)s, lease_expires_at = NULL,
            updated_at = {clock.now},
            ended_at = CASE WHEN %(is_over)s THEN {clock.now} END,
            keep_until = CASE WHEN %(is_kept)s THEN {clock.after("keep_ms")} END,
            is_emptied = FALSE
        WHERE id = %(key)s"""
    )
)

# --- Readers ---------------------------------------------------------------------------------------

_OF_PAGE: Final = f"""
        FROM {_CHUNK} WHERE stream_id = stream.id AND sequence > %(after)s AND sequence <= %(last)s"""


def _page(chunks: str) -> str:
    return f"""
    SELECT stream.id, generation, status, last_sequence, floor, {chunks}
    WHERE stream.tenant = %(tenant)s AND stream.stream_id = %(stream_id)s"""


PAGE: Final = Statement(
    postgresql=_page(f"""first_sequence, payloads FROM {_STREAM} AS stream CROSS JOIN LATERAL (
        SELECT min(sequence) AS first_sequence, string_agg(payload, chr(10) ORDER BY sequence) AS payloads
        {_OF_PAGE}) AS chunks"""),
    sqlite=_page(f"""
        (SELECT min(sequence) {_OF_PAGE}),
        (SELECT group_concat(payload, char(10)) FROM (SELECT payload {_OF_PAGE} ORDER BY sequence))
    FROM {_STREAM} AS stream"""),
)
"""A head with the first sequence and the payloads of a range, or NULL if there are no chunks; no row for an
unknown stream. The payloads are joined by line breaks, which no payload contains, because transferring many
rows takes longer than finding them.
"""

TENANTS_OF: Final = tenants_with(_STREAM, "stream_id")
"""The tenants that have a stream with this id."""

# --- Pruning and deleting --------------------------------------------------------------------------


def _is_lost(clock: Clock) -> str:
    """Select active streams whose writer's lease has expired, of one tenant or of all."""
    of_tenant = "(CAST(%(tenant)s AS varchar) IS NULL OR tenant = %(tenant)s)"
    return f"status = 'active' AND lease_expires_at <= {clock.now} AND {of_tenant}"


def _fail_lost(clock: Clock, lock: str = "") -> str:
    return f"""
        UPDATE {_STREAM} SET
            status = 'failed', error = %(error)s, lease_expires_at = NULL,
            ended_at = {clock.now}, updated_at = {clock.now}, is_emptied = FALSE
        WHERE id IN (SELECT id FROM {_STREAM} WHERE {_is_lost(clock)} ORDER BY id LIMIT %(limit)s {lock})
        RETURNING id, last_sequence"""


_SKIP_LOCKED: Final = "FOR NO KEY UPDATE SKIP LOCKED"
FAIL_LOST: Final = Statement(
    _fail_lost(POSTGRESQL, _SKIP_LOCKED), _fail_lost(SQLITE), citus=(_fail_lost(CITUS, _SKIP_LOCKED),)
)
COUNT_LOST: Final = with_clock(lambda clock: f"SELECT count(*) FROM {_STREAM} WHERE {_is_lost(clock)}")

DELETE_CHUNKS: Final = Statement(f"DELETE FROM {_CHUNK} WHERE stream_id = %(key)s AND sequence <= %(last)s")
DELETE_STREAM: Final = Statement(f"DELETE FROM {_STREAM} WHERE id = %(key)s")

# --- Notifications ---------------------------------------------------------------------------------

SEND_NOTIFICATIONS: Final = Statement(
    """
    SELECT set_config('synchronous_commit', 'off', true), pg_notify(%(channel)s, payload)
    FROM unnest(%(payloads)s::text[]) AS payload"""
)
"""For PostgreSQL. The commit does not wait for the disk, because polling finds what a crash loses."""
