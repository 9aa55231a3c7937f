"""How another store is read: at one moment, without a change, in constant memory, its address never shown."""

from __future__ import annotations

import json
import logging
import random
import resource
import signal
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.synchronize import Event
from typing import Any
from unittest.mock import patch

import pytest
from django.db import connections

from helix_store.checkpointers import GraphCheckpointStore
from helix_store.core import moments
from helix_store.exceptions import InvalidPayload
from helix_store.models import Message, Session
from helix_store.transfer import ImportSummary, import_units, importing
from helix_store.transfer.sources import SOURCES, Origin, PostgresReader, SourceUnreadable
from tests.cells import for_each
from tests.commands.running import command_line, run
from tests.commands.test_helix_import import SignalAtCommit
from tests.databases import CommittedDatabase
from tests.invariants import broken_invariants
from tests.processes import PROCESSES, WorkerProcess
from tests.transfer.files import exported
from tests.transfer.sources.origins import NOON, ObskuTables, ZiroTable
from tests.transfer.sources.running import import_from, import_problems

SECRET = "s3cr3t-p4ss"
MEGABYTE = 1_000_000


def fill(obsku: ObskuTables, sessions: int) -> None:
    for number in range(sessions):
        obsku.session(f"s-{number:02}", title=f"session {number}")
        for message in range(1 + number % 5):
            obsku.message(f"s-{number:02}", NOON + message, content=f"message {message}")
        obsku.checkpoint(f"s-{number:02}", f"c-{number}")


# --- One moment, and repeats -----------------------------------------------------------------------


def test_the_source_is_read_at_one_moment(obsku: ObskuTables, committed_db: CommittedDatabase) -> None:
    fill(obsku, 3)
    source = SOURCES["obsku"](Origin(dsn=obsku.dsn, schema=obsku.schema, tenant=committed_db.tenant))

    def change(summary: ImportSummary) -> None:
        if summary.sessions == 1:
            obsku.connection.execute("DELETE FROM sessions WHERE id = 's-01'")
            obsku.session("s-99")

    with source.reading():
        assert source.session_count == 3
        summary = import_units(
            source.units(), committed_db.alias, tenant=committed_db.tenant, progress=change
        )
        assert list(source.left_out(summary.records)) == []
    assert (summary.imported["session"], summary.problems) == (3, [])
    graph = GraphCheckpointStore(committed_db.alias, tenant=committed_db.tenant)
    assert [message.content for message in graph.get_messages("s-01")] == ["message 0", "message 1"]


def test_the_source_cannot_be_written(obsku: ObskuTables) -> None:
    reader = PostgresReader(obsku.dsn, schema=obsku.schema)
    with reader.reading():
        names = ("transaction_isolation", "transaction_read_only", "search_path")
        settings = [reader.one("SELECT current_setting(%s)", name)[0] for name in names]
        assert settings == ["repeatable read", "on", obsku.schema]
        with pytest.raises(SourceUnreadable, match="cannot execute INSERT in a read-only transaction"):
            reader.one("INSERT INTO sessions VALUES ('x', 'x', 'x', 'x', 1, 1, 'x') RETURNING 1")


@pytest.mark.parametrize("store", ["obsku", "ziro"])
def test_a_repeat_stores_nothing(
    request: pytest.FixtureRequest, committed_db: CommittedDatabase, store: str
) -> None:
    origin: Any = request.getfixturevalue(store)
    if isinstance(origin, ObskuTables):
        fill(origin, 6)
    else:
        for number in range(6):
            origin.snapshot(f"t-{number % 3}", f"c-{number}")
    first = import_from(origin, committed_db).data
    data = exported(committed_db)
    again = import_from(origin, committed_db)
    assert (again.code, again.data["imported"], again.data["records"]) == (0, {}, {})
    assert again.data["identical"] == first["imported"]
    assert exported(committed_db) == data


def test_a_session_that_was_continued_here_is_not_overwritten(
    obsku: ObskuTables, committed_db: CommittedDatabase
) -> None:
    fill(obsku, 2)
    import_from(obsku, committed_db)
    graph = GraphCheckpointStore(committed_db.alias, tenant=committed_db.tenant)
    graph.add_message("s-01", role="user", content="new")
    summary = import_problems(obsku, committed_db)
    (problem,) = summary["problems"]
    assert problem.startswith("the session 's-01' of tenant ")
    assert problem.endswith(" is stored already, and differs; it was not changed")
    assert graph.get_messages("s-01")[-1].content == "new"


def test_a_tenant_has_only_its_own_sessions(obsku: ObskuTables, committed_db: CommittedDatabase) -> None:
    fill(obsku, 1)
    other = CommittedDatabase(alias=committed_db.alias, tenant=f"{committed_db.tenant}-2")
    for database in (committed_db, other):
        assert import_from(obsku, database).data["imported"] == {"session": 1}
        assert len(GraphCheckpointStore(database.alias, tenant=database.tenant).list_sessions()) == 1


