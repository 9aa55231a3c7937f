"""``helix_sessions``: status, interrupt, delete, and the command as a process."""

from __future__ import annotations

import io
import json
import os
import pty
import re
import signal
import subprocess
import sys
import termios
import threading
from pathlib import Path
from typing import Any

import pytest

from helix_store.management.output import width_of
from helix_store.stores import DatabaseUsageStore
from tests.cells import for_each
from tests.commands.running import read_by_a_program
from tests.commands.sample import SAMPLE_ID
from tests.commands.test_helix_sessions import listed, sample, sessions, store_of
from tests.databases import CommittedDatabase

__all__ = ["sample"]


def test_a_status_is_set_with_its_reason(sample: CommittedDatabase) -> None:
    arguments = ["set-status", SAMPLE_ID, "--tenant", sample.tenant, "--format", "json"]
    data = read_by_a_program(sessions(sample, *arguments, "failed", "--reason", "worker lost").out)
    state = store_of(sample).load_state(SAMPLE_ID)
    assert state is not None
    assert (state.status, state.failure_reason) == ("failed", "worker lost")
    assert data == {
        "tenant": sample.tenant,
        "session_id": SAMPLE_ID,
        "status": "failed",
        "version": state.version,
    }


def test_a_status_is_set_only_from_an_expected_one(sample: CommittedDatabase) -> None:
    arguments = ["set-status", SAMPLE_ID, "--tenant", sample.tenant, "completed"]
    refused = sessions(sample, *arguments, "--expected", "paused", "--expected", "running")
    assert (refused.code, refused.out) == (1, "")
    assert "is active at version 5; nothing was changed" in refused.err
    assert sessions(sample, *arguments, "--expected", "active").code == 0
    state = store_of(sample).load_state(SAMPLE_ID)
    assert state is not None
    assert state.status == "completed"


def test_an_interrupt_reaches_the_run(sample: CommittedDatabase) -> None:
    arguments = ["interrupt", SAMPLE_ID, "--tenant", sample.tenant, "--format", "json"]
    data = read_by_a_program(sessions(sample, *arguments, "--reason", "cost").out)
    assert data.keys() == {
        *("tenant", "session_id", "kind", "reason", "run_id", "requested_at", "has_worker")
    }
    assert (data["kind"], data["reason"], data["run_id"]) == ("interrupt", "cost", "run-1")
    assert sessions(sample, *arguments, "--abort", "--run", "run-1").data["kind"] == "abort"
    request = store_of(sample).check_interrupt(SAMPLE_ID, run_id="run-1")
    assert request is not None
    assert request.kind == "abort"
    assert sessions(sample, *arguments, "--run", "run-9").code == 1
    assert "abort requested" in sessions(sample, "show", SAMPLE_ID, "--tenant", sample.tenant).out


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the operator types."""
    lines: list[str] = []
    reader = io.StringIO()
    monkeypatch.setattr(reader, "readline", lambda: lines.pop(0) if lines else "")
    monkeypatch.setattr(sys, "stdin", reader)
    return lines


@for_each(("typed", "code"), [(["no\n"], 1), (["y\n"], 1), (["\n"], 1), ([], 2)])
def test_nothing_is_deleted_without_a_yes(
    typed: list[str], code: int, sample: CommittedDatabase, answers: list[str]
) -> None:
    answers += typed
    ended = sessions(sample, "delete", SAMPLE_ID, "--tenant", sample.tenant)
    assert (ended.code, ended.out) == (code, "")
    assert "2 sessions with 5 messages?" in ended.err
    assert "othing was changed" in ended.err
    assert store_of(sample).session_exists(SAMPLE_ID)


def test_a_session_is_deleted_with_its_tree(sample: CommittedDatabase, answers: list[str]) -> None:
    answers.append("yes\n")
    ended = sessions(sample, "delete", SAMPLE_ID, "--tenant", sample.tenant, "--format", "json")
    assert read_by_a_program(ended.out) == {
        "tenant": sample.tenant,
        "session_id": SAMPLE_ID,
        "deleted_sessions": 2,
    }
    assert sorted(listed(sample)) == [("", SAMPLE_ID), ("", f"{SAMPLE_ID}-hotels")]
    assert not DatabaseUsageStore(sample.alias, tenant=sample.tenant).exists(SAMPLE_ID)


def test_the_usage_of_a_deleted_session_can_stay(sample: CommittedDatabase) -> None:
    arguments = ["delete", SAMPLE_ID, "--tenant", sample.tenant, "--keep-usage", "--no-input"]
    assert sessions(sample, *arguments).code == 0
    assert DatabaseUsageStore(sample.alias, tenant=sample.tenant).exists(SAMPLE_ID)


# --- the process


def manage(tmp_path: Path, *arguments: str, **options: Any) -> subprocess.Popen[str]:
    """The example project's ``manage.py`` on an SQLite file."""
    environment = {**os.environ, "DATABASE_URL": f"sqlite:///{tmp_path / 'file.sqlite3'}"}
    environment["DJANGO_SETTINGS_MODULE"] = "example_project.settings"
    return subprocess.Popen(
        [sys.executable, "manage.py", *arguments],
        cwd=Path(__file__).parents[2],
        env=environment,
        text=True,
        **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options},
    )


