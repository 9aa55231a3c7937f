"""The SQL of retention and erasure."""

from __future__ import annotations

from functools import cache
from typing import Final

from helix_store.catalogue.rows import children_of_sessions
from helix_store.core.types import RunStatus, SessionStatus, StreamStatus
from helix_store.engine.clocks import Clock, with_clock
from helix_store.engine.expressions import for_keys
from helix_store.engine.statement import Statement, table
from helix_store.models import (
    Checkpoint,
    CheckpointKind,
    Lock,
    Run,
    Session,
    Stream,
    SubSessionRef,
    UsageEntry,
)

_SESSION: Final = table(Session)
_REF: Final = table(SubSessionRef)
_STREAM: Final = table(Stream)

# --- Sessions by their keys ---------------------------------------------------------------------------

LINKS_INTO: Final = for_keys(
    f"""
    SELECT child.id, parent.id FROM {_SESSION} AS child JOIN {_SESSION} AS parent
        ON parent.tenant = child.tenant AND parent.session_id = child.parent_session_id
    WHERE child.id IN %(keys)s
  UNION ALL
    SELECT child.id, ref.session_id FROM {_SESSION} AS child
    JOIN {_REF} AS ref ON ref.sub_session_id = child.session_id AND ref.location = 'local'
    JOIN {_SESSION} AS owner ON owner.id = ref.session_id AND owner.tenant = child.tenant
    WHERE child.id IN %(keys)s"""
)
"""The keys of these sessions, each with the key of a session of which it is a sub-session."""

_AGES: Final = " ".join(f"WHEN '{status}' THEN updated_at <= %({status})s" for status in SessionStatus)

NOT_IDLE: Final = for_keys(
    f"""
    SELECT id FROM {_SESSION}
    WHERE id IN %(keys)s AND NOT coalesce(CASE status {_AGES} END, FALSE)"""
)
"""The keys of sessions written after the cutoff for their status. Without a cutoff, they are never idle."""


def _in_use(clock: Clock) -> str:
    return f"""
        SELECT s.id FROM {_SESSION} AS s WHERE s.id IN %(keys)s AND (
            EXISTS (
                SELECT 1 FROM {table(Run)} AS r
                WHERE r.session_id = s.id AND r.status = '{RunStatus.RUNNING.value}'
            ) OR EXISTS (
                SELECT 1 FROM {table(Lock)} AS l
                WHERE l.tenant = s.tenant AND l.name = s.session_id AND l.expires_at > {clock.now}
            ) OR EXISTS (
                SELECT 1 FROM {_STREAM} AS st
                WHERE st.tenant = s.tenant AND st.stream_id = s.stream_id
                    AND st.status = '{StreamStatus.ACTIVE.value}' AND st.lease_expires_at > {clock.now}
            )
        )"""


IN_USE: Final = for_keys(with_clock(_in_use))
"""The keys of sessions with a running run, a live lock, or a stream with a live writer."""


def _streams_of_no_other(clock: Clock) -> str:
    not_chosen = "NOT (o.id IN %(keys)s)"
    # The search for other sessions is split in two, so that each part is one index lookup.
    other = f"SELECT 1 FROM {_SESSION} AS o WHERE o.tenant = st.tenant AND o.stream_id = st.stream_id"
    return f"""
        SELECT st.id, st.last_sequence - st.floor,
            st.status = '{StreamStatus.ACTIVE.value}' AND st.lease_expires_at <= {clock.now}
        FROM {_STREAM} AS st
        WHERE st.tenant = (SELECT %(tenant)s)
            AND st.stream_id IN (SELECT s.stream_id FROM {_SESSION} AS s WHERE s.id IN %(keys)s)
            AND NOT EXISTS ({other} AND o.session_id = st.stream_id AND {not_chosen})
            AND NOT EXISTS (
                {other} AND (o.stream_id < o.session_id OR o.stream_id > o.session_id) AND {not_chosen}
            )"""


STREAMS_OF_NO_OTHER: Final = for_keys(with_clock(_streams_of_no_other))
"""The key, the chunk count and the lost-writer flag of streams that only these sessions refer to."""


@cache
def row_counts() -> Statement:
    """Return the statement that counts rows of these sessions, in the order of `children_of_sessions`.

    It is built on first use, because only then are all models known.
    """
    counts = (
        f"(SELECT count(*) FROM {table(child.related_model)} WHERE {child.field.column} IN %(keys)s)"
        for child in children_of_sessions()
    )
    return for_keys(f"SELECT {', '.join(counts)}")


# --- Usage --------------------------------------------------------------------------------------------


def _anonymise(random_id: str) -> str:
    # Rows that are already anonymous are not written again.
    return f"""
        UPDATE {table(UsageEntry)} SET user_id = NULL, session_id = NULL, run_id = NULL,
            sub_session_id = NULL, recorded_for = '', entry_id = {random_id}
        WHERE id IN %(keys)s AND recorded_for <> '' RETURNING id"""


# Citus does not allow random functions in an UPDATE.
_DIGEST_OF_ID: Final = "left(encode(pg_catalog.sha256((%(secret)s || id::text)::bytea), 'hex'), 32)"
ANONYMISE_USAGE: Final = for_keys(
    Statement(_anonymise(_DIGEST_OF_ID), _anonymise("lower(hex(randomblob(16)))"))
)
"""Remove the user, the session and the run from usage entries.

The id of an entry is also replaced, because it may be derived from the session's id. ``secret`` is random.
"""


# --- Checkpoints --------------------------------------------------------------------------------------

_IS_STEP: Final = f"c.kind = '{CheckpointKind.STEP.value}' AND c.namespace = ''"


def _too_many_checkpoints(clock: Clock) -> str:
    checkpoints = f"""
        {table(Checkpoint)} AS c
        WHERE c.session_id = s.id AND {_IS_STEP}"""
    return f"""
        SELECT s.session_id, (SELECT count(*) FROM {checkpoints}) - %(keep)s
        FROM {_SESSION} AS s
        WHERE s.tenant = (SELECT %(tenant)s) AND s.session_id > %(after)s
            AND (SELECT c.version FROM {checkpoints} ORDER BY c.version DESC LIMIT 1 OFFSET %(keep)s)
                IS NOT NULL
            AND NOT EXISTS (
                SELECT 1 FROM {table(Run)} AS r
                WHERE r.session_id = s.id AND r.status = '{RunStatus.RUNNING.value}'
            )
            AND NOT EXISTS (
                SELECT 1 FROM {table(Lock)} AS l
                WHERE l.tenant = s.tenant AND l.name = s.session_id AND l.expires_at > {clock.now}
            )
        ORDER BY s.session_id LIMIT %(limit)s"""


TOO_MANY_CHECKPOINTS: Final = with_clock(_too_many_checkpoints)
"""The id of each session that is not in use, and its number of surplus step checkpoints, ordered by id."""

SURPLUS_CHECKPOINTS: Final = for_keys(
    f"""
    SELECT coalesce(sum(grouped.surplus), 0) FROM (
        SELECT count(*) - %(keep)s AS surplus FROM {table(Checkpoint)} AS c
        WHERE c.session_id IN %(keys)s AND {_IS_STEP} GROUP BY c.session_id HAVING count(*) > %(keep)s
    ) AS grouped"""
)
"""The total number of surplus step checkpoints of these sessions."""
