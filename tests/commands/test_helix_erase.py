"""``helix_erase``: it asks, prints a receipt without what was erased, and has honest exit codes."""

from __future__ import annotations

import io
import json
import os
import shutil
import signal
import subprocess
import sys
from io import StringIO
from typing import Any

import pytest
from django.core.management import CommandError, call_command
from django.db import connections

from helix_store.cleanup import ErasureReceipt, erase
from helix_store.models import Session
from helix_store.stores import DatabaseLockManager, DatabaseStateStore
from tests.cells import for_each
from tests.databases import CommittedDatabase


@pytest.fixture
def store(empty_db: CommittedDatabase) -> DatabaseStateStore:
    store = DatabaseStateStore(empty_db.alias, tenant=empty_db.tenant)
    for number in range(3):
        store.create_session(f"secret-{number}", agent_type="agent", user_id="ada-lovelace")
    store.create_session("other", agent_type="agent", user_id="bob")
    return store


def run(store: DatabaseStateStore, *arguments: str, **options: Any) -> tuple[str, str]:
    out, err = StringIO(), StringIO()
    call_command("helix_erase", *arguments, database=store.alias, stdout=out, stderr=err, **options)
    return out.getvalue(), err.getvalue()


def left(store: DatabaseStateStore) -> int:
    return store.list_sessions().total or 0


def answer(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(text))


