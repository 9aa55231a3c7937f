"""An import never overwrites, may be repeated, killed and run at the same time."""

from __future__ import annotations

import io
import random
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from django.db import transaction
from django.test.utils import CaptureQueriesContext

from helix_store.models import Lock, Session, UsageEntry
from helix_store.stores import DatabaseLockManager, DatabaseStateStore, DatabaseUsageStore
from helix_store.testing.state_store.approvals import approve, ask_approval, forge_answer, use_once
from helix_store.testing.state_store.samples import loaded
from helix_store.testing.state_store.tool_calls import APPROVE, LONG_AGO
from helix_store.testing.usage.base import tokens
from helix_store.transfer import (
    DatabaseSource,
    ExportFile,
    ImportSummary,
    import_units,
    importing,
    write_export,
)
from tests.cells import for_each
from tests.databases import CommittedDatabase, delete_all_rows
from tests.invariants import broken_invariants
from tests.processes import PROCESSES, WorkerProcess, run_in_processes
from tests.transfer.files import exported, fill, imported, lines_of, simple_session, written


def test_a_repeat_stores_nothing(committed_db: CommittedDatabase) -> None:
    fill(committed_db)
    data = exported(committed_db)
    delete_all_rows(committed_db.alias)
    first, _ = imported(committed_db, data)
    again, file = imported(committed_db, data)
    assert file.is_complete
    assert again.imported == {}
    assert again.records == {}
    assert again.identical == first.imported
    assert exported(committed_db) == data


def test_an_answer_with_a_deadline_stays_an_answer(committed_db: CommittedDatabase) -> None:
    """The decisions, which say that it counts, come with their session."""
    store = DatabaseStateStore(committed_db.alias, tenant=committed_db.tenant)
    answered = ("approved", "used", "rejected")
    for session_id in (*answered, "forged"):
        store.create_session(session_id, agent_type="agent")
        ask_approval(store, session_id, {**APPROVE, "deadline": LONG_AGO, "on_expiry": "reject"})
    for session_id in answered:
        approve(store, session_id, approved=session_id != "rejected")
    use_once(store, "used")
    forge_answer(store, "forged")
    data = exported(committed_db)
    delete_all_rows(committed_db.alias)
    imported(committed_db, data)
    assert exported(committed_db) == data
    for _ in range(2):
        assert [call.session_id for call in store.find_expired_pending()] == ["forged"]
        assert broken_invariants(committed_db) == []
        for session_id in (*answered, "forged"):
            store.save_state(session_id, loaded(store, session_id))
    assert use_once(store, "approved").tool_name == "pay"


@pytest.mark.thorough
@for_each("change", ["message", "title", "usage", "staged", "interrupt"])
def test_a_session_that_differs_is_a_problem_and_stays(committed_db: CommittedDatabase, change: str) -> None:
    simple_session(committed_db, "a")
    simple_session(committed_db, "b")
    data = exported(committed_db)
    store = DatabaseStateStore(committed_db.alias, tenant=committed_db.tenant)
    if change == "message":
        store.append_messages("a", [{"role": "user", "content": "more"}])
    elif change == "title":
        Session.objects.using(committed_db.alias).filter(tenant=committed_db.tenant, session_id="a").update(
            title="new"
        )
    elif change == "usage":
        DatabaseUsageStore(committed_db.alias, tenant=committed_db.tenant).record_entry(tokens("a"))
    elif change == "staged":
        store.stage_changes("a", "step-1", {"tool_call_id": "call", "merge_changes": {"x": 1}})
    else:
        store.request_interrupt("a")
    changed = exported(committed_db)
    assert changed != data
    summary, file = imported(committed_db, data)
    assert file.is_complete
    (problem,) = summary.problems
    assert "'a'" in problem.text
    assert "differs" in problem.text
    assert summary.identical["session"] == 1
    assert exported(committed_db) == changed


@pytest.mark.thorough
def test_small_sessions_share_statements(committed_db: CommittedDatabase) -> None:
    for number in range(60):
        simple_session(committed_db, f"s{number}")
    data = exported(committed_db)
    delete_all_rows(committed_db.alias)
    for expected in ("imported", "identical"):
        with CaptureQueriesContext(committed_db.connection) as statements:
            summary, _ = imported(committed_db, data)
        assert getattr(summary, expected)["session"] == 60
        assert len(statements) <= 180, "\n".join(each["sql"][:200] for each in statements)
    assert exported(committed_db) == data


