"""The statements of the saver. On PostgreSQL each write and each page is one statement.

A write to a known thread takes a share lock on the session's row, so that the session cannot be deleted in
the meantime; writers of one thread do not wait for each other. The session is looked up by a scalar subquery
and never joined, so that the planner reads the rows of a session by their index, regardless of the size of
the tables.
"""

from __future__ import annotations

from functools import cache
from typing import Final

from helix_store.contrib.langgraph.models import LangGraphCheckpoint, LangGraphValue, LangGraphWrite
from helix_store.engine.expressions import for_keys, is_in_list, looked_up
from helix_store.engine.statement import Statement, table
from helix_store.models import Session
from helix_store.sessions.statements import SESSION_BY_ID

_SESSION: Final = table(Session)
_CHECKPOINT: Final = table(LangGraphCheckpoint)
_VALUE: Final = table(LangGraphValue)
_WRITE: Final = table(LangGraphWrite)

_KNOWN_SESSION: Final = f"SELECT id FROM {_SESSION} WHERE {SESSION_BY_ID}"
_SESSION_OF_USER: Final = f"""
    {_KNOWN_SESSION} AND (%(user_id)s::text IS NULL OR user_id = %(user_id)s) FOR KEY SHARE"""


# --- Writes ----------------------------------------------------------------------------------------

_VALUE_CONTENT: Final = "namespace, channel, version, type, blob"
_VALUE_COLUMNS: Final = f"session_id, {_VALUE_CONTENT}"
_KEEP_VALUE: Final = "ON CONFLICT (session_id, namespace, channel, version) DO NOTHING"
_CHECKPOINT_COLUMNS: Final = {
    "thread_id": "text",
    "namespace": "text",
    "checkpoint_id": "text",
    "parent_id": "text",
    "run_id": "text",
    "source": "text",
    "step": "bigint",
    "metadata": "jsonb",
    "versions": "text",
    "has_deltas": "boolean",
    "type": "text",
    "body": "bytea",
    "size_bytes": "bigint",
}
_REPLACE_CHECKPOINT: Final = "ON CONFLICT (session_id, namespace, checkpoint_id) DO UPDATE SET " + ", ".join(
    f"{name} = EXCLUDED.{name}" for name in _CHECKPOINT_COLUMNS if name not in ("namespace", "checkpoint_id")
)
_WRITE_CONTENT: Final = "namespace, checkpoint_id, task_id, position, task_path, channel, type, blob"
_WRITE_COLUMNS: Final = f"session_id, {_WRITE_CONTENT}"
# At positions of 0 or more, the first writer wins; at negative positions, the last one does.
_KEEP_WRITE: Final = f"""
    ON CONFLICT (session_id, namespace, checkpoint_id, task_id, position) DO UPDATE
    SET task_path = EXCLUDED.task_path, channel = EXCLUDED.channel, type = EXCLUDED.type, blob = EXCLUDED.blob
    WHERE {_WRITE}.position < 0"""

_TOUCHED: Final = f"""touched AS (
        UPDATE {_SESSION} SET updated_at = %(at)s
        WHERE id = (SELECT id FROM session) AND updated_at < %(at)s::timestamptz - interval '1 second'
    )"""
"""Updates, at most once per second, the time of the last write, which shows whether the session is idle."""

WAITS_SINCE: Final = "interrupt:"
"""The beginning of what a session waits for. It is followed by the checkpoint after which it was interrupted,
so that the row alone shows whether a checkpoint is newer: it may be stored after the interrupt.
"""

# A newer checkpoint of the graph itself shows that it goes on.
_WENT_ON: Final = f"""touched AS (
        UPDATE {_SESSION} SET updated_at = %(at)s, waiting_kind = CASE
            WHEN %(namespace)s::text <> '' OR waiting_kind >= '{WAITS_SINCE}' || %(checkpoint_id)s::text
            THEN waiting_kind END
        WHERE id = (SELECT id FROM session) AND (waiting_kind IS NOT NULL
            OR updated_at < %(at)s::timestamptz - interval '1 second')
    )"""

PUT: Final = Statement(f"""
    WITH session AS ({_SESSION_OF_USER}),
    stored AS (
        INSERT INTO {_VALUE} ({_VALUE_COLUMNS})
        SELECT session.id, %(namespace)s, value.channel, value.version, value.type, value.blob
        FROM session, unnest(
            %(channels)s::text[], %(channel_versions)s::text[], %(types)s::text[], %(blobs)s::bytea[]
        ) AS value(channel, version, type, blob)
        {_KEEP_VALUE}
    ),
    {_WENT_ON}
    INSERT INTO {_CHECKPOINT} (session_id, created_at, {", ".join(_CHECKPOINT_COLUMNS)})
    SELECT session.id, %(at)s::timestamptz,
        {", ".join(f"%({name})s::{kind}" for name, kind in _CHECKPOINT_COLUMNS.items())}
    FROM session
    {_REPLACE_CHECKPOINT}
    RETURNING session_id""")
