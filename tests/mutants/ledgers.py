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
_SNAPSHOTS: Final = ("tests/concurrency/test_stale_snapshots.py",)
_FOUR_AT_ONCE: Final = ("tests/concurrency/test_four_at_once.py",)
_PROGRESS: Final = ("tests/handles/test_stored_progress.py",)
_LOCKING: Final = "sessions/locking.py"
_CAPS: Final = ("tests/contract/test_budgets.py",)
_REST: Final = ("tests/handles/test_rest.py",)
_CAP_PAGES: Final = ("tests/admin/test_budgets.py::test_values_of_another_tenant_are_not_shown",)
_CAP_RACES: Final = ("tests/concurrency/test_budgets.py",)

_PRICES: Final = named("tests/unit/test_pricing.py", "every_kind_of_token", "do_not_say_what")
_CHECKS: Final = ("tests/frameworks/test_payload_checks.py",)
_LANE: Final = named("tests/items/test_item_log.py", "a_whole_lane")

_STEPS: Final = "sessions/steps.py"
_MEMORY_STEPS: Final = "sessions/memory.py"
_USAGE: Final = "usage/ledger.py"
_ENTRIES: Final = "usage/ledger.py"
_ITEM_STORAGE: Final = "contrib/item_storage.py"
_PYDANTIC: Final = "contrib/pydantic_ai/store.py"
_USAGE_SQL: Final = "usage/ledger.py"
_ITEMS_DB: Final = "items.py"
_ITEM_SQL: Final = "items.py"
_BUDGET_RULES: Final = "budgets.py"
_BUDGETS: Final = "budgets.py"
_BUDGET_SQL: Final = "budgets.py"

