"""The usage ledger: its entries and their prices, the checks of arguments, and the statements.

Usage entries: their validation, and the price of their tokens.

The library ``genai-prices`` (extra ``prices``) contains the prices, so no network request is sent.

The SQL of the usage ledger. An insertion skips every entry whose id is known.

An entry takes its columns from the locked row of its session, and the unique constraint decides on its id.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from datetime import UTC, datetime, timedelta
from decimal import Decimal, InvalidOperation
from functools import cache, lru_cache, partial
from importlib import import_module
from types import ModuleType
from typing import Any, Final

from django.db.models import Count, QuerySet

from helix_store.catalogue import Part, Table
from helix_store.core import validation
from helix_store.core.dicts import AnyUsageEntry
from helix_store.core.ids import new_id
from helix_store.core.types import UsageKind
from helix_store.core.usage import (
    MAX_COST_UNITS,
    CallStats,
    TokenCounts,
    ToolStats,
    UsageBucket,
    UsageEntry,
    UsageGrouping,
    UsageReportGrouping,
    UsageRollup,
    UsageSource,
    UsageTimeBucket,
    cost_as_stored,
    cost_from_units,
    cost_units,
)
from helix_store.counters import (
    Spender,
    applies_to,
    change_counters,
    count_inserted,
    delete_usage,
    has_budgets,
    spent_on,
)
from helix_store.engine.database import Call, Database, DatabaseOperations, reads, writes
from helix_store.engine.expressions import (
    ISOLATION,
    SEES_COMMITS,
    ExactSum,
    StartInUTC,
    after_keyset,
    all_tenants,
    exact_sum,
    for_keys,
    is_in_list,
    list_parameter,
    local_day,
    require_read_committed,
    rows_parameter,
    summed,
    tenant_parameter,
)
from helix_store.engine.statement import Statement, table
from helix_store.exceptions import InvalidPayload
from helix_store.models import Session
from helix_store.models import UsageEntry as UsageRow
from helix_store.sessions.heads import tree_keys
from helix_store.sessions.locking import first_row, missing_session, session_with_id
from helix_store.sessions.statements import SESSION_BY_ID

MAX_AMOUNT: Final = 1e300
"""The largest custom amount: the sum of a hundred million such amounts is still a finite float."""

MAX_EXACT_AMOUNT: Final = 2**53
"""The largest whole custom amount: amounts are stored and summed as floats, which are exact up to here."""


def checked_entry(entry: UsageEntry | AnyUsageEntry, path: str = "") -> UsageEntry:
    """Return the entry as a read would, with an id. Raises `InvalidPayload` with a path below ``path``."""
    try:
        return _checked(entry if isinstance(entry, UsageEntry) else UsageEntry.from_dict(entry))
    except InvalidPayload as exc:
        raise InvalidPayload(path=path + exc.path, reason=exc.reason) from exc


def plain_amount(amount: float) -> int | float:
    """Return an amount in the form in which it would be read: a whole amount is an ``int``."""
    return int(amount) if amount <= MAX_EXACT_AMOUNT and amount == int(amount) else float(amount)


def _checked(entry: UsageEntry) -> UsageEntry:
    kind = validation.enum(UsageKind, entry.kind, "kind")
    rules = _RULES[kind]
    for name in _ALL_OWN_FIELDS - rules.keys():
        if getattr(entry, name) is not None:
            raise InvalidPayload(path=name, reason=f"an entry of kind {kind} has no such field")
    checked = validation.fields(entry, rules)
    if checked["id"] is None:
        checked["id"] = new_id()
    return replace(entry, kind=kind, **checked)


def _amount(value: Any, name: str) -> int | float:
    if type(value) is int:
        return validation.whole_number(value, name, maximum=MAX_EXACT_AMOUNT)
    if type(value) is not float or not math.isfinite(value):
        raise InvalidPayload(path=name, reason="expected a finite number")
    if not 0 <= value <= MAX_AMOUNT:
        raise InvalidPayload(path=name, reason=f"expected a number from 0 to {MAX_AMOUNT}")
    return plain_amount(value)


def checked_cost(value: Any, name: str) -> Decimal | None:
    """Return a cost, rounded to the stored decimal places. For a float, its shortest decimal form counts."""
    if value is None:
        return None
    if type(value) not in (Decimal, int, float, str):
        raise InvalidPayload(path=name, reason=f"expected a decimal number, got {type(value).__name__}")
    try:
        cost = Decimal(repr(value) if type(value) is float else value)
    except InvalidOperation as exc:
        raise InvalidPayload(path=name, reason="expected a decimal number") from exc
    if not cost.is_finite() or not 0 <= cost <= cost_from_units(MAX_COST_UNITS):
        reason = f"expected dollars from 0 to {cost_from_units(MAX_COST_UNITS)}"
        raise InvalidPayload(path=name, reason=reason)
    return cost_from_units(cost_units(cost))


_TOKENS: Final = validation.record(
    TokenCounts,
    {field.name: validation.optional(validation.whole_number, 0) for field in fields(TokenCounts)},
)
_SOURCE: Final = validation.record(
    UsageSource, {"type": validation.identifier, "name": validation.identifier}
)
_CALL: Final[dict[str, validation.Rule]] = {
    "success": lambda value, name: validation.instance(value, bool, name),
    "duration_ms": validation.milliseconds,
}
_OWN_FIELDS: Final[dict[UsageKind, dict[str, validation.Rule]]] = {
    UsageKind.TOKENS: {
        "model": validation.identifier,
        "tokens": _TOKENS,
        "duration_ms": validation.optional(validation.milliseconds),
    },
    UsageKind.TOOL: {"tool_name": validation.identifier, **_CALL},
    UsageKind.SUBAGENT: {
        "agent_type": validation.identifier,
        "sub_session_id": validation.identifier,
        **_CALL,
    },
    UsageKind.CUSTOM: {
        "type": validation.identifier,
        "name": validation.identifier,
        "amount": _amount,
        "unit": partial(validation.optional_identifier, empty=True),
    },
}
_RULES: Final = {
    kind: {
        **own,
        "session_id": validation.identifier,
        "step_count": validation.whole_number,
        "timestamp": validation.epoch_milliseconds,
        "source": _SOURCE,
        "run_id": validation.optional_identifier,
        "id": validation.optional_identifier,
        "cost_usd": validation.optional(checked_cost),
    }
    for kind, own in _OWN_FIELDS.items()
}
_ALL_OWN_FIELDS: Final = frozenset(name for own_fields in _OWN_FIELDS.values() for name in own_fields)


def priced(entry: UsageEntry) -> UsageEntry:
    """Return a checked entry with the cost of its tokens, unless it has a cost or the price is unknown."""
    if entry.cost_usd is not None or entry.model is None or entry.tokens is None:
        return entry
    at = validation.milliseconds_to_datetime(entry.timestamp)
    return replace(entry, cost_usd=token_cost(entry.model, entry.tokens, at))


def token_cost(model: str, tokens: TokenCounts, at: datetime, *, cache_write_1h: int = 0) -> Decimal | None:
    """Return the cost in dollars at the price of that time, or ``None`` if it is unknown: for an unknown
    model, for a total without prompt and completion tokens, and for counts that contradict each other.

    A model may begin with its provider, followed by a slash or colon (``openai/gpt-4o``), or be an id or an
    ARN of Amazon Bedrock. ``cache_write_1h`` is the part of ``tokens.cache_write`` that the provider keeps
    for an hour, for which some charge more.
    """
    library = _library()
    if library is None or not _adds_up(tokens, cache_write_1h):
        return None
    usage = library.Usage(**_priced_counts(tokens, cache_write_1h))
    for provider, reference in _references(model):
        try:
            price = library.calc_price(
                usage, reference, provider_id=provider, genai_request_timestamp=at
            ).total_price
        except LookupError:
            continue
        except ValueError:
            return None
        return cost_as_stored(price)
    return None


def _adds_up(tokens: TokenCounts, cache_write_1h: int) -> bool:
    """Return whether each count is at most the one that includes it, so that every token has one price."""
    return (
        bool(tokens.prompt or tokens.completion or not tokens.total)
        and tokens.cached + tokens.cache_write <= tokens.prompt
        and tokens.audio_prompt <= tokens.prompt
        and tokens.reasoning + tokens.audio_completion <= tokens.completion
        and cache_write_1h <= tokens.cache_write
    )


def _priced_counts(tokens: TokenCounts, cache_write_1h: int) -> dict[str, int]:
    """Return the counts by the names of the price list, which has more of them in newer releases."""
    counts = {
        "input_tokens": tokens.prompt,
        "cache_read_tokens": tokens.cached,
        "output_tokens": tokens.completion,
        "output_reasoning_tokens": tokens.reasoning,
    }
    rarer = {
        "cache_write_tokens": tokens.cache_write,
        "cache_write_1h_tokens": cache_write_1h,
        "input_audio_tokens": tokens.audio_prompt,
        "output_audio_tokens": tokens.audio_completion,
    }
    counts |= {name: count for name, count in rarer.items() if count}
    if tokens.audio_prompt:
        # Nobody reports which of the cached tokens were audio: as few as possible, so text is cached first.
        beyond_text = tokens.cached + tokens.cache_write + tokens.audio_prompt - tokens.prompt
        read = min(tokens.cached, max(0, beyond_text))
        if tokens.cached:
            counts["cache_audio_read_tokens"] = read
        if tokens.cache_write:
            counts["cache_audio_write_tokens"] = max(0, beyond_text - read)
    return counts


_BEDROCK_PROVIDERS: Final = ("", "aws", "bedrock", "amazon-bedrock", "amazon_bedrock", "bedrock_converse")
_BEDROCK_ID: Final = re.compile(r"[a-z][a-z-]*\.[a-z]", re.IGNORECASE)
"""The beginning of a model id of Amazon Bedrock: its region or vendor, and a period."""


def _references(model: str) -> Iterator[tuple[str | None, str]]:
    """Yield the providers (``None`` if the price list chooses one) and names by which to look a model up."""
    path, _, last = model.rpartition("/")
    if path.startswith("arn:aws") and ":bedrock:" in path:
        path = ""
    if path.lower() in _BEDROCK_PROVIDERS and _BEDROCK_ID.match(last):
        yield "aws", last
    provider, name = re.split("[/:]", f"{model}/", maxsplit=1)
    yield provider, name.removesuffix("/")
    yield None, model


@cache
def _library() -> ModuleType | None:
    # It is imported on first use, because the import takes 0.2 seconds and most processes record no usage.
    try:
        return import_module("genai_prices")
    except ImportError:
        return None


KindFilter = Sequence[UsageKind] | None
"""The kinds in order; ``None`` means all."""
StepFilter = tuple[int | None, int | None]
"""The first and the last step, both inclusive; ``None`` means no bound."""

TOKEN_FIELDS: Final = tuple(each.name for each in fields(TokenCounts))
RARE_TOKEN_FIELDS: Final = ("cache_write", "audio_prompt", "audio_completion")
"""Most entries have none of these tokens. Their columns then hold no value, as in rows of older releases."""


def token_counts(counts: Iterable[int]) -> TokenCounts:
    """Return numbers of tokens in the order of `TOKEN_FIELDS`."""
    return TokenCounts(**dict(zip(TOKEN_FIELDS, counts, strict=True)))


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageQuery:
    """A page of entries. Filters are combined with AND; ``None`` means no filter. ``agent_type`` and
    ``user_id`` are those of the session. ``date_from`` is inclusive, ``date_to`` is exclusive. ``after`` is
    the timestamp and the ordinal of the last entry of the previous page.
    """

    agent_type: str | None = None
    kinds: KindFilter = None
    user_id: str | None = None
    model: str | None = None
    date_from: datetime | None = None
    date_to: datetime | None = None
    descending: bool = True
    limit: int = 50
    offset: int = 0
    after: tuple[datetime, int] | None = None
    count: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageSum:
    """The sum of entries of one kind, name and custom name. Costs are whole units; see `cost_units`.

    ``name`` is the model, the tool, the agent type or the custom type, depending on the kind.
    """

    kind: UsageKind
    name: str
    custom_name: str | None
    entry_count: int
    successes: int
    tokens: TokenCounts
    duration_ms: int
    amount: float
    cost: int

    @property
    def calls(self) -> CallStats:
        return CallStats(
            calls=self.entry_count,
            failures=self.entry_count - self.successes,
            total_duration_ms=self.duration_ms,
        )


def sum_of(entry: UsageEntry) -> UsageSum:
    """Return the sum of a single entry."""
    return UsageSum(
        kind=entry.kind,
        name=entry.model or entry.tool_name or entry.agent_type or entry.type or "",
        custom_name=entry.name,
        entry_count=1,
        successes=1 if entry.success else 0,
        tokens=entry.tokens or TokenCounts(),
        duration_ms=entry.duration_ms or 0,
        amount=entry.amount or 0,
        cost=0 if entry.cost_usd is None else cost_units(entry.cost_usd),
    )


def rollup(sums: Iterable[UsageSum], *, session_count: int) -> UsageRollup:
    """Return the rollup of one session or of a tree of sessions."""
    tokens_by_model: defaultdict[str, TokenCounts] = defaultdict(TokenCounts)
    by_tool: defaultdict[str, CallStats] = defaultdict(CallStats)
    sub_agents: defaultdict[str, CallStats] = defaultdict(CallStats)
    custom: defaultdict[str, defaultdict[str, float]] = defaultdict(lambda: defaultdict(int))
    cost = entry_count = 0
    for part in sums:
        cost += part.cost
        entry_count += part.entry_count
        if part.kind is UsageKind.TOKENS:
            tokens_by_model[part.name] += part.tokens
        elif part.kind is UsageKind.TOOL:
            by_tool[part.name] += part.calls
        elif part.kind is UsageKind.SUBAGENT:
            sub_agents[part.name] += part.calls
        else:
            custom[part.name][part.custom_name or ""] += part.amount
    return UsageRollup(
        tokens=sum(tokens_by_model.values(), TokenCounts()),
        tokens_by_model=dict(sorted(tokens_by_model.items())),
        tool_stats=ToolStats(
            total_calls=sum(stats.calls for stats in by_tool.values()), by_tool=dict(sorted(by_tool.items()))
        ),
        sub_agents=dict(sorted(sub_agents.items())),
        custom={
            custom_type: {name: plain_amount(amount) for name, amount in sorted(amounts.items())}
            for custom_type, amounts in sorted(custom.items())
        },
        cost_usd=cost_from_units(cost),
        entry_count=entry_count,
        session_count=session_count,
    )


def bucket_start(time: datetime, bucket: UsageTimeBucket) -> datetime:
    """Return the start of the bucket that contains a time, in UTC."""
    start = time.astimezone(UTC).replace(minute=0, second=0, microsecond=0)
    if bucket is UsageTimeBucket.HOUR:
        return start
    day = start.replace(hour=0)
    if bucket is UsageTimeBucket.WEEK:
        return day - timedelta(days=day.weekday())
    return day.replace(day=1) if bucket is UsageTimeBucket.MONTH else day


def time_series(sums: Iterable[UsageBucket]) -> list[UsageBucket]:
    """Return a bucket for each start and group, in this order, with the one without a group first."""
    merged: dict[tuple[datetime, bool, str], UsageBucket] = {}
    for part in sums:
        key = (part.start, part.group is not None, part.group or "")
        earlier = merged.get(key)
        merged[key] = part if earlier is None else _add(earlier, part)
    return [merged[key] for key in sorted(merged)]


def _add(one: UsageBucket, other: UsageBucket) -> UsageBucket:
    return replace(
        one,
        tokens=one.tokens + other.tokens,
        cost_usd=cost_from_units(cost_units(one.cost_usd) + cost_units(other.cost_usd)),
        entry_count=one.entry_count + other.entry_count,
    )


_TYPES: Final = {
    "BigIntegerField": "bigint",
    "BooleanField": "boolean",
    "CharField": "varchar",
    "DateTimeField": "timestamptz",
    "FloatField": "float8",
    "ForeignKey": "bigint",
}
_COLUMN_TYPES: Final = {
    field.attname: _TYPES[field.get_internal_type()]
    for field in UsageRow._meta.concrete_fields
    if not (field.primary_key or field.attname == "tree_id")
}
"""PostgreSQL's type of each column: prepared parameters have types before they have values."""