def test_a_dry_run_tells_the_problems_and_stores_nothing(
    obsku: ObskuTables, committed_db: CommittedDatabase
) -> None:
    fill(obsku, 3)
    obsku.message("s-01", role="nobody")
    told = import_problems(obsku, committed_db, "--dry-run")
    assert (told["imported"], told["records"]) == ({}, {})
    assert not Session.objects.using(committed_db.alias).filter(tenant=committed_db.tenant).exists()
    done = import_problems(obsku, committed_db)
    assert done["imported"] == {"session": 3}
    assert [told[name] for name in ("source", "left", "problems")] == [
        done[name] for name in ("source", "left", "problems")
    ]


def test_rows_that_a_policy_hides_are_not_left_silently(obsku: ObskuTables) -> None:
    role = f"reader_{uuid.uuid4().hex}"
    execute = obsku.connection.execute
    execute(f"CREATE ROLE {role}")
    execute(f"GRANT USAGE ON SCHEMA {obsku.schema} TO {role}")
    execute(f"GRANT SELECT ON ALL TABLES IN SCHEMA {obsku.schema} TO {role}")
    execute("ALTER TABLE messages ENABLE ROW LEVEL SECURITY")
    obsku.session("s")
    obsku.message("s")
    try:
        source = SOURCES["obsku"](Origin(dsn=f"{obsku.dsn} options='-c role={role}'", schema=obsku.schema))
        with source.reading(), pytest.raises(SourceUnreadable, match="row-level security"):
            list(source.units())
    finally:
        execute(f"DROP OWNED BY {role}")
        execute(f"DROP ROLE {role}")


# --- Crashes ---------------------------------------------------------------------------------------


def import_slowly(alias: str, tenant: str, dsn: str, schema: str, begun: Event) -> None:
    source = SOURCES["obsku"](Origin(dsn=dsn, schema=schema, tenant=tenant))
    with source.reading(), patch.object(importing, "_UNITS_TOGETHER", 3):
        import_units(
            source.units(),
            alias,
            tenant=tenant,
            reads_back=True,
            progress=lambda done: begun.set() if done.sessions == 3 else None,
        )


@pytest.mark.thorough
@pytest.mark.parametrize("seed", range(3))
def test_an_import_that_is_killed_is_completed_by_the_next_one(
    obsku: ObskuTables, committed_db: CommittedDatabase, seed: int
) -> None:
    fill(obsku, 40)
    begun = PROCESSES.Event()
    worker = WorkerProcess(
        import_slowly, committed_db.alias, committed_db.tenant, obsku.dsn, obsku.schema, begun
    )
    assert begun.wait(60), worker.outcome(1)
    # Anywhere in a transaction, or between two.
    PROCESSES.Event().wait(random.Random(seed).uniform(0, 0.1))  # noqa: S311  a moment, no secret
    worker.kill()
    assert broken_invariants(committed_db) == []
    stored = Session.objects.using(committed_db.alias).filter(tenant=committed_db.tenant).count()
    assert stored >= 3
    ended = import_from(obsku, committed_db)
    assert ended.code == 0
    assert (ended.data["identical"].get("session", 0), ended.data["imported"].get("session", 0)) == (
        stored,
        40 - stored,
    )
    messages = Message.objects.using(committed_db.alias).filter(session__tenant=committed_db.tenant)
    assert messages.count() == ended.data["source"]["messages"]
    assert broken_invariants(committed_db) == []


class Stopped(BaseException):
    pass


class StopAfter:
    """Ends an import after so many statements that write."""

    def __init__(self, writes: int) -> None:
        self.left = writes

    def __call__(self, execute: Any, sql: str, params: Any, many: bool, context: Any) -> Any:
        if sql.startswith(("INSERT", "UPDATE")):
            self.left -= 1
            if self.left < 0:
                raise Stopped
        return execute(sql, params, many, context)


def test_whatever_statement_is_the_last_one_the_next_import_completes_it(
    obsku: ObskuTables, committed_db: CommittedDatabase
) -> None:
    fill(obsku, 12)
    last, is_stopped = 0, True
    while is_stopped:
        try:
            with connections[committed_db.alias].execute_wrapper(StopAfter(last)):
                ended = import_from(obsku, committed_db)
            is_stopped = False
        except Stopped:
            assert broken_invariants(committed_db) == []
            last += 1
    assert last > 2
    assert (ended.code, ended.data["source"]["sessions"]) == (0, 12)
    assert len(GraphCheckpointStore(committed_db.alias, tenant=committed_db.tenant).list_sessions()) == 12


