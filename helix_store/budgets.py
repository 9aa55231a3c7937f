"""Budgets: limits on the amounts that sessions spend, and the amounts that steps hold.

Budgets in the database.

The statement that writes the ledger also looks for budgets. Creating or deleting a budget therefore locks the
ledger's table for a moment: every writer has then either finished, or sees the budget.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any, Final, Literal, NamedTuple

from django.db.models import Q, QuerySet, Subquery

from helix_store import conf
from helix_store.catalogue import Table
from helix_store.core import moments, validation
from helix_store.core.moments import as_utc
from helix_store.core.types import UserId
from helix_store.core.usage import (
    Budget,
    BudgetPeriod,
    BudgetScope,
    BudgetStatus,
    Dollars,
    cost_from_units,
    cost_units,
)
from helix_store.core.validation import Guard
from helix_store.counters import (
    IN_ORDER,
    Key,
    Spender,
    bounded,
    is_period,
    keys_of,
    period,
    period_of,
    spent_on,
    start_of,
)
from helix_store.engine.async_twins import async_twin
from helix_store.engine.database import Call, Database, DatabaseOperations, Rows, reads, writes
from helix_store.engine.expressions import (
    ISOLATION,
    ExactSum,
    StartInUTC,
    for_keys,
    list_parameter,
    require_read_committed,
    tenant_parameter,
)
from helix_store.engine.memory import MemoryTable, MemoryWorld
from helix_store.engine.statement import SQLITE, Clock, Statement, table, with_clock
from helix_store.exceptions import (
    BudgetExceeded,
    IntegrityFault,
    InvalidPayload,
    NotFoundError,
    OutcomeUnknown,
    StoreUnavailable,
    shown_id,
)
from helix_store.locks import LockTable
from helix_store.models import Budget as BudgetRow
from helix_store.models import BudgetCounter, Lock, Session, UsageEntry
from helix_store.sessions.locking import first_row, lock_session
from helix_store.sessions.records import TenantScope
from helix_store.sessions.statements import SESSION_BY_ID
from helix_store.usage.ledger import checked_cost
from helix_store.usage.store import UsageLedger

_EACH = frozenset({BudgetScope.USER, BudgetScope.AGENT_TYPE})
"""The scopes whose budgets may have no value: each user or agent type then has its own counter."""


class Amounts(NamedTuple):
    usd: int = 0
    tokens: int = 0

    def __add__(self, other: Any) -> Amounts:
        return Amounts(self.usd + other.usd, self.tokens + other.tokens)


NOTHING = Amounts()


@dataclass(frozen=True, slots=True)
class Definition:
    """A checked budget. ``value`` is empty for a tenant, and for each user or agent type."""

    name: str
    scope: BudgetScope
    value: str
    period: BudgetPeriod
    limit_usd: int | None
    limit_tokens: int | None

    @property
    def is_for_each(self) -> bool:
        return self.scope in _EACH and not self.value

    def counted(self, value: str | None) -> str:
        """Return the value whose counter a caller requests. Raises `InvalidPayload`."""
        if self.is_for_each:
            if value is None:
                raise InvalidPayload(path="value", reason=f"the budget is for each {self.scope}; name one")
            return value
        if value not in (None, self.value or None):
            raise InvalidPayload(path="value", reason="the budget has another value")
        return self.value

    def as_value(self, *, created_at: datetime, updated_at: datetime) -> Budget:
        return Budget(
            name=self.name,
            scope=self.scope,
            value=self.value or None,
            period=self.period,
            limit_usd=_dollars(self.limit_usd),
            limit_tokens=self.limit_tokens,
            created_at=created_at,
            updated_at=updated_at,
        )


class Balance(NamedTuple):
    """A budget with one of its counters at one moment, and the total that other sessions hold."""

    definition: Definition
    value: str
    spent: Amounts
    held: Amounts
    at: datetime


class Hold(NamedTuple):
    """The hold of a turn; only the back end interprets ``owner`` and ``counters``."""

    owner: Any
    fencing_token: int
    counters: Sequence[Any]


class Reservation(NamedTuple):
    """What the budgets of a session have allowed its next step, or the error of the one that refused it."""

    is_capped: bool = True
    """True if any budget applies to the session."""
    is_checked: bool = True
    """False if the step still has to check the budgets when it begins."""
    hold: Hold | None = None
    refusal: BudgetExceeded | None = None
    at: datetime | None = None
    """The database's time, if it is known."""


def checked_definition(
    name: Any, *, scope: Any, value: Any, period: Any, limit_usd: Any, limit_tokens: Any
) -> Definition:
    """Return the definition of a budget. Raises `InvalidPayload`."""
    scope = validation.enum(BudgetScope, scope, "scope")
    check = validation.user_id if scope is BudgetScope.USER else validation.optional_identifier
    value = check(value, "value")
    if scope is BudgetScope.TENANT and value is not None:
        raise InvalidPayload(path="value", reason="a budget of the tenant has no value")
    if scope is BudgetScope.TREE and value is None:
        raise InvalidPayload(path="value", reason="a budget of a tree needs the session id of its root")
    limits = checked_amounts(limit_usd, limit_tokens, "limit")
    if limits == (None, None):
        raise InvalidPayload(path="limit_usd", reason="a budget needs a limit in dollars, tokens or both")
    return Definition(
        name=validation.identifier(name, "name"),
        scope=scope,
        value=value or "",
        period=validation.enum(BudgetPeriod, period, "period"),
        limit_usd=limits[0],
        limit_tokens=limits[1],
    )


def checked_amounts(usd: Any, tokens: Any, name: str) -> tuple[int | None, int | None]:
    """Return dollars as whole units, and tokens; either may be ``None``. Raises `InvalidPayload`."""
    cost = checked_cost(usd, f"{name}_usd")
    count = validation.optional(validation.whole_number)(tokens, f"{name}_tokens")
    return None if cost is None else cost_units(cost), count


