"""The SQL of retention and erasure."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Final

from helix_store.catalogue.rows import children_of_sessions
from helix_store.core.types import RunStatus, SessionStatus, StreamStatus
from helix_store.engine.clocks import CITUS, POSTGRESQL, SQLITE, Clock, with_clock
from helix_store.engine.expressions import is_in_list
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


def _in_keys(form: Callable[[str, Clock], str], column: str) -> Statement:
    """Return a statement, for each database, with a condition on the keys in the parameter ``keys``."""
    postgresql, sqlite = is_in_list(column, "keys", "bigint")
    return Statement(form(postgresql, POSTGRESQL), form(sqlite, SQLITE), citus=(form(postgresql, CITUS),))


# --- Sessions by their keys ---------------------------------------------------------------------------

LINKS_INTO: Final = _in_keys(
    lambda in_keys, clock: (
        f"""
    SELECT child.id, parent.id FROM {_SESSION} AS child JOIN {_SESSION} AS parent
        ON parent.tenant = child.tenant AND parent.session_id = child.parent_session_id
    WHERE {in_keys}
  UNION ALL
    SELECT child.id, ref.session_id FROM {_SESSION} AS child
    JOIN {_REF} AS ref ON ref.sub_session_id = child.session_id AND ref.location = 'local'
    JOIN {_SESSION} AS owner ON owner.id = ref.session_id AND owner.tenant = child.tenant
    WHERE {in_keys}"""
    ),
    "child.id",
)
"""The keys of these sessions, each with the key of a session that has it as a sub-session."""

_AGES: Final = " ".join(f"WHEN '{status}' THEN updated_at <= %({status})s" for status in SessionStatus)

NOT_IDLE: Final = _in_keys(
    lambda in_keys, clock: (
        f"""
        SELECT id FROM {_SESSION}
        WHERE {in_keys} AND NOT coalesce(CASE status {_AGES} END, FALSE)"""
    ),
    "id",
)
"""The keys of sessions written after the cutoff of their status. Without a cutoff, they are never idle."""

IN_USE: Final = _in_keys(
    lambda in_keys, clock: (
        f"""
        SELECT s.id FROM {_SESSION} AS s WHERE {in_keys} AND (
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
    ),
    "s.id",
)
"""The keys of sessions with a running run, a live lock, or a stream with a live writer."""


def _streams_of_no_other(in_keys: str, clock: Clock) -> str:
    chosen, not_chosen = in_keys.format(row="s"), f"NOT ({in_keys.format(row='o')})"
    # The search for other sessions is split in two, so that each part is one index lookup.
    other = f"SELECT 1 FROM {_SESSION} AS o WHERE o.tenant = st.tenant AND o.stream_id = st.stream_id"
    return f"""
        SELECT st.id, st.last_sequence - st.floor,
            st.status = '{StreamStatus.ACTIVE.value}' AND st.lease_expires_at <= {clock.now}
        FROM {_STREAM} AS st
        WHERE st.tenant = (SELECT %(tenant)s)
            AND st.stream_id IN (SELECT s.stream_id FROM {_SESSION} AS s WHERE {chosen})
            AND NOT EXISTS ({other} AND o.session_id = st.stream_id AND {not_chosen})
            AND NOT EXISTS (
                {other} AND (o.stream_id < o.session_id OR o.stream_id > o.session_id) AND {not_chosen}
            )"""


STREAMS_OF_NO_OTHER: Final = _in_keys(_streams_of_no_other, "{row}.id")
"""The key, chunk count and lost-writer flag of streams that only these sessions refer to."""


@cache
def row_counts() -> Statement:
    """Return the statement that counts rows of these sessions, in the order of `children_of_sessions`.

    It is built on first use, because only then is every model known.
    """

    def form(in_keys: str, clock: Clock) -> str:
        counts = (
            f"(SELECT count(*) FROM {table(child.related_model)} AS c "
            f"WHERE {in_keys.replace('key_of_session', f'c.{child.field.column}')})"
            for child in children_of_sessions()
        )
        return f"SELECT {', '.join(counts)}"

    return _in_keys(form, "key_of_session")


# --- Usage --------------------------------------------------------------------------------------------


def _anonymise(in_keys: str, random_id: str) -> str:
    # Rows that are already anonymous are not written again.
    return f"""
        UPDATE {table(UsageEntry)} SET user_id = NULL, session_id = NULL, run_id = NULL,
            sub_session_id = NULL, recorded_for = '', entry_id = {random_id}
        WHERE {in_keys} AND recorded_for <> '' RETURNING id"""


# Citus does not allow random functions in an UPDATE.
_DIGEST_OF_ID: Final = "left(encode(pg_catalog.sha256((%(secret)s || id::text)::bytea), 'hex'), 32)"
ANONYMISE_USAGE: Final = Statement(
    *map(_anonymise, is_in_list("id", "keys", "bigint"), (_DIGEST_OF_ID, "lower(hex(randomblob(16)))"))
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
"""The id and the number of surplus step checkpoints of sessions that are not in use, ordered by id."""

SURPLUS_CHECKPOINTS: Final = _in_keys(
    lambda in_keys, clock: (
        f"""
        SELECT coalesce(sum(grouped.surplus), 0) FROM (
            SELECT count(*) - %(keep)s AS surplus FROM {table(Checkpoint)} AS c
            WHERE {in_keys} AND {_IS_STEP} GROUP BY c.session_id HAVING count(*) > %(keep)s
        ) AS grouped"""
    ),
    "c.session_id",
)
"""The total number of surplus step checkpoints of these sessions."""
