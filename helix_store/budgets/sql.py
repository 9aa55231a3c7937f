"""The SQL of budgets. The statements with which the ledger updates the counters are in `counters.sql`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from helix_store.counters.sql import period
from helix_store.engine.clocks import SQLITE, Clock, with_clock
from helix_store.engine.expressions import for_keys
from helix_store.engine.statement import Statement, table
from helix_store.models import Budget, BudgetCounter, Lock, Session, UsageEntry
from helix_store.sessions.sql import SESSION_BY_ID

_BUDGET: Final = table(Budget)
_COUNTER: Final = table(BudgetCounter)

MOST_COUNTERS: Final = 1_000
"""The maximum number of a budget's counters that a list of budgets reads."""


def _of_keys(is_sqlite: bool) -> str:
    """Return the budgets ``b`` with one of the given keys, and the value that each counts, as ``counted``.

    A cross join makes SQLite start with the keys. Otherwise it would read all budgets by name.
    """
    columns = ("scope", "value", "counted")
    read = "json_extract(e.value, '$[{}]')" if is_sqlite else "e.value ->> {}"
    given = ", ".join(f"{read.format(number)} AS {name}" for number, name in enumerate(columns))
    rows = "json_each(%(keys)s)" if is_sqlite else "jsonb_array_elements(%(keys)s::jsonb)"
    return f"""
            SELECT b.*, k.counted FROM (SELECT {given} FROM {rows} AS e) AS k
            CROSS JOIN {_BUDGET} AS b
            WHERE b.tenant = %(tenant)s AND b.scope = k.scope AND b.value = k.value"""


def _of_name(is_sqlite: bool) -> str:
    return f"""
            SELECT b.*, CASE WHEN b.scope = 'tenant' OR b.value <> '' THEN b.value
                ELSE CAST(%(value)s AS varchar) END AS counted
            FROM {_BUDGET} AS b WHERE b.tenant = %(tenant)s AND b.name = %(name)s"""


def _moment(clock: Clock) -> str:
    if clock is SQLITE:
        return f"moment AS (SELECT {clock.now} AS now, strftime('%%Y-%%m-%%d', 'now') AS day)"
    # The clock advances within a statement. Citus refuses to_char() in a write, because it is not immutable.
    return rf"""moment AS MATERIALIZED (
            SELECT now, regexp_replace(
                (extract(year FROM t) * 10000 + extract(month FROM t) * 100 + extract(day FROM t))::int::text,
                '(....)(..)(..)', '\1-\2-\3') AS day
            FROM (SELECT {clock.now} AS now) AS clock, LATERAL (SELECT now AT TIME ZONE 'UTC' AS t) AS utc)"""


_PERIOD: Final = period("(SELECT day FROM moment)")
_IS_FOR_EACH: Final = "b.scope IN ('user', 'agent_type') AND b.value = ''"
_SPENT: Final = "CASE WHEN b.limit_usd IS NULL THEN c.spent_tokens ELSE c.spent_usd END"
_COUNTER_OF_BUDGET: Final = f"""{_COUNTER} AS c ON c.tenant = b.tenant AND c.name = b.name
            AND c.value = b.counted AND c.period = {_PERIOD}"""


def _live_holds(clock: Clock) -> str:
    """Return a counter's holds whose lock has not expired and was not taken over, as JSON."""
    if clock is SQLITE:
        found = "json_group_object(h.key, json(h.value))"
        holds = "json_each(c.holds) AS h"
        key = "CAST(h.key AS integer)"
        is_held = "l.token = CASE WHEN h.type = 'array' THEN json_extract(h.value, '$[0]') END"
    else:
        found = "jsonb_object_agg(h.key, h.value)::text"
        holds = "jsonb_each(CASE jsonb_typeof(c.holds) WHEN 'object' THEN c.holds ELSE '{}' END) AS h"
        key = "CASE WHEN h.key ~ '^[0-9]{1,18}$' THEN h.key::bigint END"
        is_held = "l.token::text = h.value ->> 0"
    return f"""(
                SELECT {found} FROM {holds}
                JOIN {table(Session)} AS s ON s.id = {key}
                JOIN {table(Lock)} AS l ON l.tenant = s.tenant AND l.name = s.session_id AND {is_held}
                WHERE l.expires_at > (SELECT now FROM moment))"""


def _of_rows(is_sqlite: bool) -> str:
    """Return the budgets ``b`` with these keys. A budget that applies to each value gets its highest counter.

    Only `MOST_COUNTERS` counters are searched for the highest, and ``value_count`` is at most one more than
    that.
    """
    current = f"{_COUNTER} AS c WHERE c.tenant = b.tenant AND c.name = b.name AND c.period = {_PERIOD}"
    return f"""
            SELECT b.*,
                CASE WHEN {_IS_FOR_EACH} THEN COALESCE((
                    SELECT value
                    FROM (SELECT c.value, {_SPENT} AS spent FROM {current} LIMIT {MOST_COUNTERS}) AS c
                    ORDER BY spent DESC, value LIMIT 1), '') ELSE b.value END AS counted,
                CASE WHEN {_IS_FOR_EACH} THEN (
                    SELECT count(*) FROM (SELECT 1 FROM {current} LIMIT {MOST_COUNTERS + 1}) AS c
                ) END AS value_count
            FROM {_BUDGET} AS b WHERE b.id IN %(keys)s"""