def test_the_command_line_has_exit_codes(tmp_path: Path) -> None:
    for arguments, code in (
        (["migrate", "-v0"], 0),
        (["helix_sessions", "list", "-v0"], 0),
        (["helix_sessions", "list", "--limit", "0"], 2),
        (["helix_sessions", "show", "unknown"], 1),
        (["helix_sessions", "show", "unknown", "--database", "nowhere"], 2),
        (["helix_sessions"], 2),
    ):
        process = manage(tmp_path, *arguments)
        _, err = process.communicate(timeout=60)
        assert (process.returncode, "Traceback" in err) == (code, False), (arguments, err)


def test_control_c_ends_a_question(tmp_path: Path) -> None:
    for arguments in (["migrate", "-v0"], ["shell", "-v0", "-c", _CREATE]):
        process = manage(tmp_path, *arguments)
        assert process.communicate(timeout=60)[1] == ""
    asking = manage(tmp_path, "helix_sessions", "delete", "trip-1", stdin=subprocess.PIPE)
    assert asking.stderr is not None
    seen = ""
    while not seen.endswith("continue: "):
        seen += asking.stderr.read(1)
    timer = threading.Timer(30, asking.kill)
    timer.start()
    asking.send_signal(signal.SIGINT)
    out, err = asking.communicate()
    timer.cancel()
    assert (asking.returncode, out) == (1, "")
    assert "Nothing was changed" in err
    process = manage(tmp_path, "helix_sessions", "list", "--format", "json")
    assert len(json.loads(process.communicate(timeout=60)[0])["sessions"]) == 1


_CREATE = """
from helix_store.stores import DatabaseStateStore
DatabaseStateStore().create_session("trip-1", agent_type="travel")
"""


def test_a_reader_that_stops_early_is_no_error(tmp_path: Path) -> None:
    for arguments in (["migrate", "-v0"], ["shell", "-v0", "-c", _CREATE_MANY]):
        process = manage(tmp_path, *arguments)
        assert process.communicate(timeout=60)[1] == ""
    writer = manage(tmp_path, "helix_sessions", "list", "--limit", "1000")
    assert writer.stdout is not None
    assert writer.stderr is not None
    writer.stdout.close()
    assert "Traceback" not in writer.stderr.read()
    assert writer.wait(timeout=60) == 1
    writer.stderr.close()


@pytest.mark.parametrize(
    ("environment", "is_coloured"),
    [({}, True), ({"NO_COLOR": "1"}, False), ({"DJANGO_COLORS": "nocolor"}, False)],
)
def test_a_terminal_gets_colours_and_its_width(
    environment: dict[str, str], is_coloured: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("NO_COLOR", "DJANGO_COLORS", "COLUMNS"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"TERM": "xterm", **environment}.items():
        monkeypatch.setenv(name, value)
    for arguments in (["migrate", "-v0"], ["shell", "-v0", "-c", _CREATE.replace("trip-1", "trip-" * 40)]):
        assert manage(tmp_path, *arguments).communicate(timeout=60)[1] == ""
    terminal, its_end = pty.openpty()
    termios.tcsetwinsize(its_end, (24, 90))
    process = manage(tmp_path, "helix_sessions", "list", stdout=its_end, stderr=subprocess.DEVNULL)
    assert process.wait(timeout=60) == 0
    os.close(its_end)
    shown = os.read(terminal, 10_000).decode()
    os.close(terminal)
    plain = re.sub(r"\x1b\[[0-9;]*m", "", shown)
    assert ("\x1b[36mactive\x1b[0m" in shown, plain == shown) == (is_coloured, not is_coloured)
    assert max(map(width_of, plain.splitlines())) == 90


_CREATE_MANY = """
from helix_store.stores import DatabaseStateStore
for number in range(300):
    DatabaseStateStore().create_session(f"session-{number}", agent_type="travel")
"""
