"""The SQL of items. Writes run under the lock of the session, whose key and version are parameters.

The order of a lane is that of the ids, because a row gets its id after the lock is taken.
"""

from __future__ import annotations

from typing import Final

from helix_store.engine.statement import Statement, table
from helix_store.models import Item, Session
from helix_store.sessions.sql import SESSION_BY_ID

_ITEM: Final = table(Item)
_SESSION: Final = table(Session)

_COLUMNS: Final = "id, key, payload, created_at"
_READ: Final = f"session_id = (SELECT id FROM {_SESSION} WHERE {SESSION_BY_ID})"
_LOCKED: Final = "session_id = %(session)s"
_LANE: Final = "lane = %(lane)s"
_INSERT: Final = f"INSERT INTO {_ITEM} (session_id, lane, key, payload, created_at, session_version)"
_HAS_KEY: Final = "ON CONFLICT (session_id, lane, key) WHERE key IS NOT NULL"

# --- Reads -----------------------------------------------------------------------------------------


def _newest(of_session: str) -> str:
    return f"""
        SELECT {_COLUMNS} FROM {_ITEM} WHERE {of_session} AND {_LANE} AND id < %(before)s
        ORDER BY id DESC LIMIT %(limit)s"""


NEWEST: Final = Statement(_newest(_READ))
NEWEST_LOCKED: Final = Statement(_newest(_LOCKED))
OLDEST_LOCKED: Final = Statement(
    f"""SELECT {_COLUMNS} FROM {_ITEM} WHERE {_LOCKED} AND {_LANE} AND id > %(after)s
        ORDER BY id LIMIT %(limit)s"""
)
# This is a range of a single key, because only the key index has this order; otherwise PostgreSQL might use
# the lane index.
BY_KEY: Final = Statement(
    f"""SELECT {_COLUMNS} FROM {_ITEM}
        WHERE {_READ} AND {_LANE} AND key >= %(key)s AND key <= %(key)s ORDER BY key LIMIT 1"""
)
COUNT: Final = Statement(f"SELECT count(*) FROM {_ITEM} WHERE {_READ} AND {_LANE}")
COUNT_LANES: Final = Statement(
    f"SELECT lane, count(*) FROM {_ITEM} WHERE {_READ} GROUP BY lane ORDER BY lane"
)

# --- Writes ----------------------------------------------------------------------------------------

ADD: Final = Statement(
    f"""{_INSERT}
        SELECT %(session)s, %(lane)s, given.key, given.payload, %(at)s, %(version)s
        FROM unnest(%(keys)s::varchar[], %(payloads)s::text[]) WITH ORDINALITY AS given(key, payload, place)
        ORDER BY given.place {_HAS_KEY} DO NOTHING RETURNING id""",
    f"""{_INSERT}
        SELECT %(session)s, %(lane)s, keys.value, payloads.value, %(at)s, %(version)s
        FROM json_each(%(keys)s) AS keys JOIN json_each(%(payloads)s) AS payloads ON payloads.key = keys.key
        WHERE true ORDER BY keys.key {_HAS_KEY} DO NOTHING RETURNING id""",
)
PUT: Final = Statement(
    f"""{_INSERT} VALUES (%(session)s, %(lane)s, %(key)s, %(payload)s, %(at)s, %(version)s)
        {_HAS_KEY} DO UPDATE SET payload = excluded.payload RETURNING id"""
)
POP: Final = Statement(
    f"""DELETE FROM {_ITEM} WHERE id = (
            SELECT id FROM {_ITEM} WHERE {_LOCKED} AND {_LANE} ORDER BY id DESC LIMIT 1
        ) RETURNING {_COLUMNS}"""
)
DELETE_FROM: Final = Statement(
    f"DELETE FROM {_ITEM} WHERE {_LOCKED} AND {_LANE} AND id >= %(first)s RETURNING id"
)
DELETE_TO: Final = Statement(f"DELETE FROM {_ITEM} WHERE {_LOCKED} AND {_LANE} AND id <= %(last)s")
COPY: Final = Statement(
    f"""{_INSERT}
        SELECT session_id, %(target)s, key, payload, created_at, %(version)s FROM {_ITEM}
        WHERE {_LOCKED} AND {_LANE} AND id < %(before)s ORDER BY id RETURNING id"""
)
CLEAR_ALL: Final = Statement(f"DELETE FROM {_ITEM} WHERE {_LOCKED} RETURNING 1")
CLEAR: Final = Statement(f"DELETE FROM {_ITEM} WHERE {_LOCKED} AND {_LANE} RETURNING 1")
MARK_WRITTEN: Final = Statement(
    f"UPDATE {_SESSION} SET updated_at = %(at)s WHERE id = %(session)s RETURNING 1"
)

COPY_TO_BRANCH: Final = Statement(
    f"""
        INSERT INTO {_ITEM} (session_id, lane, key, payload, created_at, session_version)
        SELECT %(target)s, lane, key, payload, created_at, 0 FROM {_ITEM}
        WHERE session_id = %(source)s
            AND (session_version < %(version)s OR session_version IS NULL AND created_at <= %(until)s)
        ORDER BY lane, id"""
)
"""Copies the items that were added before the session reached a version.

Rows of earlier releases have no version. For these rows only, the worker's clock decides.
"""