def _of_values(is_sqlite: bool) -> str:
    """Return a page of a budget's current counters, the highest first."""
    return f"""
            SELECT b.*, c.value AS counted FROM {_BUDGET} AS b JOIN {_COUNTER} AS c
                ON c.tenant = b.tenant AND c.name = b.name AND c.period = {_PERIOD}
            WHERE b.id = %(key)s ORDER BY {_SPENT} DESC, c.value LIMIT %(limit)s OFFSET %(offset)s"""


def _standings(source: Callable[[bool], str], *others: str, order: str = "b.name, b.counted") -> Statement:
    """Return budgets with their definition, current counter and live holds, and the database's time.

    ``others`` are additional columns.
    """
    return with_clock(
        lambda clock: (
            f"""
        WITH {_moment(clock)}
        SELECT b.name, b.scope, b.value, b.period, b.limit_usd, b.limit_tokens, b.counted,
            c.id, coalesce(c.spent_usd, 0), coalesce(c.spent_tokens, 0), {_live_holds(clock)},
            {", ".join(("(SELECT now FROM moment)", *others))}
        FROM ({source(clock is SQLITE)}) AS b LEFT JOIN {_COUNTER_OF_BUDGET}
        ORDER BY {order}"""
        )
    )


STANDINGS_OF_KEYS: Final = _standings(
    _of_keys,
    f"(SELECT id FROM {table(Session)} WHERE {SESSION_BY_ID})",
    "CAST(c.holds AS text)",
)
"""These columns are followed by the key of the caller's session, and all holds as they are stored."""
STANDING_OF_NAME: Final = _standings(_of_name)
STANDINGS_OF_ROWS: Final = for_keys(_standings(_of_rows, "b.id", "b.value_count", order="b.id"))
STANDINGS_OF_VALUES: Final = _standings(_of_values, order=f"{_SPENT} DESC, b.counted")


def _lock(clock: Clock) -> str:
    return f"""
        WITH {_moment(clock)}
        SELECT c.id FROM ({_of_keys(clock is SQLITE)}) AS b
        {"CROSS JOIN" if clock is SQLITE else "JOIN"} {_COUNTER_OF_BUDGET}
        {"" if clock is SQLITE else "ORDER BY c.name, c.value, c.period FOR NO KEY UPDATE OF c"}"""


LOCK_COUNTERS: Final = with_clock(_lock)
"""Lock the current counters in order.

A later statement reads the counters, and which locks are still live.
"""

CREATE_COUNTERS: Final = with_clock(
    lambda clock: (
        f"""
        WITH {_moment(clock)}
        INSERT INTO {_COUNTER} (tenant, name, value, period, spent_usd, spent_tokens, holds)
        SELECT b.tenant, b.name, b.counted, {_PERIOD}, 0, 0, '{{}}' FROM ({_of_keys(clock is SQLITE)}) AS b
        WHERE true ORDER BY 2, 3, 4
        ON CONFLICT (tenant, name, value, period) DO NOTHING"""
    )
)


def _set_holds(is_sqlite: bool) -> str:
    names = {"counter": "bigint", "usd": "bigint", "tokens": "bigint", "read": "jsonb", "holds": "jsonb"}
    read = "json_extract(e.value, '$[{}]')" if is_sqlite else "(e.value ->> {})::{}"
    given = ", ".join(f"{read.format(number, names[name])} AS {name}" for number, name in enumerate(names))
    changes = "json_each(%(changes)s)" if is_sqlite else "jsonb_array_elements(%(changes)s::jsonb)"
    lock = "" if is_sqlite else "ORDER BY name, value, period FOR NO KEY UPDATE SKIP LOCKED"
    return f"""
        WITH given AS (SELECT {given} FROM {changes} AS e),
        locked AS (SELECT * FROM {_COUNTER} WHERE id IN (SELECT counter FROM given) {lock})
        UPDATE {_COUNTER} AS c SET holds = given.holds FROM given
        WHERE c.id = given.counter AND NOT EXISTS (
            SELECT 1 FROM given WHERE NOT EXISTS (
                SELECT 1 FROM locked AS l WHERE l.id = given.counter
                    AND l.spent_usd = given.usd AND l.spent_tokens = given.tokens AND l.holds = given.read))
        RETURNING id"""


SET_HOLDS: Final = Statement(_set_holds(False), _set_holds(True))
"""Set the holds of counters, or change nothing if any of the counters has changed or is being changed."""


def _release(is_own: str, without: str, order: str = "") -> str:
    return f"""
        UPDATE {_COUNTER} SET holds = {without}
        WHERE id IN (SELECT id FROM {_COUNTER} WHERE id IN %(keys)s {order}) AND {is_own}"""


RELEASE_HOLDS: Final = for_keys(
    Statement(
        postgresql=_release(
            "holds -> %(key)s::text ->> 0 = %(token)s::text",
            "holds - %(key)s::text",
            "ORDER BY name, value, period FOR NO KEY UPDATE",
        ),
        sqlite=_release(
            """CAST(json_extract(holds, '$."' || %(key)s || '"[0]') AS text) = %(token)s""",
            """json_remove(holds, '$."' || %(key)s || '"')""",
        ),
    )
)
"""Release the hold of a session in these counters, if it still has this token."""

LOCK_TIMEOUT: Final = Statement("SELECT pg_catalog.current_setting('lock_timeout')")
SET_LOCK_TIMEOUT: Final = Statement("SELECT pg_catalog.set_config('lock_timeout', %(timeout)s, true)")
LOCK_LEDGER: Final = Statement(f"LOCK TABLE {table(UsageEntry)} IN SHARE MODE")
"""Wait for everyone who is writing to the ledger, and block other writers. It does not wait for readers."""
