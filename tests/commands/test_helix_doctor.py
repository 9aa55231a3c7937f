"""``helix_doctor``: findings on stdout, fixes told on stderr, exit codes, and a stop that says where."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from django.db import connections
from django.test import override_settings

from example_project.settings import HELIX_STORE
from helix_store.doctor import RULES
from helix_store.stores import DatabaseStateStore
from tests.cells import for_each
from tests.commands.running import Ended, run
from tests.databases import CommittedDatabase
from tests.doctor.planting import execute
from tests.doctor.sample import write_sample
from tests.postgres import NOT_DURABLE, PostgresCluster

VERSION_ZERO = "UPDATE [session] SET version = 0 WHERE id = [=steps]"
COUNTS_OFF = "UPDATE [session] SET message_count = message_count + 1 WHERE session_id IN ('steps', 'branch')"


@pytest.fixture
def database(empty_db: CommittedDatabase) -> CommittedDatabase:
    write_sample(empty_db)
    return empty_db


def doctor(database: CommittedDatabase, *arguments: str, form: str = "json", verbosity: int = 1) -> Ended:
    return run(database.alias, "helix_doctor", *arguments, "--format", form, "--verbosity", str(verbosity))


def ids(ended: Ended) -> list[str]:
    return [finding["id"] for finding in ended.data["findings"]]


def test_a_sound_database_is_exit_code_zero(database: CommittedDatabase) -> None:
    ended = doctor(database, form="table")
    assert (ended.err, ended.code) == ("", 0)
    lines = ended.out.splitlines()
    assert lines[:2] == [f"database {database.alias}, schema version 7", "No findings."]
    assert any(line.startswith("usage_entry ") for line in lines)


@pytest.mark.thorough
def test_json_has_the_documented_keys_for_another_program(database: CommittedDatabase) -> None:
    execute(database, VERSION_ZERO)
    ended = doctor(database)
    program = ["jq", "."] if shutil.which("jq") else [sys.executable, "-m", "json.tool"]
    read = subprocess.run(program, input=ended.out, capture_output=True, text=True, check=True)
    data = json.loads(read.stdout)
    assert list(data) == ["database", "schema_version", "findings", "tables", "stopped_at"]
    assert data["findings"] == [
        {
            "id": "version-zero",
            "severity": "error",
            "table": "session",
            "count": 1,
            "fixed": 0,
            "what": RULES["version-zero"].what,
            "advice": RULES["version-zero"].advice,
            "is_fixable": False,
            "samples": [{"tenant": database.tenant, "name": "steps", "row": None}],
        }
    ]
    assert set(data["tables"][0]) == {"table", "rows", "table_bytes", "index_bytes"}
    assert ended.code == 1


@pytest.mark.thorough
def test_a_table_fits_the_terminal_and_says_what_to_do(
    database: CommittedDatabase, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    execute(database, VERSION_ZERO)
    execute(database, COUNTS_OFF)
    execute(database, "UPDATE [session] SET session_id = 'steps \x1b[2J' WHERE id = [=steps]")
    ended = doctor(database, form="table")
    assert ended.code == 1
    assert max(map(len, ended.out.splitlines())) <= 80
    assert "\x1b" not in ended.out
    for rule in ("version-zero", "message-count-off"):
        assert rule in ended.out
        advice = " ".join(ended.out.split())
        assert RULES[rule].advice in advice
    assert "Findings that are problems:" in ended.err
    wide = doctor(database, "--wide", form="table")
    assert f"{RULES['message-count-off'].what} {RULES['message-count-off'].advice}\n" in wide.out


@pytest.mark.thorough
def test_a_fix_is_told_before_it_is_made_and_a_second_run_finds_nothing(database: CommittedDatabase) -> None:
    execute(database, COUNTS_OFF)
    trial = doctor(database, "--fix", "--dry-run")
    assert trial.err.count("Would fix message-count-off of session") == 2
    assert (ids(trial), trial.code) == (["message-count-off"], 1)
    assert ids(doctor(database)) == ["message-count-off"]
    ended = doctor(database, "--fix", "--tenant", database.tenant)
    assert f"Fixing message-count-off of session branch of tenant {database.tenant}: set" in ended.err
    (finding,) = json.loads(ended.out)["findings"]
    assert (finding["count"], finding["fixed"], ended.code) == (2, 2, 0)
    for once_more in (doctor(database, "--fix"), doctor(database)):
        assert (ids(once_more), once_more.err, once_more.code) == ([], "", 0)


@pytest.mark.thorough
def test_verbosity_zero_is_silent(database: CommittedDatabase) -> None:
    execute(database, COUNTS_OFF)
    ended = doctor(database, "--fix", verbosity=0)
    assert (ended.err, ended.code) == ("", 0)


@pytest.mark.thorough
def test_what_cannot_be_fixed_is_told_and_stays_a_problem(database: CommittedDatabase) -> None:
    execute(database, "DELETE FROM [message] WHERE session_id = [=steps] AND sequence = 6")
    ended = doctor(database, "--fix")
    assert "Not safe to fix message-count-off of session steps" in ended.err
    assert ended.code == 1


@pytest.mark.thorough
def test_a_tenant_or_a_session_is_examined_alone(database: CommittedDatabase) -> None:
    other = DatabaseStateStore(database.alias, tenant="other")
    for name in ("one", "two"):
        other.create_session(name, agent_type="agent")
    execute(database, "UPDATE [session] SET version = 0 WHERE session_id IN ('one', 'steps')")
    execute(database, "UPDATE [stream] SET last_sequence = 9 WHERE stream_id = 'pruned'")
    everything = ["version-zero", "stream-last-off"]
    assert ids(doctor(database)) == everything
    assert ids(doctor(database, "--tenant", database.tenant)) == everything
    assert ids(doctor(database, "--tenant", "other")) == ["version-zero"]
    assert ids(doctor(database, "--tenant", "other", "--session", "one")) == ["version-zero"]
    assert doctor(database, "--tenant", "other", "--session", "two").code == 0
    assert ids(doctor(database, "--tenant", database.tenant, "--session", "steps")) == ["version-zero"]
    nobody = doctor(database, "--tenant", "nobody")
    assert (nobody.code, ids(nobody)) == (0, [])


@pytest.mark.thorough
def test_a_session_with_everything_is_examined_with_its_stream_lock_and_usage(
    database: CommittedDatabase,
) -> None:
    execute(database, "UPDATE [stream_chunk] SET payload = 'nonsense'")
    execute(database, "UPDATE [lock] SET expires_at = '2020-01-01 00:00:00'")
    execute(database, "UPDATE [usage_entry] SET session_id = 9000000000 WHERE recorded_for = 'full'")
    own = ("--tenant", database.tenant, "--session")
    assert ids(doctor(database, *own, "full")) == ["usage-of-unknown-session", "unreadable-payload"]
    assert ids(doctor(database, *own, "steps")) == ["lock-expired"]


@for_each(
    ("arguments", "code"),
    [
        (["--dry-run"], 2),
        (["--session", "nobody"], 1),
        (["--session", ""], 2),
        (["--tenant", "x" * 256], 2),
    ],
    shared=True,
)
def test_wrong_usage_and_unknown_sessions(
    database: CommittedDatabase, arguments: list[str], code: int
) -> None:
    ended = doctor(database, *arguments)
    assert (ended.out, ended.code) == ("", code)
    assert ended.err


@pytest.mark.thorough
def test_pages_of_one_row_find_the_same(database: CommittedDatabase) -> None:
    for statement in (
        COUNTS_OFF,
        "UPDATE [message] SET payload = 'nonsense' WHERE sequence > 1",
        "UPDATE [stream] SET last_sequence = 9 WHERE stream_id = 'pruned'",
        "INSERT INTO [stream_chunk] (stream_id, sequence, payload) VALUES (9000000000, 1, '{}')",
    ):
        execute(database, statement)
    whole = json.loads(doctor(database).out)
    with override_settings(HELIX_STORE={**HELIX_STORE, "PAGE_SIZE": 7}):
        assert json.loads(doctor(database).out)["findings"] == whole["findings"]


@pytest.mark.thorough
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_an_examination_that_a_signal_stops_does_not_pass_for_one_without_findings(
    database: CommittedDatabase, number: signal.Signals
) -> None:
    def signal_at_once(execute: Any, sql: str, params: Any, many: bool, context: Any) -> Any:
        os.kill(os.getpid(), number)
        wrappers.pop()
        return execute(sql, params, many, context)

    wrappers = connections[database.alias].execute_wrappers
    wrappers.append(signal_at_once)
    ended = doctor(database)
    assert (json.loads(ended.out)["findings"], ended.code) == ([], 1)
    assert ended.err.endswith("Run it again to examine the rest.\nThe examination is not complete.")
    assert doctor(database).code == 0


@pytest.mark.thorough
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_stops_it_after_the_current_page(
    database: CommittedDatabase, number: signal.Signals
) -> None:
    execute(database, COUNTS_OFF)
    before = [signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGINT)]
    with (
        override_settings(HELIX_STORE={**HELIX_STORE, "PAGE_SIZE": 1}),
        connections[database.alias].execute_wrapper(signalling(number)),
    ):
        ended = doctor(database, "--fix")
    assert "Stopped at message-count-off, message-hole after" in ended.err
    data = json.loads(ended.out)
    assert data["stopped_at"].startswith("message-count-off, message-hole after ")
    assert data["findings"][0]["fixed"] == 1
    assert data["tables"] == []
    assert [signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGINT)] == before
    (left,) = json.loads(doctor(database).out)["findings"]
    assert left["count"] == 1
    assert doctor(database, "--fix").code == 0
    assert ids(doctor(database)) == []


def signalling(number: signal.Signals) -> Callable[..., Any]:
    """Sends the signal to this process with the first row that is mended."""
    sent = False

    def send(execute: Any, sql: str, params: Any, many: bool, context: Any) -> Any:
        nonlocal sent
        result = execute(sql, params, many, context)
        if sql.startswith("UPDATE") and not sent:
            sent = True
            os.kill(os.getpid(), number)
        return result

    return send


@pytest.mark.thorough
def test_an_empty_database_on_a_server_that_does_not_sync(
    postgres_db: CommittedDatabase, tmp_path: Path
) -> None:
    with PostgresCluster(options=NOT_DURABLE) as cluster:
        environment = {
            **os.environ,
            "DATABASE_URL": cluster.url,
            "DJANGO_SETTINGS_MODULE": "example_project.settings",
        }
        ended = subprocess.run(
            [sys.executable, "manage.py", "helix_doctor", "--format", "json"],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
    assert ended.returncode == 1
    assert "Traceback" not in ended.stderr
    ids = [finding["id"] for finding in json.loads(ended.stdout)["findings"]]
    assert ids == ["helix_store.E011", "schema-behind"]


def test_a_silenced_system_check_is_no_finding(empty_db: CommittedDatabase, settings: Any) -> None:
    settings.HELIX_STORE = {**HELIX_STORE, "NOPE": 1}
    assert ids(doctor(empty_db)) == ["helix_store.E001"]
    settings.SILENCED_SYSTEM_CHECKS = [*settings.SILENCED_SYSTEM_CHECKS, "helix_store.E001"]
    assert ids(doctor(empty_db)) == []
