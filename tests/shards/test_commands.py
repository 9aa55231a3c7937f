"""Commands on several databases: one output, the worst exit code."""

from __future__ import annotations

import io
import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from django.core.management import CommandError, call_command
from django.db import connections
from django.test.utils import CaptureQueriesContext

from helix_store.cleanup import erase
from helix_store.engine.database import Database, app_aliases
from helix_store.models import Session
from helix_store.stores import DatabaseStateStore, DatabaseUsageStore
from helix_store.stores.directory import SessionDirectory
from helix_store.testing.usage.base import tokens
from tests.commands.test_help_examples import PARSERS
from tests.shards.conftest import Pair
from tests.shards.routers import PLACES


def run(*arguments: str) -> str:
    printed = io.StringIO()
    call_command(*arguments, stdout=printed, verbosity=0)
    return printed.getvalue()


def both(pair: Pair) -> list[str]:
    return [f"--database={alias}" for alias in pair.aliases]


def sessions_of(part: dict[str, Any]) -> list[str]:
    return [session["session_id"] for session in part["sessions"]]


def test_the_json_of_several_databases_is_one_object_by_their_aliases(pair: Pair) -> None:
    for number, alias in enumerate(pair.aliases):
        DatabaseStateStore(alias, tenant=pair.tenant).create_session(f"session-{number}", agent_type="agent")
    options = ("--tenant", pair.tenant, "--format", "json")
    data = json.loads(run("helix_sessions", "list", *both(pair), *options))
    assert {alias: sessions_of(part) for alias, part in data.items()} == {
        pair.first: ["session-0"],
        pair.second: ["session-1"],
    }
    alone = json.loads(run("helix_sessions", "list", f"--database={pair.second}", *options))
    assert alone == data[pair.second]


def test_a_table_names_its_database(pair: Pair) -> None:
    lines = run("helix_sessions", "list", *both(pair), "--tenant", pair.tenant).splitlines()
    assert [line for line in lines if line.startswith("database ")] == [
        f"database {alias}" for alias in pair.aliases
    ]


def test_all_databases_are_those_that_the_app_is_migrated_to(pair: Pair) -> None:
    assert set(pair.aliases) <= set(app_aliases())
    data = json.loads(
        run("helix_streams", "list", "--all-databases", "--tenant", pair.tenant, "--format=json")
    )
    assert list(data) == app_aliases()


def test_a_problem_in_one_database_does_not_keep_the_command_from_the_next(pair: Pair) -> None:
    store = DatabaseStateStore(pair.second, tenant=pair.tenant)
    store.create_session("session", agent_type="agent")
    printed = io.StringIO()
    with pytest.raises(CommandError, match=f"database {pair.first}: There is no session") as caught:
        call_command(
            *("helix_sessions", "show", "session", "--tenant", pair.tenant, "--format=json", *both(pair)),
            stdout=printed,
            verbosity=0,
        )
    assert caught.value.returncode == 1
    data = json.loads(printed.getvalue())
    assert data[pair.first] is None
    assert data[pair.second]["state"]["session_id"] == "session"


def test_a_command_with_a_tenant_asks_the_database_of_the_tenant_alone(routed: Pair) -> None:
    tenant = f"south:{routed.tenant}"
    DatabaseStateStore(tenant=tenant).create_session("session", agent_type="agent")
    connections[routed.first].ensure_connection()
    with CaptureQueriesContext(connections[routed.first]) as other:
        data = json.loads(run("helix_sessions", "list", "--tenant", tenant, "--format", "json"))
    assert sessions_of(data) == ["session"]
    assert other.captured_queries == []


def test_a_tenant_is_unknown_if_no_database_has_it(pair: Pair, capsys: pytest.CaptureFixture[str]) -> None:
    DatabaseStateStore(pair.second, tenant=pair.tenant).create_session("session", agent_type="agent")
    for command in ("helix_retention", "helix_sessions wake"):
        assert set(json.loads(run(*command.split(), *both(pair), "--tenant", pair.tenant, "--format=json")))
        assert "Nothing is stored" not in capsys.readouterr().err
        call_command(*command.split(), *both(pair), "--tenant", "nobody", stdout=io.StringIO())
        assert "'nobody' in the databases " in capsys.readouterr().err


def test_a_file_without_a_database_is_imported_where_the_router_places_its_tenants(
    routed: Pair, tmp_path: Path
) -> None:
    """The stores find what was imported, as the help of ``--database`` says."""
    tenants = {group: f"{group}:{routed.tenant}" for group in ("north", "south", "east", "west")}
    for tenant in tenants.values():
        DatabaseStateStore(routed.first, tenant=tenant).create_session("session", agent_type="agent")
        DatabaseUsageStore(routed.first, tenant=tenant).record_entry(tokens("session"))
    file = tmp_path / "all.jsonl"
    call_command("helix_export", database=routed.first, output=file, stdout=io.StringIO(), verbosity=0)
    for tenant in tenants.values():
        erase(using=routed.first, tenant=tenant)

    summary = json.loads(run("helix_import", str(file), "--format=json"))
    assert summary["is_complete"]
    assert summary["imported"]["session"] >= 4
    for group, tenant in tenants.items():
        assert Database(None, tenant).alias == PLACES[group]
        found = [Session.objects.using(alias).filter(tenant=tenant).count() for alias in routed.aliases]
        assert found == [int(alias == PLACES[group]) for alias in routed.aliases], group
        assert DatabaseUsageStore(tenant=tenant).get_entries("session")
    again = json.loads(run("helix_import", str(file), "--format=json"))
    assert (again["imported"], again["is_complete"]) == ({}, True)

    with suppress(CommandError):  # the file has the rows of other tests too
        run("helix_import", str(file), f"--database={routed.second}")
    chosen = Session.objects.using(routed.second).filter(tenant__in=tenants.values())
    assert set(chosen.values_list("tenant", flat=True)) == set(tenants.values())


