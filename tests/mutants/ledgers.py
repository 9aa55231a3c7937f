"""Mutants of operation ids, usage and items."""

from __future__ import annotations

from typing import Final

from tests.mutants.mutant import Mutant, in_memory, named, state, usage

__all__ = ["LEDGERS"]

_OPERATIONS: Final = state(
    "a_repeat_returns",
    "a_repeat_comes",
    "another_payload_under",
    "merely_equal",
    "ids_of_operations",
    "another_id_is_another",
    "a_refused_step",
    "same_operation",
)
_LOST_COMMITS: Final = ("tests/faults/test_lost_commits.py",)
_SAME_ENTRY: Final = usage("same_id", "recorded_by_many")
_USAGE_TENANTS: Final = usage("tenant")
_USAGE_RACES: Final = ("tests/concurrency/test_usage.py",)
_REPORTS: Final = named("tests/usage/test_reports.py", "test_the_sums_of_a_report")
_ITEMS: Final = ("tests/items/test_item_log.py",)
_CAPS: Final = ("tests/contract/test_budgets.py",)
_CAP_PAGES: Final = ("tests/admin/test_budgets.py::test_values_of_another_tenant_are_not_shown",)
_CAP_RACES: Final = ("tests/concurrency/test_budgets.py",)

_STEPS: Final = "sessions/database/steps.py"
_REQUESTS: Final = "sessions/requests.py"
_MEMORY_STEPS: Final = "sessions/memory/steps.py"
_USAGE: Final = "usage/database.py"
_USAGE_SQL: Final = "usage/sql.py"
_ITEMS_DB: Final = "items/log.py"
_ITEM_SQL: Final = "items/sql.py"
_BUDGET_RULES: Final = "budgets/rules.py"
_BUDGETS: Final = "budgets/database.py"
_BUDGET_SQL: Final = "budgets/sql.py"

