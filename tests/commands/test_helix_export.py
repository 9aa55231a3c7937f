"""``helix_export``: the file on stdout or in a file, and honest exit codes."""

from __future__ import annotations

import io
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from django.core.management import CommandError, call_command
from django.db import connections

from helix_store.models import Session
from helix_store.stores import DatabaseLockManager, DatabaseStateStore
from helix_store.transfer import DatabaseSource, ExportSummary, write_export
from tests.asgi_server import database_url
from tests.cells import for_each
from tests.commands.running import command_line, run
from tests.databases import CommittedDatabase, delete_all_rows
from tests.invariants import broken_invariants
from tests.transfer.files import exported, fill, lines_of, simple_session

JSON_READER = ["jq", "-c", "."] if shutil.which("jq") else [sys.executable, "-m", "json.tool"]


def export(database: CommittedDatabase, *arguments: str, **options: Any) -> tuple[str, str]:
    """Stdout and stderr."""
    out, err = StringIO(), StringIO()
    call_command(
        "helix_export",
        *arguments,
        database=database.alias,
        tenant=database.tenant,
        stdout=out,
        stderr=err,
        **options,
    )
    return out.getvalue(), err.getvalue()


def command(database: CommittedDatabase, *arguments: str) -> tuple[list[str], dict[str, str]]:
    """A process of the example project's ``manage.py`` on a test database, and its environment."""
    environment = {**os.environ, "DATABASE_URL": database_url(database, "transfer")}
    environment["DJANGO_SETTINGS_MODULE"] = "example_project.settings"
    return [sys.executable, "manage.py", *arguments], environment


def test_the_export_is_on_stdout_and_the_summary_on_stderr(committed_db: CommittedDatabase) -> None:
    fill(committed_db)
    out, err = export(committed_db)
    assert out.encode() == exported(committed_db)
    sessions = [each for each in lines_of(out.encode()) if each["record"] == "session"]
    assert f"{len(sessions)} sessions" in err