@pytest.mark.thorough
@for_each("fault", ["a sequence twice", "a value", "an id twice", "it differs"])
def test_a_session_that_is_refused_leaves_those_beside_it(
    committed_db: CommittedDatabase, fault: str
) -> None:
    for name in "abcd":
        simple_session(committed_db, name)
    lines = lines_of(exported(committed_db))
    delete_all_rows(committed_db.alias)
    if fault == "it differs":
        simple_session(committed_db, "c", messages=1)
    of_c = next(at for at, line in enumerate(lines) if line.get("session_id") == "c")
    first = next(at for at in range(of_c, len(lines)) if lines[at]["record"] == "message")
    if fault == "a sequence twice":
        lines[first + 1]["sequence"] = lines[first]["sequence"]
    elif fault == "a value":
        lines[first]["sequence"] = "one"
    elif fault == "an id twice":
        lines[of_c]["session_id"] = "b"
    summary, file = imported(committed_db, written(lines))
    assert file.is_complete, file.problems
    (problem,) = summary.problems
    assert problem.line == (first if fault == "a value" else of_c) + 1
    assert summary.imported["session"] == 3
    stored = Session.objects.using(committed_db.alias).filter(tenant=committed_db.tenant)
    names = {"a", "b", "d"} | ({"c"} if fault == "it differs" else set())
    assert set(stored.values_list("session_id", flat=True)) == names
    assert broken_invariants(committed_db) == []


def test_only_the_given_tenant_is_imported(committed_db: CommittedDatabase) -> None:
    simple_session(committed_db, "a")
    data = exported(committed_db)
    delete_all_rows(committed_db.alias)
    file = ExportFile(io.BytesIO(data))
    summary = import_units(file.units(), committed_db.alias, tenant="another")
    assert (summary.imported, summary.other_tenants) == ({}, 2)
    assert Session.objects.using(committed_db.alias).count() == 0


def test_chosen_sessions_come_with_their_stream_lock_and_usage(committed_db: CommittedDatabase) -> None:
    fill(committed_db)
    simple_session(committed_db, "alone")
    data = exported(committed_db, session_ids=["own-session", "gone"])
    delete_all_rows(committed_db.alias)
    summary, _ = imported(committed_db, data)
    assert dict(summary.imported) == {"session": 1, "stream": 1, "kept_usage": 1, "locks": 1}
    assert exported(committed_db) == data


def test_an_unknown_session_is_a_problem(committed_db: CommittedDatabase) -> None:
    simple_session(committed_db, "a")
    source = DatabaseSource(committed_db.alias, tenant=committed_db.tenant, session_ids=["a", "b"])
    summary = write_export(source, io.BytesIO())
    assert [problem.text for problem in summary.problems] == ["There is no session with the id 'b'."]
    assert summary.sessions == 1


def test_a_deleted_session_is_restored_with_the_usage_that_was_kept(committed_db: CommittedDatabase) -> None:
    simple_session(committed_db, "a")
    usage = DatabaseUsageStore(committed_db.alias, tenant=committed_db.tenant)
    for number in range(3):
        usage.record_entry(tokens("a", prompt=number, cost_usd="0.5"))
    data = exported(committed_db)
    store = DatabaseStateStore(committed_db.alias, tenant=committed_db.tenant)
    store.delete_session("a", keep_usage=True)
    assert imported(committed_db, data)[0].problems == []
    assert exported(committed_db) == data
    assert UsageEntry.objects.using(committed_db.alias).filter(tenant=committed_db.tenant).count() == 3


def test_kept_usage_that_differs_is_not_overwritten(committed_db: CommittedDatabase) -> None:
    simple_session(committed_db, "a")
    DatabaseUsageStore(committed_db.alias, tenant=committed_db.tenant).record_entry(tokens("a", prompt=1))
    data = exported(committed_db)
    store = DatabaseStateStore(committed_db.alias, tenant=committed_db.tenant)
    store.delete_session("a", keep_usage=True)
    entries = UsageEntry.objects.using(committed_db.alias).filter(tenant=committed_db.tenant)
    entries.update(prompt_tokens=2)
    (problem,) = imported(committed_db, data)[0].problems
    assert "refused a row" in problem.text
    assert not store.session_exists("a")
    assert entries.get().session_id is None
    assert entries.get().prompt_tokens == 2