def checked_estimate(usd: Any, tokens: Any, default: Amounts) -> Amounts:
    """Return an estimate, with the default for each amount of ``None``. Raises `InvalidPayload`."""
    given = checked_amounts(usd, tokens, "estimate")
    return Amounts(*(amount if each is None else each for each, amount in zip(given, default, strict=True)))


def require_allowed(balance: Balance, estimate: Amounts) -> None:
    """Raise `BudgetExceeded` if a limit has been reached, or if the estimate does not fit."""
    of, spent, held = balance.definition, balance.spent, balance.held
    if of.limit_usd is not None and _is_exceeded(of.limit_usd, spent.usd + held.usd, estimate.usd):
        amounts = map(cost_from_units, (of.limit_usd, spent.usd, held.usd))
        raise BudgetExceeded(of.name, *amounts)
    if of.limit_tokens is not None and _is_exceeded(
        of.limit_tokens, spent.tokens + held.tokens, estimate.tokens
    ):
        raise BudgetExceeded(of.name, of.limit_tokens, spent.tokens, held.tokens)


def _is_exceeded(limit: int, used: int, estimate: int) -> bool:
    return used >= limit or used + estimate > limit


def status_of(balance: Balance) -> BudgetStatus:
    of, spent, held = balance.definition, balance.spent, balance.held
    term = start_of(of.period, balance.at)
    return BudgetStatus(
        name=of.name,
        value=balance.value or None,
        limit_usd=_dollars(of.limit_usd),
        limit_tokens=of.limit_tokens,
        spent_usd=cost_from_units(spent.usd),
        spent_tokens=spent.tokens,
        held_usd=cost_from_units(held.usd),
        held_tokens=held.tokens,
        remaining_usd=_dollars(_remaining(of.limit_usd, spent.usd + held.usd)),
        remaining_tokens=_remaining(of.limit_tokens, spent.tokens + held.tokens),
        period_start=term and term[0],
        resets_at=term and term[1],
    )


def _remaining(limit: int | None, used: int) -> int | None:
    return None if limit is None else max(0, limit - used)


def _dollars(units: int | None) -> Decimal | None:
    return None if units is None else cost_from_units(units)


def unknown_budget(name: str) -> NotFoundError:
    return NotFoundError(f"There is no budget {shown_id(name)}.", name=name)


_BUDGET: Final = table(BudgetRow)
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


def _counter_of_budget(name: str) -> str:
    return f"""{_COUNTER} AS {name} ON {name}.tenant = b.tenant AND {name}.name = b.name
            AND {name}.value = b.counted AND {name}.period"""


_COUNTER_OF_BUDGET: Final = f"{_counter_of_budget('c')} = {_PERIOD}"
# Holds belong to no period: a step that begins in one may spend in the next.
_HOLDS_OF_BUDGET: Final = f"{_counter_of_budget('h')} = ''"


def _from_live_holds(clock: Clock, now: str) -> str:
    """Return the FROM clause of the holds ``e`` of the counter ``h`` whose lock has not expired and was not
    taken over, with their sessions ``holder``.
    """
    if clock is SQLITE:
        holds = "json_each(h.holds) AS e"
        key = "CAST(e.key AS integer)"
        is_held = "l.token = CASE WHEN e.type = 'array' THEN json_extract(e.value, '$[0]') END"
    else:
        holds = "jsonb_each(CASE jsonb_typeof(h.holds) WHEN 'object' THEN h.holds ELSE '{}' END) AS e"
        key = "CASE WHEN e.key ~ '^[0-9]{1,18}$' THEN e.key::bigint END"
        is_held = "l.token::text = e.value ->> 0"
    return f"""FROM {holds}
                JOIN {table(Session)} AS holder ON holder.id = {key}
                JOIN {table(Lock)} AS l
                    ON l.tenant = holder.tenant AND l.name = holder.session_id AND {is_held}
                WHERE l.expires_at > {now}"""


def _live_holds(clock: Clock) -> str:
    """Return a budget's live holds as JSON."""
    found = (
        "json_group_object(e.key, json(e.value))"
        if clock is SQLITE
        else "jsonb_object_agg(e.key, e.value)::text"
    )
    return f"""(
                SELECT {found} {_from_live_holds(clock, "(SELECT now FROM moment)")})"""


def held_by_others(clock: Clock, unit: Literal["usd", "tokens"], session: str) -> str:
    """Return what sessions other than this one hold in the counter ``h``."""
    place = 1 + Amounts._fields.index(unit)
    if clock is SQLITE:
        amount = f"json_extract(e.value, '$[{place}]')"
    else:
        amount = f"CASE WHEN e.value ->> {place} ~ '^[0-9]{{1,30}}$' THEN (e.value ->> {place})::numeric END"
    return f"""(
                SELECT coalesce(sum({amount}), 0) {_from_live_holds(clock, clock.now)}
                    AND holder.id <> {session}.id)"""


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


def _balances(source: Callable[[bool], str], *others: str, order: str = "b.name, b.counted") -> Statement:
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
        LEFT JOIN {_HOLDS_OF_BUDGET}
        ORDER BY {order}"""
        )
    )


BALANCES_OF_KEYS: Final = _balances(
    _of_keys,
    f"(SELECT id FROM {table(Session)} WHERE {SESSION_BY_ID})",
    "CAST(h.holds AS text)",
    "h.id",
)
"""These columns are followed by the key of the caller's session, all holds as they are stored, and the key of
the counter that stores them.
"""
BALANCE_OF_NAME: Final = _balances(_of_name)
BALANCES_OF_ROWS: Final = for_keys(_balances(_of_rows, "b.id", "b.value_count", order="b.id"))
BALANCES_OF_VALUES: Final = _balances(_of_values, order=f"{_SPENT} DESC, b.counted")


def _lock(clock: Clock) -> str:
    return f"""
        WITH {_moment(clock)}
        SELECT c.id FROM ({_of_keys(clock is SQLITE)}) AS b
        {"CROSS JOIN" if clock is SQLITE else "JOIN"} {_counter_of_budget("c")} IN ('', {_PERIOD})
        {"" if clock is SQLITE else "ORDER BY c.period, c.name, c.value FOR NO KEY UPDATE OF c"}"""


LOCK_COUNTERS: Final = with_clock(_lock)
"""Lock the current counters, and those with the holds, in order.