LEDGERS: Final = (
    # --- Operation ids: what a repeat finds
    Mutant("operation", _STEPS, "if digest != step.digest():", "if False:", _OPERATIONS),
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
        "is_simple = step.operation_id is None and ",
        "is_simple = ",
        _OPERATIONS,
    ),
    Mutant(
        "operation",
        _STEPS,
        "if step.operation_id is not None:\n            Operation",
        "if False:\n            Operation",
        _OPERATIONS,
    ),
    Mutant("operation", _STEPS, "step, is_repeat=True)", "step, is_repeat=False)", _LOST_COMMITS),
    Mutant("operation", _STEPS, "            self.encoded.payload,\n", "", _OPERATIONS),
    Mutant("operation", _STEPS, "            self.encoded.envelope,\n", "", _OPERATIONS),
    Mutant("operation", _STEPS, "            self.info.step_id,\n", "", _OPERATIONS),
    Mutant("operation", _STEPS, "            str(self.info.stream_sequence),\n", "", _OPERATIONS),
    Mutant("operation", _STEPS, '            self.run_id or "",\n', "", _OPERATIONS),
    Mutant(
        "operation", _STEPS, ", *(message.text for message in self.encoded_messages)):", ",):", _OPERATIONS
    ),
    Mutant("operation", _STEPS, 'len(data).to_bytes(8, "big") + data', "data", _OPERATIONS),
    Mutant(
        "operation",
        _MEMORY_STEPS,
        "operation.digest != step.digest()",
        "False",
        in_memory("another_payload_under"),
    ),
    # --- Prices: every token has the price of its kind
    Mutant("prices", _ENTRIES, "tokens.cached + tokens.cache_write <= tokens.prompt", "True", _PRICES),
    Mutant(
        "prices", _ENTRIES, '"cache_write_tokens": tokens.cache_write', '"cache_write_tokens": 0', _PRICES
    ),
    Mutant(
        "prices", _ENTRIES, '"input_audio_tokens": tokens.audio_prompt', '"input_audio_tokens": 0', _PRICES
    ),
    # --- What is stored is readable, and a replacement ends at its lane
    Mutant(
        "payload checks",
        _ITEM_STORAGE,
        "raise InvalidPayload(path=name, reason=reason)",
        "return",
        _CHECKS,
    ),
    Mutant("payload checks", _PYDANTIC, "        adapter.validate_python(dumped)\n", "", _CHECKS),
    Mutant(
        "lane",
        _ITEMS_DB,
        "self.db.execute(CLEAR, of_lane)",
        "self.db.execute(CLEAR_ALL, of_lane)",
        _LANE,
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
        "WHERE tenant = (SELECT %(tenant)s) AND {condition} ORDER BY id",
        "WHERE {condition} ORDER BY id",
        _USAGE_TENANTS,
    ),
    Mutant(
        "usage",
        _USAGE,
        "(by_id[entry_id] for entry_id, has_budgets in inserted if has_budgets)",
        "(entry for entry in entries if entry.id in {entry_id for entry_id, _ in inserted})",
        _CAPS,
    ),
    Mutant("usage", _USAGE_SQL, "{session} AND {SEES_COMMITS} {{}}", "{session} {{}}", _SNAPSHOTS),
    Mutant(
        "usage",
        _USAGE,
        "                require_read_committed(isolation)\n",
        "                pass\n",
        _SNAPSHOTS,
    ),
    Mutant("budgets", _BUDGETS, "    require_read_committed(isolation)\n", "", _SNAPSHOTS),
    Mutant("budgets", _BUDGET_SQL, "IN SHARE ROW EXCLUSIVE MODE", "IN SHARE MODE", _FOUR_AT_ONCE),
    Mutant(
        "sessions",
        _LOCKING,
        '        require_read_committed(vars(head)["isolation"])\n',
        "        pass\n",
        _SNAPSHOTS,
    ),
    Mutant(
        "sessions",
        "sessions/messages.py",
        "LEAST(s.next_post_at, added.due_at) FROM added\n            WHERE s.id = %(key)s",
        "added.due_at FROM added\n            WHERE s.id = %(key)s AND s.next_post_at IS NULL",
        _SNAPSHOTS,
    ),
    Mutant(
        "runs",
        "sessions/runs.py",
        "call_ids=with_recorded(None, call_id),",
        "",
        ("tests/faults/test_marks.py",),
    ),
    Mutant("turn", "sessions/statements.py", " AND {step}.step_count = r.step_count\n", "\n", _REST),
    Mutant("turn", "sessions/statements.py", "AND {step}.message_count = s.message_count", "\n", _REST),
    Mutant("turn", _STEPS, " and not has_due_posts),", "),", _REST),
    Mutant("turn", "stores/turn.py", " and not readiness_of(self.session._stores, state).answers", "", _REST),
    Mutant("turn", "stores/turn.py", "        turn._require_open(opened.state)\n", "", _PROGRESS),
    Mutant("turn", "stores/turn.py", "            self._turn._commit_failed(self, exc)\n", "", _PROGRESS),
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
        "items", _ITEMS_DB, "session_id, new, guard, *columns", "session_id, new, Guard(), *columns", _ITEMS
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
    Mutant("budget", _BUDGET_SQL, " ON {name}.tenant = b.tenant AND ", " ON ", _CAPS),
    Mutant("budget", _BUDGET_SQL, "counters = counters.exclude(period=_HOLDER, **applies)", "pass", _CAPS),
    Mutant(
        "budget",
        _BUDGET_SQL,
        "                if left:\n",
        "                if 0:\n",
        _CAPS,
    ),
    Mutant(
        "budget", "stores/turn.py", "            self._stop(refusal, self._spending.estimate)\n", "", _CAPS
    ),
    Mutant(
        "budget",
        "stores/turn.py",
        "is_guarded=is_guarded, may_be_stopped=may_be_stopped\n            )\n        except",
        "is_guarded=False, may_be_stopped=may_be_stopped\n            )\n        except",
        _CAPS,
    ),
    Mutant("budget", _BUDGET_SQL, "l.tenant = holder.tenant AND ", "", _CAPS),
    Mutant("budget", _BUDGET_SQL, "AS c WHERE c.tenant = b.tenant AND ", "AS c WHERE ", _CAP_PAGES),
    Mutant("budget", _BUDGET_SQL, "                ON c.tenant = b.tenant AND ", "ON ", _CAP_PAGES),
    Mutant("budget", _BUDGET_SQL, "l.spent_usd = given.usd AND ", "", _CAP_RACES),
    Mutant("budget", _BUDGET_SQL, " AND l.holds = given.read", "", _CAP_RACES),
    Mutant("budget", _USAGE_SQL, "AND NOT {applies_to('s')}", "", _CAPS),
    Mutant("budget", "counters.py", "usd=-each.usd, tokens=-each.tokens", "usd=0, tokens=0", _CAPS),
)