# --- Locks -----------------------------------------------------------------------------------------


def _token(database: CommittedDatabase, name: str) -> int:
    return Lock.objects.using(database.alias).get(tenant=database.tenant, name=name).token


@for_each(("here", "expected"), [(1, 3), (3, 3), (5, 5)])
def test_the_higher_token_of_a_free_lock_stays(
    committed_db: CommittedDatabase, here: int, expected: int
) -> None:
    locks = Lock.objects.using(committed_db.alias)
    lock = locks.create(tenant=committed_db.tenant, name="x", token=3)
    data = exported(committed_db)
    lock.token = here
    lock.save(using=committed_db.alias)
    summary, _ = imported(committed_db, data)
    assert summary.problems == []
    assert _token(committed_db, "x") == expected


def test_a_held_lock_is_not_taken_from_its_holder(committed_db: CommittedDatabase) -> None:
    Lock.objects.using(committed_db.alias).create(tenant=committed_db.tenant, name="x", token=3)
    data = exported(committed_db)
    Lock.objects.using(committed_db.alias).filter(tenant=committed_db.tenant).update(token=0)
    lock = DatabaseLockManager(committed_db.alias, tenant=committed_db.tenant).acquire("x")
    assert lock is not None
    summary, _ = imported(committed_db, data)
    assert ["'x'" in problem.text for problem in summary.problems] == [True]
    lock.refresh()
    lock.release()
    assert imported(committed_db, data)[0].problems == []
    assert _token(committed_db, "x") == 3


# --- Crashes and races -----------------------------------------------------------------------------


def import_slowly(alias: str, path: str, begun: Event | None) -> ImportSummary:
    few = patch.object(importing, "_UNITS_TOGETHER", 5)
    with few, Path(path).open("rb") as stream:
        file = ExportFile(stream)

        def tell(summary: ImportSummary) -> None:
            if begun is not None and summary.imported["session"] == 5:
                begun.set()

        return import_units(file.units(), alias, progress=tell)


@pytest.fixture
def many(committed_db: CommittedDatabase, tmp_path: Path) -> tuple[Path, bytes]:
    """An export of 60 sessions and of a row of everything, which are stored no longer."""
    fill(committed_db)
    for number in range(60):
        simple_session(committed_db, f"session-{number:02}", messages=1 + number % 7)
    data = exported(committed_db)
    delete_all_rows(committed_db.alias)
    path = tmp_path / "export.jsonl"
    path.write_bytes(data)
    return path, data


@pytest.mark.thorough
@pytest.mark.parametrize("seed", range(3))
def test_an_import_that_is_killed_is_completed_by_the_next_one(
    committed_db: CommittedDatabase, many: tuple[Path, bytes], seed: int
) -> None:
    path, data = many
    begun = PROCESSES.Event()
    worker = WorkerProcess(import_slowly, committed_db.alias, str(path), begun)
    assert begun.wait(60), worker.outcome(1)
    # Anywhere in a transaction, or between two.
    PROCESSES.Event().wait(random.Random(seed).uniform(0, 0.15))  # noqa: S311  a moment, no secret
    worker.kill()
    assert broken_invariants(committed_db) == []
    stored = Session.objects.using(committed_db.alias).filter(tenant=committed_db.tenant).count()
    assert stored >= 5
    summary, file = imported(committed_db, data)
    assert (summary.problems, file.is_complete) == ([], True)
    assert summary.identical["session"] == stored
    assert exported(committed_db) == data
    assert broken_invariants(committed_db) == []


@pytest.mark.thorough
def test_two_imports_at_once_store_everything_once(
    committed_db: CommittedDatabase, many: tuple[Path, bytes]
) -> None:
    path, data = many
    outcomes = run_in_processes(import_slowly, [(committed_db.alias, str(path), None)] * 2)
    summaries = [outcome.unwrap() for outcome in outcomes]
    assert [summary.problems for summary in summaries] == [[], []]
    sessions = data.count(b'\n{"record":"session",')
    assert sum(summary.imported["session"] for summary in summaries) == sessions
    assert exported(committed_db) == data
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