A later statement reads the counters, and which locks are still live.
"""

CREATE_COUNTERS: Final = with_clock(
    lambda clock: (
        f"""
        WITH {_moment(clock)}
        INSERT INTO {_COUNTER} (tenant, name, value, period, spent_usd, spent_tokens, holds)
        SELECT b.tenant, b.name, b.counted, b.period, 0, 0, '{{}}' FROM (
            SELECT b.tenant, b.name, b.counted, {_PERIOD} AS period FROM ({_of_keys(clock is SQLITE)}) AS b
            UNION SELECT b.tenant, b.name, b.counted, '' FROM ({_of_keys(clock is SQLITE)}) AS b
        ) AS b
        WHERE true ORDER BY 4, 2, 3
        ON CONFLICT (tenant, name, value, period) DO NOTHING"""
    )
)


def _set_holds(is_sqlite: bool) -> str:
    numbers = dict.fromkeys(("counter", "usd", "tokens", "holder"), "bigint")
    names = {**numbers, "read": "jsonb", "holds": "jsonb"}
    read = "json_extract(e.value, '$[{}]')" if is_sqlite else "(e.value ->> {})::{}"
    given = ", ".join(f"{read.format(number, names[name])} AS {name}" for number, name in enumerate(names))
    changes = "json_each(%(changes)s)" if is_sqlite else "jsonb_array_elements(%(changes)s::jsonb)"
    # As an array: PostgreSQL expects a hundred rows of each query, and would read the whole table for them.
    # SQLite has locked the whole database, and would build an index on a query that is read twice.
    locked = _COUNTER if is_sqlite else "locked"
    lock = "" if is_sqlite else f"ORDER BY {IN_ORDER} FOR NO KEY UPDATE SKIP LOCKED"
    rows = f""",
        locked AS (
            SELECT * FROM {_COUNTER}
            WHERE id = ANY (ARRAY(SELECT counter FROM given UNION ALL SELECT holder FROM given)) {lock})"""
    return f"""
        WITH given AS (SELECT {given} FROM {changes} AS e){"" if is_sqlite else rows}
        UPDATE {_COUNTER} AS c SET holds = given.holds FROM given
        WHERE c.id = given.holder AND NOT EXISTS (
            SELECT 1 FROM given WHERE NOT EXISTS (
                SELECT 1 FROM {locked} AS l WHERE l.id = given.counter
                    AND l.spent_usd = given.usd AND l.spent_tokens = given.tokens
            ) OR NOT EXISTS (
                SELECT 1 FROM {locked} AS l WHERE l.id = given.holder AND l.holds = given.read))
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
            f"ORDER BY {IN_ORDER} FOR NO KEY UPDATE",
        ),
        sqlite=_release(
            """CAST(json_extract(holds, '$."' || %(key)s || '"[0]') AS text) = %(token)s""",
            """json_remove(holds, '$."' || %(key)s || '"')""",
        ),
    )
)
"""Release the hold of a session in these counters, if it still has this token."""

LOCK_TIMEOUT: Final = Statement(f"SELECT pg_catalog.current_setting('lock_timeout'), {ISOLATION}")
SET_LOCK_TIMEOUT: Final = Statement("SELECT pg_catalog.set_config('lock_timeout', %(timeout)s, true)")
LOCK_LEDGER: Final = Statement(f"LOCK TABLE {table(UsageEntry)} IN SHARE ROW EXCLUSIVE MODE")
"""Wait for everyone who is writing to the ledger or has locked it, and block others. It does not wait for
readers.
"""


def _check_budget(values: Mapping[str, Any]) -> None:
    names = ("scope", "period", "limit_usd", "limit_tokens")
    checked_definition(
        values["name"], value=values["value"] or None, **{name: values[name] for name in names}
    )
    _require_period(values["counted_from"], "/counted_from")


def _check_counter(values: Mapping[str, Any]) -> None:
    _require_period(values["period"], "/period")


def _require_period(text: str, path: str) -> None:
    if not is_period(text):
        raise InvalidPayload(path=path, reason="expected a day, a month or nothing")


def _unknown_periods(db: Database, keys: Collection[int]) -> Iterator[tuple[int, str]]:
    """Yield the counters with a period that no budget has."""
    rows = BudgetCounter.objects.using(db.alias).filter(pk__in=keys).exclude(period=_HOLDER)
    for key, name, text in rows.values_list("pk", "name", "period"):
        if not is_period(text):
            yield key, f"the counter of {shown_id(name)} has the period {shown_id(text)}"


TABLES: Final = (
    Table(BudgetRow, record="budget", order=("name",), parent="tenant", check_import=_check_budget),
    Table(
        BudgetCounter,
        record="budget_counter",
        order=("name", "period", "value"),
        parent="tenant",
        check=_unknown_periods,
        check_import=_check_counter,
        not_exported={"holds": "A hold belongs to a lease, which a process holds in the other database."},
        reads=None,
    ),
)


_LOCK_TIMEOUT: Final = "2s"
"""While a call waits for the ledger, other writers also wait. PostgreSQL cancels an autovacuum of the ledger
for this lock, but only after ``deadlock_timeout``, by default one second.
"""
_ATTEMPTS: Final = 3
_ROWS: Final = 1_000