LEDGERS: Final = (
    # --- Operation ids: what a repeat finds
    Mutant("operation", _STEPS, "if digest != request.digest():", "if False:", _OPERATIONS),
    Mutant(
        "operation",
        _STEPS,
        "condition=Q(operations__operation_id=name)",
        "condition=Q(operations__operation_id__isnull=False)",
        _OPERATIONS,
    ),
    Mutant(
        "operation",
        _STEPS,
        "request.operation_id is None and not request.uses",
        "not request.uses",
        _OPERATIONS,
    ),
    Mutant(
        "operation",
        _STEPS,
        "if request.operation_id is not None:\n            Operation",
        "if False:\n            Operation",
        _OPERATIONS,
    ),
    Mutant("operation", _STEPS, "request, is_repeat=True)", "request, is_repeat=False)", _LOST_COMMITS),
    Mutant("operation", _REQUESTS, "            self.encoded.payload,\n", "", _OPERATIONS),
    Mutant("operation", _REQUESTS, "            self.encoded.envelope,\n", "", _OPERATIONS),
    Mutant("operation", _REQUESTS, "            self.step.step_id,\n", "", _OPERATIONS),
    Mutant("operation", _REQUESTS, "            str(self.step.stream_sequence),\n", "", _OPERATIONS),
    Mutant("operation", _REQUESTS, '            self.run_id or "",\n', "", _OPERATIONS),
    Mutant("operation", _REQUESTS, ", *(message.text for message in self.messages)):", ",):", _OPERATIONS),
    Mutant("operation", _REQUESTS, 'len(data).to_bytes(8, "big") + data', "data", _OPERATIONS),
    Mutant(
        "operation",
        _MEMORY_STEPS,
        "operation.digest != request.digest()",
        "False",
        in_memory("another_payload_under"),
    ),
    # --- Usage: an entry counts once, for its session and its tenant
    Mutant("usage", _USAGE_SQL, '"ON CONFLICT (tenant, entry_id) DO NOTHING"', '""', _SAME_ENTRY),
    Mutant(
        "usage",
        _USAGE_SQL,
        "WHERE tenant = (SELECT %(tenant)s) AND session_id = %(recorded_for)s::varchar",
        "WHERE session_id = %(recorded_for)s::varchar",
        _USAGE_TENANTS,
    ),
    Mutant(
        "usage",
        _USAGE_SQL,
        "WHERE tenant = (SELECT %(tenant)s) AND session_id = %(recorded_for)s {uncapped}",
        "WHERE session_id = %(recorded_for)s {uncapped}",
        _USAGE_TENANTS,
    ),
    Mutant(
        "usage",
        _USAGE_SQL,
        "WHERE tenant = (SELECT %(tenant)s) AND {{}} ORDER BY id",
        "WHERE {{}} ORDER BY id",
        _USAGE_TENANTS,
    ),
    Mutant(
        "usage",
        _USAGE_SQL,
        "tenant = (SELECT %(tenant)s) AND recorded_for",
        "recorded_for",
        usage("kept_usage_stays_with_its_tenant"),
    ),
    Mutant(
        "usage", _USAGE_SQL, '"e.tenant = (SELECT %(tenant)s)"', '"(SELECT %(tenant)s) IS NOT NULL"', _REPORTS
    ),
    Mutant("usage", _USAGE_SQL, '"FOR KEY SHARE"', '""', _USAGE_RACES),
    Mutant(
        "usage",
        _USAGE,
        "self._rows.filter(tenant=tenant_parameter(self.db.tenant))",
        "self._rows.all()",
        _USAGE_TENANTS,
    ),
    # --- Items: their session, their lane, their key, and what a writer expects
    Mutant("items", _ITEM_SQL, '"session_id = %(session)s"', '"%(session)s > 0"', _ITEMS),
    Mutant("items", _ITEM_SQL, '"lane = %(lane)s"', '"%(lane)s IS NOT NULL"', _ITEMS),
    Mutant(
        "items",
        _ITEM_SQL,
        "ORDER BY given.place {_HAS_KEY} DO NOTHING",
        "ORDER BY given.place {_HAS_KEY} DO UPDATE SET payload = excluded.payload",
        _ITEMS,
    ),
    Mutant(
        "items",
        _ITEM_SQL,
        "ORDER BY keys.key {_HAS_KEY} DO NOTHING",
        "ORDER BY keys.key {_HAS_KEY} DO UPDATE SET payload = excluded.payload",
        _ITEMS,
    ),
    Mutant(
        "items",
        _ITEM_SQL,
        "{_HAS_KEY} DO UPDATE SET payload = excluded.payload",
        "{_HAS_KEY} DO NOTHING",
        _ITEMS,
    ),
    Mutant("items", _ITEM_SQL, "{_LANE} ORDER BY id DESC LIMIT 1", "{_LANE} ORDER BY id LIMIT 1", _ITEMS),
    Mutant(
        "items",
        _ITEMS_DB,
        "lock_session(self.db, self.session_id, guard, *",
        "lock_session(self.db, self.session_id, None, *",
        _ITEMS,
    ),
    Mutant(
        "items", _ITEMS_DB, "session_id, new, guard, *columns)", "session_id, new, Guard(), *columns)", _ITEMS
    ),
    Mutant(
        "items",
        _ITEMS_DB,
        "[text for _, _, text, _ in reversed(suffix)] != texts",
        "not suffix",
        _ITEMS,
    ),
    Mutant("items", _ITEMS_DB, 'of_target, "before": MAX_BIGINT', 'of_target, "before": 0', _ITEMS),
    # --- Budgets: spent and held stay within the limit, and spent is the sum of the ledger
    Mutant("budget", _BUDGET_RULES, "or used + estimate > limit", "", _CAPS),
    Mutant("budget", _BUDGET_RULES, "used >= limit or", "used > limit or", _CAPS),
    Mutant("budget", _BUDGETS, "holds.pop(str(own), None)", "holds.clear()", _CAPS),
    Mutant("budget", _BUDGET_SQL, '"holds -> %(key)s::text ->> 0 = %(token)s::text"', '"true"', _CAPS),
    Mutant("budget", _BUDGET_SQL, "WHERE b.tenant = %(tenant)s AND b.scope", "WHERE b.scope", _CAPS),
    Mutant("budget", _BUDGET_SQL, "WHERE b.tenant = %(tenant)s AND b.name", "WHERE b.name", _CAPS),
    Mutant("budget", _BUDGET_SQL, "AS c ON c.tenant = b.tenant AND ", "AS c ON ", _CAPS),
    Mutant("budget", _BUDGET_SQL, "l.tenant = s.tenant AND ", "", _CAPS),
    Mutant("budget", _BUDGET_SQL, "AS c WHERE c.tenant = b.tenant AND ", "AS c WHERE ", _CAP_PAGES),
    Mutant("budget", _BUDGET_SQL, "                ON c.tenant = b.tenant AND ", "ON ", _CAP_PAGES),
    Mutant("budget", _BUDGET_SQL, "l.spent_usd = given.usd AND ", "", _CAP_RACES),
    Mutant("budget", _BUDGET_SQL, " AND l.holds = given.read", "", _CAP_RACES),
    Mutant("budget", _USAGE_SQL, "AND NOT {has_budgets('(SELECT %(tenant)s)')}", "", _CAPS),
    Mutant("budget", "counters/counting.py", "usd=-each.usd, tokens=-each.tokens", "usd=0, tokens=0", _CAPS),
)