@contextmanager
def altered_messages(database: CommittedDatabase) -> Iterator[None]:
    """The database changes each message that is written to it."""
    table = Message._meta.db_table
    with database.connection.cursor() as cursor:
        if database.vendor == "sqlite":
            cursor.execute(
                f"CREATE TEMP TRIGGER altering AFTER INSERT ON {table} BEGIN"
                f" UPDATE {table} SET payload = '{{}}' WHERE id = NEW.id; END"
            )
            yield
            cursor.execute("DROP TRIGGER altering")
            return
        cursor.execute(
            "CREATE FUNCTION altering() RETURNS trigger LANGUAGE plpgsql AS"
            " $$ BEGIN NEW.payload := '{}'; RETURN NEW; END $$"
        )
        cursor.execute(
            f"CREATE TRIGGER altering BEFORE INSERT ON {table} FOR EACH ROW EXECUTE FUNCTION altering()"
        )
        try:
            yield
        finally:
            cursor.execute("DROP FUNCTION altering CASCADE")


def test_what_is_not_read_back_as_it_was_written_is_not_stored(
    obsku: ObskuTables, committed_db: CommittedDatabase
) -> None:
    obsku.session("s")
    obsku.message("s", content="x")
    with altered_messages(committed_db):
        (problem,) = import_problems(obsku, committed_db)["problems"]
    assert problem.endswith(
        "cannot be imported: The data that was read back differs from the data that was written."
    )
    assert not Session.objects.using(committed_db.alias).filter(tenant=committed_db.tenant).exists()
    assert import_from(obsku, committed_db).data["imported"] == {"session": 1}


# --- Memory ----------------------------------------------------------------------------------------


def import_and_measure(alias: str, tenant: str, dsn: str, schema: str) -> tuple[int, int]:
    source = SOURCES["obsku"](Origin(dsn=dsn, schema=schema, tenant=tenant))
    with source.reading():
        summary = import_units(source.units(), alias, tenant=tenant)
    return summary.records["message"], resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


@pytest.mark.thorough
def test_a_long_session_takes_no_more_memory_than_a_short_one(
    obsku: ObskuTables, committed_db: CommittedDatabase
) -> None:
    peaks = []
    for number, count in enumerate((500, 4_000)):
        obsku.connection.execute("DELETE FROM sessions")
        obsku.session("long")
        obsku.connection.execute(
            "INSERT INTO messages (session_id, role, content, created_at)"
            f" SELECT 'long', 'user', repeat('x', 10000), {NOON} + n FROM generate_series(1, {count}) AS n"
        )
        tenant = f"{committed_db.tenant}-{number}"
        worker = WorkerProcess(import_and_measure, committed_db.alias, tenant, obsku.dsn, obsku.schema)
        imported, peak = worker.outcome(timeout=300).unwrap()
        assert imported == count
        peaks.append(peak)
    assert peaks[1] - peaks[0] < 20 * MEGABYTE


# --- The address -----------------------------------------------------------------------------------


@for_each(
    ("dsn", "reason"),
    [
        (f"postgresql://u:{SECRET}@127.0.0.1:1/db", "(Connection refused)"),
        (f"postgresql//u:{SECRET}@127.0.0.1/db", "is not a connection string"),
        (f"postgresql://u:{SECRET}%zz@127.0.0.1/db", "is not a connection string"),
        (f"postgresql://u:x/{SECRET}@127.0.0.1/db", ""),
        (f"postgresql://u:x@{SECRET}.invalid/db", ""),
        (f"host=127.0.0.1 port=1 password={SECRET} nonsense=1", "is not a connection string"),
        (f"postgresql://u:{SECRET}\udc80@127.0.0.1/db", "is not a connection string"),
        (f"postgresql://u:{SECRET}\x00@127.0.0.1/db", ""),
        (f"host=/nowhere password={SECRET}", "(No such file or directory)"),
        (f"service={SECRET}", "(definition of service)"),
    ],
)
def test_an_address_is_never_shown(
    sqlite_db: CommittedDatabase,
    server: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    dsn: str,
    reason: str,
) -> None:
    caplog.set_level(logging.INFO)
    ended = run(sqlite_db.alias, "helix_import", "--from", "obsku", dsn, "--format", "json")
    assert (ended.code, ended.out) == (1, "")
    assert reason in ended.err
    assert SECRET not in ended.err + caplog.text
    assert dsn not in repr(Origin(dsn=dsn))
    with pytest.raises(SourceUnreadable) as caught, PostgresReader(dsn).reading():
        pass
    assert caught.value.__cause__ is caught.value.__context__ is None