class DatabaseBudgets(DatabaseOperations):
    """The database back end. Arguments have already been checked."""

    @property
    def checks_in_commits(self) -> bool:
        return not self.db.is_postgresql

    @writes
    def set(self, definition: Definition) -> Budget:
        at, row = moments.now(), first_row(self._rows.filter(name=definition.name))
        if row is None or not _is_counted_alike(row, definition):
            _lock_ledger(self.db)
            # Another caller may have set the budget in the meantime.
            at, row = moments.now(), first_row(self._rows.filter(name=definition.name))
        if row is not None and _is_counted_alike(row, definition):
            self._rows.filter(pk=row.pk).update(updated_at=at, **_limits(definition))
            return definition.as_value(created_at=row.created_at, updated_at=at)
        created_at = at if row is None else row.created_at
        self._rows.filter(name=definition.name).delete()
        counters = _counters_of(self.db, definition.name)
        if row is not None and row.scope == definition.scope:
            # Steps that have begun still spend what they hold, where the budget still applies.
            applies = {"value": definition.value} if definition.value else {}
            counters = counters.exclude(period=_HOLDER, **applies)
        counters.delete()
        self._rows.create(
            tenant=self.db.tenant,
            name=definition.name,
            scope=definition.scope.value,
            value=definition.value,
            period=definition.period.value,
            counted_from=period_of(definition.period, self.db.now()),
            created_at=created_at,
            updated_at=at,
            **_limits(definition),
        )
        _count_locked(self.db, definition.name)
        return definition.as_value(created_at=created_at, updated_at=at)

    @reads
    def get(self, name: str) -> Budget | None:
        row = first_row(self._rows.filter(name=name))
        return None if row is None else _value_of(row)

    @reads
    def select(self) -> list[Budget]:
        return [_value_of(row) for row in self._rows.order_by("name")]

    @writes
    def delete(self, name: str) -> bool:
        if not self._rows.filter(name=name).exists():
            return False
        _lock_ledger(self.db)
        _counters_of(self.db, name).delete()
        return self._rows.filter(name=name).delete()[0] > 0

    def balance(self, name: str, value: str | None) -> Balance:
        """Return the budget and its counter now. Raises `NotFoundError` and `InvalidPayload`."""
        parameters = {"tenant": self.db.tenant, "name": name, "value": value or ""}
        for row in self.db.read(BALANCE_OF_NAME, parameters):
            balance, _, _ = balance_of(row)
            return balance._replace(value=balance.definition.counted(value))
        raise unknown_budget(name)

    def balances(self, keys: Sequence[Key]) -> list[Balance]:
        """Return the budgets with one of these keys."""
        rows = self.db.read(BALANCES_OF_KEYS, self._given(keys))
        return [balance_of(row)[0] for row in rows]

    def hold(
        self, keys: Sequence[Key], session_id: str, fencing_token: int, estimate: Amounts
    ) -> Reservation:
        """Hold an estimate in every budget with one of these keys, in place of the session's earlier hold.

        If a budget refuses it, the session holds nothing new. Raises `FencedOutError` and `SessionNotFound`.
        """
        given = self._given(keys, session_id)
        rows = self.db.read(BALANCES_OF_KEYS, given)
        try:
            held = self._hold(given, rows, session_id, fencing_token, estimate)
        except BudgetExceeded as exc:
            return Reservation(refusal=exc, at=_time_of(rows))
        return Reservation(bool(rows), hold=held, at=_time_of(rows))

    def _hold(
        self, given: dict[str, Any], rows: Rows, session_id: str, fencing_token: int, estimate: Amounts
    ) -> Hold | None:
        has_own_hold = any(f'"{row[_OWN]}"' in (row[_HOLDS] or "") for row in rows)
        if not rows or (not has_own_hold and not any(estimate)):
            for row in rows:
                require_allowed(balance_of(row)[0], estimate)
            return None

        def hold(call: Call) -> Hold | None:
            found = None
            # In the caller's transaction, the session must be locked before the counters.
            if not (has_own_hold or call.in_transaction):
                found = self._hold_as_read(rows, fencing_token, estimate)
            return found or self._hold_locked(given, session_id, fencing_token, estimate)

        def hold_again(_: Call) -> Hold | None:
            return self._hold_locked(given, session_id, fencing_token, estimate)

        try:
            # A repeated hold replaces the first one, so it need not leave a mark.
            return self.db.committed_once(hold, hold_again, operation_id=lambda: None)
        except OutcomeUnknown as exc:
            # For the same reason, the caller may repeat the call.
            raise StoreUnavailable from exc

    @writes
    def _hold_locked(
        self, given: dict[str, Any], session_id: str, fencing_token: int, estimate: Amounts
    ) -> Hold | None:
        """Hold an estimate even if others are using the counters, or if it replaces an earlier hold."""
        lock_session(self.db, session_id, Guard(fencing_token=fencing_token))
        return self._hold_as_read(self._locked_rows(given), fencing_token, estimate)

    def _hold_as_read(self, rows: Rows, fencing_token: int, estimate: Amounts) -> Hold | None:
        """Hold an estimate, or return ``None`` if any of the counters has changed since it was read.

        That read also determined which holds are live. A statement that waits for a counter could not
        determine this: it sees the new counter, but the old locks. Raises `BudgetExceeded`.
        """
        changes = []
        for row in rows:
            own = row[_OWN]
            balance, counter, holds = balance_of(row, own=own)
            require_allowed(balance, estimate)
            # The new value omits the holds of workers that died.
            holds[str(own)] = [fencing_token, *estimate]
            stored = row[_HOLDER_POSITION], row[_STORED_HOLDS]
            changes.append([counter, *balance.spent, *stored, json.dumps(holds)])
        # The session may have been deleted in the meantime.
        if not changes or own is None:
            return None
        if not self.db.write(SET_HOLDS, {"changes": json.dumps(changes)}):
            return None
        return Hold(own, fencing_token, [row[_HOLDER_POSITION] for row in rows])

    def _locked_rows(self, given: dict[str, Any]) -> Rows:
        """Lock the current counters of all budgets with the given keys, and return their rows."""
        rows: Rows = []
        for _ in range(_ATTEMPTS):
            locked = {key for (key,) in self.db.write(LOCK_COUNTERS, given)}
            rows = self.db.read(BALANCES_OF_KEYS, given)
            if all(_are_locked(row, locked) for row in rows):
                return rows
            # A counter does not exist before its first step, or before the first step of a period.
            self.db.write(CREATE_COUNTERS, given)
        return [row for row in rows if _are_locked(row, locked)]

    def settle(self, hold: Hold, record: Callable[[], object] | None) -> None:
        """Record usage, and release a hold in the same transaction."""

        def write() -> None:
            # Recording locks the session and the ledger before the counters.
            if record is not None:
                record()
            self._release(hold)

        # This needs no separate savepoint in a commit.
        write() if self.db.in_transaction else self.db.transaction(write)

    def renew(
        self,
        keys: Sequence[Key],
        session_id: str,
        fencing_token: int,
        estimate: Amounts,
        held: Hold | None,
        record: Callable[[], bool] | None,
        *,
        is_guarded: bool,
        may_be_stopped: bool | None,
    ) -> Reservation:
        """Record usage, and replace the session's hold by an estimate, in one transaction.

        If a budget refuses the estimate, the usage is recorded and the session holds nothing. On PostgreSQL,
        without an estimate, the budgets are only checked if the usage may have reached a limit, or if the
        step ``may_be_stopped`` anyway; if that is not known, the step still has to check them when it begins.
        If the session is not locked yet, pass ``is_guarded``: it then raises `FencedOutError` and records
        nothing.
        """
        given = self._given(keys, session_id)

        def write() -> Reservation:
            if is_guarded:
                lock_session(self.db, session_id, Guard(fencing_token=fencing_token))
            # Recording locks the session and the ledger before the counters.
            may_stop = (record is not None and record()) or may_be_stopped
            if held is None and not any(estimate) and self.db.is_postgresql and not may_stop:
                return Reservation(is_checked=may_stop is False)
            rows = self.db.read(BALANCES_OF_KEYS, given)
            hold, refusal = None, None
            try:
                hold = self._renewed(given, rows, fencing_token, estimate)
            except BudgetExceeded as exc:
                refusal = exc
            if held is not None:
                # The session may have another user now, and other budgets.
                left = held.counters if hold is None else set(held.counters) - set(hold.counters)
                if left:
                    self._release(held._replace(counters=list(left)))
            return Reservation(hold=hold, refusal=refusal, at=_time_of(rows))

        return write() if self.db.in_transaction else self.db.transaction(write)

    def _renewed(
        self, given: dict[str, Any], rows: Rows, fencing_token: int, estimate: Amounts
    ) -> Hold | None:
        if not any(estimate):
            for row in rows:
                require_allowed(balance_of(row, own=row[_OWN])[0], estimate)
            return None
        held = self._hold_as_read(rows, fencing_token, estimate)
        return held or self._hold_as_read(self._locked_rows(given), fencing_token, estimate)

    def _release(self, hold: Hold) -> None:
        parameters = {
            "key": str(hold.owner),
            "token": str(hold.fencing_token),
            "keys": list_parameter(self.db, hold.counters),
        }
        self.db.write(RELEASE_HOLDS, parameters)

    def _given(self, keys: Sequence[Key], session_id: str = "") -> dict[str, Any]:
        given = json.dumps(keys, ensure_ascii=False)
        return {"tenant": self.db.tenant, "keys": given, "session_id": session_id}

    @property
    def _rows(self) -> QuerySet[BudgetRow]:
        return _rows_of(self.db)