"""Store a checkpoint and its new values. If the session is unknown, or the given user is not the session's
user, nothing is stored and no row is returned.
"""

PUT_WRITES: Final = Statement(f"""
    WITH session AS ({_SESSION_OF_USER}),
    stored AS (
        INSERT INTO {_WRITE} ({_WRITE_COLUMNS})
        SELECT session.id, %(namespace)s, %(checkpoint_id)s, %(task_id)s, write.position, %(task_path)s,
            write.channel, write.type, write.blob
        FROM session, unnest(
            %(positions)s::integer[], %(channels)s::text[], %(types)s::text[], %(blobs)s::bytea[]
        ) AS write(position, channel, type, blob)
        {_KEEP_WRITE}
    ),
    {_TOUCHED}
    SELECT id FROM session""")
"""Store the writes of a task. In the same cases, nothing is stored and no row is returned. The session's row
is returned, so that a repeat, which inserts nothing, does not look like an unknown session.
"""

# The same for one row, in a transaction that has locked the session: on SQLite, and for guarded writes.
INSERT_VALUE: Final = Statement(f"""
    INSERT INTO {_VALUE} ({_VALUE_COLUMNS})
    VALUES (%(session)s, %(namespace)s, %(channel)s, %(version)s, %(type)s, %(blob)s)
    {_KEEP_VALUE}""")
INSERT_CHECKPOINT: Final = Statement(f"""
    INSERT INTO {_CHECKPOINT} (session_id, created_at, {", ".join(_CHECKPOINT_COLUMNS)})
    VALUES (%(session)s, %(at)s, {", ".join(f"%({name})s" for name in _CHECKPOINT_COLUMNS)})
    {_REPLACE_CHECKPOINT}""")
INSERT_WRITE: Final = Statement(f"""
    INSERT INTO {_WRITE} ({_WRITE_COLUMNS})
    VALUES (%(session)s, %(namespace)s, %(checkpoint_id)s, %(task_id)s, %(position)s, %(task_path)s,
        %(channel)s, %(type)s, %(blob)s)
    {_KEEP_WRITE}""")


# --- Reads -----------------------------------------------------------------------------------------

_FOUND: Final = "id, session_id, namespace, checkpoint_id, parent_id, thread_id, versions, type, body"

# Compare members for equality, not containment: a filter for {"a": {}} must not find {"a": {"b": 1}}.
_MATCHES: Final = (
    """NOT EXISTS (
        SELECT 1 FROM jsonb_each(%(filter)s::jsonb) AS wanted
        WHERE c.metadata -> wanted.key IS DISTINCT FROM wanted.value
    )""",
    """NOT EXISTS (
        SELECT 1 FROM json_each(%(filter)s) AS wanted
        WHERE NOT EXISTS (
            SELECT 1 FROM json_each(c.metadata) AS member
            WHERE member.key = wanted.key AND member.value IS wanted.value
                AND replace(member.type, 'real', 'integer') = replace(wanted.type, 'real', 'integer')
        )
    )""",
)

# SQLite would read all sessions for a Bloom filter of the join; PostgreSQL may start with a few sessions.
_OF_ALL_THREADS: Final = (
    (
        f"{_CHECKPOINT} AS c JOIN {_SESSION} AS s ON s.id = c.session_id",
        "s.session_id",
        "s.tenant = (SELECT %(tenant)s)",
    ),
    (
        f"{_CHECKPOINT} AS c",
        f"(SELECT session_id FROM {_SESSION} WHERE id = c.session_id)",
        f"(SELECT tenant FROM {_SESSION} WHERE id = c.session_id) = %(tenant)s",
    ),
)
"""The table, the id of a thread, and the condition of the tenant."""

_VERSIONS: Final = ("json_each_text(c.versions::json)", "json_each(c.versions)")
"""The channels and versions of the values that a checkpoint ``c`` refers to."""

_ITS_VALUE: Final = looked_up(
    LangGraphValue,
    "found",
    "found.session_id = v.session_id AND found.namespace = v.namespace AND found.channel = v.key "
    "AND found.version = v.value",
)
_ITS_WRITES: Final = looked_up(
    LangGraphWrite,
    "w",
    "w.session_id = c.session_id AND w.namespace = c.namespace AND w.checkpoint_id = c.checkpoint_id",
    end="OFFSET 0",
)


