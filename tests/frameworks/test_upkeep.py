"""Sessions of Claude Agent SDK and of Strands live and go as any other session does."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
from claude_agent_sdk import SessionKey

from example_project.frameworks.strands import agent_of
from helix_store import DatabaseStateStore
from helix_store.cleanup import erase
from helix_store.contrib.claude_agent import DjangoSessionStore
from helix_store.contrib.claude_agent.models import ClaudeSession
from helix_store.contrib.strands import DjangoSessionRepository
from helix_store.core import moments
from helix_store.core.types import SessionStatus
from helix_store.core.validation import datetime_to_milliseconds
from helix_store.doctor import diagnose
from helix_store.models import Item, Session, UsageEntry
from helix_store.retention import RetentionPolicy, apply_retention
from tests.databases import CommittedDatabase, delete_all_rows
from tests.transfer.files import exported, imported, lines_of

KEY: SessionKey = {"project_key": "-srv-app" * 60, "session_id": "s1"}
SUB: SessionKey = {**KEY, "subpath": "subagents/agent-1"}
YEAR_MS = 365 * 86_400_000


@dataclass
class Framework:
    """Writes a session, reads all of it back, and says under which id it is stored."""

    fill: Callable[[CommittedDatabase, str], str]
    read: Callable[[CommittedDatabase], Any]


def _fill_claude(db: CommittedDatabase, user_id: str) -> str:
    store = DjangoSessionStore(db.alias, tenant=db.tenant, user_id=user_id)
    usage = {"input_tokens": 1, "output_tokens": 2}
    answer: Any = {
        "type": "assistant",
        "uuid": "b",
        "message": {"id": f"m-{db.tenant}", "model": "claude-opus-4-6", "usage": usage, "content": []},
    }
    prompt: Any = {"type": "user", "uuid": "a", "message": {"content": "\x00 \ud800"}, "n": [1.0, 10**400]}
    asyncio.run(store.append(KEY, [prompt, answer]))
    asyncio.run(store.append(SUB, [prompt]))
    return store.session_id_of(KEY)


def _read_claude(db: CommittedDatabase) -> Any:
    store = DjangoSessionStore(db.alias, tenant=db.tenant)
    return (
        asyncio.run(store.load(KEY)),
        asyncio.run(store.load(SUB)),
        asyncio.run(store.list_subkeys(KEY)),
        asyncio.run(store.list_session_summaries(KEY["project_key"])),
    )


def _fill_strands(db: CommittedDatabase, user_id: str) -> str:
    repository = DjangoSessionRepository(db.alias, tenant=db.tenant, user_id=user_id)
    agent_of("trip", repository)("How is the weather?")
    return repository.session_id_of("trip")


def _read_strands(db: CommittedDatabase) -> Any:
    repository = DjangoSessionRepository(db.alias, tenant=db.tenant)
    return (
        repository.read_session("trip"),
        repository.read_agent("trip", "guide"),
        repository.list_messages("trip", "guide"),
    )


CLAUDE = Framework(_fill_claude, _read_claude)
STRANDS = Framework(_fill_strands, _read_strands)
EACH = pytest.mark.parametrize("framework", [CLAUDE, STRANDS], ids=["claude", "strands"])


def rows_of(db: CommittedDatabase) -> list[int]:
    """The number of rows in each table that the frameworks write, of all tenants."""
    return [
        model._base_manager.using(db.alias).count() for model in (Session, Item, ClaudeSession, UsageEntry)
    ]


@EACH
def test_the_stores_own_deletion_leaves_no_row(framework: Framework, empty_db: CommittedDatabase) -> None:
    session_id = framework.fill(empty_db, "ada")
    assert min(rows_of(empty_db)[:2]) > 0
    DatabaseStateStore(empty_db.alias, tenant=empty_db.tenant).delete_session(session_id)
    assert rows_of(empty_db) == [0, 0, 0, 0]


@EACH
def test_retention_takes_idle_sessions_whole(framework: Framework, empty_db: CommittedDatabase) -> None:
    framework.fill(empty_db, "ada")
    policy = RetentionPolicy(sessions_idle_days=dict.fromkeys(SessionStatus, 30))
    apply_retention(using=empty_db.alias, policy=policy)
    assert rows_of(empty_db)[0] == 1
    later = datetime_to_milliseconds(moments.now()) + YEAR_MS
    apply_retention(using=empty_db.alias, policy=policy, now=later)
    # What was spent stays for the reports.
    assert rows_of(empty_db)[:3] == [0, 0, 0]


@EACH
def test_an_erased_user_leaves_no_row(framework: Framework, empty_db: CommittedDatabase) -> None:
    framework.fill(empty_db, "ada")
    receipt = erase(using=empty_db.alias, user_id="ada")
    assert receipt.complete
    assert rows_of(empty_db) == [0, 0, 0, 0]


@EACH
def test_an_erased_tenant_leaves_no_row(framework: Framework, empty_db: CommittedDatabase) -> None:
    framework.fill(empty_db, "ada")
    assert erase(using=empty_db.alias, tenant=empty_db.tenant).complete
    assert rows_of(empty_db) == [0, 0, 0, 0]


@EACH
def test_an_export_brings_all_of_it_to_the_other_database(
    framework: Framework, sqlite_db: CommittedDatabase, postgres_db: CommittedDatabase
) -> None:
    other = CommittedDatabase(alias=postgres_db.alias, tenant=sqlite_db.tenant)
    for database in (sqlite_db, other):
        delete_all_rows(database.alias)
    framework.fill(sqlite_db, "ada")
    expected, data = framework.read(sqlite_db), exported(sqlite_db)
    summary, file = imported(other, data)
    assert (summary.problems, file.problems, file.is_complete) == ([], [], True)
    assert repr(framework.read(other)) == repr(expected)
    assert exported(other) == data
    assert rows_of(other) == rows_of(sqlite_db)


def test_an_export_has_a_record_for_what_the_sdk_lists(empty_db: CommittedDatabase) -> None:
    CLAUDE.fill(empty_db, "ada")
    records = [each for each in lines_of(exported(empty_db)) if each["record"] == "claude_session"]
    assert [(each["project_key"], each["claude_session_id"]) for each in records] == [
        (KEY["project_key"], KEY["session_id"])
    ]


@EACH
def test_the_doctor_has_nothing_to_say(framework: Framework, empty_db: CommittedDatabase) -> None:
    framework.fill(empty_db, "ada")
    assert diagnose(using=empty_db.alias).findings == []


@pytest.mark.parametrize("damage", [{"tenant": "other"}, {"claude_session_id": "s2"}], ids=["tenant", "key"])
def test_the_doctor_finds_a_row_that_no_key_leads_to(
    empty_db: CommittedDatabase, damage: dict[str, str]
) -> None:
    CLAUDE.fill(empty_db, "ada")
    ClaudeSession.objects.using(empty_db.alias).update(**damage)
    assert len(diagnose(using=empty_db.alias).findings) == 1


def test_a_branch_of_a_session_of_strands_goes_on_under_its_own_id(empty_db: CommittedDatabase) -> None:
    STRANDS.fill(empty_db, "ada")
    DatabaseStateStore(empty_db.alias, tenant=empty_db.tenant).branch_session("trip", new_session_id="branch")
    repository = DjangoSessionRepository(empty_db.alias, tenant=empty_db.tenant)
    session = repository.read_session("branch")
    assert session is not None
    assert session.session_id == "branch"
    assert len(agent_of("branch", repository).messages) == 4
