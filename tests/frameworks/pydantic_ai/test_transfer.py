"""Branches of sessions, exports and imports, and the doctor."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
from asgiref.sync import async_to_sync
from django.db import transaction

from helix_store.contrib.pydantic_ai.catalogue import faults_of_conversations, faults_of_entries
from helix_store.contrib.pydantic_ai.models import Conversation, ConversationEntry
from helix_store.doctor import diagnose
from helix_store.models import Session
from helix_store.stores import DatabaseStateStore
from tests.databases import CommittedDatabase
from tests.frameworks.pydantic_ai.conversations import entry_ids, forked, history, saved, store_of, turn
from tests.transfer.files import exported, imported, lines_of


@pytest.fixture
def other_db(sqlite_db: CommittedDatabase, postgres_db: CommittedDatabase) -> CommittedDatabase:
    """PostgreSQL, with the tenant of ``sqlite_db``."""
    return CommittedDatabase(alias=postgres_db.alias, tenant=sqlite_db.tenant)


def _family_of_three(database: CommittedDatabase) -> None:
    saved(database, "source", "one", "two", "three", scope="ada")
    forked(database, "source", "fork", "four \udc00\x00", at=2)
    forked(database, "source", "empty", at=0)


def test_a_branch_of_a_session_has_a_fork_of_its_conversation(committed_db: CommittedDatabase) -> None:
    saved(committed_db, "source", "one", "two", scope="ada")
    sessions = DatabaseStateStore(committed_db.alias, tenant=committed_db.tenant)
    sessions.branch_session("source", new_session_id="branch")
    store = store_of(committed_db)
    assert history(committed_db, "branch") == history(committed_db, "source")
    branch = async_to_sync(store.load)("branch")
    record = async_to_sync(store.read_record)("branch")
    assert branch is not None
    assert record is not None
    assert (record.forked_from, record.branches, record.scope) == ("source", [], "ada")
    turn(branch, "three")
    async_to_sync(store.save)(branch)
    async_to_sync(store.delete)("source")
    assert len(entry_ids(committed_db)) == 6
    assert set(history(committed_db, "branch") or ()) == entry_ids(committed_db)


def test_an_import_of_an_export_is_the_same_file_again(
    sqlite_db: CommittedDatabase, other_db: CommittedDatabase
) -> None:
    _family_of_three(sqlite_db)
    data = exported(sqlite_db)
    records = Counter(line["record"] for line in lines_of(data))
    assert (records["pydantic_conversation"], records["pydantic_entry"], records["pydantic_family"]) == (
        3,
        8,
        2,
    )
    for _ in range(2):
        summary, file = imported(other_db, data)
        assert (summary.problems, file.problems) == ([], [])
    assert exported(other_db) == data
    for name in ("source", "fork", "empty"):
        ours, theirs = (async_to_sync(store_of(each).load)(name) for each in (sqlite_db, other_db))
        assert ours == theirs
    fork = async_to_sync(store_of(other_db).load)("fork")
    assert fork is not None
    turn(fork, "five")
    async_to_sync(store_of(other_db).save)(fork)
    async_to_sync(store_of(other_db).delete)("source")
    assert entry_ids(other_db) == set(history(other_db, "fork") or ())


def test_an_export_of_one_session_has_what_its_conversation_reaches(
    sqlite_db: CommittedDatabase, other_db: CommittedDatabase
) -> None:
    _family_of_three(sqlite_db)
    data = exported(sqlite_db, session_ids=["fork"])
    entries = {line["entry_id"] for line in lines_of(data) if line["record"] == "pydantic_entry"}
    assert entries == set(history(sqlite_db, "fork") or ())
    assert "three" not in data.decode()
    # Back into PostgreSQL and out of it: the same rows there.
    imported(other_db, data)
    assert exported(other_db, session_ids=["fork"]) == data
    # The rest comes later, and shares what is there.
    imported(other_db, exported(sqlite_db))
    assert entry_ids(other_db) == entry_ids(sqlite_db)


def _faults(database: CommittedDatabase) -> list[str]:
    db = store_of(database)._sessions.db
    sessions = Session.objects.using(database.alias).filter(tenant=database.tenant)
    entries = ConversationEntry.objects.using(database.alias).filter(tenant=database.tenant)
    found = [
        *faults_of_conversations(db, list(sessions.values_list("pk", flat=True))),
        *faults_of_entries(db, list(entries.values_list("pk", flat=True))),
    ]
    return [what for _, what in found]


def test_the_doctor_finds_missing_and_unreached_entries(committed_db: CommittedDatabase) -> None:
    _family_of_three(committed_db)
    conversation = async_to_sync(store_of(committed_db).load)("source")
    assert conversation is not None
    async_to_sync(store_of(committed_db).branch)("source", at=3, expected_revision=conversation.revision)
    assert _faults(committed_db) == []
    rows = ConversationEntry.objects.using(committed_db.alias).filter(tenant=committed_db.tenant)
    conversations = Conversation.objects.using(committed_db.alias).filter(tenant=committed_db.tenant)
    (left,) = conversations.get(session__session_id="source").branches
    fork = history(committed_db, "fork") or ()

    def planted(plant: Callable[[], object]) -> list[str]:
        with transaction.atomic(using=committed_db.alias):
            plant()
            found = _faults(committed_db)
            transaction.set_rollback(True, using=committed_db.alias)
        return found

    assert planted(rows.filter(entry_id=fork[-1]).delete) == [
        f"the conversation ends with the entry {fork[-1]}, which is not stored",
        "no conversation reaches the entry",
    ]
    assert planted(rows.filter(entry_id=left).delete)[0] == (
        f"the conversation ends with the entry {left}, which is not stored"
    )
    assert planted(rows.filter(entry_id=fork[2]).delete) == [
        f"the entry before it, {fork[2]}, is not stored",
    ]
    assert planted(conversations.filter(session__session_id="fork").delete) == (
        ["no conversation reaches the entry"] * 2
    )


@pytest.mark.thorough
def test_the_doctor_asks_for_these_faults(committed_db: CommittedDatabase) -> None:
    _family_of_three(committed_db)

    def found() -> list[tuple[str, int]]:
        findings = diagnose(using=committed_db.alias, tenant=committed_db.tenant).findings
        return [(finding.id, finding.count) for finding in findings]

    assert found() == []
    conversations = Conversation.objects.using(committed_db.alias).filter(tenant=committed_db.tenant)
    # Other tests look at every row.
    with transaction.atomic(using=committed_db.alias):
        conversations.filter(session__session_id="fork").delete()
        assert found() == [("app-rows-unsound", 2)]
        transaction.set_rollback(True, using=committed_db.alias)
