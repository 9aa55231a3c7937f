"""The queries of a back end, and the sums of rollups and time series. A database passes sums of many entries,
whereas the in-memory store passes single entries.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from datetime import UTC, datetime, timedelta
from typing import Final

from helix_store.core.types import UsageKind
from helix_store.core.usage import (
    CallStats,
    TokenCounts,
    ToolStats,
    UsageBucket,
    UsageEntry,
    UsageRollup,
    UsageTimeBucket,
    cost_from_units,
    cost_units,
)
from helix_store.usage.entries import plain_amount

KindFilter = Sequence[UsageKind] | None
"""The kinds in order; ``None`` means all."""
StepFilter = tuple[int | None, int | None]
"""The first and the last step, both inclusive; ``None`` means no bound."""

TOKEN_FIELDS: Final = tuple(each.name for each in fields(TokenCounts))


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