@cache
def select(names: frozenset[str]) -> Statement:
    """Return a page of checkpoints, newest first, with their values and writes as three kinds of rows.

    ``names`` are the names of the parameters, which determine the conditions. The result contains each value
    once, however many checkpoints of the page refer to it.
    """
    of_thread, of_namespace = "session_id" in names, "namespace" in names
    # The id is unique within a namespace, so this is the order of an index.
    order = "c.checkpoint_id" if of_thread and of_namespace else "c.checkpoint_id, c.id"
    last = "%(last_checkpoint_id)s" if of_thread and of_namespace else "%(last_checkpoint_id)s, %(last_id)s"

    def page(vendor: int) -> str:
        source, shown, owned = _OF_ALL_THREADS[vendor]
        if of_thread:
            source, shown, owned = f"{_CHECKPOINT} AS c", "NULL", f"c.session_id = ({_KNOWN_SESSION})"
        conditions = {
            "namespace": "c.namespace = %(namespace)s",
            "checkpoint_id": "c.checkpoint_id = %(checkpoint_id)s",
            "before": "c.checkpoint_id < %(before)s",
            "last_checkpoint_id": f"({order}) < ({last})",
            "filter": _MATCHES[vendor],
        }
        chosen = [owned, *(condition for name, condition in conditions.items() if name in names)]
        columns = ", ".join(f"c.{name}" for name in _FOUND.split(", "))
        return f"""
            SELECT {columns}, {shown} AS session_name FROM {source}
            WHERE {" AND ".join(chosen)}
            ORDER BY {order.replace(",", " DESC,")} DESC LIMIT %(limit)s"""

    unique = "" if of_thread and of_namespace and "checkpoint_id" in names else "DISTINCT"

    def text(vendor: int) -> str:
        return f"""
        WITH c AS MATERIALIZED ({page(vendor)})
        SELECT 0 AS kind, id, session_id, namespace, checkpoint_id AS a, parent_id AS b, versions AS d,
            coalesce(thread_id, session_name) AS e, CAST(NULL AS integer) AS position, type, body FROM c
        UNION ALL
        SELECT 1, NULL, v.session_id, v.namespace, v.key, v.value, NULL, NULL, NULL, found.type, found.blob
        FROM (
            SELECT {unique} c.session_id, c.namespace, u.key, u.value FROM c, {_VERSIONS[vendor]} AS u
        ) AS v {_ITS_VALUE[vendor]}
        UNION ALL
        SELECT 2, c.id, NULL, NULL, w.task_id, w.channel, w.task_path, NULL, w.position, w.type, w.blob
        FROM c {_ITS_WRITES[vendor]}"""

    return Statement(text(0), text(1))


NEWEST_ID: Final = Statement(f"""
    SELECT checkpoint_id FROM {_CHECKPOINT}
    WHERE session_id = ({_KNOWN_SESSION}) AND namespace = %(namespace)s
    ORDER BY checkpoint_id DESC LIMIT 1""")


_LINK: Final = "checkpoint_id, parent_id, versions, type, body"


def _chain(parent: str) -> str:
    # SQLite reads the whole table for a Bloom filter unless the child has all columns that find its parent.
    parents = ", ".join(f"p.{name}" for name in _LINK.split(", "))
    return f"""
        WITH RECURSIVE chain (depth, session_id, namespace, {_LINK}) AS (
            SELECT 0, session_id, namespace, {_LINK} FROM {_CHECKPOINT}
            WHERE session_id = ({_KNOWN_SESSION}) AND namespace = %(namespace)s
                AND checkpoint_id = %(checkpoint_id)s
          UNION ALL
            SELECT chain.depth + 1, p.session_id, p.namespace, {parents} FROM chain {parent}
            WHERE chain.depth < %(depth)s
        )
        SELECT {_LINK} FROM chain ORDER BY depth"""


CHAIN: Final = Statement(
    *map(
        _chain,
        looked_up(
            LangGraphCheckpoint,
            "p",
            "p.session_id = chain.session_id AND p.namespace = chain.namespace "
            "AND p.checkpoint_id = chain.parent_id",
        ),
    )
)
"""A checkpoint and up to ``depth`` of its ancestors, each followed by its parent."""


def _history(of_checkpoints: str, of_channels: str, of_versions: str) -> str:
    owner = f"session_id = ({_KNOWN_SESSION}) AND namespace = %(namespace)s"
    return f"""
        SELECT checkpoint_id, task_path, task_id, position, channel, type, blob FROM {_WRITE}
        WHERE {owner} AND {of_checkpoints} AND {of_channels}
        UNION ALL
        SELECT NULL, version, NULL, NULL, channel, type, blob FROM {_VALUE}
        WHERE {owner} AND {of_channels} AND {of_versions}"""


