"""An import stores nothing that a call would have refused."""

from __future__ import annotations

import io
from typing import Any

from asgiref.sync import async_to_sync
from django.test import override_settings

from helix_store.core.limits import Limits
from helix_store.core.types import StagedChanges, StepInfo
from helix_store.items import ItemLog
from helix_store.models import Budget, BudgetCounter, Lock
from helix_store.stores import (
    DatabaseBudgetStore,
    DatabaseLockManager,
    DatabaseStateStore,
    DatabaseStreamManager,
    DatabaseUsageStore,
)
from helix_store.testing.usage.base import tokens
from helix_store.transfer import ExportFile
from tests.databases import CommittedDatabase, delete_all_rows
from tests.transfer.files import exported, imported, lines_of, simple_session, written

REFUSED: dict[str, tuple[str, str, Any]] = {
    "a session id with a control character": ("session", "session_id", "evil\x07"),
    "a long title": ("session", "title", "x" * 5_000),
    "an id with a control character": ("session", "user_id", "ada\x1b[2J"),
    "an empty id": ("session", "agent_type", ""),
    "an id of too many bytes": ("session", "workspace_id", "\U0001f600" * 255),
    "a long tag": ("session", "tags", ["x" * 20_000]),
    "a tag that is no text": ("session", "tags", [1]),
    "metadata that is no text": ("session", "metadata", {"a": 1}),
    "a long directory": ("session", "directory", "x" * 5_000),
    "a role with a control character": ("message", "role", "user\x7f"),
    "a large message": ("message", "payload", '"' + "x" * 2_000_000 + '"'),
    "a large item": ("item", "payload", '"' + "x" * 9_000_000 + '"'),
    "a checkpoint of a run with a control character": ("checkpoint", "run_id", "run\x07"),
    "a checkpoint id with a control character": ("checkpoint", "checkpoint_id", "id\x07"),
    "a status that there is not": ("session", "status", "asleep"),
    "a negative version": ("session", "version", -1),
    "a root that is nobody": ("session", "root_session_id", "nobody"),
    "calls that are a list": ("session", "pending_client_tool_calls", "[]"),
    "answers that are a list": ("session", "completed_client_tool_calls", "[]"),
    "approvals that are a list": ("session", "approved_tool_calls", "[]"),
    "owners that are no JSON": ("session", "client_tool_call_ownership", "{"),
    "a context that is a number": ("session", "suspension_context", "1"),
    "a message that is none": ("message", "payload", '"hello"'),
    "a message without a role": ("message", "payload", '{"content":"hello"}'),
    "a message of another role": ("message", "role", "assistant"),
    "a negative sequence": ("message", "sequence", -1),
    "an item that is no JSON": ("item", "payload", "hello"),
    "an envelope that is a list": ("checkpoint", "envelope", "[]"),
    "a state that is no JSON": ("checkpoint", "payload", "{"),
    "a post that is no message": ("post", "payload", "[1]"),
    "a post with a negative position": ("post", "position", -5),
    "a post in a state that there is not": ("post", "state", "lost"),
    "usage of negative tokens": ("usage_entry", "prompt_tokens", -1),
    "usage of a negative cost": ("usage_entry", "cost_usd", "-1.000000000000"),
    "a run with a status that there is not": ("run", "status", "asleep"),
    "a run of turn 0": ("run", "turn", 0),
    "an error of a run that is no JSON": ("run", "error", "{"),
    "staged changes that are none": ("staged_change", "payload", "[]"),
}


def _session(database: CommittedDatabase) -> list[dict[str, Any]]:
    """The records of an export of a session with messages, an item and a checkpoint. It is stored no more."""
    store = DatabaseStateStore(database.alias, tenant=database.tenant)
    store.create_session("session", agent_type="agent", user_id="ada", workspace_id="w", title="t")
    store.start_run("session", "run")
    store.post_message("session", {"role": "user", "content": "hello"})
    store.stage_changes("session", "later", StagedChanges(tool_call_id="call"))
    usage = DatabaseUsageStore(database.alias, tenant=database.tenant)
    usage.record_entry(tokens("session"))
    state = store.load_state("session")
    assert state is not None
    store.save_state_and_promote_staging(
        "session", state, [{"role": "user", "content": "hello"}], StepInfo("step", 1)
    )
    ItemLog("session", "lane", using=database.alias, tenant=database.tenant).append(["item"])
    records = lines_of(exported(database))
    store.delete_session("session")
    return records