_COUNTER_POSITION: Final = 7
_HOLDS: Final = 10
_OWN: Final = 12
_STORED_HOLDS: Final = 13
_HOLDER_POSITION: Final = 14
_TIME: Final = 11
_HOLDER: Final = ""
"""The period of the counter that stores a budget's holds."""


def _are_locked(row: tuple[Any, ...], locked: set[int]) -> bool:
    return row[_COUNTER_POSITION] in locked and row[_HOLDER_POSITION] in locked


def _time_of(rows: Rows) -> datetime | None:
    return as_utc(rows[0][_TIME]) if rows else None


def balance_of(row: tuple[Any, ...], *, own: int | None = None) -> tuple[Balance, int, dict[str, list[int]]]:
    """Return a row's balance, the key of its counter, and the live holds of others."""
    counted, counter, usd, tokens, text, at = row[6:12]
    holds: dict[str, list[int]] = json.loads(text) if text else {}
    holds.pop(str(own), None)
    held = sum(map(_amounts_of, holds.values()), NOTHING)
    return Balance(_definition(*row[:6]), counted, Amounts(usd, tokens), held, as_utc(at)), counter, holds


def _amounts_of(hold: Any) -> Amounts:
    """Return the amounts of a hold. Raises `IntegrityFault`."""
    if len(hold) != 3 or any(type(each) is not int for each in hold):
        raise IntegrityFault("A stored hold of a budget cannot be read; other rows are not affected.")
    return Amounts(*hold[1:])


def _value_of(row: BudgetRow) -> Budget:
    return _definition_of(row).as_value(created_at=row.created_at, updated_at=row.updated_at)


def _definition_of(row: BudgetRow) -> Definition:
    limit_usd = None if row.limit_usd is None else cost_units(row.limit_usd)
    return _definition(row.name, row.scope, row.value, row.period, limit_usd, row.limit_tokens)


