"""The tokens, tools and costs of the session, alone and together with its sub-sessions."""

from __future__ import annotations

from datetime import timedelta
from itertools import islice
from typing import Any, Final

from django.utils.translation import gettext_lazy as _

from helix_store.admin.elements import NOTHING, printable
from helix_store.admin.sections.section import Section, SessionView
from helix_store.admin.times import duration
from helix_store.core.usage import CallStats, TokenCounts, UsageRollup, rounded_cost
from helix_store.models import UsageEntry

_ROWS: Final = 50


class Usage(Section):
    name = "usage"
    label = _("Usage")
    needs = (UsageEntry,)

    def context(self, view: SessionView) -> dict[str, Any]:
        session_id = view.session.session_id
        own = view.usage.get_rollup(session_id)
        tree = view.usage.get_rollup(session_id, include_sub_agents=True)
        if own is None or tree is None:
            return {"columns": []}
        columns = [(_("This session"), own)]
        if tree.session_count > 1:
            columns.append((_("With sub-sessions"), tree))
        return {
            "columns": [_column(heading, rollup) for heading, rollup in columns],
            "models": [_tokens(_name(name), counts) for name, counts in _first(tree.tokens_by_model)],
            "calls": [
                *(_calls(_("tool"), name, stats) for name, stats in _first(tree.tool_stats.by_tool)),
                *(_calls(_("sub-agent"), name, stats) for name, stats in _first(tree.sub_agents)),
            ],
            "custom": [
                {"kind": printable(kind), "name": _name(name), "amount": f"{amount:,}"}
                for kind, amounts in _first(tree.custom)
                for name, amount in _first(amounts)
            ],
        }


def _name(name: str | None) -> str:
    # A row that was not written by a store may have no name.
    return NOTHING if name is None else printable(name)


def _first(values: dict[str, Any]) -> Any:
    return islice(values.items(), _ROWS)


def _column(heading: Any, rollup: UsageRollup) -> dict[str, Any]:
    return {
        "heading": heading,
        "cost": rounded_cost(rollup.cost_usd),
        "entries": f"{rollup.entry_count:,}",
        "sessions": f"{rollup.session_count:,}",
        "calls": f"{rollup.tool_stats.total_calls:,}",
        **_tokens("", rollup.tokens),
    }


def _tokens(name: str, counts: TokenCounts) -> dict[str, str]:
    numbers = {key: f"{value:,}" for key, value in counts.to_dict().items()}
    return {"name": name, **numbers}


def _calls(kind: Any, name: str, stats: CallStats) -> dict[str, Any]:
    try:
        took = duration(timedelta(milliseconds=stats.total_duration_ms))
    except OverflowError:
        took = f"{stats.total_duration_ms:,} ms"
    return {
        "kind": kind,
        "name": _name(name),
        "calls": f"{stats.calls:,}",
        "failures": stats.failures,
        "took": took,
    }
