"""An export, imported into another database and exported there, is the same file."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
from django.db import connections

from example_project.transcripts import read_transcripts, replay
from helix_store.catalogue import tables
from helix_store.core.types import StepInfo
from helix_store.exceptions import ApprovalUsed, InvalidPayload, InvalidQuery
from helix_store.models import Checkpoint, Session
from helix_store.retention import RetentionPolicy, apply_retention
from helix_store.stores import DatabaseLockManager, DatabaseStateStore, DatabaseUsageStore, Store
from helix_store.testing.usage.base import tokens
from helix_store.transfer import DatabaseSource, write_export
from tests.cells import for_each
from tests.databases import CommittedDatabase, delete_all_rows
from tests.invariants import broken_invariants
from tests.transfer.files import exported, fill, imported, lines_of, simple_session

RECORDED = Path("shared") / "data" / "tau-airline-trajectories.json.xz"


def _recorded() -> Path | None:
    """The recorded conversations beside the project, or beside a folder that it is in."""
    found = (folder / RECORDED for folder in Path(__file__).resolve().parents)
    return next((path for path in found if path.is_file()), None)


@pytest.fixture
def other_db(sqlite_db: CommittedDatabase, postgres_db: CommittedDatabase) -> CommittedDatabase:
    """PostgreSQL, with the tenant of ``sqlite_db``."""
    return CommittedDatabase(alias=postgres_db.alias, tenant=sqlite_db.tenant)


def _delete(database: CommittedDatabase) -> None:
    delete_all_rows(database.alias)


def test_everything_goes_to_the_other_database_and_back(
    sqlite_db: CommittedDatabase, other_db: CommittedDatabase
) -> None:
    fill(sqlite_db)
    data = exported(sqlite_db)
    own = {table.record for table in tables() if table.is_own}
    assert {record["record"] for record in lines_of(data)} >= own | {"kept_usage"}
    for database in (other_db, sqlite_db):
        _delete(database)
        summary, file = imported(database, data)
        assert (summary.problems, file.problems, file.is_complete) == ([], [], True)
        assert exported(database) == data
        assert broken_invariants(database) == []


def test_an_export_of_no_sessions_is_complete(committed_db: CommittedDatabase) -> None:
    simple_session(committed_db, "a")
    nothing: tuple[Any, ...] = ([], (), iter(()))
    for session_ids in nothing:
        for with_trees in (False, True):
            data = exported(committed_db, session_ids=session_ids, with_trees=with_trees)
            assert [each["record"] for each in lines_of(data)] == ["header", "trailer"]
            summary, file = imported(committed_db, data)
            assert (file.is_complete, summary.imported, summary.problems) == (True, {}, [])
    for table in tables("tenant"):
        if table.of_sessions is not None:
            rows = table.model._base_manager.using(committed_db.alias)
            assert list(table.of_sessions(rows, Session.objects.using(committed_db.alias).none())) == []


@for_each(
    "given",
    [
        *({"session_ids": value} for value in ("root", b"root", {"root": 1}, 5, [5], ["a", "b\x00"], [""])),
        *({"tenant": value} for value in (5, "a\x00", "x" * 256)),
        {"session_ids": ["a"], "with_trees": "no"},
    ],
    ids=str,
)
def test_a_selection_that_makes_no_sense_is_refused(given: dict[str, Any]) -> None:
    """One text is a collection of texts, which would be exported as sessions that do not exist."""
    with pytest.raises((InvalidQuery, InvalidPayload), match=list(given)[-1]):
        DatabaseSource(**given)


def test_a_deleted_session_comes_back_to_a_budget_that_counts_its_kept_usage(
    committed_db: CommittedDatabase,
) -> None:
    simple_session(committed_db, "a")
    usage = DatabaseUsageStore(committed_db.alias, tenant=committed_db.tenant)
    usage.record_entry(tokens("a", prompt=3, total=3))
    budgets = Store(committed_db.alias, tenant=committed_db.tenant).budgets
    budgets.set_budget("all", scope="tenant", limit_tokens=100)
    data = exported(committed_db)
    DatabaseStateStore(committed_db.alias, tenant=committed_db.tenant).delete_session("a", keep_usage=True)
    summary, _ = imported(committed_db, data)
    assert (summary.problems, summary.imported["session"]) == ([], 1)
    assert [each.session_id for each in usage.get_entries("a")] == ["a"]
    assert budgets.status("all").spent_tokens == 3
    assert exported(committed_db) == data


def test_an_import_keeps_what_was_approved_and_what_was_used(
    sqlite_db: CommittedDatabase, other_db: CommittedDatabase
) -> None:
    store = DatabaseStateStore(sqlite_db.alias, tenant=sqlite_db.tenant)
    session = store.new_session("s", agent_type="t")
    for call in ("used", "unused"):
        store.add_pending_tool_calls("s", {call: {"tool_name": "pay", "input": 7, "approval_id": call}})
        store.submit_tool_result("s", call, approved=True, approval_id=call, actor="ann")
    with session.step("first") as step:
        step.use_approval("used")
    imported(other_db, exported(sqlite_db))
    with DatabaseStateStore(other_db.alias, tenant=other_db.tenant).session("s").step() as step:
        with pytest.raises(ApprovalUsed, match="first"):
            step.use_approval("used")
        assert step.use_approval("unused").actors == ["ann"]


@pytest.mark.thorough
def test_sessions_work_on_after_an_import(sqlite_db: CommittedDatabase, other_db: CommittedDatabase) -> None:
    fill(sqlite_db)
    imported(other_db, exported(sqlite_db))
    stores = [DatabaseStateStore(each.alias, tenant=each.tenant) for each in (sqlite_db, other_db)]
    for head in stores[0].list_sessions().sessions:
        before, after = (store.load_state(head.session_id) for store in stores)
        assert before == after
        checkpoints = [store.list_checkpoints(head.session_id).items for store in stores]
        assert checkpoints[0] == checkpoints[1]
        for item in checkpoints[0]:
            states = [store.get_checkpoint(head.session_id, item.checkpoint_id) for store in stores]
            assert states[0] == states[1]
    store = stores[1]
    state = store.load_state("deltas é\u2028")
    assert state is not None
    state.custom_state["step"] = 6
    store.save_state_and_promote_staging(
        state.session_id, state, [], StepInfo("step-6", 6), expected_version=state.version
    )
    assert broken_invariants(other_db) == []
    again = store.load_state(state.session_id)
    assert again is not None
    assert again.custom_state == state.custom_state


def test_a_state_loaded_before_is_not_taken_for_the_base_of_a_step_after(
    sqlite_db: CommittedDatabase, other_db: CommittedDatabase
) -> None:
    fill(sqlite_db)
    session_id = "deltas é\u2028"
    loaded = DatabaseStateStore(sqlite_db.alias, tenant=sqlite_db.tenant).load_state(session_id)
    assert loaded is not None
    imported(other_db, exported(sqlite_db))
    loaded.custom_state["step"] = 6
    store = DatabaseStateStore(other_db.alias, tenant=other_db.tenant)
    store.save_state_and_promote_staging(session_id, loaded, [], StepInfo("step-6", 6))
    newest = Checkpoint.objects.using(other_db.alias).filter(session__tenant=other_db.tenant).latest("pk")
    assert newest.base_id is None
    assert broken_invariants(other_db) == []


def test_fencing_tokens_grow_after_an_import(
    sqlite_db: CommittedDatabase, other_db: CommittedDatabase
) -> None:
    locks = DatabaseLockManager(sqlite_db.alias, tenant=sqlite_db.tenant)
    for _ in range(3):
        lock = locks.acquire("session-1")
        assert lock is not None
        lock.release()
    held = locks.acquire("session-1")
    assert held is not None
    imported(other_db, exported(sqlite_db))
    next_lock = DatabaseLockManager(other_db.alias, tenant=other_db.tenant).acquire("session-1")
    assert next_lock is not None
    assert next_lock.fencing_token == held.fencing_token + 1


def test_usage_of_a_deleted_session_is_kept(
    sqlite_db: CommittedDatabase, other_db: CommittedDatabase
) -> None:
    fill(sqlite_db)
    imported(other_db, exported(sqlite_db))
    usages = [DatabaseUsageStore(each.alias, tenant=each.tenant) for each in (sqlite_db, other_db)]
    pages = [usage.get_entries("gone") for usage in usages]
    assert pages[0] == pages[1] != []


def test_usage_that_names_nobody_any_more_is_moved_too(
    sqlite_db: CommittedDatabase, other_db: CommittedDatabase
) -> None:
    fill(sqlite_db)
    policy = RetentionPolicy(usage_anonymise_days=0)
    report = apply_retention(policy=policy, using=sqlite_db.alias, tenant=sqlite_db.tenant)
    assert report.usage_anonymised
    first = exported(sqlite_db)
    imported(other_db, first)
    assert exported(other_db) == first


def test_the_hash_of_the_trailer_is_that_of_all_lines_before_it(committed_db: CommittedDatabase) -> None:
    simple_session(committed_db, "one")
    *lines, last = exported(committed_db).splitlines(keepends=True)
    assert json.loads(last)["sha256"] == hashlib.sha256(b"".join(lines)).hexdigest()


def test_sessions_are_in_the_order_of_their_ids(committed_db: CommittedDatabase) -> None:
    for session_id in ("b", "é", "a", "B", "a b"):
        simple_session(committed_db, session_id)
    found = [each["session_id"] for each in lines_of(exported(committed_db)) if each["record"] == "session"]
    assert found == ["B", "a", "a b", "b", "é"]


@pytest.mark.thorough
def test_pages_do_not_change_the_file(
    committed_db: CommittedDatabase, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(committed_db)
    simple_session(committed_db, "long", messages=50)
    data = exported(committed_db)
    for rows in (1, 2, 7):
        monkeypatch.setattr("helix_store.transfer.export_source._MOST_ROWS", rows)
        monkeypatch.setattr("helix_store.transfer.export_source._MOST_UNITS", rows)
        assert exported(committed_db) == data


@pytest.mark.thorough
def test_the_recorded_conversations_are_the_same_file_from_both_databases(
    sqlite_db: CommittedDatabase, other_db: CommittedDatabase
) -> None:
    path = _recorded()
    if path is None:
        pytest.skip(f"{RECORDED.name} is not part of the project")
    store = DatabaseStateStore(sqlite_db.alias, tenant=sqlite_db.tenant)
    for transcript in read_transcripts(path):
        replay(store, transcript)
    data = exported(sqlite_db)
    summary, file = imported(other_db, data)
    assert (summary.problems, file.problems) == ([], [])
    assert summary.imported["session"] == 200
    assert summary.records["message"] == 5_308
    assert exported(other_db) == data
    assert broken_invariants(other_db) == []


def test_an_export_shows_one_moment(committed_db: CommittedDatabase, monkeypatch: pytest.MonkeyPatch) -> None:
    """A session that is written before its page is read: the file has it as it was at the start."""
    monkeypatch.setattr("helix_store.transfer.export_source._MOST_UNITS", 1)
    for session_id in ("a", "b"):
        simple_session(committed_db, session_id)
    before = exported(committed_db)

    class Interrupting:
        def __init__(self) -> None:
            self.data = b""
            self.is_first = True

        def write(self, data: bytes) -> None:
            self.data += data
            if self.is_first and b'"session"' in data:
                self.is_first = False
                with committed_db.second_connection() as connection, connection.cursor() as cursor:
                    table = Session._meta.db_table
                    cursor.execute(
                        f"UPDATE {table} SET title = 'new' WHERE tenant = %s", [committed_db.tenant]
                    )

    file = Interrupting()
    write_export(DatabaseSource(committed_db.alias, tenant=committed_db.tenant), file)
    assert not file.is_first
    assert file.data == before
    assert exported(committed_db) != before
    assert not connections[committed_db.alias].in_atomic_block


def test_posts_are_imported_as_they_were(sqlite_db: CommittedDatabase, other_db: CommittedDatabase) -> None:
    simple_session(sqlite_db, "session")
    stores = [DatabaseStateStore(db.alias, tenant=db.tenant) for db in (sqlite_db, other_db)]
    message = {"role": "user", "content": "hello"}
    for key in ("received", "withdrawn", "waiting"):
        post = stores[0].post_message("session", message, key=key, author="ada")
        if key == "received":
            stores[0].receive_posts("session")
        elif key == "withdrawn":
            stores[0].withdraw_post("session", post.post_id)
    imported(other_db, exported(sqlite_db))
    everything = [
        store.list_posts("session", states=("waiting", "received", "withdrawn")) for store in stores
    ]
    assert everything[0] == everything[1]
    assert stores[1].post_message("session", message, key="received", author="ada").state == "received"
    assert stores[1].post_message("session", message).sequence == 4
    assert stores[1].receive_posts("session") == [message, message]