def _definition(
    name: str, scope: str, value: str, period: str, limit_usd: int | None, limit_tokens: int | None
) -> Definition:
    return Definition(name, BudgetScope(scope), value, BudgetPeriod(period), limit_usd, limit_tokens)


def _is_counted_alike(row: BudgetRow, definition: Definition) -> bool:
    return (row.scope, row.value, row.period) == (definition.scope, definition.value, definition.period)


def _limits(definition: Definition) -> dict[str, Any]:
    usd = definition.limit_usd
    return {
        "limit_usd": None if usd is None else cost_from_units(usd),
        "limit_tokens": definition.limit_tokens,
    }


def _rows_of(db: Database) -> QuerySet[BudgetRow]:
    return BudgetRow.objects.using(db.alias).filter(tenant=db.tenant)


# --- The sums of the ledger ---------------------------------------------------------------------------


def _lock_ledger(db: Database) -> None:
    """Wait for all current writers of the ledger. Later writers see what this transaction commits.

    Raises `UnsupportedIsolation` if this transaction may not see what the current writers commit.
    """
    if not db.has_row_locks:
        return
    ((timeout, isolation),) = db.execute(LOCK_TIMEOUT, {})
    require_read_committed(isolation)
    db.execute(SET_LOCK_TIMEOUT, {"timeout": _LOCK_TIMEOUT})
    db.execute(LOCK_LEDGER, {})
    db.execute(SET_LOCK_TIMEOUT, {"timeout": timeout})


def count_again(db: Database, name: str) -> None:
    """Set the counters of a budget to the sums of the ledger. Holds stay. Call in a transaction."""
    _lock_ledger(db)
    _count_locked(db, name)


def _count_locked(db: Database, name: str) -> None:
    sums = sums_of(db, name)
    for row in _counters_of(db, name):
        usd, tokens = sums.pop((row.value, row.period), NOTHING)
        counted = {"spent_usd": cost_from_units(bounded(usd)), "spent_tokens": bounded(tokens)}
        if (row.spent_usd, row.spent_tokens) != tuple(counted.values()):
            _counters_of(db, name).filter(pk=row.pk).update(**counted)
    new = [
        BudgetCounter(
            tenant=db.tenant,
            name=name,
            value=value,
            period=period,
            spent_usd=cost_from_units(bounded(usd)),
            spent_tokens=bounded(tokens),
        )
        for (value, period), (usd, tokens) in sorted(sums.items())
        if usd or tokens
    ]
    BudgetCounter.objects.using(db.alias).bulk_create(new, batch_size=_ROWS)


def forget_periods(db: Database, name: str, before: datetime, limit: int) -> int:
    """Delete up to ``limit`` counters of a budget's periods before the one of ``before``; return how many.

    The budget no longer counts entries of these periods. Call this in a transaction.
    """
    row = _rows_of(db).select_for_update().filter(name=name).first()
    if row is None:
        return 0
    first = period_of(BudgetPeriod(row.period), before)
    if row.counted_from < first:
        row.counted_from = first
        row.save(using=db.alias, update_fields=["counted_from"])
    ended = ended_counters(db, name, BudgetPeriod(row.period), before)
    keys = list(ended.order_by("period", "value").values_list("pk", flat=True)[:limit])
    return ended.filter(pk__in=keys).delete()[0]


def ended_counters(
    db: Database, name: str, period: BudgetPeriod, before: datetime
) -> QuerySet[BudgetCounter]:
    """Return the counters of a budget's periods before the one of ``before``; none for a total."""
    ended = _counters_of(db, name).filter(period__lt=period_of(period, before))
    return ended.exclude(period=_HOLDER)


def counters_of(db: Database, name: str) -> dict[tuple[str, str], Amounts]:
    """Return a budget's stored counters by value and period, without periods that no longer count."""
    counted_from = _rows_of(db).filter(name=name).values("counted_from")[:1]
    rows = _counters_of(db, name).filter(period__gte=Subquery(counted_from))
    return {(row.value, row.period): Amounts(cost_units(row.spent_usd), row.spent_tokens) for row in rows}


def _counters_of(db: Database, name: str) -> QuerySet[BudgetCounter]:
    return BudgetCounter.objects.using(db.alias).filter(tenant=db.tenant, name=name)


_SPENDER_COLUMNS: Final = {BudgetScope.USER: "user_id", BudgetScope.AGENT_TYPE: "session_agent_type"}


def sums_of(db: Database, name: str) -> dict[tuple[str, str], Amounts]:
    """Return the ledger's sums for a budget, by the value and the period of their counters."""
    row = _rows_of(db).get(name=name)
    definition = _definition_of(row)
    since = datetime.fromisoformat(f"{row.counted_from}-01"[:10]) if row.counted_from else None
    sums: dict[tuple[str, str], Amounts] = {}
    for entries in _entries_of(db, definition):
        if since is not None:
            entries = entries.filter(timestamp__gte=since.replace(tzinfo=UTC))
            entries = entries.annotate(start=StartInUTC("timestamp", definition.period.value))
        column = _SPENDER_COLUMNS[definition.scope] if definition.is_for_each else None
        groups = [*([column] if column else []), *(["start"] if since else [])]
        totals = {"usd": ExactSum("cost_usd"), "tokens": ExactSum("total_tokens")}
        found = (
            entries.values(*groups).annotate(**totals).order_by() if groups else [entries.aggregate(**totals)]
        )
        for each in found:
            counted = each[column] if column else definition.value
            period = period_of(definition.period, each["start"]) if since else ""
            counter = (counted, period)
            sums[counter] = sums.get(counter, NOTHING) + Amounts(each["usd"], each["tokens"])
    return sums