def test_it_asks_and_says_what_it_would_erase(
    store: DatabaseStateStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    for text, code in (("", 2), ("no\n", 1), ("y\n", 1)):
        answer(monkeypatch, text)
        with pytest.raises(CommandError, match="othing was changed") as caught:
            run(store, "--user", "ada-lovelace")
        assert caught.value.returncode == code
        assert left(store) == 4
    answer(monkeypatch, "yes\n")
    out, err = run(store, "--user", "ada-lovelace", "--format", "json")
    assert "erases 3 session trees, 6 rows in all, of the user 'ada-lovelace'" in err
    assert json.loads(out)["complete"]
    assert left(store) == 1


def test_it_is_confirmed_like_every_other_deletion(
    store: DatabaseStateStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer(monkeypatch, "")
    run(store, "--session", "secret-0", "--no-input")
    run(store, "--session", "secret-1", "--noinput")
    run(store, session="secret-2", interactive=False)
    assert left(store) == 1
    with pytest.raises(CommandError, match="no answer on stdin"):
        run(store, session="other")
    with pytest.raises(CommandError, match="interactive: expected True or False, got 'no'"):
        run(store, session="other", interactive="no")
    run(store, session="other", no_input=True)
    assert left(store) == 0
    store.create_session("another", agent_type="agent")
    run(store, session="another", noinput=True)
    assert left(store) == 0


def test_the_receipt_can_be_stored_and_has_nothing_that_was_erased(store: DatabaseStateStore) -> None:
    out, _ = run(store, "--user", "ada-lovelace", "--no-input", "--format", "json", "--tenant", store.tenant)
    receipt = ErasureReceipt.from_dict(json.loads(out))
    assert receipt.deleted == {"checkpoint": 3, "session": 3}
    assert receipt.complete
    assert "ada-lovelace" not in out
    assert "secret" not in out
    assert store.tenant not in out
    assert set(json.loads(out)) == {
        *("subject", "subject_sha256", "tenant_sha256", "dry_run", "started_at", "finished_at", "complete"),
        *("deleted", "changed", "trees", "branches", "snapshots_deleted", "sessions_left", "locks_left"),
        "errors",
    }
    jq = shutil.which("jq")
    reader = [jq, ".deleted"] if jq else [sys.executable, "-m", "json.tool"]
    subprocess.run(reader, input=out, text=True, check=True, stdout=subprocess.DEVNULL)


def test_a_dry_run_does_not_ask_and_changes_nothing(store: DatabaseStateStore) -> None:
    said = json.loads(run(store, "--user", "ada-lovelace", "--dry-run", "--format", "json")[0])
    assert (said["trees"], said["complete"], left(store)) == (3, False, 4)


@pytest.mark.parametrize("extra", [[], ["--dry-run"], ["--no-input"], ["--no-input", "--format", "json"]])
@pytest.mark.parametrize(
    "subject",
    [
        ["--user", "ada-lovelase"],
        ["--user", "ada-lovelace", "--tenant", "elsewhere"],
        ["--session", "secret-9"],
        ["--tenant", "elsewhere"],
    ],
    ids=["user", "user of a tenant", "session", "tenant"],
)
def test_erasing_nobody_is_said_and_is_exit_code_1(
    store: DatabaseStateStore, subject: list[str], extra: list[str]
) -> None:
    out, err = StringIO(), StringIO()
    with pytest.raises(
        CommandError, match=r"^Nothing is stored for the .*\. Nothing was erased\.$"
    ) as caught:
        call_command("helix_erase", *subject, *extra, database=store.alias, stdout=out, stderr=err)
    assert caught.value.returncode == 1
    assert repr(subject[1]) in str(caught.value)
    assert out.getvalue() == ""
    assert left(store) == 4


def test_a_repeated_erasure_has_nobody_to_erase(store: DatabaseStateStore) -> None:
    run(store, "--user", "ada-lovelace", "--no-input")
    with pytest.raises(CommandError, match="Nothing is stored for the user 'ada-lovelace'"):
        run(store, "--user", "ada-lovelace", "--no-input")
    assert erase(using=store.alias, user_id="ada-lovelace").is_empty
    assert not erase(using=store.alias, user_id="bob").is_empty


def test_a_table(store: DatabaseStateStore) -> None:
    lines = [line.split() for line in run(store, "--session", "secret-1", "--no-input")[0].splitlines()]
    assert lines[:4] == [
        ["table", "change", "rows"],
        ["checkpoint", "deleted", "1"],
        ["session", "deleted", "1"],
        [],
    ]
    assert ["trees", "1"] in lines
    assert ["complete", "yes"] in lines
    assert left(store) == 3


def test_a_tenant(store: DatabaseStateStore) -> None:
    DatabaseStateStore(store.alias, tenant="other").create_session("stays", agent_type="agent")
    run(store, "--tenant", store.tenant, "--no-input")
    assert list(Session.objects.using(store.alias).values_list("tenant", flat=True)) == ["other"]


def test_a_session_in_use_is_named_and_is_exit_code_1(store: DatabaseStateStore) -> None:
    assert DatabaseLockManager(store.alias, tenant=store.tenant).acquire("secret-1")
    err = StringIO()
    with pytest.raises(CommandError, match="not complete") as caught:
        call_command(
            "helix_erase",
            user="ada-lovelace",
            no_input=True,
            database=store.alias,
            stdout=StringIO(),
            stderr=err,
        )
    assert caught.value.returncode == 1
    assert f"Left session secret-1 of tenant {store.tenant}: it is in use." in err.getvalue()
    assert left(store) == 2
    run(store, "--user", "ada-lovelace", "--no-input", "--force")
    assert left(store) == 1


@for_each("options", [{}, {"user": ""}, {"user": "a\x00"}, {"user": "a", "session": "b"}], shared=True)
def test_wrong_usage_is_exit_code_2(store: DatabaseStateStore, options: Any) -> None:
    with pytest.raises(CommandError) as caught:
        run(store, no_input=True, **options)
    assert caught.value.returncode == 2


def test_a_session_id_of_two_tenants_is_exit_code_2(store: DatabaseStateStore) -> None:
    DatabaseStateStore(store.alias, tenant="other").create_session("secret-1", agent_type="agent")
    with pytest.raises(CommandError, match="pass the tenant") as caught:
        run(store, "--session", "secret-1", "--no-input")
    assert caught.value.returncode == 2


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_stops_it_after_the_tree(store: DatabaseStateStore, number: signal.Signals) -> None:
    sent: list[str] = []

    def signalling(execute: Any, sql: str, params: Any, many: bool, context: Any) -> Any:
        """Sends the signal in the middle of the first transaction."""
        if not sent and f'DELETE FROM "{Session._meta.db_table}"' in sql:
            sent.append(sql)
            os.kill(os.getpid(), number)
        return execute(sql, params, many, context)

    err = StringIO()
    with (
        connections[store.alias].execute_wrapper(signalling),
        pytest.raises(CommandError, match="not complete"),
    ):
        call_command(
            "helix_erase",
            user="ada-lovelace",
            no_input=True,
            database=store.alias,
            stdout=StringIO(),
            stderr=err,
        )
    assert "Stopped after 1 session trees; run it again" in err.getvalue()
    assert left(store) == 3
    run(store, "--user", "ada-lovelace", "--no-input")
    assert left(store) == 1
