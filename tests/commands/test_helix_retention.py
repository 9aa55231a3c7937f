"""``helix_retention``: the policy of the settings, its summary as JSON and as a table, exit codes, a stop."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import fields
from datetime import timedelta
from io import StringIO
from typing import Any

import pytest
from django.core.management import CommandError, call_command
from django.db import connections
from django.test import override_settings

from helix_store.core import moments
from helix_store.management.commands import helix_retention
from helix_store.models import Session
from helix_store.retention import RetentionSummary
from helix_store.stores import DatabaseStateStore
from tests.databases import CommittedDatabase

POLICY = {"RETENTION": {"sessions_idle_days": {"completed": 30}}}


@pytest.fixture
def store(empty_db: CommittedDatabase) -> DatabaseStateStore:
    return DatabaseStateStore(empty_db.alias, tenant=empty_db.tenant)


def idle(store: DatabaseStateStore, count: int, **changes: Any) -> None:
    for number in range(count):
        state = store.create_session(f"session-{number}", agent_type="agent")
        state.status = "completed"  # type: ignore[assignment]
        for name, value in changes.items():
            setattr(state, name, value)
        store.save_state(state.session_id, state)
    sessions = Session.objects.using(store.alias)
    sessions.update(updated_at=moments.now() - timedelta(days=31))


def run(store: DatabaseStateStore, *arguments: str, **options: Any) -> tuple[str, str]:
    out, err = StringIO(), StringIO()
    call_command("helix_retention", *arguments, database=store.alias, stdout=out, stderr=err, **options)
    return out.getvalue(), err.getvalue()


def test_the_dry_run_and_the_run_print_the_same_report(store: DatabaseStateStore) -> None:
    idle(store, 3)
    with override_settings(HELIX_STORE=POLICY):
        said = json.loads(run(store, "--dry-run", "--format", "json")[0])
        assert store.list_sessions().total == 3
        done = json.loads(run(store, "--format", "json", "--batch-size", "2")[0])
    assert said == {**done, "dry_run": True}
    assert done == {
        "dry_run": False,
        "sessions": {"checkpoint": 3, "session": 3},
        "checkpoints": {},
        "streams": {},
        "usage_dropped": {},
        "usage_anonymised": {},
        "trees": 3,
        "in_use": 0,
        "snapshots_deleted": 0,
        "streams_failed": 0,
        "budget_periods": {},
        "operations": {},
        "errors": 0,
    }
    assert RetentionSummary.from_dict(done).trees == 3
    assert store.list_sessions().total == 0


def test_json_goes_through_a_pipe(store: DatabaseStateStore) -> None:
    with override_settings(HELIX_STORE=POLICY):
        text = run(store, "--format", "json", verbosity=0)[0]
    jq = shutil.which("jq")
    reader = [jq, ".trees"] if jq else [sys.executable, "-m", "json.tool"]
    subprocess.run(reader, input=text, text=True, check=True, stdout=subprocess.DEVNULL)


def test_a_table_has_a_line_for_each_rule_and_table(store: DatabaseStateStore) -> None:
    idle(store, 2)
    with override_settings(HELIX_STORE=POLICY):
        text = run(store, "--dry-run")[0]
    assert [line.split() for line in text.splitlines()] == [
        ["rule", "table", "rows", "that", "would", "change"],
        ["delete", "idle", "sessions", "checkpoint", "2"],
        ["delete", "idle", "sessions", "session", "2"],
        [],
        ["trees", "2"],
        ["in", "use", "0"],
        ["snapshots", "deleted", "0"],
        ["streams", "failed", "0"],
        ["errors", "0"],
    ]


def test_the_table_has_every_rule_of_the_summary() -> None:
    counts = {each.name for each in fields(RetentionSummary)}
    shown = {*helix_retention._RULES, *helix_retention._COUNTS, "dry_run"}
    assert shown == counts


def test_one_tenant(store: DatabaseStateStore) -> None:
    idle(store, 1)
    idle(DatabaseStateStore(store.alias, tenant="other"), 1)
    with override_settings(HELIX_STORE=POLICY):
        run(store, "--tenant", "other")
        assert store.list_sessions().total == 1
        run(store, "--tenant", store.tenant)
    assert store.list_sessions().total == 0


def test_without_a_policy_it_says_so_and_changes_nothing(store: DatabaseStateStore) -> None:
    idle(store, 1)
    with override_settings(HELIX_STORE={}):
        assert "everything is kept" in run(store)[1]
    assert store.list_sessions().total == 1


def test_a_session_with_a_problem_is_exit_code_1(store: DatabaseStateStore) -> None:
    idle(store, 1, workspace_refs={"code": {"provider": "unknown"}})
    with override_settings(HELIX_STORE=POLICY), pytest.raises(CommandError, match="1 sessions") as caught:
        run(store)
    assert caught.value.returncode == 1
    assert store.list_sessions().total == 1


def test_a_wrong_policy_is_exit_code_2(store: DatabaseStateStore) -> None:
    with (
        override_settings(HELIX_STORE={"RETENTION": {"sessions": 1}}),
        pytest.raises(CommandError) as caught,
    ):
        run(store, skip_checks=True)
    assert caught.value.returncode == 2


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_stops_it_after_the_batch(store: DatabaseStateStore, number: signal.Signals) -> None:
    idle(store, 4)
    sent: list[str] = []

    def signalling(execute: Any, sql: str, params: Any, many: bool, context: Any) -> Any:
        """Sends the signal in the middle of the first batch."""
        if not sent and f'DELETE FROM "{Session._meta.db_table}"' in sql:
            sent.append(sql)
            os.kill(os.getpid(), number)
        return execute(sql, params, many, context)

    with (
        override_settings(HELIX_STORE=POLICY),
        connections[store.alias].execute_wrapper(signalling),
    ):
        text, progress = run(store, "--batch-size", "2", "--format", "json")
    assert json.loads(text)["trees"] == 2
    assert "after 2 session trees; run it again" in progress
    assert store.list_sessions().total == 2
