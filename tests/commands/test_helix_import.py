"""``helix_import``: what it prints, honest exit codes, and a stop between two sessions."""

from __future__ import annotations

import json
import os
import signal
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from django.core.management import CommandError, call_command
from django.db import connections

from helix_store.models import Session
from helix_store.stores import DatabaseStateStore
from helix_store.transfer import importing
from tests.cells import for_each
from tests.commands.running import command_line
from tests.databases import CommittedDatabase, delete_all_rows
from tests.invariants import broken_invariants
from tests.transfer.files import exported, fill


@pytest.fixture
def file(committed_db: CommittedDatabase, tmp_path: Path) -> Path:
    """An export of something of everything, which is stored no longer."""
    fill(committed_db)
    path = tmp_path / "sessions.jsonl"
    path.write_bytes(exported(committed_db))
    delete_all_rows(committed_db.alias)
    return path


def run_import(
    database: CommittedDatabase, *arguments: str, problems: str | None = None, **options: Any
) -> tuple[dict[str, Any], str]:
    """The JSON on stdout, and stderr. ``problems`` is what the command ends with."""
    out, err = StringIO(), StringIO()
    options = {"database": database.alias, "format": "json", "stdout": out, "stderr": err, **options}
    if problems is None:
        call_command("helix_import", *arguments, **options)
    else:
        with pytest.raises(CommandError, match=problems) as caught:
            call_command("helix_import", *arguments, **options)
        assert caught.value.returncode == 1
    (line,) = out.getvalue().splitlines()
    return json.loads(line), err.getvalue()


def test_a_file_is_imported_and_counted(committed_db: CommittedDatabase, file: Path) -> None:
    summary, err = run_import(committed_db, str(file))
    assert err == ""
    assert summary.keys() == {
        "imported", "identical", "other_tenants", "records", "is_complete", "problems",
    }  # fmt: skip
    assert summary["is_complete"]
    assert summary["records"]["session"] == summary["imported"]["session"] > 1
    assert exported(committed_db) == file.read_bytes()
    again, _ = run_import(committed_db, str(file))
    assert (again["imported"], again["identical"]) == ({}, summary["imported"])


@pytest.mark.thorough
def test_the_table_has_the_counts(committed_db: CommittedDatabase, file: Path) -> None:
    out = StringIO()
    call_command("helix_import", str(file), database=committed_db.alias, stdout=out)
    lines = [line.split() for line in out.getvalue().splitlines()]
    assert ["imported", "sessions", "5"] in lines
    assert ["identical", "sessions", "0"] in lines


def test_a_problem_is_told_with_its_line(committed_db: CommittedDatabase, file: Path) -> None:
    lines = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(b"".join(lines[:-1]))
    summary, err = run_import(committed_db, str(file), problems="1 problem")
    assert not summary["is_complete"]
    assert summary["problems"] == [err.strip()]
    assert err.startswith(f"line {len(lines) - 1}: ")


def test_another_session_is_not_overwritten(committed_db: CommittedDatabase, file: Path) -> None:
    store = DatabaseStateStore(committed_db.alias, tenant=committed_db.tenant)
    store.create_session("deltas é\u2028", agent_type="other")
    summary, err = run_import(committed_db, str(file), problems="1 problem")
    assert "differs" in err
    assert summary["is_complete"]
    state = store.load_state("deltas é\u2028")
    assert state is not None
    assert state.agent_type == "other"


def test_a_tenant_is_chosen(committed_db: CommittedDatabase, file: Path) -> None:
    problem = (
        "^The file has nothing of the tenant 'another'; parts of other tenants: [1-9].*Nothing was imported"
    )
    summary, _ = run_import(committed_db, str(file), tenant="another", problems=problem)
    assert summary["imported"] == {}
    assert summary["other_tenants"] > 1


@pytest.mark.thorough
def test_an_import_of_one_tenant_may_be_repeated(committed_db: CommittedDatabase, file: Path) -> None:
    first, _ = run_import(committed_db, str(file), tenant=committed_db.tenant)
    again, _ = run_import(committed_db, str(file), tenant=committed_db.tenant)
    assert (again["imported"], again["identical"]) == ({}, first["imported"])


class SignalAtCommit:
    """Sends a signal to this process in the transaction of the first sessions."""

    def __init__(self, number: signal.Signals) -> None:
        self.number = number
        self.is_sent = False

    def __call__(self, execute: Any, sql: str, params: Any, many: bool, context: Any) -> Any:
        if sql.startswith(f'INSERT INTO "{Session._meta.db_table}"') and not self.is_sent:
            self.is_sent = True
            os.kill(os.getpid(), self.number)
        return execute(sql, params, many, context)


@pytest.mark.thorough
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_stops_it_after_the_current_transaction(
    committed_db: CommittedDatabase, file: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    monkeypatch.setattr(importing, "_UNITS_TOGETHER", 2)
    with connections[committed_db.alias].execute_wrapper(SignalAtCommit(number)):
        summary, _ = run_import(committed_db, str(file), problems="Stopped after 2 sessions; run it again")
    assert not summary["is_complete"]
    assert summary["imported"]["session"] == 2
    assert broken_invariants(committed_db) == []
    rest, _ = run_import(committed_db, str(file))
    assert rest["identical"]["session"] == 2
    assert exported(committed_db) == file.read_bytes()


def test_progress_is_shown_after_a_second(
    committed_db: CommittedDatabase, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("helix_store.management.output.ProgressBar.first_after", 0.0)
    assert "sessions" in run_import(committed_db, str(file))[1]
    assert run_import(committed_db, str(file), verbosity=0)[1] == ""


@for_each(
    "arguments",
    [["--database", "nowhere"], ["--format", "xml"], ["--nonsense"], ["no-such-file"], ["tests"]],
    ids=" ".join,
)
def test_wrong_usage_is_exit_code_two(arguments: list[str]) -> None:
    # The system checks ask every database since Django 6.1, and this test has none.
    ended = command_line("helix_import", "--skip-checks", *arguments)
    assert (ended.code, ended.out) == (2, "")
    assert "Traceback" not in ended.err
    assert ended.err


def test_a_file_of_something_else_is_a_problem(committed_db: CommittedDatabase, tmp_path: Path) -> None:
    path = tmp_path / "other.jsonl"
    path.write_text('{"a": 1}\n')
    with pytest.raises(CommandError, match="Line 1 is not the header") as caught:
        call_command("helix_import", str(path), database=committed_db.alias)
    assert caught.value.returncode == 1


def test_the_error_for_a_path_has_no_character_that_a_terminal_obeys(committed_db: CommittedDatabase) -> None:
    with pytest.raises(CommandError, match="cannot be read: No such file") as caught:
        call_command("helix_import", "no\x1b[31m\x9b\u202efile", database=committed_db.alias)
    assert str(caught.value).startswith(r"no\x1b[31m\x9b\u202efile ")


def test_a_path_that_the_system_refuses_is_no_traceback(committed_db: CommittedDatabase) -> None:
    with pytest.raises(CommandError, match=r"x cannot be read or written: File name too long\.") as caught:
        call_command(
            "helix_import", source=["langgraph-sqlite", f"/{'x' * 300}"], database=committed_db.alias
        )
    assert caught.value.returncode == 1