class Terminal(StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_gets_no_character_that_it_obeys_or_hides(
    committed_db: CommittedDatabase, tmp_path: Path
) -> None:
    """Its lines have the same values as the file, which has the exact bytes."""
    content = "\x9b31m \x85 \u202e\u2066 \u200b\ufeff\u2028 é 漢 \U0001f600 \U000e0041 \x7f \x1b[2J"
    store = DatabaseStateStore(committed_db.alias, tenant=committed_db.tenant)
    store.create_session("session", agent_type="agent")
    store.append_messages("session", [{"role": "user", "content": content}])
    terminal, file = Terminal(), tmp_path / "export.jsonl"
    arguments = {"database": committed_db.alias, "tenant": committed_db.tenant, "verbosity": 0}
    call_command("helix_export", stdout=terminal, **arguments)
    call_command("helix_export", output=str(file), stdout=StringIO(), **arguments)
    shown, stored = terminal.getvalue(), file.read_text()
    assert "\u202e" in stored
    for char in "\x9b\x85\u202e\u2066\u200b\ufeff\u2028\U000e0041\x7f\x1b":
        assert char not in shown
    for char in "é漢\U0001f600":
        assert char in shown
    assert list(map(json.loads, shown.splitlines())) == list(map(json.loads, stored.split("\n")[:-1]))


def test_verbosity_zero_is_silent(committed_db: CommittedDatabase) -> None:
    simple_session(committed_db, "a")
    assert export(committed_db, verbosity=0)[1] == ""


@pytest.mark.parametrize("form", ["table", "json"])
def test_a_file_is_written_and_the_summary_is_on_stdout(
    committed_db: CommittedDatabase, tmp_path: Path, form: str
) -> None:
    fill(committed_db)
    path = tmp_path / "sessions.jsonl"
    path.write_text("old")
    out, err = export(committed_db, "--output", str(path), format=form)
    data = exported(committed_db)
    assert path.read_bytes() == data
    assert err == ""
    assert list(tmp_path.iterdir()) == [path]
    assert path.stat().st_mode & 0o077 == 0
    trailer = lines_of(data)[-1]
    if form == "table":
        assert trailer["sha256"] in "".join(out.split())
    else:
        assert json.loads(out) == {
            "sessions": trailer["counts"]["session"],
            "records": trailer["counts"],
            "failed": 0,
            "sha256": trailer["sha256"],
            "problems": [],
        }


def test_only_the_named_sessions_are_exported(committed_db: CommittedDatabase) -> None:
    for session_id in ("a", "b", "c"):
        simple_session(committed_db, session_id)
    out, _ = export(committed_db, "--session", "a", "--session", "c")
    records = lines_of(out.encode())
    assert [each["session_id"] for each in records if each["record"] == "session"] == ["a", "c"]
    assert [each["name"] for each in records if each["record"] == "lock"] == ["a", "c"]


def test_several_sessions_may_follow_one_option(committed_db: CommittedDatabase) -> None:
    for session_id in ("a", "b", "c", "-d"):
        simple_session(committed_db, session_id)
    for arguments, expected in (
        (["--session", "a", "c"], ["a", "c"]),
        (["--session", "a", "-d", "--session", "b"], ["-d", "a", "b"]),
    ):
        out, _ = export(committed_db, *arguments, "-v", "0")
        assert names(out) == [(committed_db.tenant, each) for each in expected]


def test_an_empty_list_of_sessions_is_wrong_usage(committed_db: CommittedDatabase, tmp_path: Path) -> None:
    """It would be an export of nothing, and the default is an export of everything."""
    simple_session(committed_db, "a")
    nothing: tuple[Any, ...] = ([], ())
    for session in nothing:
        with pytest.raises(CommandError, match="--session needs an ID") as caught:
            export(committed_db, session=session)
        assert caught.value.returncode == 2


def names(data: str) -> list[tuple[str, str]]:
    """Tenants and ids of the exported sessions."""
    records = lines_of(data.encode())
    return [(each.get("tenant", ""), each["session_id"]) for each in records if each["record"] == "session"]


def tree(database: CommittedDatabase, tenant: str) -> None:
    """``root``, below it ``child``, and below that one ``grandchild`` by a ref."""
    store = DatabaseStateStore(database.alias, tenant=tenant)
    store.create_session("root", agent_type="agent")
    store.create_session("child", agent_type="agent", parent_session_id="root")
    store.create_session("grandchild", agent_type="agent")
    ref = {"sub_session_id": "grandchild", "agent_type": "agent", "status": "running"}
    store.add_sub_session_refs("child", [ref])
    store.create_session("other", agent_type="agent")


def test_a_tree_is_exported_as_a_whole(committed_db: CommittedDatabase) -> None:
    tree(committed_db, committed_db.tenant)
    out, _ = export(committed_db, "--session", "root")
    assert names(out) == [(committed_db.tenant, "root")]
    out, _ = export(committed_db, "--session", "root", "--tree")
    assert names(out) == [(committed_db.tenant, each) for each in ("child", "grandchild", "root")]
    out, _ = export(committed_db, "--session", "child", "--session", "other", "--tree")
    assert names(out) == [(committed_db.tenant, each) for each in ("child", "grandchild", "other")]


def test_a_tree_has_no_session_of_another_tenant_with_the_id_of_a_sub_session(
    empty_db: CommittedDatabase,
) -> None:
    tree(empty_db, "a")
    DatabaseStateStore(empty_db.alias, tenant="b").create_session("child", agent_type="agent")
    out = StringIO()
    arguments = ["--session", "root", "--tree"]
    call_command("helix_export", *arguments, database=empty_db.alias, stdout=out, stderr=StringIO())
    assert names(out.getvalue()) == [("a", each) for each in ("child", "grandchild", "root")]


def test_a_tree_is_that_of_the_moment_of_the_export(committed_db: CommittedDatabase) -> None:
    tree(committed_db, committed_db.tenant)
    source = DatabaseSource(
        committed_db.alias, tenant=committed_db.tenant, session_ids=["root"], with_trees=True
    )
    assert source.session_count == 3
    store = DatabaseStateStore(committed_db.alias, tenant=committed_db.tenant)
    store.create_session("new", agent_type="agent", parent_session_id="root")
    assert write_export(source, io.BytesIO()).sessions == 4


def test_a_tree_without_a_session_is_wrong_usage(committed_db: CommittedDatabase) -> None:
    with pytest.raises(CommandError, match="--tree needs --session") as caught:
        export(committed_db, "--tree")
    assert caught.value.returncode == 2


def test_an_unknown_session_is_a_problem(committed_db: CommittedDatabase) -> None:
    out, err = StringIO(), StringIO()
    with pytest.raises(CommandError, match="1 problem") as caught:
        call_command("helix_export", "--session=x", database=committed_db.alias, stdout=out, stderr=err)
    assert caught.value.returncode == 1
    assert "There is no session with the id 'x'." in err.getvalue()


@for_each("arguments", [[], ["--format", "json"], ["--output", "{file}"]])
def test_an_unknown_tenant_is_refused(
    committed_db: CommittedDatabase, tmp_path: Path, arguments: list[str]
) -> None:
    simple_session(committed_db, "a")
    file = tmp_path / "sessions.jsonl"
    given = [each.format(file=file) for each in arguments]
    ended = run(committed_db.alias, "helix_export", "--tenant", "nobody", *given)
    assert (ended.code, ended.out) == (1, "")
    assert ended.err.endswith(
        f"Nothing is stored for the tenant 'nobody' in the database {committed_db.alias!r}. "
        f"{f'{file} was not written' if '--output' in given else 'Nothing was exported'}."
    )
    assert not file.exists()


def test_a_tenant_with_a_lock_alone_is_exported(committed_db: CommittedDatabase) -> None:
    assert DatabaseLockManager(committed_db.alias, tenant=committed_db.tenant).acquire("a")
    ended = run(committed_db.alias, "helix_export", "--tenant", committed_db.tenant)
    assert (ended.code, '"record":"locks"' in ended.out.replace(" ", "")) == (0, True)


def test_every_tenant_is_exported_by_default(empty_db: CommittedDatabase) -> None:
    for tenant in ("one", "two"):
        simple_session(CommittedDatabase(alias=empty_db.alias, tenant=tenant), "a")
    out = StringIO()
    call_command("helix_export", database=empty_db.alias, stdout=out, stderr=StringIO())
    records = lines_of(out.getvalue().encode())
    assert [each["tenant"] for each in records if each["record"] == "session"] == ["one", "two"]


def test_a_file_may_be_named_by_a_keyword(
    empty_db: CommittedDatabase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    simple_session(empty_db, "a")
    call_command("helix_export", database=empty_db.alias, output="x", stdout=StringIO())
    delete_all_rows(empty_db.alias)
    call_command("helix_import", database=empty_db.alias, file="x", stdout=StringIO(), stderr=StringIO())
    assert Session.objects.using(empty_db.alias).count() == 1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_stops_it_and_leaves_the_old_file(
    committed_db: CommittedDatabase, tmp_path: Path, number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    for session_id in ("a", "b", "c"):
        simple_session(committed_db, session_id)
    monkeypatch.setattr("helix_store.transfer.export_source._MOST_UNITS", 1)
    path = tmp_path / "sessions.jsonl"
    path.write_text("old")
    with (
        connections[committed_db.alias].execute_wrapper(signalling(number, Session._meta.db_table)),
        pytest.raises(CommandError, match=r"Stopped after [01] sessions\. .* is unchanged") as caught,
    ):
        export(committed_db, "--output", str(path))
    assert caught.value.returncode == 1
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]
    assert not connections[committed_db.alias].in_atomic_block
    simple_session(committed_db, "d")


def signalling(number: signal.Signals, table: str) -> Callable[..., Any]:
    """Sends a signal to this process when a page of a table is read."""
    sent = False

    def send(execute: Any, sql: str, params: Any, many: bool, context: Any) -> Any:
        nonlocal sent
        if f'FROM "{table}"' in sql and "COUNT(" not in sql and not sent:
            sent = True
            os.kill(os.getpid(), number)
        return execute(sql, params, many, context)

    return send


def test_progress_is_shown_after_a_second(
    committed_db: CommittedDatabase, monkeypatch: pytest.MonkeyPatch
) -> None:
    for session_id in ("a", "b"):
        simple_session(committed_db, session_id)
    monkeypatch.setattr("helix_store.management.output.ProgressBar.first_after", 0.0)
    assert "of 2 sessions" in export(committed_db)[1]


@for_each(
    "arguments",
    [["--database", "nowhere"], ["--format", "xml"], ["--nonsense"], ["extra"], ["--session"]],
    ids=" ".join,
)
def test_wrong_usage_is_exit_code_two(arguments: list[str]) -> None:
    ended = command_line("helix_export", *arguments)
    assert (ended.code, ended.out) == (2, "")
    assert "Traceback" not in ended.err
    assert ended.err


@pytest.mark.parametrize("output", ["nowhere/file", ".", "x" * 300])
def test_an_output_that_cannot_be_written_is_wrong_usage(
    committed_db: CommittedDatabase, tmp_path: Path, output: str
) -> None:
    with pytest.raises(CommandError) as caught:
        export(committed_db, "--output", str(tmp_path / output))
    assert caught.value.returncode == 2
    assert list(tmp_path.iterdir()) == []


def test_the_error_for_a_path_has_no_character_that_a_terminal_obeys(
    committed_db: CommittedDatabase, tmp_path: Path
) -> None:
    with pytest.raises(CommandError) as caught:
        export(committed_db, "--output", str(tmp_path / "no\x1b[31m\x9b\u202e" / "file"))
    assert r"/no\x1b[31m\x9b\u202e/file cannot be written" in str(caught.value)


@pytest.mark.thorough
def test_a_pipe_or_a_device_stays_what_it_is(committed_db: CommittedDatabase, tmp_path: Path) -> None:
    simple_session(committed_db, "session")
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    export(committed_db, "--output", str(pipe))
    # It fits into the buffer of a pipe.
    found = os.read(reader, 65_536)
    os.close(reader)
    assert pipe.is_fifo()
    assert found.splitlines() == exported(committed_db).splitlines()
    assert list(tmp_path.iterdir()) == [pipe]


def test_a_link_stays_a_link(committed_db: CommittedDatabase, tmp_path: Path) -> None:
    simple_session(committed_db, "session")
    link, target = tmp_path / "link", tmp_path / "target"
    link.symlink_to(target)
    for _ in range(2):
        export(committed_db, "--output", str(link))
        assert link.is_symlink()
        assert target.read_bytes()
        target.write_bytes(b"")


def test_a_folder_is_wrong_usage(committed_db: CommittedDatabase, tmp_path: Path) -> None:
    with pytest.raises(CommandError, match="Is a directory"):
        export(committed_db, "--output", str(tmp_path))


@pytest.mark.thorough
def test_every_line_is_read_by_a_json_tool(committed_db: CommittedDatabase) -> None:
    fill(committed_db)
    arguments, environment = command(committed_db, "helix_export", "--tenant", committed_db.tenant)
    ended = subprocess.run(arguments, env=environment, capture_output=True, check=True)
    assert ended.stdout == exported(committed_db)
    lines = ended.stdout.splitlines()
    if JSON_READER[0] == "jq":
        read = subprocess.run(JSON_READER, input=ended.stdout, capture_output=True, check=True).stdout
        assert len(read.splitlines()) == len(lines)
    else:
        subprocess.run(JSON_READER, input=lines[-1], capture_output=True, check=True)


@pytest.mark.thorough
def test_a_reader_that_ends_early_is_no_traceback(committed_db: CommittedDatabase) -> None:
    for number in range(30):
        simple_session(committed_db, f"session-{number}", messages=100)
    arguments, environment = command(committed_db, "helix_export", "--tenant", committed_db.tenant)
    process = subprocess.Popen(arguments, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.read(10)
    process.stdout.close()
    message = process.stderr.read().decode()
    process.stderr.close()
    assert process.wait(60) == 1
    assert "Traceback" not in message
    assert "not complete" in message


@pytest.mark.thorough
@pytest.mark.parametrize("arguments", [("helix_export",), ("helix_sessions", "list"), ("helix_doctor",)])
def test_a_full_disk_behind_stdout_is_no_traceback(
    committed_db: CommittedDatabase, arguments: tuple[str, ...]
) -> None:
    simple_session(committed_db, "one")
    words, environment = command(committed_db, *arguments, "--tenant", committed_db.tenant, "-v0")
    with Path("/dev/full").open("w") as full:
        process = subprocess.run(
            words, env=environment, stdout=full, stderr=subprocess.PIPE, text=True, check=False
        )
    assert process.returncode == 1
    assert process.stderr == "CommandError: The output cannot be written: No space left on device.\n"


@pytest.mark.thorough
def test_one_pipe_moves_everything_to_the_other_database(
    sqlite_db: CommittedDatabase, postgres_db: CommittedDatabase
) -> None:
    fill(sqlite_db)
    target = CommittedDatabase(alias=postgres_db.alias, tenant=sqlite_db.tenant)
    delete_all_rows(target.alias)
    arguments, environment = command(sqlite_db, "helix_export", "--tenant", sqlite_db.tenant)
    source = subprocess.Popen(arguments, env=environment, stdout=subprocess.PIPE)
    arguments, environment = command(target, "helix_import", "--format", "json", "--verbosity", "0")
    ended = subprocess.run(arguments, env=environment, stdin=source.stdout, capture_output=True, check=False)
    assert source.stdout is not None
    source.stdout.close()
    assert source.wait(60) == 0
    assert (ended.returncode, ended.stderr) == (0, b"")
    assert json.loads(ended.stdout)["is_complete"]
    assert exported(target) == exported(sqlite_db)
    assert broken_invariants(target) == []


def test_an_export_without_a_trailer_has_no_sha256() -> None:
    assert ExportSummary().to_dict()["sha256"] is None
