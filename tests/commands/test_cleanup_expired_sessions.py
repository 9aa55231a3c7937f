"""The command: data on stdout, progress on stderr, honest exit codes, and a stop after the current batch."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from io import StringIO
from typing import Any

import pytest
from django.core.management import CommandError, call_command
from django.db import connections
from django.test import override_settings

from helix_store.stores import DatabaseStateStore
from tests.cells import for_each
from tests.cleanup.conftest import LONG_AGO
from tests.commands.running import command_line
from tests.databases import CommittedDatabase

NOTHING = {
    "detected": 0,
    "marked": 0,
    "already_terminal": 0,
    "snapshots_deleted": 0,
    "errors": 0,
    "renewed": 0,
    "defaults_applied": 0,
    "deleted": 0,
    "swept": 0,
}


@pytest.fixture
def store(empty_db: CommittedDatabase) -> DatabaseStateStore:
    return DatabaseStateStore(empty_db.alias, tenant=empty_db.tenant)


def expire(store: DatabaseStateStore, count: int, **changes: Any) -> None:
    for number in range(count):
        state = store.create_session(f"session-{number}", agent_type="agent", expires_at=LONG_AGO)
        for name, value in changes.items():
            setattr(state, name, value)
        store.save_state(state.session_id, state)


def run(store: DatabaseStateStore, *arguments: str, **options: Any) -> tuple[dict[str, Any], str]:
    """The JSON on stdout, and stderr."""
    out, err = StringIO(), StringIO()
    call_command(
        "cleanup_expired_sessions",
        *arguments,
        database=store.alias,
        format="json",
        stdout=out,
        stderr=err,
        **options,
    )
    (line,) = out.getvalue().splitlines()
    return json.loads(line), err.getvalue()


def failed(store: DatabaseStateStore) -> int:
    return store.list_sessions(status="failed").total or 0


def test_it_cleans_up_every_tenant_and_says_what_it_did(store: DatabaseStateStore) -> None:
    expire(store, 3)
    DatabaseStateStore(store.alias, tenant="other").create_session(agent_type="a", expires_at=LONG_AGO)
    summary, progress = run(store, "--batch-size", "2")
    assert summary == {**NOTHING, "detected": 4, "marked": 4}
    assert "2 marked" in progress
    assert "4 marked" in progress
    assert run(store) == (NOTHING, "0 expired, 0 marked, 0 errors so far\n")


def test_verbosity_zero_is_silent(store: DatabaseStateStore) -> None:
    expire(store, 1)
    assert run(store, verbosity=0) == ({**NOTHING, "detected": 1, "marked": 1}, "")


def test_a_dry_run_lists_what_a_run_would_do_and_changes_nothing(store: DatabaseStateStore) -> None:
    expire(store, 3)
    call = {"tool_name": "ask", "deadline": LONG_AGO}
    store.create_session("waits", agent_type="agent")
    calls: dict[str, dict[str, Any]] = {
        "call-1": {**call, "on_expiry": "fail"},
        "call-2": call,
        "call-3": {"tool_name": "ask"},
    }
    for session_id in ("waits", "session-0"):
        store.add_pending_tool_calls(session_id, calls)
    other = DatabaseStateStore(store.alias, tenant="other")
    other.create_session("session-0", agent_type="agent", expires_at=LONG_AGO)
    sessions = [{"tenant": store.tenant, "session_id": f"session-{number}"} for number in range(3)]
    overdue = {"tenant": store.tenant, "session_id": "waits", "tool_name": "ask", "deadline": LONG_AGO}
    listed = run(store, "--dry-run", "--batch-size", "2")[0]
    assert listed == {
        **NOTHING,
        "detected": 4,
        "expired_sessions": [*sessions, {"tenant": "other", "session_id": "session-0"}],
        "overdue_calls": [
            {**overdue, "tool_call_id": "call-1", "has_default": True},
            {**overdue, "tool_call_id": "call-2", "has_default": False},
        ],
    }
    assert failed(store) == 0
    assert run(store)[0] == {**NOTHING, "detected": 4, "marked": 4, "defaults_applied": 1}


def test_a_dry_run_as_a_table_has_a_line_for_each_session_and_call(store: DatabaseStateStore) -> None:
    expire(store, 2)
    store.create_session("waits", agent_type="agent")
    call = {"tool_name": "ask\x1b[2J", "deadline": LONG_AGO, "on_expiry": "fail"}
    state = store.load_state("waits")
    assert state is not None
    state.pending_client_tool_calls = {"call \ud800": call}
    store.save_state("waits", state)
    out = StringIO()
    call_command("cleanup_expired_sessions", "--dry-run", database=store.alias, stdout=out, verbosity=0)
    lines = out.getvalue().splitlines()
    assert [line.split() for line in lines[:4]] == [
        ["expired", "sessions:"],
        ["tenant", "session", "id"],
        [store.tenant, "session-0"],
        [store.tenant, "session-1"],
    ]
    assert lines[5] == "overdue calls:"
    assert "waits" in lines[7]
    assert "call \\ud800" in lines[7]
    assert "\x1b" not in out.getvalue()
    assert ["detected", "2"] in [line.split() for line in lines]


def test_a_limit_bounds_what_is_done(store: DatabaseStateStore) -> None:
    expire(store, 3)
    assert run(store, "--limit", "2", "--batch-size", "1")[0]["marked"] == 2
    assert failed(store) == 2


def test_sessions_long_expired_are_deleted_when_asked_to(store: DatabaseStateStore) -> None:
    expire(store, 2)
    assert run(store)[0]["deleted"] == 0
    assert run(store, "--delete-after", "30")[0]["deleted"] == 2
    assert store.list_sessions().total == 0


def test_a_table_names_every_sum(store: DatabaseStateStore) -> None:
    expire(store, 1)
    out = StringIO()
    call_command("cleanup_expired_sessions", database=store.alias, stdout=out, verbosity=0)
    rows = [line.rsplit(maxsplit=1) for line in out.getvalue().splitlines()]
    assert {name.strip().replace(" ", "_"): int(value) for name, value in rows} == {
        **NOTHING,
        "detected": 1,
        "marked": 1,
    }


def test_problems_are_exit_code_one_after_the_data(store: DatabaseStateStore) -> None:
    expire(store, 2, workspace_refs={"main": {"provider": "nobody"}})
    out = StringIO()
    with pytest.raises(CommandError) as caught:
        call_command("cleanup_expired_sessions", database=store.alias, format="json", stdout=out, verbosity=0)
    assert caught.value.returncode == 1
    assert json.loads(out.getvalue()) == {**NOTHING, "detected": 2, "errors": 2}


def test_a_missing_provider_is_one_line_of_the_log(
    store: DatabaseStateStore, caplog: pytest.LogCaptureFixture
) -> None:
    expire(store, 5, workspace_refs={"main": {"provider": "nobody\n"}})
    state = store.create_session("no name", agent_type="agent", expires_at=LONG_AGO)
    state.workspace_refs = {"main": "nonsense"}
    store.save_state("no name", state)
    with pytest.raises(CommandError, match="6 sessions"):
        run(store, "--batch-size", "2")
    assert [(record.levelname, record.exc_info) for record in caplog.records] == [("WARNING", None)] * 2
    assert sorted(caplog.messages) == [
        "No workspace provider 'nobody\\n' is configured; sessions left for this reason: 5.",
        "No workspace provider None is configured; sessions left for this reason: 1.",
    ]


@for_each(
    "arguments",
    [
        ["--database", "nowhere"],
        ["--batch-size", "0"],
        ["--batch-size", "many"],
        ["--limit", "0"],
        ["--limit", "-3"],
        ["--delete-after", "-1"],
        ["--delete-after", "1.5"],
        ["--delete-after", "999999999999"],
        ["--loop", "0"],
        ["--format", "xml"],
        ["--nonsense"],
        ["extra"],
    ],
    ids=" ".join,
)
def test_wrong_usage_is_exit_code_two(arguments: list[str]) -> None:
    ended = command_line("cleanup_expired_sessions", *arguments)
    assert (ended.code, ended.out) == (2, "")
    assert "Traceback" not in ended.err
    assert ended.err


def test_a_provider_that_cannot_be_loaded_is_wrong_usage(store: DatabaseStateStore) -> None:
    expire(store, 1)
    with (
        override_settings(HELIX_STORE={"WORKSPACE_PROVIDERS": {"disk": "nobody.there"}}),
        pytest.raises(CommandError) as caught,
    ):
        run(store)
    assert caught.value.returncode == 2
    assert failed(store) == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_stops_it_after_the_current_batch(store: DatabaseStateStore, number: signal.Signals) -> None:
    expire(store, 6)
    before = [signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGINT)]
    with connections[store.alias].execute_wrapper(signalling(number)):
        summary, progress = run(store, "--batch-size", "2")
    assert summary["marked"] == 2
    assert "Stopped after 2 sessions" in progress
    assert [signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGINT)] == before
    assert run(store)[0]["marked"] == 4


@pytest.mark.thorough
def test_a_loop_goes_on_until_it_is_stopped(store: DatabaseStateStore) -> None:
    expire(store, 1)
    out = StringIO()
    with connections[store.alias].execute_wrapper(StoppingInRound(3)):
        call_command(
            "cleanup_expired_sessions",
            database=store.alias,
            format="json",
            loop=1,
            stdout=out,
            stderr=StringIO(),
        )
    summaries = [json.loads(line) for line in out.getvalue().splitlines()]
    assert [summary["marked"] for summary in summaries] == [1, 0, 0]


@pytest.mark.thorough
def test_a_loop_counts_a_session_with_a_problem_once(store: DatabaseStateStore) -> None:
    expire(store, 2, workspace_refs={"main": {"provider": "nobody"}})
    out, err = StringIO(), StringIO()
    with (
        connections[store.alias].execute_wrapper(StoppingInRound(3)),
        pytest.raises(CommandError, match=r"^2 sessions had a problem"),
    ):
        call_command(
            "cleanup_expired_sessions",
            database=store.alias,
            format="json",
            loop=1,
            stdout=out,
            stderr=err,
        )
    summaries = [json.loads(line) for line in out.getvalue().splitlines()]
    assert [(each["detected"], each["errors"]) for each in summaries] == [(2, 2)] * 3
    assert err.getvalue().splitlines()[:2] == ["2 expired, 0 marked, 2 errors so far"] * 2


class StoppingInRound:
    """Sends SIGTERM to this process when a round looks for overdue calls, which is its last query."""

    def __init__(self, number: int) -> None:
        self.left = number

    def __call__(self, execute: Any, sql: str, params: Any, many: bool, context: Any) -> Any:
        self.left -= "deadline" in sql and sql.startswith("SELECT")
        if self.left == 0:
            os.kill(os.getpid(), signal.SIGTERM)
        return execute(sql, params, many, context)


def signalling(number: signal.Signals) -> Callable[..., Any]:
    """Sends the signal to this process with the first session that is marked."""
    sent = False

    def send(execute: Any, sql: str, params: Any, many: bool, context: Any) -> Any:
        nonlocal sent
        result = execute(sql, params, many, context)
        if sql.startswith("UPDATE") and not sent:
            sent = True
            os.kill(os.getpid(), number)
        return result

    return send
