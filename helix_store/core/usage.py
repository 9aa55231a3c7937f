"""The usage ledger's vocabulary: entries, and the sums that are made of them."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from decimal import ROUND_HALF_EVEN, Context, Decimal
from enum import StrEnum
from typing import Final

from helix_store.core.serialization import Serializable
from helix_store.core.types import UsageKind

__all__ = [
    "COST_PLACES",
    "MAX_COST_UNITS",
    "CallStats",
    "TokenCounts",
    "ToolStats",
    "UsageBucket",
    "UsageEntry",
    "UsageGrouping",
    "UsagePage",
    "UsageRollup",
    "UsageSource",
    "UsageTimeBucket",
    "cost_from_units",
    "cost_units",
]

COST_PLACES: Final = 12
"""Decimal places of a cost. Prices go down to a millionth of a dollar for a million tokens."""

MAX_COST_UNITS: Final = 2**63 - 1
"""The highest cost of one entry: a little over nine million dollars."""

# More digits than a sum of costs can have, whatever context the caller has set.
_EXACT: Final = Context(prec=80, rounding=ROUND_HALF_EVEN)


def cost_units(cost: Decimal) -> int:
    """A cost as a whole number of its smallest unit, rounded half to even: what is stored and summed."""
    return int(_EXACT.to_integral_value(_EXACT.scaleb(cost, COST_PLACES)))


def cost_from_units(units: int) -> Decimal:
    return _EXACT.scaleb(Decimal(units), -COST_PLACES)


# --- Entries ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageSource(Serializable):
    """What spent: an agent, a tool or a sub-agent, by its name."""

    type: str
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenCounts(Serializable):
    """Tokens by field; one that was not given counts as 0, ``total`` as well: it is never derived."""

    prompt: int = 0
    completion: int = 0
    reasoning: int = 0
    cached: int = 0
    total: int = 0

    def __add__(self, other: TokenCounts) -> TokenCounts:
        return TokenCounts(
            prompt=self.prompt + other.prompt,
            completion=self.completion + other.completion,
            reasoning=self.reasoning + other.reasoning,
            cached=self.cached + other.cached,
            total=self.total + other.total,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageEntry(Serializable):
    """One thing that was spent. ``timestamp`` is epoch milliseconds; without an ``id`` the store makes one.

    What else belongs to it depends on ``kind``: of tokens ``model`` and ``tokens``; of a tool ``tool_name``,
    ``success`` and ``duration_ms``; of a sub-agent ``agent_type``, ``sub_session_id``, ``success`` and
    ``duration_ms``; of anything custom ``type``, ``name``, ``amount`` and, if wanted, ``unit``.
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
class UsagePage(Serializable):
    """``total`` is ``None`` when it was not asked for."""

    entries: list[UsageEntry]
    total: int | None
    offset: int
    limit: int
    has_more: bool
    next_cursor: str | None


# --- Sums ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class CallStats(Serializable):
    """Calls of one tool, or of sub-agents of one type."""

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
    """What a session spent, or a tree of sessions; names are in order.

    ``sub_agents`` is by agent type and ``custom`` by type and name. ``cost_usd`` sums the costs that are
    known. ``session_count`` counts the sessions of the tree, also those without entries.
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
    """How long a bucket of a time series is; weeks start on Monday, everything is UTC."""

    HOUR = "hour"
    DAY = "day"
    WEEK = "week"
    MONTH = "month"


class UsageGrouping(StrEnum):
    """What a time series is split by; ``agent_type`` and ``user_id`` are the session's."""

    MODEL = "model"
    AGENT_TYPE = "agent_type"
    USER_ID = "user_id"
    KIND = "kind"


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageBucket(Serializable):
    """What one group spent from ``start`` on; ``group`` is ``None`` where entries have no such value."""

    start: datetime
    group: str | None
    tokens: TokenCounts
    cost_usd: Decimal
    entry_count: int
