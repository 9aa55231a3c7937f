"""``manage.py demo``: what it writes, prints and needs."""

from __future__ import annotations

import io
import json
import lzma
import os
import re
import resource
import shlex
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.core.management import CommandError, call_command
from django.test.utils import override_settings

from example_project.management.commands.demo import SAMPLE
from example_project.replay import replay_file
from helix_store.stores import DatabaseStateStore
from tests.admin.conftest import browser_on
from tests.cells import for_each
from tests.databases import CommittedDatabase
from tests.processes import WorkerProcess

ROOT = Path(__file__).resolve().parents[2]
RECORDED = ROOT.parent / "shared" / "data" / "tau-airline-trajectories.json.xz"
MEGABYTE = 1_000_000


def _demo(database: CommittedDatabase, *arguments: str, **options: Any) -> str:
    written = io.StringIO()
    call_command(
        "demo",
        *arguments,
        f"--database={database.alias}",
        f"--tenant={database.tenant}",
        **{"stdout": written, "stderr": io.StringIO(), **options},
    )
    return written.getvalue()


def _replay_and_measure(alias: str, tenant: str, path: str) -> tuple[dict[str, Any], int]:
    """In a process of its own, with DEBUG as in development: the summary and the peak of memory in bytes."""
    written = io.StringIO()
    with override_settings(DEBUG=True):
        call_command(
            "demo",
            f"--database={alias}",
            f"--tenant={tenant}",
            f"--transcripts={path}",
            "--verify",
            "--format=json",
            verbosity=0,
            stdout=written,
        )
    return json.loads(written.getvalue()), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


@pytest.mark.skipif(not RECORDED.is_file(), reason=f"{RECORDED.name} is not part of the project")
def test_the_recorded_conversations_are_stored_exactly_in_less_than_200_megabytes(
    committed_db: CommittedDatabase,
) -> None:
    worker = WorkerProcess(_replay_and_measure, committed_db.alias, committed_db.tenant, str(RECORDED))
    summary, peak = worker.outcome(timeout=300).unwrap()
    assert peak < 200 * MEGABYTE
    with lzma.open(RECORDED, "rt") as stream:
        recorded = [entry["traj"] for entry in json.load(stream)]
    assert sum(map(len, recorded)) == 5_308
    store = DatabaseStateStore(committed_db.alias, tenant=committed_db.tenant)
    stored = [store.get_messages(f"tau-airline-trajectories-{number:04d}").messages for number in range(200)]
    assert [len(messages) for messages in stored] == [len(messages) for messages in recorded]
    assert _roles(stored) == _roles(recorded)
    assert [json.dumps(messages) for messages in stored] == [json.dumps(messages) for messages in recorded]
    assert summary["sessions"] == summary["sessions_verified"] == 200
    assert summary["messages_written"] == 5_308
    assert summary["steps_written"] == _roles(recorded)["assistant"]
    assert store.list_sessions(status="completed").total == 200


def test_statements_are_not_kept_in_memory_while_debugging(committed_db: CommittedDatabase) -> None:
    store = DatabaseStateStore(committed_db.alias, tenant=committed_db.tenant)
    with override_settings(DEBUG=True):
        store.list_sessions()
        assert committed_db.connection.queries_log
        replay_file(store, SAMPLE, progress=lambda line, is_last: None, stop=[], verify=False)
    assert not committed_db.connection.queries_log


def _roles(conversations: list[list[dict[str, Any]]]) -> Counter[str]:
    return Counter(message["role"] for messages in conversations for message in messages)


def test_the_demo_can_be_run_again_and_leaves_three_sessions_each_time(
    committed_db: CommittedDatabase,
) -> None:
    for _ in range(2):
        sessions = json.loads(_demo(committed_db, "--format=json"))["sessions"]
        assert [(session["status"], session["messages"]) for session in sessions] == [
            ("completed", 9),
            ("completed", 9),
            ("paused", 7),
        ]
        assert [session["card_charges"] for session in sessions] == [1, 1, 0]
    store = DatabaseStateStore(committed_db.alias, tenant=committed_db.tenant)
    assert store.list_sessions(agent_type="travel-planner").total == 6


def test_the_printed_approval_names_the_database_and_the_tenant(
    committed_db: CommittedDatabase, capsys: pytest.CaptureFixture[str]
) -> None:
    said = io.StringIO()
    _demo(committed_db, stderr=said)
    (line,) = (line for line in said.getvalue().splitlines() if "approve(" in line)
    *_, shell, option, code = shlex.split(line)
    assert (shell, option) == ("shell", "-c")
    exec(code, {})  # noqa: S102  the line that the demo tells its reader to run
    assert "booked" in capsys.readouterr().out
    store = DatabaseStateStore(committed_db.alias, tenant=committed_db.tenant)
    assert store.list_sessions(agent_type="travel-planner", status="paused").total == 0


def test_data_goes_to_stdout_and_progress_to_stderr(committed_db: CommittedDatabase) -> None:
    said = io.StringIO()
    table = _demo(committed_db, f"--transcripts={SAMPLE}", "--verify", stderr=said)
    head, row = table.splitlines()
    assert head.split() == ["sessions", "messages", "written", "steps", "written", "verified", "seconds"]
    assert row.split()[:4] == ["3", "16", "6", "3"]
    assert "3 sessions, 16 messages in 6 steps written" in said.getvalue()
    silent = io.StringIO()
    _demo(committed_db, f"--transcripts={SAMPLE}", stderr=silent, verbosity=0)
    assert silent.getvalue() == ""


class _Terminal(io.StringIO):
    """A terminal whose user ends the program as soon as it shows progress."""

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        if "1 sessions" in text:
            os.kill(os.getpid(), signal.SIGTERM)
        return super().write(text)