def test_a_wrong_password_is_told_and_not_shown(sqlite_db: CommittedDatabase, server: str) -> None:
    host, port = _loopback(server)
    dsn = f"postgresql://postgres:{SECRET}@{host}:{port}/postgres"
    ended = run(sqlite_db.alias, "helix_import", "--from", "ziro", dsn)
    assert ended.code == 1
    assert "(password authentication failed)" in ended.err
    assert SECRET not in ended.err


def _loopback(server: str) -> tuple[str, int]:
    reader = PostgresReader(server)
    with reader.reading():
        port = int(reader.one("SELECT current_setting('port')")[0])
    return "127.0.0.1", port


@for_each("store", ["obsku", "ziro", "langgraph-postgres", "openai-agents-postgres"])
def test_a_database_without_the_tables_is_told(
    committed_db: CommittedDatabase, server: str, store: str
) -> None:
    ended = run(committed_db.alias, "helix_import", "--from", store, server, "--schema", "nowhere")
    assert (ended.code, ended.out) == (1, "")
    assert 'relation "' in ended.err
    assert "does not exist" in ended.err


@for_each("name", ["schema", "table"])
@for_each("value", ["", "a\x00", "\udc80", "x" * 300], ids=ascii)
def test_a_name_that_no_table_has_is_refused(name: str, value: str) -> None:
    names: dict[str, Any] = {name: value}
    with pytest.raises(InvalidPayload) as caught:
        SOURCES["ziro"](Origin(dsn="service=x", **names))
    assert caught.value.path == f"/{name}"


def test_a_source_that_goes_away_is_told(obsku: ObskuTables, committed_db: CommittedDatabase) -> None:
    fill(obsku, 2)
    reader = PostgresReader(obsku.dsn, schema=obsku.schema)
    with reader.reading():
        (process,) = reader.one("SELECT pg_backend_pid()")
        obsku.connection.execute("SELECT pg_terminate_backend(%s, 10000)", [process])
        with pytest.raises(SourceUnreadable, match="The source cannot be read: "):
            reader.one("SELECT 1")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_stops_it_after_the_current_transaction(
    obsku: ObskuTables,
    committed_db: CommittedDatabase,
    monkeypatch: pytest.MonkeyPatch,
    number: signal.Signals,
) -> None:
    fill(obsku, 4)
    monkeypatch.setattr(importing, "_UNITS_TOGETHER", 2)
    with connections[committed_db.alias].execute_wrapper(SignalAtCommit(number)):
        ended = import_from(obsku, committed_db)
    assert (ended.code, ended.err) == (1, "Stopped after 2 sessions; run it again to continue.")
    assert not ended.data["is_complete"]
    assert import_from(obsku, committed_db).data["identical"] == {"session": 2}


def test_without_psycopg_the_command_says_what_to_install(
    sqlite_db: CommittedDatabase, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "psycopg", None)
    ended = run(sqlite_db.alias, "helix_import", "--from", "obsku", "service=agents")
    assert ended.code == 1
    assert "pip install 'helix-store[postgres]'" in ended.err


@for_each(
    "arguments",
    [
        ["--from", "redis", "service=x"],
        ["--from", "obsku"],
        ["--from", "obsku", "service=x", "file.jsonl"],
        ["--from", "obsku", "service=x", "--table", "t"],
        ["file.jsonl", "--schema", "s"],
        ["file.jsonl", "--only-whole"],
        ["file.jsonl", "--dry-run"],
    ],
    ids=" ".join,
)
def test_wrong_usage_is_exit_code_two(sqlite_db: CommittedDatabase, arguments: list[str]) -> None:
    # The checks of Django 6.1, which run first, open SQLite.
    ended = command_line("helix_import", *arguments)
    assert (ended.code, ended.out) == (2, "")
    assert "Traceback" not in ended.err
    assert ended.err


def test_the_table_has_the_counts_of_both_sides(ziro: ZiroTable, committed_db: CommittedDatabase) -> None:
    ziro.snapshot("t", "a")
    ended = run(
        committed_db.alias,
        *("helix_import", "--from", "ziro", ziro.dsn),
        *("--schema", ziro.schema, "--tenant", committed_db.tenant),
    )
    lines = [line.split() for line in ended.lines]
    assert ["imported", "sessions", "1"] in lines
    assert ["snapshots", "(source)", "1"] in lines


def test_a_time_of_the_import_is_no_time_of_a_session(
    obsku: ObskuTables, committed_db: CommittedDatabase
) -> None:
    begun = moments.now()
    fill(obsku, 1)
    obsku.session("meta", metadata=json.dumps({"a": 1}))
    import_from(obsku, committed_db)
    for line in exported(committed_db).splitlines():
        record = json.loads(line)
        assert all(value < begun.isoformat() for name, value in record.items() if name.endswith("_at"))