def test_a_value_that_a_store_refuses_is_a_problem(committed_db: CommittedDatabase) -> None:
    records = _session(committed_db)
    problems: dict[str, list[str]] = {}
    reasons: dict[str, str] = {}
    for name, (record, column, value) in REFUSED.items():
        number = next(n for n, each in enumerate(records) if each["record"] == record)
        changed = [*records[:number], {**records[number], column: value}, *records[number + 1 :]]
        summary, _ = imported(committed_db, written(changed))
        problems[name] = [problem.text.partition(": ")[0].rpartition(" ")[2] for problem in summary.problems]
        reasons[name] = summary.problems[0].text.partition(": ")[2]
        assert summary.sessions == 0, name
    assert problems == {key: ["imported"] for key in REFUSED}
    assert {name for name, reason in reasons.items() if "expected one of" in reason} == {
        name for name in REFUSED if name.endswith("that there is not")
    }
    store = DatabaseStateStore(committed_db.alias, tenant=committed_db.tenant)
    assert store.list_sessions().sessions == []
    summary, _ = imported(committed_db, written(records))
    assert (summary.sessions, summary.problems) == (1, [])


REFUSED_BUDGETS: dict[str, dict[str, Any]] = {
    "a scope that there is not": {"scope": "galaxy"},
    "a period that there is not": {"period": "week"},
    "a limit below zero": {"limit_tokens": -1},
    "dollars below zero": {"limit_usd": "-1.000000000000"},
    "no limit at all": {"limit_tokens": None, "limit_usd": None},
    "a tenant with a value": {"scope": "tenant", "value": "ada"},
    "a tree without its root": {"scope": "tree", "value": ""},
    "a name that is a list": {"name": []},
    "a name with a control character": {"name": "a\x07"},
    "a first period that is none": {"counted_from": "x"},
}


def test_a_bad_budget_is_a_problem_of_its_line_and_the_others_are_imported(
    committed_db: CommittedDatabase,
) -> None:
    budgets = DatabaseBudgetStore(committed_db.alias, tenant=committed_db.tenant)
    for name in ("a", "b", "c"):
        budgets.set_budget(name, scope="user", limit_tokens=5, limit_usd=1)
    locks = DatabaseLockManager(committed_db.alias, tenant=committed_db.tenant)
    for name in ("first", "second"):
        locks.acquire(name)
    simple_session(committed_db, "session")
    records = lines_of(exported(committed_db))
    places = [number for number, each in enumerate(records) if each["record"] == "budget"]
    outcomes = {}
    for name, changes in REFUSED_BUDGETS.items():
        delete_all_rows(committed_db.alias)
        changed = list(records)
        changed[places[1]] = {
            key: value for key, value in {**records[places[1]], **changes}.items() if value is not None
        }
        summary, _ = imported(committed_db, written(changed))
        stored = sorted(Budget.objects.using(committed_db.alias).values_list("name", flat=True))
        # The header is line 1, as is the first record of the list.
        lines = [problem.line for problem in summary.problems]
        outcomes[name] = (lines, stored, summary.sessions, summary.is_complete)
    assert outcomes == dict.fromkeys(REFUSED_BUDGETS, ([places[1] + 1], ["a", "c"], 1, True))


