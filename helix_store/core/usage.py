"""Value objects of usage: entries, sums of entries, and budgets."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from decimal import ROUND_HALF_EVEN, Context, Decimal
from enum import StrEnum
from typing import Final, TypeAlias

from helix_store.core.limits import MAX_BIGINT
from helix_store.core.payloads import Page, Serializable
from helix_store.core.types import UsageKind

__all__ = [
    "Budget",
    "BudgetPeriod",
    "BudgetScope",
    "BudgetStatus",
    "CallStats",
    "Dollars",
    "TokenCounts",
    "ToolStats",
    "UsageBucket",
    "UsageEntry",
    "UsageGroup",
    "UsageGrouping",
    "UsagePage",
    "UsageReport",
    "UsageReportGrouping",
    "UsageRollup",
    "UsageSource",
    "UsageTimeBucket",
    "UsageTotal",
]


COST_PLACES: Final = 12
"""The decimal places of a cost. The lowest prices are a millionth of a dollar for a million tokens."""

MAX_COST_UNITS: Final = MAX_BIGINT
"""The highest cost of one entry: about nine million dollars."""

# This is more digits than a sum of costs can have, regardless of the caller's own context.
_EXACT: Final = Context(prec=80, rounding=ROUND_HALF_EVEN)


def cost_units(cost: Decimal) -> int:
    """Return a cost in its smallest unit, rounded half to even, in which it is stored and summed."""
    return int(_EXACT.to_integral_value(_EXACT.scaleb(cost, COST_PLACES)))


def cost_from_units(units: int) -> Decimal:
    return _EXACT.scaleb(Decimal(units), -COST_PLACES)


def cost_as_stored(cost: Decimal) -> Decimal | None:
    """Return the cost of an entry, rounded to the stored decimal places; ``None`` if it is too high."""
    units = cost_units(cost)
    return cost_from_units(units) if units <= MAX_COST_UNITS else None


def rounded_cost(cost: Decimal) -> str:
    """Return a cost for display: two decimals, or two significant digits below a tenth."""
    places = max(2, 1 - cost.adjusted()) if cost else 2
    return f"{_EXACT.quantize(cost, Decimal(1).scaleb(-places)):,f}"


# --- Entries ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageSource(Serializable):
    """The agent, tool or sub-agent that caused the usage.

    Example::

        source = UsageSource(type="agent", name="planner")
    """

    type: str
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenCounts(Serializable):
    """Tokens by field. A field that was not given is 0; ``total`` is not computed from the others.

    ``prompt`` includes ``cached`` (tokens read from a cache), ``cache_write`` (tokens written to one) and
    ``audio_prompt``; a token is either read or written. ``completion`` includes ``reasoning`` and
    ``audio_completion``. Counts that contradict this are kept as they were reported, but have no price.

    Example::

        counts = TokenCounts(prompt=120, cached=100, completion=30, total=150)
    """

    prompt: int = 0
    completion: int = 0
    reasoning: int = 0
    cached: int = 0
    cache_write: int = 0
    audio_prompt: int = 0
    audio_completion: int = 0
    total: int = 0

    def __add__(self, other: TokenCounts) -> TokenCounts:
        return TokenCounts(
            prompt=self.prompt + other.prompt,
            completion=self.completion + other.completion,
            reasoning=self.reasoning + other.reasoning,
            cached=self.cached + other.cached,
            cache_write=self.cache_write + other.cache_write,
            audio_prompt=self.audio_prompt + other.audio_prompt,
            audio_completion=self.audio_completion + other.audio_completion,
            total=self.total + other.total,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageEntry(Serializable):
    """One event with usage. ``timestamp`` is epoch milliseconds. The store sets the ``id`` if it is missing.

    Further fields by ``kind``: ``model``, ``tokens`` and optionally ``duration_ms`` of tokens; ``tool_name``,
    ``success`` and ``duration_ms`` of a tool; ``agent_type``, ``sub_session_id``, ``success`` and
    ``duration_ms`` of a sub-agent; ``type``, ``name``, ``amount`` and optionally ``unit`` of a custom entry.

    Example::

        (entry,) = store.usage.get_entries("trip")
        print(entry.kind, entry.model, entry.tokens.total, entry.cost_usd)
    """

    kind: UsageKind
    session_id: str
    step_count: int
    timestamp: int
    source: UsageSource
    run_id: str | None = None
    id: str | None = None
    cost_usd: Decimal | None = None
    model: str | None = None
    tokens: TokenCounts | None = None
    tool_name: str | None = None
    agent_type: str | None = None
    sub_session_id: str | None = None
    success: bool | None = None
    duration_ms: int | None = None
    type: str | None = None
    name: str | None = None
    amount: int | float | None = None
    unit: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class UsagePage(Serializable, Page[UsageEntry]):
    """``total`` is ``None`` if the list was queried with ``count=False``.

    Example::

        page = store.usage.query_usage(user_id="ada", limit=20)
        for entry in page:
            print(entry.kind, entry.session_id, entry.cost_usd)
    """

    entries: list[UsageEntry]
    total: int | None
    offset: int
    limit: int
    has_more: bool
    next_cursor: str | None


# --- Sums ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class CallStats(Serializable):
    """Calls of one tool, or of the sub-agents of one type."""

    calls: int = 0
    failures: int = 0
    total_duration_ms: int = 0

    def __add__(self, other: CallStats) -> CallStats:
        return CallStats(
            calls=self.calls + other.calls,
            failures=self.failures + other.failures,
            total_duration_ms=self.total_duration_ms + other.total_duration_ms,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolStats(Serializable):
    total_calls: int = 0
    by_tool: dict[str, CallStats] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageRollup(Serializable):
    """The usage of a session, or of a tree of sessions. Dicts are sorted by name.

    The keys of ``sub_agents`` are agent types; the keys of ``custom`` are types and names. ``cost_usd`` is
    the sum of the known costs. ``session_count`` includes sessions without entries.

    Example::

        rollup = session.usage(tree=True)
        if rollup is not None:
            print(rollup.tokens.total, rollup.tokens_by_model, rollup.cost_usd)
    """

    tokens: TokenCounts
    tokens_by_model: dict[str, TokenCounts]
    tool_stats: ToolStats
    sub_agents: dict[str, CallStats]
    custom: dict[str, dict[str, int | float]]
    cost_usd: Decimal
    entry_count: int
    session_count: int


class UsageTimeBucket(StrEnum):
    """The length of a bucket in a time series. All times are UTC; weeks start on Monday."""

    HOUR = "hour"
    DAY = "day"
    WEEK = "week"
    MONTH = "month"


class UsageGrouping(StrEnum):
    """The grouping of a time series; ``agent_type`` and ``user_id`` are those of the session."""

    MODEL = "model"
    AGENT_TYPE = "agent_type"
    USER_ID = "user_id"
    KIND = "kind"


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageBucket(Serializable):
    """The usage of one group in one bucket; ``group`` is ``None`` for entries without a value to group by.

    Example::

        now = datetime.now(UTC)
        for bucket in store.usage.timeseries(date_from=now - timedelta(days=7), date_to=now):
            print(bucket.start, bucket.tokens.total, bucket.cost_usd)
    """

    start: datetime
    group: str | None
    tokens: TokenCounts
    cost_usd: Decimal
    entry_count: int


class UsageReportGrouping(StrEnum):
    """The grouping of a report; ``agent_type`` and ``user`` are those of the session.

    A ``tree`` has the id of its root session. A session, a tree or a user belongs to one tenant; a model, an
    agent type or a day is one group for all tenants.
    """

    SESSION = "session"
    TREE = "tree"
    MODEL = "model"
    AGENT_TYPE = "agent_type"
    USER = "user"
    DAY = "day"


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageTotal(Serializable):
    """A sum of entries.

    ``cost_usd`` is the sum of the known costs; ``unpriced`` counts token entries without a cost.
    """

    entry_count: int
    tool_calls: int
    unpriced: int
    tokens: TokenCounts
    cost_usd: Decimal

    @property
    def known_cost(self) -> Decimal | None:
        """The cost, or ``None`` if no token entry has one."""
        return None if self.unpriced and not self.cost_usd else self.cost_usd


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageGroup(UsageTotal):
    """The usage of one group; ``group`` is ``None`` for entries without a value to group by.

    A day is written ``2026-11-20``. ``tenant`` is ``None`` if the group may contain several tenants.
    ``is_deleted`` marks entries that remain from a deleted session whose id is ``group``.
    """

    group: str | None
    tenant: str | None
    is_deleted: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageReport(Serializable):
    """``group_count`` and ``total`` include groups beyond the limit of the report."""

    by: UsageReportGrouping
    groups: list[UsageGroup]
    group_count: int
    total: UsageTotal


Dollars: TypeAlias = Decimal | int | float | str
"""An amount that a caller may pass; for a float, its shortest decimal form counts."""


class BudgetScope(StrEnum):
    """The sessions that a budget caps: of one tree, user or agent type, or of the tenant."""

    TREE = "tree"
    USER = "user"
    AGENT_TYPE = "agent_type"
    TENANT = "tenant"


class BudgetPeriod(StrEnum):
    """The period after which a budget starts again, in UTC; a total never does."""

    TOTAL = "total"
    DAY = "day"
    MONTH = "month"


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget(Serializable):
    """A cap on what sessions spend in a period.

    ``value`` is the session id of a root, a user id or an agent type. Without it, each user or each agent
    type has a budget of this size. A limit that is ``None`` caps nothing.

    Example::

        store.budgets.set_budget("free-plan", scope="user", period="day", limit_usd="0.50")
        for budget in store.budgets.list_budgets():
            print(budget.name, budget.scope, budget.limit_usd)
    """

    name: str
    scope: BudgetScope
    value: str | None
    period: BudgetPeriod
    limit_usd: Decimal | None
    limit_tokens: int | None
    created_at: datetime
    updated_at: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetStatus(Serializable):
    """The amounts spent and held in the current period of a budget, all at the same point in time.

    The remainder of a limit is never negative; it is ``None`` if there is no such limit. A total has no
    ``period_start`` and no ``resets_at``.

    Example::

        store.budgets.set_budget("free-plan", scope="user", period="day", limit_tokens=10_000)
        status = store.budgets.status("free-plan", value="ada")
        print(status.remaining_tokens, "tokens are left until", status.resets_at)
    """

    name: str
    value: str | None
    limit_usd: Decimal | None
    limit_tokens: int | None
    spent_usd: Decimal
    spent_tokens: int
    held_usd: Decimal
    held_tokens: int
    remaining_usd: Decimal | None
    remaining_tokens: int | None
    period_start: datetime | None
    resets_at: datetime | None