@pytest.mark.thorough
def test_a_session_is_stored_as_a_whole_or_not_at_all(
    committed_db: CommittedDatabase, many: tuple[Path, bytes]
) -> None:
    """Whatever statement is the last one."""
    _, data = many
    last, is_stopped = 0, True
    while is_stopped:
        last += 1
        try:
            with committed_db.connection.execute_wrapper(StopAfter(last)):
                summary, _ = imported(committed_db, data)
            is_stopped = False
        except Stopped:
            assert broken_invariants(committed_db) == []
    assert last > 10
    assert summary.problems == []
    assert exported(committed_db) == data


@pytest.mark.thorough
def test_an_import_in_a_transaction_of_the_caller_is_part_of_it(committed_db: CommittedDatabase) -> None:
    fill(committed_db)
    data = exported(committed_db)
    delete_all_rows(committed_db.alias)
    with transaction.atomic(using=committed_db.alias):
        assert imported(committed_db, data)[0].problems == []
        assert exported(committed_db) == data
        transaction.set_rollback(True, using=committed_db.alias)
    assert Session.objects.using(committed_db.alias).filter(tenant=committed_db.tenant).count() == 0


# --- What cannot be exported -----------------------------------------------------------------------


def test_a_session_with_an_unreadable_row_is_told_and_the_others_are_exported(
    committed_db: CommittedDatabase,
) -> None:
    fill(committed_db)
    simple_session(committed_db, "fine")
    session = Session.objects.using(committed_db.alias).get(
        tenant=committed_db.tenant, session_id="deltas é\u2028"
    )
    bases = session.checkpoints.filter(base__isnull=True)
    bases.delete()
    file = io.BytesIO()
    summary = write_export(DatabaseSource(committed_db.alias, tenant=committed_db.tenant), file)
    assert summary.failed == 1
    assert "is not a checkpoint of its session" in summary.problems[0].text
    delete_all_rows(committed_db.alias)
    found, export = imported(committed_db, file.getvalue())
    assert export.is_complete
    assert [problem.text for problem in found.problems] == []
    assert "could not be exported" in export.problems[0].text
    names = Session.objects.using(committed_db.alias).values_list("session_id", flat=True)
    assert "fine" in names
    assert session.session_id not in names


def test_a_session_whose_head_is_unreadable_is_told_and_the_file_is_whole(
    committed_db: CommittedDatabase,
) -> None:
    for session_id in ("a", "b é", "c"):
        simple_session(committed_db, session_id)
    # A value of another type, which only SQLite stores, or a time that Python cannot represent.
    value = "'garbage'" if committed_db.vendor == "sqlite" else "'infinity'"
    with committed_db.connection.cursor() as cursor:
        table, tenant = Session._meta.db_table, [committed_db.tenant]
        where = "session_id = 'b é' AND tenant = %s"
        cursor.execute(f"UPDATE {table} SET created_at = {value} WHERE {where}", tenant)
    file = io.BytesIO()
    summary = write_export(DatabaseSource(committed_db.alias, tenant=committed_db.tenant), file)
    assert (summary.failed, summary.sessions) == (1, 2)
    delete_all_rows(committed_db.alias)
    found, export = imported(committed_db, file.getvalue())
    assert (found.problems, found.imported["session"]) == ([], 2)
    (problem,) = export.problems
    named = f"the session 'b é' of tenant '{committed_db.tenant}' could not be exported: "
    assert problem.text.startswith(named)
    assert export.is_complete
    # An older export does not name it.
    records = lines_of(file.getvalue())
    (failed,) = [each for each in records if each["record"] == "failed"]
    del failed["tenant"], failed["name"]
    _, export = imported(committed_db, written(records))
    (problem,) = export.problems
    assert problem.text.startswith("a session could not be exported: ")
    assert export.is_complete


def test_rows_that_belong_to_nothing_are_told(empty_db: CommittedDatabase) -> None:
    simple_session(empty_db, "a")
    DatabaseUsageStore(empty_db.alias, tenant=empty_db.tenant).record_entry(tokens("a"))
    UsageEntry.objects.using(empty_db.alias).update(session_id=1_000_000)
    summary = write_export(DatabaseSource(empty_db.alias), io.BytesIO())
    (problem,) = summary.problems
    assert problem.text.startswith("1 rows of UsageEntry are not in it")
