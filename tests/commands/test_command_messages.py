"""Messages of commands name what was typed, and say of an unknown cost that it is unknown."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from helix_store.stores import DatabaseStateStore, DatabaseUsageStore
from tests.cells import for_each
from tests.commands.running import run
from tests.databases import CommittedDatabase


@pytest.fixture
def store(empty_db: CommittedDatabase) -> DatabaseStateStore:
    store = DatabaseStateStore(empty_db.alias, tenant=empty_db.tenant)
    store.create_session("journey", agent_type="travel")
    state = store.load_state("journey")
    assert state is not None
    store.save_state_and_promote_staging("journey", state, [], {"step_id": "step-1", "step_count": 1})
    return store


def spend(store: DatabaseStateStore, entry_id: str, **fields: Any) -> None:
    entry = {
        "id": entry_id,
        "kind": "tokens",
        "session_id": "journey",
        "step_count": 1,
        "timestamp": 1_795_347_748_089,
        "source": {"type": "agent", "name": "travel"},
        "model": "in-house",
        "tokens": {"prompt": 100, "total": 100},
        **fields,
    }
    DatabaseUsageStore(store.alias, tenant=store.tenant).record_entry(entry)


def cost_shown(store: DatabaseStateStore) -> str:
    lines = run(store.alias, "helix_sessions", "show", "journey", "--wide").lines
    (line,) = (line for line in lines if line.startswith("cost "))
    return line.removeprefix("cost").strip()


def test_an_unknown_checkpoint_is_named_as_it_was_given(store: DatabaseStateStore) -> None:
    ended = run(store.alias, "helix_checkpoints", "restore", "journey@latest~500", "--no-input")
    assert (ended.code, ended.out) == (1, "")
    assert ended.err == "There is no checkpoint journey@latest~500. Checkpoints of the session: 1."


def test_an_erasure_of_nothing_names_the_options(store: DatabaseStateStore) -> None:
    ended = run(store.alias, "helix_erase", "--no-input")
    assert (ended.code, ended.out) == (2, "")
    assert ended.err == "Pass --user, --session or --tenant."


@pytest.mark.thorough
def test_work_for_an_unknown_tenant_says_so(store: DatabaseStateStore) -> None:
    for command in (
        "helix_doctor",
        "helix_retention",
        "helix_sessions wake",
        "helix_checkpoints prune --keep 1",
        "helix_streams prune",
    ):
        for tenant in ("nobody", store.tenant):
            ended = run(store.alias, *command.split(), "--tenant", tenant, "--format", "json")
            said = f"Nothing is stored for the tenant '{tenant}' in the database {store.alias!r}."
            is_known = tenant == store.tenant
            assert (ended.code, said in ended.err) == (0, not is_known), command
            assert isinstance(ended.data, dict)


def test_a_cost_that_is_not_known_is_not_zero(store: DatabaseStateStore) -> None:
    spend(store, "free", cost_usd="0")
    assert cost_shown(store) == "$0"
    spend(store, "unpriced")
    assert cost_shown(store) == "unknown: token entries without a known cost: 1"
    by_model = run(store.alias, "helix_usage", "--by", "model").lines
    by_day = run(store.alias, "helix_usage", "--by", "day").lines
    assert [line.split()[1] for line in by_model[1:3]] == ["unknown", "unknown"]
    assert [line.split()[1] for line in by_day[1:3]] == ["unknown", "unknown"]
    spend(store, "priced", cost_usd="0.25")
    assert cost_shown(store) == "$0.25, token entries without a known cost: 1"
    assert run(store.alias, "helix_usage", "--by", "model").lines[1].split()[1] == "0.25"


@pytest.mark.thorough
@for_each(
    ("arguments", "code"),
    [
        (["cleanup_expired_sessions"], 1),
        (["helix_export"], 1),
        (["helix_import", "no-such-file"], 2),
    ],
)
def test_a_process_on_an_empty_database_has_the_exit_code_and_no_traceback(
    tmp_path: Path, arguments: list[str], code: int
) -> None:
    environment = {**os.environ, "DATABASE_URL": f"sqlite:///{tmp_path / 'empty.sqlite3'}"}
    environment["DJANGO_SETTINGS_MODULE"] = "example_project.settings"
    command = [sys.executable, "manage.py", *arguments]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout) == (code, "")
    assert ended.stderr
    assert "Traceback" not in ended.stderr