def test_a_replay_that_is_ended_says_where_and_goes_on_when_repeated(committed_db: CommittedDatabase) -> None:
    terminal = _Terminal()
    with pytest.raises(CommandError, match="sample_transcripts-0000"):
        _demo(committed_db, f"--transcripts={SAMPLE}", "--verify", stderr=terminal)
    assert "\r" in terminal.getvalue()
    store = DatabaseStateStore(committed_db.alias, tenant=committed_db.tenant)
    assert store.list_sessions().total == 1
    summary = json.loads(_demo(committed_db, f"--transcripts={SAMPLE}", "--verify", "--format=json"))
    assert (summary["sessions_verified"], summary["messages_written"]) == (3, 6)


def test_a_session_that_differs_from_its_recording_is_a_problem(committed_db: CommittedDatabase) -> None:
    store = DatabaseStateStore(committed_db.alias, tenant=committed_db.tenant)
    _demo(committed_db, f"--transcripts={SAMPLE}")
    store.append_messages("sample_transcripts-0001", [{"role": "user", "content": "more"}])
    said = io.StringIO()
    with pytest.raises(CommandError) as raised:
        _demo(committed_db, f"--transcripts={SAMPLE}", "--verify", stderr=said)
    assert raised.value.returncode == 1
    assert "sample_transcripts-0001: 3 messages instead of 2" in said.getvalue()


@for_each("arguments", [["--verify"], ["--transcripts=missing.json"], ["--format=xml"]])
def test_wrong_usage_is_refused_before_anything_is_written(
    committed_db: CommittedDatabase, arguments: list[str]
) -> None:
    with pytest.raises(CommandError):
        _demo(committed_db, *arguments)
    store = DatabaseStateStore(committed_db.alias, tenant=committed_db.tenant)
    assert store.list_sessions().total == 0


def test_a_file_without_conversations_is_a_problem(committed_db: CommittedDatabase, tmp_path: Path) -> None:
    path = tmp_path / "other.json"
    path.write_text("{}")
    with pytest.raises(CommandError, match=r"other\.json"):
        _demo(committed_db, f"--transcripts={path}")


def test_a_superuser_is_made_for_development_only(sqlite_db: CommittedDatabase) -> None:
    User.objects.using(sqlite_db.alias).filter(username="demo").delete()
    said = io.StringIO()
    _demo(sqlite_db, f"--transcripts={SAMPLE}", stderr=said)
    assert "uvicorn" in said.getvalue()
    assert not User.objects.using(sqlite_db.alias).filter(username="demo").exists()
    with override_settings(DEBUG=True):
        _demo(sqlite_db, f"--transcripts={SAMPLE}", stderr=said)
        again = io.StringIO()
        _demo(sqlite_db, f"--transcripts={SAMPLE}", stderr=again)
        assert "Sign in as demo" in again.getvalue()
        user = User.objects.using(sqlite_db.alias).get(username="demo")
        user.set_password("changed")
        user.save()
        _demo(sqlite_db, f"--transcripts={SAMPLE}", stderr=said)
    try:
        assert said.getvalue().count("Sign in as demo") == 1
        kept = User.objects.using(sqlite_db.alias).get(username="demo")
        assert kept.is_superuser
        assert kept.check_password("changed")
    finally:
        user.delete()


def test_one_command_is_enough_on_a_new_database(tmp_path: Path) -> None:
    environment = {
        name: value for name, value in os.environ.items() if name not in ("DJANGO_SETTINGS_MODULE", "DEBUG")
    }
    environment["DATABASE_URL"] = f"sqlite:///{tmp_path / 'new.sqlite3'}"
    environment["CARD_SERVICE"] = str(tmp_path / "charges.jsonl")
    ended = subprocess.run(
        [sys.executable, "manage.py", "demo", "--format=json"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    assert [session["status"] for session in json.loads(ended.stdout)["sessions"]] == [
        "completed",
        "completed",
        "paused",
    ]
    assert "Applying" in ended.stderr
    assert "ended exactly like the undisturbed one" in ended.stderr
    assert "Its card was charged once." in ended.stderr
    assert "Sign in as demo" in ended.stderr
    usage = subprocess.run(
        [sys.executable, "manage.py", "demo", "--transcripts", "missing.json"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        check=False,
    )
    assert usage.returncode == 2


def test_the_address_that_is_printed_shows_the_settled_payment(sqlite_db: CommittedDatabase) -> None:
    said = io.StringIO()
    _demo(sqlite_db, stderr=said)
    (address,) = re.findall(r"http://127\.0\.0\.1:8000(/\S+section=effects)", said.getvalue())
    store = DatabaseStateStore(sqlite_db.alias, tenant=sqlite_db.tenant)
    (killed,) = (
        session
        for session in store.list_sessions(agent_type="travel-planner").sessions
        if session.title == "Workers are killed and others continue"
    )
    (effect,) = store.list_effects(killed.session_id).items
    with browser_on(sqlite_db) as browser:
        browser.sign_in(superuser=True)
        page = browser.client.get(address).content.decode()
    assert effect.key in page
    assert "the demo" in page
    assert "It happened" not in page


def test_the_kills_stand_out(sqlite_db: CommittedDatabase) -> None:
    said = io.StringIO()
    _demo(sqlite_db, stderr=said, force_color=True)
    coloured = [line for line in said.getvalue().splitlines() if "\x1b[31;1m" in line]
    assert [line for line in coloured if "SIGKILL" in line] == coloured
    assert len(coloured) == 2
    reports = [line for line in said.getvalue().splitlines() if line.startswith("  travel-planner step-")]
    assert reports
    assert not any("\x1b" in line for line in reports)