def test_a_counter_of_no_period_is_a_problem(committed_db: CommittedDatabase) -> None:
    budgets = DatabaseBudgetStore(committed_db.alias, tenant=committed_db.tenant)
    store = DatabaseStateStore(committed_db.alias, tenant=committed_db.tenant)
    budgets.set_budget("total", scope="tenant", limit_tokens=5, period="total")
    store.create_session("session", agent_type="agent")
    usage = DatabaseUsageStore(committed_db.alias, tenant=committed_db.tenant)
    usage.record_entry(tokens("session", prompt=3, total=3))
    records = lines_of(exported(committed_db))
    place = next(number for number, each in enumerate(records) if each["record"] == "budget_counter")
    lines = {}
    for period in ("x", "active", "{}", "2026", "2026-13", "20261120", "2026-W01-1", "2026-11", "2026-11-20"):
        delete_all_rows(committed_db.alias)
        changed = [*records[:place], {**records[place], "period": period}, *records[place + 1 :]]
        summary, _ = imported(committed_db, written(changed))
        counters = BudgetCounter.objects.using(committed_db.alias).filter(period=period)
        lines[period] = ([problem.line for problem in summary.problems], counters.count())
    months_and_days = {period: lines.pop(period) for period in ("2026-11", "2026-11-20")}
    assert lines == dict.fromkeys(lines, ([place + 1], 0))
    assert months_and_days == dict.fromkeys(months_and_days, ([], 1))


def test_a_bad_lock_is_a_problem_of_its_line_and_the_others_are_imported(
    committed_db: CommittedDatabase,
) -> None:
    locks = DatabaseLockManager(committed_db.alias, tenant=committed_db.tenant)
    for name in ("first", "second"):
        locks.acquire(name)
    records = lines_of(exported(committed_db))
    place = next(number for number, each in enumerate(records) if each["record"] == "lock")
    delete_all_rows(committed_db.alias)
    changed = [*records[:place], {**records[place], "token": -1}, *records[place + 1 :]]
    summary, _ = imported(committed_db, written(changed))
    assert [problem.line for problem in summary.problems] == [place + 1]
    assert list(Lock.objects.using(committed_db.alias).values_list("name", flat=True)) == ["second"]


def test_a_bad_stream_is_a_problem(committed_db: CommittedDatabase) -> None:
    streams = DatabaseStreamManager(committed_db.alias, tenant=committed_db.tenant)
    async_to_sync(streams.create_writer)("stream", "run", "agent")
    streams.write_sync("stream", [{"type": "text"}])
    records = lines_of(exported(committed_db))
    refused = {
        "a floor behind the end": ("stream", "floor", 9),
        "an output that is no JSON": ("stream", "output", "{"),
        "a status that there is not": ("stream", "status", "asleep"),
        "a chunk 0": ("stream_chunk", "sequence", 0),
        "a chunk that is no JSON": ("stream_chunk", "payload", "{"),
    }
    counts = {}
    for name, (record, column, value) in refused.items():
        delete_all_rows(committed_db.alias)
        number = next(n for n, each in enumerate(records) if each["record"] == record)
        changed = [*records[:number], {**records[number], column: value}, *records[number + 1 :]]
        summary, _ = imported(committed_db, written(changed))
        counts[name] = (len(summary.problems), summary.imported["stream"])
    assert counts == dict.fromkeys(refused, (1, 0))


def test_a_tree_without_its_root_is_a_problem(committed_db: CommittedDatabase) -> None:
    store = DatabaseStateStore(committed_db.alias, tenant=committed_db.tenant)
    store.create_session("root", agent_type="agent")
    store.create_session("child", agent_type="agent", parent_session_id="root")
    whole, alone = exported(committed_db), exported(committed_db, session_ids=["child"])
    delete_all_rows(committed_db.alias)
    summary, _ = imported(committed_db, alone)
    (problem,) = summary.problems
    assert "tree of 'root', which is not stored" in problem.text
    summary, _ = imported(committed_db, whole)
    assert summary.problems == []


def test_a_line_without_end_is_not_read_whole(committed_db: CommittedDatabase) -> None:
    simple_session(committed_db, "first")
    simple_session(committed_db, "second")
    data = exported(committed_db)
    cut = data.index(b'{"record":"message"', data.index(b'"session_id":"second"'))
    endless = io.BytesIO(data[:cut] + bytes(70_000_000))
    with override_settings(HELIX_STORE={"LIMITS": dict.fromkeys(Limits.__slots__, 1_000)}):
        file = ExportFile(endless)
        assert [unit.name for unit in file.units() if unit.kind == "session"] == ["first"]
    (problem,) = file.problems
    assert "has more than 67,132,864 bytes" in problem.text
    assert endless.tell() < 68_000_000
    assert not file.is_complete
