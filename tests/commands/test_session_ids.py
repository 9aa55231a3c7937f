"""The start of a session's id is enough where a command takes one, as with the ids of git."""

from __future__ import annotations

import pytest

from helix_store.management.output import width_of
from helix_store.stores import DatabaseStateStore
from tests.cells import for_each
from tests.commands.running import Ended, run
from tests.databases import CommittedDatabase

FIRST, SECOND = "019aaf3c-1c02-7bd1-8a30-000000000001", "019aaf3c-2d77-7bd1-8a30-000000000002"


@pytest.fixture
def store(empty_db: CommittedDatabase) -> DatabaseStateStore:
    """Two sessions whose ids begin alike, the first one with a sub-session that is named after it."""
    store = DatabaseStateStore(empty_db.alias, tenant=empty_db.tenant)
    for session_id in (FIRST, SECOND):
        store.create_session(session_id, agent_type="travel", title=f"A trip to {session_id[-1]}")
        state = store.load_state(session_id)
        assert state is not None
        store.save_state_and_promote_staging(session_id, state, [], {"step_id": "step-1", "step_count": 1})
    store.create_session(f"{FIRST}.visa", agent_type="visa", parent_session_id=FIRST)
    return store


def sessions(store: DatabaseStateStore, *arguments: str) -> Ended:
    return run(store.alias, "helix_sessions", *arguments)


@for_each(
    "arguments",
    [
        ["helix_sessions", "show", "019aaf3c-1"],
        ["helix_sessions", "tree", "019aaf3c-1"],
        ["helix_sessions", "set-status", "019aaf3c-1", "paused"],
        ["helix_sessions", "interrupt", "019aaf3c-1"],
        ["helix_checkpoints", "list", "019aaf3c-1"],
        ["helix_checkpoints", "show", "019aaf3c-1@latest"],
        ["helix_checkpoints", "diff", "019aaf3c-1", "019aaf3c-1@current"],
        ["helix_checkpoints", "branch", "019aaf3c-1@latest~0"],
        ["helix_checkpoints", "branch", "019aaf3c-1", "--message-index", "0"],
        ["helix_checkpoints", "prune", "019aaf3c-1", "--keep", "1", "--dry-run"],
        ["helix_export", "--session", "019aaf3c-1"],
        ["helix_sessions", "list", "--parent", "019aaf3c-1"],
        ["helix_sessions", "list", "--root", "019aaf3c-1"],
    ],
    ids=" ".join,
    shared=True,
)
def test_a_command_takes_the_start_of_an_id(store: DatabaseStateStore, arguments: list[str]) -> None:
    ended = run(store.alias, *arguments, "--tenant", store.tenant, "--format", "json")
    assert ended.code == 0, ended.err
    if "prune" not in arguments:
        assert FIRST in ended.out
    assert SECOND not in ended.out


def test_the_start_of_an_id_finds_its_tenant(store: DatabaseStateStore) -> None:
    assert sessions(store, "show", "019aaf3c-2", "--format", "json").data["session_id"] == SECOND


def test_an_ambiguous_start_names_the_sessions_that_begin_with_it(store: DatabaseStateStore) -> None:
    ended = sessions(store, "show", "019aaf3c")
    assert (ended.code, ended.out) == (2, "")
    assert FIRST in ended.err
    assert SECOND in ended.err
    assert f"{FIRST}.visa" not in ended.err


def test_an_id_comes_before_the_ids_that_it_begins(store: DatabaseStateStore) -> None:
    store.create_session("trip-1", agent_type="travel")
    store.create_session("trip-10", agent_type="travel")
    assert sessions(store, "show", "trip-1", "--format", "json").data["session_id"] == "trip-1"


@for_each("text", ["019", "019AAF3C-1", "019aaf3c-1_02", "%", "019aaf3c-3"], shared=True)
def test_what_no_id_begins_with_is_not_found(store: DatabaseStateStore, text: str) -> None:
    ended = sessions(store, "show", text)
    assert (ended.code, ended.out) == (1, "")
    assert text in ended.err


def test_a_deletion_that_does_not_ask_takes_whole_ids_only(store: DatabaseStateStore) -> None:
    """A script that is repeated must not delete trip-10 when trip-1 is gone."""
    store.create_session("trip-10", agent_type="travel")
    restore = run(store.alias, "helix_checkpoints", "restore", "019aaf3c-2@latest", "--no-input")
    for ended in (sessions(store, "delete", "trip-1", "--no-input"), restore):
        assert (ended.code, ended.out) == (1, "")
    assert store.session_exists("trip-10")
    assert sessions(store, "delete", "trip-10", "--no-input").code == 0


def test_a_list_shows_enough_of_an_id_to_name_its_session(
    store: DatabaseStateStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    listed = sessions(store, "list", "--tenant", store.tenant, "--roots")
    headings, *rows = listed.lines
    assert max(map(width_of, listed.lines)) <= 80
    assert headings.split()[:2] == ["title", "session"]
    at = headings.index("session")
    shown = [row[at:].split()[0].rstrip("…") for row in rows]
    found = [sessions(store, "show", start, "--format", "json").data["session_id"] for start in shown]
    assert found == [SECOND, FIRST]