def _entries_of(db: Database, definition: Definition) -> Iterator[QuerySet[UsageEntry]]:
    """Yield the usage entries in a budget's scope, in parts that each use an index."""
    entries = UsageEntry.objects.using(db.alias).filter(tenant=tenant_parameter(db.tenant))
    if definition.scope is not BudgetScope.TREE:
        column = _SPENDER_COLUMNS.get(definition.scope)
        if column is not None and definition.value:
            entries = entries.filter(**{column: definition.value})
        elif column is not None:
            entries = entries.filter(**{f"{column}__isnull": False})
        yield entries
        return
    root = definition.value
    is_root = Q(root_session_id=root) | Q(root_session_id__isnull=True, session_id=root)
    sessions = Session.objects.using(db.alias).filter(is_root, tenant=tenant_parameter(db.tenant))
    yield UsageEntry.objects.using(db.alias).filter(session_id__in=sessions.values("pk"))
    yield entries.filter(session__isnull=True, tree_id=root)
    # Entries from before the ledger stored the root of their tree.
    yield entries.filter(session__isnull=True, tree_id__isnull=True, recorded_for=root)


_Counter = tuple[str, str]
"""The name of a budget, and the value that is counted."""


class StoredBudget(NamedTuple):
    definition: Definition
    value: Budget


@dataclass(slots=True)
class BudgetTable(MemoryTable):
    """The budgets of one tenant by name, and the fencing tokens and amounts that sessions hold."""

    budgets: dict[str, StoredBudget] = field(default_factory=dict)
    holds: dict[_Counter, dict[str, tuple[int, Amounts]]] = field(default_factory=dict)

    def session_is_gone(self, session_id: str, *, keep_usage: bool) -> None:
        for held in self.holds.values():
            held.pop(session_id, None)


class MemoryBudgets:
    """The in-memory back end; see `DatabaseBudgets` for its operations."""

    checks_in_commits = True

    def __init__(self, scope: TenantScope) -> None:
        self._scope = scope
        self._table = scope.table(BudgetTable)
        self._ledger = scope.table(UsageLedger)
        self._locks = scope.table(LockTable)

    def set(self, definition: Definition) -> Budget:
        at = moments.now()
        with self._scope.lock:
            earlier = self._table.budgets.get(definition.name)
            created_at = at if earlier is None else earlier.value.created_at
            value = definition.as_value(created_at=created_at, updated_at=at)
            self._table.budgets[definition.name] = StoredBudget(definition, value)
            if earlier is None or earlier.definition.scope != definition.scope:
                self._forget_holds(definition.name)
            elif definition.value:
                self._forget_holds(definition.name, but=definition.value)
        return value

    def get(self, name: str) -> Budget | None:
        stored = self._table.budgets.get(name)
        return None if stored is None else stored.value

    def select(self) -> list[Budget]:
        with self._scope.lock:
            return [stored.value for _, stored in sorted(self._table.budgets.items())]

    def delete(self, name: str) -> bool:
        with self._scope.lock:
            self._forget_holds(name)
            return self._table.budgets.pop(name, None) is not None

    def _forget_holds(self, name: str, *, but: str | None = None) -> None:
        for counter in [each for each in self._table.holds if each[0] == name and each[1] != but]:
            del self._table.holds[counter]

    def balance(self, name: str, value: str | None) -> Balance:
        with self._scope.lock:
            stored = self._table.budgets.get(name)
            if stored is None:
                raise unknown_budget(name)
            return self._balance(stored.definition, stored.definition.counted(value), None)

    def balances(self, keys: Sequence[Key], own: str | None = None) -> list[Balance]:
        with self._scope.lock:
            return [
                self._balance(stored.definition, key.counted, own)
                for _, stored in sorted(self._table.budgets.items())
                for key in keys
                if (key.scope, key.value) == (stored.definition.scope, stored.definition.value)
            ]

    def hold(
        self, keys: Sequence[Key], session_id: str, fencing_token: int, estimate: Amounts
    ) -> Reservation:
        with self._scope.lock:
            found = self.balances(keys, session_id)
            try:
                for balance in found:
                    require_allowed(balance, estimate)
            except BudgetExceeded as exc:
                return Reservation(refusal=exc, at=moments.now())
            if not (found and any(estimate)):
                for balance in found:
                    self._table.holds.get(_counter(balance), {}).pop(session_id, None)
                return Reservation(bool(found), at=moments.now())
            self._scope.check_guard(self._scope.require(session_id), Guard(fencing_token=fencing_token))
            counters = [_counter(balance) for balance in found]
            for counter in counters:
                self._table.holds.setdefault(counter, {})[session_id] = fencing_token, estimate
        return Reservation(hold=Hold(session_id, fencing_token, counters), at=moments.now())

    def renew(
        self,
        keys: Sequence[Key],
        session_id: str,
        fencing_token: int,
        estimate: Amounts,
        held: Hold | None,
        record: Callable[[], bool] | None,
        *,
        is_guarded: bool,
        may_be_stopped: bool | None,
    ) -> Reservation:
        with self._scope.lock:
            if is_guarded:
                self._scope.check_guard(self._scope.require(session_id), Guard(fencing_token=fencing_token))
            if held is not None or record is not None:
                self.settle(held or Hold(session_id, fencing_token, ()), record)
            return self.hold(keys, session_id, fencing_token, estimate)

    def settle(self, hold: Hold, record: Callable[[], object] | None) -> None:
        with self._scope.lock:
            if record is not None:
                record()
            for counter in hold.counters:
                held = self._table.holds.get(counter, {})
                if hold.owner in held and held[hold.owner][0] == hold.fencing_token:
                    del held[hold.owner]

    def _balance(self, definition: Definition, counted: str, own: str | None) -> Balance:
        balance = Balance(definition, counted, NOTHING, NOTHING, moments.now())
        key = Key(definition.scope, definition.value, counted)
        period = period_of(definition.period, balance.at)
        entries = (spent_on(stored.entry, stored.spender) for stored in self._ledger.all())
        spent = (
            Amounts(each.usd, each.tokens)
            for each in entries
            if key in keys_of(each.spender) and each.day.startswith(period)
        )
        holds = self._table.holds.get(_counter(balance), {}).items()
        held = (
            amounts
            for session_id, (token, amounts) in holds
            if session_id != own and self._is_live(session_id, token)
        )
        return balance._replace(spent=sum(spent, NOTHING), held=sum(held, NOTHING))

    def _is_live(self, session_id: str, token: int) -> bool:
        lock = self._locks.get(session_id)
        return lock is not None and lock.lasts and lock.token == token