COLUMNS: Final = tuple(_COLUMN_TYPES)
SESSION_COLUMNS: Final = {
    "tenant": "tenant",
    "session_id": "id",
    "session_agent_type": "agent_type",
    "user_id": "user_id",
}
"""Columns that an entry copies from its session, and their names there."""

_TOKEN_COLUMNS: Final = tuple(f"{name}_tokens" for name in TOKEN_FIELDS)
SUMMED: Final = ("duration_ms", "cost_usd", *_TOKEN_COLUMNS)

# SQLite has allowed this number of parameters since 3.32, unless it is built with a different limit.
_SQLITE_PARAMETERS: Final = 32_766
ROWS_PER_STATEMENT: Final = min(1_000, _SQLITE_PARAMETERS // len(COLUMNS))

# This prevents the deletion of a session until the commit, but does not wait for its steps. Without this lock
# a concurrent deletion would fail the commit with a broken foreign key.
_KEEP: Final = "FOR KEY SHARE"
_UNLESS_KNOWN: Final = "ON CONFLICT (tenant, entry_id) DO NOTHING"


def _names(columns: Iterable[str]) -> str:
    return ", ".join(f'"{name}"' for name in columns)


@lru_cache(512)
def insert_entry(columns: tuple[str, ...], *, counts: bool, locks_holds: bool = False) -> Statement:
    """Insert an entry of the session ``recorded_for``; return no row for a known id or an unknown session.

    An entry to which budgets apply is inserted only by a statement that ``counts``, that is, which also
    changes the counters; ``locks_holds`` is that of `count_inserted`. Only PostgreSQL has such a statement.
    Without budgets, it takes 1.1 times as long.
    In a transaction that may not see all budgets, no entry is inserted. The second column is whether a
    budget may now stop a step without an estimate.
    """
    insert = f"INSERT INTO {table(UsageRow)} ({_names((*SESSION_COLUMNS, *columns))})"
    copied = ", ".join(SESSION_COLUMNS.values())
    typed = ", ".join(f"%({name})s::{_COLUMN_TYPES[name]}" for name in columns)
    plain = ", ".join(f"%({name})s" for name in columns)
    session = f"""FROM {table(Session)} AS s
            WHERE tenant = (SELECT %(tenant)s) AND session_id = %(recorded_for)s::varchar"""
    uncapped = f"AND NOT {applies_to('s')}"
    seeing = f"{session} AND {SEES_COMMITS} {{}} {_UNLESS_KNOWN} RETURNING "
    postgresql = f"{insert} SELECT {copied}, {typed} {seeing}"
    counted = count_inserted(locks_holds=locks_holds)
    counting = f"""
            WITH inserted AS ({postgresql.format(_KEEP)} *), counted AS ({counted})
            SELECT id, EXISTS (SELECT 1 FROM counted WHERE may_stop) FROM inserted"""
    return Statement(
        postgresql=counting if counts else f"{postgresql.format(f'{uncapped} {_KEEP}')} id, false",
        # Citus does not support a row lock in an INSERT.
        citus=(f"SELECT id {session} {_KEEP}", f"{postgresql.format(uncapped)} id, false"),
        sqlite=f"""
            {insert} SELECT {copied}, {plain} FROM {table(Session)} AS s
            WHERE tenant = (SELECT %(tenant)s) AND session_id = %(recorded_for)s {uncapped}
            {_UNLESS_KNOWN} RETURNING id, 0""",
    )


@lru_cache(16)
def insert_entries(rows: int) -> Statement:
    """Insert entries in order with all `COLUMNS`; `rows_parameter` returns the parameters. With arrays,
    PostgreSQL takes a quarter of the time that it takes with a placeholder for every value.

    Return the id of each entry that was inserted, and whether its tenant may have budgets.
    """
    insert = f"INSERT INTO {table(UsageRow)} ({_names(COLUMNS)})"
    arrays = ", ".join(f"%s::{column_type}[]" for column_type in _COLUMN_TYPES.values())
    row = f"({', '.join(['%s'] * len(COLUMNS))})"
    tenant = f"{table(UsageRow)}.tenant"
    postgresql = f"""
            {insert} SELECT {_names(COLUMNS)}
            FROM unnest({arrays}) WITH ORDINALITY AS given({_names(COLUMNS)}, ordinal)
            ORDER BY ordinal {_UNLESS_KNOWN} RETURNING entry_id,"""
    return Statement(
        postgresql=f"{postgresql} {has_budgets(tenant)}",
        # Citus does not support a query in the RETURNING of an INSERT ... SELECT.
        citus=(f"{postgresql} true",),
        # With the plain column, SQLite would not use the index.
        sqlite=f"""
            {insert} VALUES {", ".join([row] * rows)} {_UNLESS_KNOWN}
            RETURNING entry_id, {has_budgets(f"+{tenant}")}""",
    )


def _keep_sessions() -> Statement:
    # Sorted in the order in which trees are locked, so that the two cannot deadlock.
    def read(condition: str, isolation: str) -> str:
        return f"""
        SELECT session_id, {isolation}, COALESCE(root_session_id, session_id),
            {", ".join(SESSION_COLUMNS.values())}
        FROM {table(Session)}
        WHERE tenant = (SELECT %(tenant)s) AND {condition} ORDER BY id"""

    postgresql, sqlite = is_in_list("session_id", "session_ids", "text")
    return Statement(f"{read(postgresql, ISOLATION)} {_KEEP}", read(sqlite, "''"))


def _sums(condition: str) -> Statement:
    """Sum the entries that meet a condition by kind, name and custom name.

    These three columns are followed by the number of entries, the number of successes, the sum of amounts,
    and the sums of `SUMMED`, for `summed`.
    """
    # All names are in one column: with more grouping columns PostgreSQL estimates too many groups, and sorts
    # where it could hash.
    of_postgresql, of_sqlite = zip(*map(exact_sum, SUMMED), strict=True)

    def text(sums: Iterable[str]) -> str:
        return f"""
            SELECT kind, COALESCE(model, tool_name, agent_type, custom_type), custom_name,
                count(*), count(*) FILTER (WHERE success), SUM(amount), {", ".join(sums)}
            FROM {table(UsageRow)} WHERE {condition} GROUP BY 1, 2, 3"""

    return Statement(text(of_postgresql), text(of_sqlite))


KEEP_SESSIONS: Final = _keep_sessions()
"""The id, the isolation level, the root and the `SESSION_COLUMNS` of each session.

No session can be deleted until the commit.
"""

SUMS_OF_SESSION: Final = _sums(f"session_id = (SELECT id FROM {table(Session)} WHERE {SESSION_BY_ID})")
SUMS_OF_SESSIONS: Final = for_keys(_sums("session_id IN %(keys)s"))
SUMS_OF_KEPT: Final = _sums(
    "tenant = (SELECT %(tenant)s) AND recorded_for = %(session_id)s AND session_id IS NULL"
)
"""Entries of deleted sessions with this id."""


@lru_cache(4)
def totals_of_sessions(most: int) -> Statement:
    """Return the key of each session with the number and the sums of its entries, of at most one more than
    ``most`` entries. On SQLite, these three are one string.
    """

    def read(columns: str, key: str) -> str:
        return f"""(SELECT {columns} FROM (
            SELECT e.total_tokens, e.cost_usd FROM {table(UsageRow)} AS e
            WHERE e.session_id = {key} LIMIT {most + 1}) AS entries)"""

    tokens, tokens_sqlite = exact_sum("total_tokens")
    cost, cost_sqlite = exact_sum("cost_usd")
    # It is a single string, because SQLite would read the entries again for each value.
    sums = f"count(*) || ';' || coalesce({tokens_sqlite}, '0 0') || ';' || coalesce({cost_sqlite}, '0 0')"
    return Statement(
        f"""SELECT keys.value, sums.* FROM unnest(%(keys)s::bigint[]) AS keys(value),
            LATERAL {read(f"count(*), {tokens}, {cost}", "keys.value")} AS sums""",
        f"SELECT keys.value, {read(sums, 'keys.value')} FROM json_each(%(keys)s) AS keys",
    )


# --- Reports ---------------------------------------------------------------------------------------

REPORTED: Final = (*_TOKEN_COLUMNS, "cost_usd")
"""The columns that a report adds up."""

_IS_OF_SOME: Final = is_in_list("e.tenant", "tenants", "text")
REPORT_FILTERS: Final = {
    "tenant": "e.tenant = (SELECT %(tenant)s)",
    "tenants": _IS_OF_SOME[0],
    "agent_type": "e.session_agent_type = %(agent_type)s",
    "user_id": "e.user_id = %(user_id)s",
    "model": "e.model = %(model)s",
    "date_from": "e.timestamp >= %(date_from)s",
    "date_to": "e.timestamp < %(date_to)s",
}
"""The conditions of a report on PostgreSQL, keyed by the names of their parameters."""

_SESSION_OF_ENTRY: Final = f"LEFT JOIN {table(Session)} AS s ON s.id = e.session_id"
_DAY: Final = local_day("e.timestamp", "zone")
_GROUPS: Final = {
    UsageReportGrouping.SESSION: ("e.tenant", "e.recorded_for", "e.session_id IS NULL"),
    UsageReportGrouping.TREE: (
        "e.tenant",
        "COALESCE(s.root_session_id, e.recorded_for)",
        "e.session_id IS NULL",
    ),
    UsageReportGrouping.MODEL: ("NULL", "e.model", "FALSE"),
    UsageReportGrouping.AGENT_TYPE: ("NULL", "e.session_agent_type", "FALSE"),
    UsageReportGrouping.USER: ("e.tenant", "e.user_id", "FALSE"),
}
"""The columns that the entries of a group share: tenant, name and whether the session was deleted."""


def _costs_by_day_and_agent(of_tenants: Iterable[str]) -> Statement:
    texts = (
        f"""SELECT {day} AS day, e.session_agent_type, {cost} FROM {table(UsageRow)} AS e
        WHERE {is_of_tenant} AND e.timestamp >= %(date_from)s
        GROUP BY day, e.session_agent_type ORDER BY day, e.session_agent_type"""
        for day, cost, is_of_tenant in zip(_DAY, exact_sum("e.cost_usd"), of_tenants, strict=True)
    )
    return Statement(*texts)


_IS_OF_ANY: Final = f"e.tenant IN ({all_tenants(table(UsageRow))})"
COSTS_BY_DAY_AND_AGENT: Final = _costs_by_day_and_agent((_IS_OF_ANY, _IS_OF_ANY))
"""The sums of the costs of all tenants by day and agent type, for `summed`."""

COSTS_OF_TENANTS_BY_DAY_AND_AGENT: Final = _costs_by_day_and_agent(_IS_OF_SOME)


@lru_cache(256)
def report_statement(by: UsageReportGrouping, filters: tuple[str, ...]) -> Statement:
    """Return the groups with the highest costs, or the last days, and the sums of all groups.

    ``filters`` are names of `REPORT_FILTERS`. The columns are the number of groups, the tenant, the group,
    whether it was deleted, the number of entries, of tool calls and of entries without a price, and the sums
    of `REPORTED`, for `summed`. The number of groups is not null in the row with the sums of all groups.
    """
    conditions = [REPORT_FILTERS[name] for name in filters]
    if conditions and not {"tenant", "tenants"} & set(filters):
        # Every other index begins with the tenant.
        conditions.insert(0, _IS_OF_ANY)
    rows = f"{table(UsageRow)} AS e"
    if by is UsageReportGrouping.TREE:
        rows += f" {_SESSION_OF_ENTRY}"
    if conditions:
        rows += f" WHERE {' AND '.join(conditions)}"
    on_sqlite = rows.replace(*_IS_OF_SOME)
    return Statement(_report(by, rows, is_sqlite=False), _report(by, on_sqlite, is_sqlite=True))


def _report(by: UsageReportGrouping, rows: str, *, is_sqlite: bool) -> str:
    """Return the report for one vendor. On SQLite, each sum has two columns; the lower one has 32 bits."""
    tenant, name, is_deleted = _GROUPS.get(by, ("NULL", _DAY[is_sqlite], "FALSE"))
    if is_sqlite:
        low = "SUM(e.{0} & 4294967295)"
        high = f"SUM(e.{{0}} >> 32) + ({low} >> 32)"
        summed = f"COALESCE({high}, 0) AS {{0}}, COALESCE({low}, 0) & 4294967295 AS {{0}}_low"
        totalled, shown = "SUM({0}) || ' ' || SUM({0}_low)", "{0} || ' ' || {0}_low"
    else:
        summed, totalled, shown = "COALESCE(SUM(e.{0}), 0) AS {0}", "SUM({0})", "{0}"
    halves = ("", "_low") if is_sqlite else ("",)
    order = [f"{column}{half} DESC" for column in ("cost_usd", "total_tokens") for half in halves]
    order += ["tenant", "name IS NULL", "name", "is_deleted"]
    if by is UsageReportGrouping.DAY:
        order = ["name DESC"]
    sums, totals, columns = (", ".join(map(each.format, REPORTED)) for each in (summed, totalled, shown))
    return f"""
        WITH grouped AS (
            SELECT {tenant} AS tenant, {name} AS name, {is_deleted} AS is_deleted, count(*) AS entry_count,
                count(*) FILTER (WHERE e.kind = 'tool') AS tool_calls,
                count(*) FILTER (WHERE e.kind = 'tokens' AND e.cost_usd IS NULL) AS unpriced,
                {sums}
            FROM {rows}
            GROUP BY 1, 2, 3
        )
        SELECT count(*), NULL, NULL, NULL, SUM(entry_count), SUM(tool_calls), SUM(unpriced), {totals}
        FROM grouped
      UNION ALL
        SELECT * FROM (
            SELECT CAST(NULL AS bigint), tenant, name, is_deleted, entry_count, tool_calls, unpriced,
                {columns}
            FROM grouped ORDER BY {", ".join(order)} LIMIT %(limit)s) AS highest"""


# An entry outlives its session, so entries are ordered within their tenant.
TABLES: Final = (
    Table(
        UsageRow,
        record="usage_entry",
        order=("entry_id",),
        parts=(Part(("timestamp", "id")),),
        session_id="recorded_for",
    ),
)


_TOKEN_SUMS: Final = {name: ExactSum(f"{name}_tokens") for name in TOKEN_FIELDS}
_GROUP_COLUMNS: Final = {
    UsageGrouping.MODEL: "model",
    UsageGrouping.AGENT_TYPE: "session_agent_type",
    UsageGrouping.USER_ID: "user_id",
    UsageGrouping.KIND: "kind",
}
_FIELDS: Final = {
    "entry_id": "id",
    "recorded_for": "session_id",
    "step_count": "step_count",
    "run_id": "run_id",
    "model": "model",
    "tool_name": "tool_name",
    "agent_type": "agent_type",
    "sub_session_id": "sub_session_id",
    "success": "success",
    "duration_ms": "duration_ms",
    "custom_type": "type",
    "custom_name": "name",
    "custom_unit": "unit",
}
"""The columns that store a field of an entry, and the name of that field."""

_ENTRY_COLUMNS: Final = tuple(
    field.attname
    for field in UsageRow._meta.concrete_fields
    if field.attname not in ("tenant", "session_id", "session_agent_type", "user_id", "tree_id")
)


class DatabaseUsage(DatabaseOperations):
    """The database back end. Arguments have already been checked, and entries have ids and costs.

    The entries of a session id belong to the existing session, or are the kept entries of a deleted one.
    """

    def __init__(self, db: Database) -> None:
        super().__init__(db)
        self._counts = False  # True once the tenant has been found to have budgets

    def record(self, entries: Sequence[UsageEntry], *, locks_holds: bool = False) -> bool:
        """Record all entries or none; entries with a known id are skipped. ``locks_holds`` is for a
        transaction that then changes the holds of budgets.

        On PostgreSQL, return whether a budget that counts them may now stop a step without an estimate.
        Raises `SessionNotFound` and `UnsupportedIsolation`.
        """
        if len(entries) != 1:
            return self._record_all(entries, locks_holds)
        (entry,) = entries
        columns = _columns_of(entry)
        parameters = {"tenant": self.db.tenant, **columns}

        def record(call: Call) -> bool:
            statement = insert_entry(tuple(columns), counts=self._counts, locks_holds=locks_holds)
            rows = call.write(statement, parameters)
            return bool(rows[0][1]) if rows else self._record_all(entries, locks_holds)

        # An entry with a known id is not recorded twice.
        return self.db.committed_once(record, record, operation_id=lambda: entry.id)

    @writes
    def _record_all(self, entries: Sequence[UsageEntry], locks_holds: bool) -> bool:
        kept = self._kept_sessions(entries)
        # Of entries with the same id, the first is stored, and counts.
        by_id = {entry.id: entry for entry in reversed(entries)}
        counted: list[UsageEntry] = []
        for start in range(0, len(entries), ROWS_PER_STATEMENT):
            batch = entries[start : start + ROWS_PER_STATEMENT]
            rows = [kept[entry.session_id][1] | _columns_of(entry) for entry in batch]
            inserted = self.db.execute(insert_entries(len(rows)), rows_parameter(self.db, COLUMNS, rows))
            counted += (by_id[entry_id] for entry_id, has_budgets in inserted if has_budgets)
        if not counted:
            return False
        self._counts = True
        spent = (spent_on(entry, kept[entry.session_id][0]) for entry in counted)
        return change_counters(self.db, spent, locks_holds=locks_holds)

    def _kept_sessions(self, entries: Sequence[UsageEntry]) -> dict[str, tuple[Spender, dict[str, Any]]]:
        """Return the spender of each session, and the columns that entries copy from it, by session id.

        The sessions cannot be deleted until the commit. Raises `SessionNotFound`, and `UnsupportedIsolation`
        if budgets that the transaction does not see may count the entries.
        """
        names = list(dict.fromkeys(entry.session_id for entry in entries))
        rows = self.db.execute(
            KEEP_SESSIONS, {"tenant": self.db.tenant, "session_ids": list_parameter(self.db, names)}
        )
        found = {}
        is_counted = any(entry.cost_usd or (entry.tokens and entry.tokens.total) for entry in entries)
        for name, isolation, root_id, *columns in rows:
            if is_counted:
                require_read_committed(isolation)
            copied = dict(zip(SESSION_COLUMNS, columns, strict=True))
            found[name] = Spender(root_id, copied["user_id"], copied["session_agent_type"]), copied
        for name in names:
            if name not in found:
                raise missing_session(self.db, name)
        return found

    @reads
    def select(
        self, session_id: str, kinds: KindFilter, steps: StepFilter, *, limit: int | None, offset: int
    ) -> list[UsageEntry]:
        """Return the entries of a session, ordered by timestamp and then by the order of recording."""
        first, last = steps
        rows = _narrowed(
            self._of_session(session_id), kind__in=kinds, step_count__gte=first, step_count__lte=last
        )
        end = None if limit is None else offset + limit
        return [_entry(row) for row in rows.order_by("timestamp", "pk").values(*_ENTRY_COLUMNS)[offset:end]]

    @reads
    def rollup(self, session_id: str, *, include_sub_agents: bool) -> UsageRollup | None:
        if include_sub_agents:
            keys = tree_keys(self.db, session_id)
            if keys:
                sums = self._sums(SUMS_OF_SESSIONS, keys=list_parameter(self.db, keys))
                return rollup(sums, session_count=len(keys))
        by_id = {"tenant": self.db.tenant, "session_id": session_id}
        sums = self._sums(SUMS_OF_SESSION, **by_id)
        if sums or self._key(session_id) is not None:
            return rollup(sums, session_count=1)
        kept = self._sums(SUMS_OF_KEPT, **by_id)
        return rollup(kept, session_count=1) if kept else None

    def _sums(self, statement: Statement, **parameters: Any) -> list[UsageSum]:
        return [_sum(row) for row in self.db.read(statement, parameters)]

    @reads
    def query(self, query: UsageQuery) -> tuple[list[tuple[UsageEntry, int]], int | None, bool]:
        """Return the page, the total if ``query.count``, and whether more entries follow. Each entry has its
        recording number, which orders entries with the same timestamp.
        """
        matching = _filtered(self._of_tenant, query)
        total = matching.count() if query.count else None
        prefix = "-" if query.descending else ""
        page = matching.order_by(f"{prefix}timestamp", f"{prefix}pk")
        if query.after is not None:
            timestamp, ordinal = query.after
            last = {"timestamp": timestamp, "id": ordinal}
            page = page.filter(after_keyset(UsageRow, last, descending=query.descending))
        rows = list(page.values(*_ENTRY_COLUMNS)[query.offset : query.offset + query.limit + 1])
        placed = [(_entry(row), row["id"]) for row in rows[: query.limit]]
        return placed, total, len(rows) > query.limit

    @reads
    def time_series(
        self, query: UsageQuery, bucket: UsageTimeBucket, group_by: UsageGrouping
    ) -> list[UsageBucket]:
        groups = (
            _filtered(self._of_tenant, query)
            .annotate(start=StartInUTC("timestamp", bucket.value))
            .values_list("start", _GROUP_COLUMNS[group_by])
            .annotate(entries=Count("pk"), cost=ExactSum("cost_usd"), **_TOKEN_SUMS)
            .order_by()
        )
        return time_series(
            UsageBucket(
                start=start,
                group=group,
                tokens=token_counts(tokens),
                cost_usd=cost_from_units(cost),
                entry_count=entries,
            )
            for start, group, entries, cost, *tokens in groups
        )

    @reads
    def exists(self, session_id: str) -> bool:
        return self._of_session(session_id).exists()

    @writes
    def delete(self, session_id: str) -> int:
        """Delete all entries with this session id, including kept ones, and return their number."""
        count = delete_usage(self.db, self._kept(session_id))
        key = self._key(session_id)
        if key is not None:
            count += delete_usage(self.db, self._rows.filter(session_id=key))
        return count

    @property
    def _rows(self) -> QuerySet[UsageRow]:
        return UsageRow.objects.using(self.db.alias)

    @property
    def _of_tenant(self) -> QuerySet[UsageRow]:
        return self._rows.filter(tenant=tenant_parameter(self.db.tenant))

    def _of_session(self, session_id: str) -> QuerySet[UsageRow]:
        key = self._key(session_id)
        return self._kept(session_id) if key is None else self._rows.filter(session_id=key)

    def _kept(self, session_id: str) -> QuerySet[UsageRow]:
        """Return the kept entries of deleted sessions with this id."""
        return self._of_tenant.filter(recorded_for=session_id, session__isnull=True)

    def _key(self, session_id: str) -> int | None:
        """Return the key of a session, or ``None`` for an unknown session."""
        return first_row(session_with_id(self.db, session_id).values_list("pk", flat=True))


def _filtered(rows: QuerySet[UsageRow], query: UsageQuery) -> QuerySet[UsageRow]:
    return _narrowed(
        rows,
        session_agent_type=query.agent_type,
        user_id=query.user_id,
        model=query.model,
        timestamp__gte=query.date_from,
        timestamp__lt=query.date_to,
        kind__in=query.kinds,
    )


def _narrowed(rows: QuerySet[UsageRow], **given: Any) -> QuerySet[UsageRow]:
    """Return the rows that meet these conditions; ``None`` means no condition."""
    return rows.filter(**{name: value for name, value in given.items() if value is not None})


def _sum(row: tuple[Any, ...]) -> UsageSum:
    kind, name, custom_name, entries, successes, amount, *sums = row
    duration, cost, *tokens = map(summed, sums)
    return UsageSum(
        kind=UsageKind(kind),
        name=name,
        custom_name=custom_name,
        entry_count=entries,
        successes=successes,
        tokens=token_counts(tokens),
        duration_ms=duration,
        amount=amount or 0,
        cost=cost,
    )


def _columns_of(entry: UsageEntry) -> dict[str, Any]:
    """Return the columns of an entry, without nulls or `SESSION_COLUMNS`; the reverse of `_entry`."""
    columns = {column: getattr(entry, field) for column, field in _FIELDS.items()}
    columns |= {
        "kind": entry.kind.value,
        "timestamp": validation.milliseconds_to_datetime(entry.timestamp),
        "source_type": entry.source.type,
        "source_name": entry.source.name,
        "amount": None if entry.amount is None else float(entry.amount),
        "cost_usd": None if entry.cost_usd is None else cost_units(entry.cost_usd),
    }
    if entry.tokens is not None:
        columns |= {f"{name}_tokens": getattr(entry.tokens, name) for name in TOKEN_FIELDS}
        columns |= {f"{name}_tokens": getattr(entry.tokens, name) or None for name in RARE_TOKEN_FIELDS}
    return {name: value for name, value in columns.items() if value is not None}


def _entry(row: Mapping[str, Any]) -> UsageEntry:
    kind = UsageKind(row["kind"])
    tokens = token_counts(row[f"{name}_tokens"] or 0 for name in TOKEN_FIELDS)
    return UsageEntry(
        **{field: row[column] for column, field in _FIELDS.items()},
        kind=kind,
        timestamp=validation.datetime_to_milliseconds(row["timestamp"]),
        source=UsageSource(type=row["source_type"], name=row["source_name"]),
        amount=None if row["amount"] is None else plain_amount(row["amount"]),
        cost_usd=row["cost_usd"],
        tokens=tokens if kind is UsageKind.TOKENS else None,
    )
