"""Reports on the usage of one tenant or of all tenants, for commands and the admin."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, Final
from zoneinfo import ZoneInfo

from helix_store import conf
from helix_store.core import validation
from helix_store.core.limits import MAX_BIGINT
from helix_store.core.serialization import exact_cost
from helix_store.core.types import Timestamp, UsageKind, UserId
from helix_store.core.usage import (
    UsageGroup,
    UsageReport,
    UsageReportGrouping,
    UsageTotal,
    cost_from_units,
    cost_units,
)
from helix_store.engine.database import Database
from helix_store.engine.expressions import list_parameter, summed
from helix_store.exceptions import InvalidQuery
from helix_store.models import UsageEntry
from helix_store.usage import sql
from helix_store.usage.rules import TOKEN_FIELDS, token_counts

_FORMULA_STARTS: Final = ("=", "+", "-", "@")

ENTRIES_READ: Final = 1_000
"""The maximum number of entries of one session that are added up."""


@dataclass(frozen=True, slots=True)
class SessionTotal:
    """A session's totals. ``is_partial`` means that the session has more entries than were added up."""

    tokens: int
    cost_usd: Decimal
    is_partial: bool


def usage_report(
    *,
    by: UsageReportGrouping | str,
    using: str | None = None,
    tenant: str | None = None,
    agent_type: str | None = None,
    user_id: UserId | None = None,
    model: str | None = None,
    date_from: Timestamp | None = None,
    date_to: Timestamp | None = None,
    zone: ZoneInfo | str = "UTC",
    limit: int | None = None,
) -> UsageReport:
    """Add up the usage of each group and of all groups together.

    ``by`` is ``session``, ``tree``, ``model``, ``agent_type``, ``user`` or ``day``. ``tenant=None`` means
    every tenant. Filters are combined with AND; ``agent_type`` and ``user_id`` are those of the session at
    the time of recording. ``date_from`` is inclusive, ``date_to`` is exclusive. ``zone`` is the time zone
    that determines where a day begins. The groups with the highest costs come first; days are in order.
    ``limit`` restricts the result to that many of the highest groups, or of the last days. Every entry
    belongs to exactly one group. Entries of a deleted session belong to the group of their session id, which
    is also their tree. Takes one statement; the database computes the sums. Raises `InvalidQuery`.
    """
    conf.require_usable_prefix()
    grouping = validation.query_enum(UsageReportGrouping, by, "by")
    given = {
        "tenant": None if tenant is None else validation.tenant(tenant),
        "agent_type": validation.optional_identifier(agent_type, "agent_type"),
        "user_id": validation.user_id(user_id),
        "model": validation.optional_identifier(model, "model"),
        "date_from": None if date_from is None else validation.aware_datetime(date_from, "date_from"),
        "date_to": None if date_to is None else validation.aware_datetime(date_to, "date_to"),
    }
    filters = {name: value for name, value in given.items() if value is not None}
    rest = {
        "limit": MAX_BIGINT if limit is None else validation.query_number(limit, "limit", minimum=1),
        "zone": time_zone(zone).key,
    }
    db = Database(using, "", None)
    statement = sql.report(grouping, tuple(filters))
    # This is not prepared, because the number of entries that a filter selects depends on its values.
    return _report(grouping, db.query(lambda: db.execute(statement, filters | rest)))


def session_totals(keys: Sequence[int], *, using: str) -> dict[int, SessionTotal]:
    """Return the usage of sessions without their sub-agents, by the keys of their rows. Takes one statement,
    which reads a bounded number of entries for each session.
    """
    db = Database(using, "")
    rows = db.read(sql.totals_of_sessions(ENTRIES_READ), {"keys": list_parameter(db, keys)})
    totals = {}
    for key, *sums in rows:
        count, tokens, cost = sums if db.is_postgresql else sums[0].split(";")
        is_partial = int(count) > ENTRIES_READ
        totals[key] = SessionTotal(summed(tokens), cost_from_units(summed(cost)), is_partial)
    return totals


def unpriced_entries(session_id: str, *, using: str | None = None, tenant: str = "") -> int:
    """Count a session's token entries without a cost, excluding its sub-sessions."""
    db = Database(using, validation.tenant(tenant), None)
    entries = UsageEntry.objects.using(db.alias).filter(
        session__tenant=db.tenant,
        session__session_id=validation.identifier(session_id, "session_id"),
        kind=UsageKind.TOKENS,
        cost_usd=None,
    )
    return db.query(entries.count)


def csv_rows(report: UsageReport) -> Iterator[list[str]]:
    """Yield the names of the columns, followed by a row for each group, as text. Costs are exact.

    Stored text that a spreadsheet would treat as a formula gets a leading apostrophe.
    """
    counts = ("entry_count", "tool_calls", "unpriced")
    yield [
        "tenant",
        report.by.value,
        "is_deleted",
        *counts,
        *(f"{name}_tokens" for name in TOKEN_FIELDS),
        "cost_usd",
    ]
    for group in report.groups:
        yield [
            _inert(group.tenant),
            _inert(group.group),
            str(group.is_deleted).lower(),
            *(str(getattr(group, name)) for name in counts),
            *(str(getattr(group.tokens, name)) for name in TOKEN_FIELDS),
            exact_cost(group.cost_usd),
        ]


def _inert(text: str | None) -> str:
    shown = text or ""
    return f"'{shown}" if shown.startswith(_FORMULA_STARTS) else shown


def time_zone(zone: ZoneInfo | str) -> ZoneInfo:
    """Return a time zone by its name, such as ``Asia/Tokyo``. Raises `InvalidQuery`."""
    try:
        found = zone if isinstance(zone, ZoneInfo) else ZoneInfo(zone)
    except (KeyError, OSError, TypeError, ValueError) as exc:
        raise InvalidQuery(f"There is no time zone {zone!r}.", path="zone") from exc
    if not found.key:
        raise InvalidQuery("A time zone needs a name.", path="zone")
    return found


def _report(by: UsageReportGrouping, rows: Iterable[tuple[Any, ...]]) -> UsageReport:
    groups = []
    group_count, total = 0, _sums(())
    for count, tenant, name, is_deleted, *sums in rows:
        if count is None:
            groups.append(UsageGroup(tenant=tenant, group=name, is_deleted=bool(is_deleted), **_sums(sums)))
        else:
            group_count, total = count, _sums(sums)
    groups.sort(key=_by_day if by is UsageReportGrouping.DAY else _by_cost)
    return UsageReport(by=by, groups=groups, group_count=group_count, total=UsageTotal(**total))


def _sums(columns: Iterable[Any]) -> dict[str, Any]:
    entries, tool_calls, unpriced, *tokens, cost = map(summed, columns or (0,) * 9)
    return {
        "entry_count": entries,
        "tool_calls": tool_calls,
        "unpriced": unpriced,
        "tokens": token_counts(tokens),
        "cost_usd": cost_from_units(cost),
    }


def _by_day(group: UsageGroup) -> str:
    return group.group or ""


def _by_cost(group: UsageGroup) -> tuple[Any, ...]:
    name = (group.tenant or "", group.group is None, group.group or "", group.is_deleted)
    return -cost_units(group.cost_usd), -group.tokens.total, *name