def _counter(balance: Balance) -> _Counter:
    of = balance.definition
    return of.name, balance.value


class BudgetStoreBase:
    """The budget store of the contract; subclasses provide the back end."""

    def __init__(self, backend: DatabaseBudgets | MemoryBudgets, *, tenant: str) -> None:
        self._backend = backend
        self.tenant: Final = tenant

    def set_budget(
        self,
        name: str,
        *,
        scope: BudgetScope | str,
        value: UserId | None = None,
        period: BudgetPeriod | str = "total",
        limit_usd: Dollars | None = None,
        limit_tokens: int | None = None,
    ) -> Budget:
        """Create a budget, or replace all of its fields, and return it. One transaction; safe to repeat.

        ``scope`` is ``tree`` (``value`` is the session id of the root), ``user`` or ``agent_type`` (``value``
        names one; without it, each has a budget of this size), or ``tenant`` (without a value). ``period`` is
        ``total``, ``day`` or ``month``, in UTC. Set at least one limit. Usage that the ledger already holds
        for the current period counts. While the ledger is being added up, nobody else can record usage in
        this database. Raises `InvalidPayload`.
        """
        definition = checked_definition(
            name, scope=scope, value=value, period=period, limit_usd=limit_usd, limit_tokens=limit_tokens
        )
        return self._backend.set(definition)

    def get_budget(self, name: str) -> Budget | None:
        """Return a budget, or ``None`` if it is unknown."""
        return self._backend.get(validation.identifier(name, "name"))

    def list_budgets(self) -> list[Budget]:
        """Return all budgets of the tenant, ordered by name."""
        return self._backend.select()

    def delete_budget(self, name: str) -> bool:
        """Delete a budget, and return whether it existed. Safe to repeat."""
        return self._backend.delete(validation.identifier(name, "name"))

    def status(self, name: str, *, value: UserId | None = None) -> BudgetStatus:
        """Return the amounts spent, held and left in the current period, all at the same point in time.

        For a budget per user or agent type, ``value`` names the user or the agent type. Raises
        `NotFoundError`, and `InvalidPayload` if such a budget has no ``value``.
        """
        name, chosen = validation.identifier(name, "name"), validation.user_id(value, "value")
        return status_of(self._backend.balance(name, chosen))

    aset_budget = async_twin(set_budget)
    aget_budget = async_twin(get_budget)
    alist_budgets = async_twin(list_budgets)
    adelete_budget = async_twin(delete_budget)
    astatus = async_twin(status)


def reserve(
    budgets: BudgetStoreBase, spender: Spender, session_id: str, fencing_token: int, estimate: Amounts
) -> Reservation:
    """Check every budget that applies to a session, and hold an estimate in all of them."""
    return budgets._backend.hold(keys_of(spender), session_id, fencing_token, estimate)


def renew(
    budgets: BudgetStoreBase,
    spender: Spender,
    session_id: str,
    fencing_token: int,
    estimate: Amounts,
    held: Hold | None,
    record: Callable[[], bool] | None,
    *,
    is_guarded: bool = False,
    may_be_stopped: bool | None = None,
) -> Reservation:
    """Record usage, and replace the session's hold by an estimate, in one transaction."""
    return budgets._backend.renew(
        keys_of(spender),
        session_id,
        fencing_token,
        estimate,
        held,
        record,
        is_guarded=is_guarded,
        may_be_stopped=may_be_stopped,
    )


def checks_in_commits(budgets: BudgetStoreBase) -> bool:
    """Return whether each commit has to check a next step without an estimate, because no statement of the
    commit finds out whether a budget may stop it.
    """
    return budgets._backend.checks_in_commits


def settle(budgets: BudgetStoreBase, hold: Hold, record: Callable[[], object] | None) -> None:
    """Record usage, and release a hold."""
    budgets._backend.settle(hold, record)


class DatabaseBudgetStore(BudgetStoreBase):
    """Budgets in a Django database, for the sessions and the ledger of the same database and tenant.

    Example::

        budgets = DatabaseBudgetStore(tenant="acme")
        budgets.set_budget("everything", scope="tenant", period="month", limit_usd=300)
        print(budgets.status("everything").remaining_usd)
    """

    def __init__(self, using: str | None = None, *, tenant: str = "") -> None:
        conf.require_usable_prefix()
        db = Database(using, validation.tenant(tenant), None)
        super().__init__(DatabaseBudgets(db), tenant=db.tenant)


class InMemoryBudgetStore(BudgetStoreBase):
    """Budgets in one process, for tests and experiments; pass the ``world`` of the stores that they limit.

    Example::

        store = InMemoryStore()
        budgets = InMemoryBudgetStore(world=store.world)
        budgets.set_budget("free-plan", scope="user", period="day", limit_usd="0.50")
    """

    def __init__(self, *, tenant: str = "", world: MemoryWorld | None = None) -> None:
        tenant = validation.tenant(tenant)
        scope = TenantScope(MemoryWorld() if world is None else world, tenant=tenant, limits=None)
        super().__init__(MemoryBudgets(scope), tenant=tenant)