HISTORY: Final = Statement(
    *map(
        _history,
        is_in_list("checkpoint_id", "checkpoint_ids", "text"),
        is_in_list("channel", "channels", "text"),
        is_in_list("version", "versions", "text"),
    )
)
"""The writes of some checkpoints to some channels, and the values of those channels at some versions."""


# --- Upkeep ----------------------------------------------------------------------------------------

_CHECKPOINT_CONTENT: Final = "created_at, " + ", ".join(
    name for name in _CHECKPOINT_COLUMNS if name != "thread_id"
)
_COPIES: Final = (
    f"""INSERT INTO {_CHECKPOINT} (session_id, thread_id, {_CHECKPOINT_CONTENT})
    SELECT %(target)s, %(thread_id)s, {_CHECKPOINT_CONTENT} FROM {_CHECKPOINT}
    WHERE session_id = ({_KNOWN_SESSION}) ON CONFLICT DO NOTHING""",
    f"""INSERT INTO {_VALUE} (session_id, {_VALUE_CONTENT})
    SELECT %(target)s, {_VALUE_CONTENT} FROM {_VALUE}
    WHERE session_id = ({_KNOWN_SESSION}) ON CONFLICT DO NOTHING""",
    f"""INSERT INTO {_WRITE} (session_id, {_WRITE_CONTENT})
    SELECT %(target)s, {_WRITE_CONTENT} FROM {_WRITE}
    WHERE session_id = ({_KNOWN_SESSION}) ON CONFLICT DO NOTHING""",
)
COPY_PARTS: Final = tuple(Statement(text) for text in _COPIES)
"""Copy the checkpoints, the values and the writes of a thread."""

COPY: Final = Statement(
    f"WITH checkpoints AS ({_COPIES[0]}), copied_values AS ({_COPIES[1]}) {_COPIES[2]}".replace(
        "%(target)s", "%(target)s::bigint"
    ).replace("%(thread_id)s", "%(thread_id)s::text"),
    citus=_COPIES,
)
"""All of `COPY_PARTS` in one statement on PostgreSQL, so that a checkpoint is copied with its values or not
at all. On Citus, the values are copied after the checkpoints, and may include unreferenced ones.
"""

DELETE_WRITES: Final = for_keys(
    f"""DELETE FROM {_WRITE} WHERE session_id = %(session)s AND (namespace, checkpoint_id) IN (
            SELECT namespace, checkpoint_id FROM {_CHECKPOINT} WHERE id IN %(keys)s
        )"""
)
DELETE_CHECKPOINTS: Final = for_keys(f"DELETE FROM {_CHECKPOINT} WHERE id IN %(keys)s")
UNLINK_PARENTS: Final = Statement(f"""
    UPDATE {_CHECKPOINT} SET parent_id = NULL
    WHERE session_id = %(session)s AND parent_id IS NOT NULL AND NOT EXISTS (
        SELECT 1 FROM {_CHECKPOINT} AS parent
        WHERE parent.session_id = %(session)s AND parent.namespace = {_CHECKPOINT}.namespace
            AND parent.checkpoint_id = {_CHECKPOINT}.parent_id
    )""")


def _delete_free_values(versions: str) -> str:
    return f"""
        WITH used AS MATERIALIZED (
            SELECT DISTINCT c.namespace, u.key AS channel, u.value AS version
            FROM {_CHECKPOINT} AS c CROSS JOIN {versions} AS u WHERE c.session_id = %(session)s
        )
        DELETE FROM {_VALUE} WHERE id IN (
            SELECT v.id FROM {_VALUE} AS v LEFT JOIN used ON used.namespace = v.namespace
                AND used.channel = v.channel AND used.version = v.version
            WHERE v.session_id = %(session)s AND used.channel IS NULL
        )"""


DELETE_FREE_VALUES: Final = Statement(*map(_delete_free_values, _VERSIONS))
"""Delete the values that no checkpoint of the session refers to."""


def _lost_values(versions: str) -> str:
    return f"""
        SELECT c.session_id, c.checkpoint_id, u.key
        FROM {_CHECKPOINT} AS c CROSS JOIN {versions} AS u
        WHERE c.session_id IN %(keys)s AND NOT EXISTS (
            SELECT 1 FROM {_VALUE} AS v WHERE v.session_id = c.session_id AND v.namespace = c.namespace
                AND v.channel = u.key AND v.version = u.value
        )
        ORDER BY c.session_id, c.id"""


LOST_VALUES: Final = for_keys(Statement(*map(_lost_values, _VERSIONS)))
"""The checkpoints of the sessions that refer to a missing value."""