def test_a_directory_prunes_in_the_database_that_it_lists(routed: Pair) -> None:
    """Rows that a tenant left behind name its sessions, which are in another database."""
    PLACES[""] = routed.first
    tenant = f"south:{routed.tenant}"
    stores = [DatabaseStateStore(alias, tenant=tenant) for alias in routed.aliases]
    for store in stores:
        state = store.create_session("session", agent_type="agent")
        for number in range(1, 4):
            step = {"step_id": f"step-{number}", "step_count": number}
            store.save_state_and_promote_staging("session", state, [], step)
    assert DatabaseStateStore(tenant=tenant).alias == routed.second
    directory = SessionDirectory()
    assert max(each.checkpoints for each in directory.prune_checkpoints(keep=1)) >= 2
    assert [store.list_checkpoints("session").total for store in stores] == [1, 3]
    assert directory.store(tenant).list_checkpoints("session").total == 1
    assert SessionDirectory(tenant=tenant).store(tenant).list_checkpoints("session").total == 3


@pytest.mark.thorough
def test_the_doctor_examines_each_database(pair: Pair) -> None:
    for alias in pair.aliases:
        DatabaseStateStore(alias, tenant=pair.tenant).create_session("session", agent_type="agent")
    Session.objects.using(pair.second).filter(tenant=pair.tenant).update(message_count=7)
    printed = io.StringIO()
    with pytest.raises(CommandError) as caught:
        call_command(
            *("helix_doctor", "--tenant", pair.tenant, "--format=json", *both(pair)),
            stdout=printed,
            verbosity=0,
        )
    assert caught.value.returncode == 1
    data = json.loads(printed.getvalue())
    assert [data[alias]["database"] for alias in pair.aliases] == list(pair.aliases)
    counted = {alias: [f for f in data[alias]["findings"] if f["table"]] for alias in pair.aliases}
    assert (counted[pair.first], len(counted[pair.second])) == ([], 1)


@pytest.mark.parametrize("command", ["helix_sessions list", "helix_streams list", "helix_doctor"])
def test_a_database_that_is_down_has_no_output_and_says_so(pair: Pair, command: str) -> None:
    DatabaseStateStore(pair.second, tenant=pair.tenant).create_session("session", agent_type="agent")
    address = {"NAME": "/nowhere/at/all"} if pair.vendor == "sqlite" else {"HOST": "/nowhere"}
    connections.settings["down"] = {**connections[pair.second].settings_dict, **address}
    printed = io.StringIO()
    options = ("--database=down", f"--database={pair.second}", "--tenant", pair.tenant, "--format=json")
    try:
        with pytest.raises(CommandError, match=r"database down: .*cannot be reached") as caught:
            call_command(*command.split(), *options, stdout=printed, verbosity=0)
    finally:
        del connections["down"]
        del connections.settings["down"]
    assert caught.value.returncode == 1
    data = json.loads(printed.getvalue())
    assert data["down"] is None
    assert data[pair.second] is not None


def test_wrong_usage_in_a_later_database_does_not_keep_the_command_from_the_next(pair: Pair) -> None:
    session_id = f"session of {pair.tenant}"
    for alias, tenant in ((pair.first, "a"), (pair.first, "b"), (pair.second, "a")):
        store = DatabaseStateStore(alias, tenant=f"{tenant} {pair.tenant}")
        store.create_session(session_id, agent_type="agent")
    # The second one, under another name.
    connections.settings["again"] = connections[pair.second].settings_dict
    aliases = ("again", pair.first, pair.second)
    printed = io.StringIO()
    options = ("--session", session_id, "--no-input", "--format=json")
    try:
        with pytest.raises(CommandError, match=f"database {pair.first}: 2 tenants have a session") as caught:
            call_command(
                *("helix_erase", *options, *(f"--database={alias}" for alias in aliases)),
                stdout=printed,
                verbosity=0,
            )
    finally:
        connections["again"].close()
        del connections["again"]
        del connections.settings["again"]
    assert caught.value.returncode == 2
    data = json.loads(printed.getvalue())
    assert {alias: part and part["trees"] for alias, part in data.items()} == {
        "again": 1,
        pair.first: None,
        pair.second: 0,
    }


def test_wrong_usage_in_the_first_database_writes_no_part_of_the_json(pair: Pair) -> None:
    session_id = f"session of {pair.tenant}"
    for tenant in ("a", "b"):
        store = DatabaseStateStore(pair.first, tenant=f"{tenant} {pair.tenant}")
        store.create_session(session_id, agent_type="agent")
    for command in (("set-status", session_id, "paused"), ("show", session_id), ("tree", session_id)):
        printed = io.StringIO()
        with pytest.raises(CommandError, match="2 tenants have a session") as caught:
            call_command("helix_sessions", *command, *both(pair), "--format=json", stdout=printed)
        assert (caught.value.returncode, printed.getvalue()) == (2, "")


@pytest.mark.parametrize("command", ["helix_export", "helix_import", "helix_usage --csv"])
def test_a_file_has_one_database(pair: Pair, command: str) -> None:
    with pytest.raises(CommandError, match="one database at a time") as caught:
        run(*command.split(), *both(pair))
    assert caught.value.returncode == 2


def test_every_command_takes_the_same_options() -> None:
    without = {
        title
        for title, parser in PARSERS.items()
        if not {"--database", "--all-databases"} <= set(parser._option_string_actions)
    }
    assert without == {"helix_move"}
