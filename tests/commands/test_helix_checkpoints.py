"""``helix_checkpoints``: lists, differences and changes, on every database."""

from __future__ import annotations

import io
import signal
import sys
from datetime import timedelta
from typing import Any

import pytest
from django.db import connections
from django.test.utils import CaptureQueriesContext

from helix_store.core import moments
from helix_store.management.output import ProgressBar, width_of
from helix_store.models import Checkpoint, Session
from helix_store.stores import DatabaseStateStore
from helix_store.stores.directory import SessionDirectory
from tests.cells import for_each
from tests.commands.running import Ended, read_by_a_program, run
from tests.commands.sample import SAMPLE_ID, write_sample
from tests.databases import CommittedDatabase
from tests.invariants import broken_invariants


@pytest.fixture
def sample(empty_db: CommittedDatabase) -> CommittedDatabase:
    write_sample(empty_db.alias, tenant=empty_db.tenant)
    return empty_db


def checkpoints(database: CommittedDatabase, *arguments: str, **options: Any) -> Ended:
    return run(database.alias, "helix_checkpoints", *arguments, **options)


def store_of(database: CommittedDatabase) -> DatabaseStateStore:
    return DatabaseStateStore(database.alias, tenant=database.tenant)


def ids_of(database: CommittedDatabase, session_id: str = SAMPLE_ID) -> list[str]:
    """The checkpoint ids of a session, newest first."""
    return [item.checkpoint_id for item in store_of(database).list_checkpoints(session_id).items]


def write_steps(database: CommittedDatabase, session_id: str, count: int) -> None:
    store = store_of(database)
    state = store.create_session(session_id, agent_type="agent")
    for number in range(1, count + 1):
        state.custom_state = {"step": number}
        step = {"step_id": f"step-{number}", "step_count": number}
        store.save_state_and_promote_staging(session_id, state, [], step)


def test_a_list_is_newest_first_and_fits(sample: CommittedDatabase, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    lines = checkpoints(sample, "list", SAMPLE_ID).lines
    assert [line.split()[1] for line in lines] == ["step", "step-3", "step-2", "step-1"]
    assert max(map(width_of, lines)) <= 80
    assert ids_of(sample)[0] in checkpoints(sample, "list", SAMPLE_ID, "--wide").out


def test_steps_of_one_moment_keep_their_order_in_each_tenant(empty_db: CommittedDatabase) -> None:
    tenants = ("a", "b")
    for count, tenant in enumerate(tenants, 2):
        write_steps(CommittedDatabase(alias=empty_db.alias, tenant=tenant), "same", count)
    Checkpoint.objects.using(empty_db.alias).update(created_at=moments.now())
    for count, tenant in enumerate(tenants, 2):
        found: list[str] = []
        cursor: list[str] = []
        while True:
            arguments = ["list", "same", "--tenant", tenant, "--limit", "1", "--format", "json", *cursor]
            page = checkpoints(empty_db, *arguments).data
            found += [item["step_id"] for item in page["items"]]
            if page["next_cursor"] is None:
                break
            cursor = ["--cursor", page["next_cursor"]]
        assert found == [f"step-{number}" for number in range(count, 0, -1)]
        positions = ["same@latest~1", "same@latest"]
        difference = checkpoints(empty_db, "diff", *positions, "--tenant", tenant, "--format", "json").data
        assert (difference["a"]["step_count"], difference["b"]["step_count"]) == (count - 1, count)
        assert {difference[name]["tenant"] for name in ("a", "b")} == {tenant}
    assert checkpoints(empty_db, "list", "same").code == 2
    assert checkpoints(empty_db, "diff", "same@latest~1", "same").code == 2


def test_the_json_of_a_list_continues(sample: CommittedDatabase) -> None:
    arguments = ["list", SAMPLE_ID, "--format", "json", "--limit", "2"]
    data = read_by_a_program(checkpoints(sample, *arguments).out)
    assert data.keys() == {"tenant", "session_id", "items", "next_cursor", "total"}
    assert data["items"][0].keys() == {
        "checkpoint_id",
        "session_id",
        "run_id",
        "step_id",
        "step_count",
        "status",
        "message_count",
        "stream_sequence",
        "created_at",
    }
    rest = checkpoints(sample, *arguments, "--cursor", data["next_cursor"]).data
    assert [each["checkpoint_id"] for each in data["items"] + rest["items"]] == ids_of(sample)
    assert (data["total"], rest["next_cursor"]) == (3, None)
    assert checkpoints(sample, "list", SAMPLE_ID, "--cursor", "forged").code == 2


@for_each(
    ("form", "position"),
    [
        ("{id}", 1),
        (f"{SAMPLE_ID}@latest~1", 1),
        (f"{SAMPLE_ID}@latest", 0),
        (SAMPLE_ID, 0),
        (f"{SAMPLE_ID}@step-2", 1),
        (f"{SAMPLE_ID}@step-1", 2),
    ],
    shared=True,
)
def test_a_checkpoint_has_several_names(form: str, position: int, sample: CommittedDatabase) -> None:
    ids = ids_of(sample)
    named = form.replace("{id}", ids[position])
    data = read_by_a_program(checkpoints(sample, "show", named, "--format", "json").out)
    assert data["checkpoint_id"] == ids[position]
    assert data["state"]["custom_state"]["step"] == 3 - position
    assert data["tenant"] == sample.tenant


def test_far_checkpoints_are_found(empty_db: CommittedDatabase) -> None:
    write_steps(empty_db, "long", 205)
    data = checkpoints(empty_db, "show", "long@latest~203", "--format", "json").data
    assert data["step_id"] == "step-2"
    assert checkpoints(empty_db, "show", "long@latest~205").code == 1
    of_step = checkpoints(empty_db, "show", "long@step-57", "--format", "json").data
    assert (of_step["step_id"], of_step["state"]["custom_state"]) == ("step-57", {"step": 57})


def test_a_step_that_was_pruned_has_no_checkpoint(sample: CommittedDatabase) -> None:
    store_of(sample).prune_checkpoints(SAMPLE_ID, keep=1)
    ended = checkpoints(sample, "show", f"{SAMPLE_ID}@step-1")
    assert (ended.code, ended.out) == (1, "")
    assert f"{SAMPLE_ID}@step-1: the step was not committed, or it was pruned" in ended.err


def test_a_checkpoint_is_shown_with_its_state(sample: CommittedDatabase) -> None:
    state = store_of(sample).load_state(SAMPLE_ID)
    assert state is not None
    state.tracing_context = {"api_key": "secret-7"}
    step = {"step_id": "step-4", "step_count": 4}
    store_of(sample).save_state_and_promote_staging(SAMPLE_ID, state, [], step)
    text = checkpoints(sample, "show", SAMPLE_ID).out
    assert '"flights": [' in text
    assert "step        step-4, 4 steps" in text
    # What may be a secret is in no table.
    assert "secret-7" not in text
    assert "secret-7" not in checkpoints(sample, "diff", f"{SAMPLE_ID}@latest~1", SAMPLE_ID).out


@for_each(
    "name",
    ["x@latest", "x", "cpv1-x-s1-t1-abcdef", f"{SAMPLE_ID}@latest~3", f"{SAMPLE_ID}@step-4"],
    shared=True,
)
def test_an_unknown_checkpoint_is_a_problem(name: str, sample: CommittedDatabase) -> None:
    for command in (["show"], ["restore", "--no-input"], ["branch"]):
        ended = checkpoints(sample, command[0], name, *command[1:])
        assert (ended.code, ended.out) == (1, "")


def test_another_sessions_checkpoint_is_unknown(sample: CommittedDatabase) -> None:
    missing = f"cpv1-{SAMPLE_ID}-s1-t1-abcdef"
    assert checkpoints(sample, "show", missing).code == 1


def test_a_difference_can_be_read(sample: CommittedDatabase) -> None:
    lines = checkpoints(sample, "diff", f"{SAMPLE_ID}@latest~1", f"{SAMPLE_ID}@latest").lines
    newest, before, _ = ids_of(sample)
    assert lines[0].startswith(f"--- {before}  4 messages, ")
    assert lines[1].startswith(f"+++ {newest}  5 messages, ")
    assert [line for line in lines[2:] if line[0] in "+-"] == [
        '-    "step": 2',
        '+    "step": 3',
        '-  "step_count": 2,',
        '+  "step_count": 3,',
    ]
    assert len(checkpoints(sample, "diff", SAMPLE_ID, SAMPLE_ID).lines) == 2


def test_a_difference_is_coloured_on_a_terminal(sample: CommittedDatabase) -> None:
    arguments = ["diff", f"{SAMPLE_ID}@latest~1", f"{SAMPLE_ID}@latest"]
    assert "\x1b[" not in checkpoints(sample, *arguments).out
    coloured = checkpoints(sample, *arguments, "--force-color").out
    assert '\x1b[31m-    "step": 2\x1b[0m' in coloured
    assert '\x1b[32m+    "step": 3\x1b[0m' in coloured


def test_the_json_of_a_difference_has_each_change(sample: CommittedDatabase) -> None:
    arguments = ["diff", f"{SAMPLE_ID}@latest~2", f"{SAMPLE_ID}@current", "--format", "json"]
    data = read_by_a_program(checkpoints(sample, *arguments).out)
    assert data.keys() == {"a", "b", "changes"}
    keys = {"tenant", "session_id", "checkpoint_id", "step_count", "message_count", "created_at"}
    assert data["a"].keys() == data["b"].keys() == keys
    assert (data["a"]["step_count"], data["b"]["checkpoint_id"]) == (1, None)
    changes = {change["path"]: change for change in data["changes"]}
    assert changes["/custom_state/step"] == {
        "op": "replace",
        "path": "/custom_state/step",
        "before": 1,
        "after": 3,
    }
    assert changes["/custom_state/flights/0"] == {
        "op": "add",
        "path": "/custom_state/flights/0",
        "after": "JL 5",
    }
    assert changes["/pending_client_tool_calls/call-3"]["op"] == "add"


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    reader = io.StringIO()
    monkeypatch.setattr(sys, "stdin", reader)
    return reader


@pytest.mark.parametrize(("typed", "code"), [("no\n", 1), ("", 2)])
def test_nothing_is_restored_without_a_yes(
    typed: str, code: int, sample: CommittedDatabase, answers: io.StringIO
) -> None:
    answers.write(typed)
    answers.seek(0)
    ended = checkpoints(sample, "restore", f"{SAMPLE_ID}@latest~1")
    assert (ended.code, ended.out) == (code, "")
    assert "1 of 5 messages" in ended.err
    assert len(ids_of(sample)) == 3


def test_a_session_is_rewound(sample: CommittedDatabase) -> None:
    before = store_of(sample).load_state(SAMPLE_ID)
    assert before is not None
    target = ids_of(sample)[1]
    arguments = ["restore", target, "--no-input", "--format", "json"]
    assert checkpoints(sample, *arguments, "--expected-version", "1").code == 1
    assert len(ids_of(sample)) == 3
    data = read_by_a_program(checkpoints(sample, *arguments, "--expected-version", str(before.version)).out)
    assert data == {
        "tenant": sample.tenant,
        "session_id": SAMPLE_ID,
        "checkpoint_id": target,
        "version": before.version + 1,
        "message_count": 4,
    }
    state = store_of(sample).load_state(SAMPLE_ID)
    assert state is not None
    assert (state.custom_state["step"], state.message_count) == (2, 4)


def test_a_branch_starts_from_a_checkpoint_or_a_message(sample: CommittedDatabase) -> None:
    arguments = ["branch", f"{SAMPLE_ID}@latest~1", "--new-id", "again", "--title", "Again"]
    data = read_by_a_program(checkpoints(sample, *arguments, "--format", "json").out)
    assert data == {
        "tenant": sample.tenant,
        "session_id": "again",
        "branched_from": SAMPLE_ID,
        "checkpoint_id": ids_of(sample)[1],
        "message_count": 4,
    }
    state = store_of(sample).load_state("again")
    assert state is not None
    assert (state.title, state.custom_state["step"]) == ("Again", 2)
    assert checkpoints(sample, *arguments).code == 1
    early = checkpoints(sample, "branch", SAMPLE_ID, "--message-index", "1", "--format", "json").data
    assert (early["message_count"], early["checkpoint_id"]) == (1, None)
    assert checkpoints(sample, "branch", SAMPLE_ID, "--message-index", "99").code == 2
    assert checkpoints(sample, "branch", SAMPLE_ID, "--new-id", "\x00").code == 2


# --- prune


def test_a_prune_keeps_the_newest_of_each_session(empty_db: CommittedDatabase) -> None:
    for number in range(3):
        write_steps(empty_db, f"session-{number}", 4 + number)
    other = CommittedDatabase(alias=empty_db.alias, tenant="other")
    write_steps(other, "session-0", 5)
    arguments = ["prune", "--keep", "4", "--format", "json"]
    assert checkpoints(empty_db, *arguments, "--dry-run").data == {
        "sessions": 3,
        "checkpoints": 4,
        "dry_run": True,
    }
    assert len(ids_of(other, "session-0")) == 5
    data = read_by_a_program(checkpoints(empty_db, *arguments, "--tenant", empty_db.tenant).out)
    assert data == {"sessions": 2, "checkpoints": 3, "dry_run": False}
    assert len(ids_of(other, "session-0")) == 5
    assert checkpoints(empty_db, *arguments).data == {"sessions": 1, "checkpoints": 1, "dry_run": False}
    assert checkpoints(empty_db, *arguments).data["checkpoints"] == 0
    for number in range(3):
        steps = [item.step_count for item in store_of(empty_db).list_checkpoints(f"session-{number}").items]
        assert steps == [4 + number - back for back in range(4)]
        state = store_of(empty_db).load_state(f"session-{number}")
        assert state is not None
        assert state.custom_state == {"step": 4 + number}


def test_a_prune_of_one_session_leaves_the_others(empty_db: CommittedDatabase) -> None:
    write_steps(empty_db, "one", 3)
    write_steps(empty_db, "two", 3)
    arguments = ["prune", "one", "--keep", "0", "--format", "json"]
    assert checkpoints(empty_db, *arguments).data["checkpoints"] == 3
    assert (len(ids_of(empty_db, "one")), len(ids_of(empty_db, "two"))) == (0, 3)
    state = store_of(empty_db).load_state("one")
    assert state is not None
    assert state.custom_state == {"step": 3}
    assert checkpoints(empty_db, "prune", "three", "--keep", "0").code == 1


def test_a_prune_by_age_takes_no_newer_checkpoint(empty_db: CommittedDatabase) -> None:
    write_steps(empty_db, "session", 5)
    old = Checkpoint.objects.using(empty_db.alias).filter(step_count__lte=3)
    old.update(created_at=moments.now() - timedelta(days=8))
    yesterday = (moments.now() - timedelta(days=1)).date().isoformat()
    for older_than, expected in (("7", 3), ("7d", 3), ("2w", 0), (yesterday, 3), ("2020-01-01", 0)):
        arguments = ["prune", "--older-than", older_than, "--format", "json", "--keep"]
        assert checkpoints(empty_db, *arguments, "0", "--dry-run").data["checkpoints"] == expected
    arguments = ["prune", "--older-than", "7", "--format", "json", "--keep"]
    assert checkpoints(empty_db, *arguments, "4", "--dry-run").data["checkpoints"] == 1
    assert checkpoints(empty_db, *arguments, "4").data["checkpoints"] == 1
    assert checkpoints(empty_db, *arguments, "0").data["checkpoints"] == 2
    assert checkpoints(empty_db, *arguments, "0").data == {
        "sessions": 0,
        "checkpoints": 0,
        "dry_run": False,
    }
    items = store_of(empty_db).list_checkpoints("session").items
    assert [item.step_count for item in items] == [5, 4]
    assert all(store_of(empty_db).get_checkpoint("session", item.checkpoint_id) for item in items)


def test_a_prune_reads_pages_and_stops_between_sessions(empty_db: CommittedDatabase) -> None:
    for number in range(5):
        write_steps(empty_db, f"session-{number}", 2)
    directory = SessionDirectory(empty_db.alias)
    sums = directory.prune_checkpoints(keep=1, page_size=2)
    assert [next(sums).sessions, next(sums).sessions, next(sums).sessions] == [1, 2, 3]
    del sums
    left = Checkpoint.objects.using(empty_db.alias).filter(kind="step").count()
    assert left == 7
    assert [each.checkpoints for each in directory.prune_checkpoints(keep=1, page_size=2)] == [1, 2]


def test_a_session_deleted_meanwhile_is_passed_over(empty_db: CommittedDatabase) -> None:
    for number in range(3):
        write_steps(empty_db, f"session-{number}", 2)
    sums = SessionDirectory(empty_db.alias).prune_checkpoints(keep=1)
    next(sums)
    second = Session.objects.using(empty_db.alias).order_by("pk")[1]
    store_of(empty_db).delete_session(second.session_id)
    assert [each.sessions for each in sums] == [1, 2]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda number: number.name)
def test_a_signal_stops_a_prune_after_the_session(
    number: signal.Signals, empty_db: CommittedDatabase, monkeypatch: pytest.MonkeyPatch
) -> None:
    for each in range(4):
        write_steps(empty_db, f"session-{each}", 3)
    update = ProgressBar.update

    def signal_after_two(bar: ProgressBar, done: int) -> None:
        update(bar, done)
        if bar.done == 2:
            signal.raise_signal(number)

    monkeypatch.setattr(ProgressBar, "update", signal_after_two)
    ended = checkpoints(empty_db, "prune", "--keep", "1", "--format", "json")
    assert (ended.code, ended.data) == (0, {"sessions": 2, "checkpoints": 4, "dry_run": False})
    assert "Stopped after 2 sessions; run it again to continue." in ended.err
    assert broken_invariants(empty_db) == []
    monkeypatch.undo()
    again = checkpoints(empty_db, "prune", "--keep", "1", "--format", "json")
    assert again.data == {"sessions": 2, "checkpoints": 4, "dry_run": False}


def test_the_statements_of_a_prune_do_not_grow_with_the_sessions_that_stay(
    empty_db: CommittedDatabase,
) -> None:
    for number in range(5):
        write_steps(empty_db, f"session-{number}", 2)
    with CaptureQueriesContext(connections[empty_db.alias]) as queries:
        checkpoints(empty_db, "prune", "--keep", "2")
    assert len(queries) == 1


@for_each(
    "arguments",
    [
        ["prune"],
        ["prune", "--keep", "-1"],
        ["prune", "--keep", "1", "--older-than", "999999999"],
        ["prune", "--keep", "1", "--older-than", "36526"],
        ["prune", "--keep", "1", "--older-than", "-1"],
        ["prune", "--keep", "1", "--older-than", "soon"],
        ["show", f"{SAMPLE_ID}@current"],
        ["diff", SAMPLE_ID],
        ["list", SAMPLE_ID, "--limit", "0"],
        ["restore"],
        ["branch", SAMPLE_ID, "--message-index", "-1"],
    ],
    ids=" ".join,
    shared=True,
)
def test_wrong_usage_changes_nothing(arguments: list[str], sample: CommittedDatabase) -> None:
    ended = checkpoints(sample, *arguments)
    assert ended.code in (1, 2)
    assert (ended.out, bool(ended.err)) == ("", True)
    assert len(ids_of(sample)) == 3


SHADOWS = ("{}@latest", "{}@latest~1", "{}@step-1", "cpv1-{}-s1-t1-abcdef")
"""Ids of sessions that could also name a checkpoint of another session."""


@pytest.mark.thorough
def test_a_session_whose_id_looks_like_a_position_is_found_first(sample: CommittedDatabase) -> None:
    long = "s" * 255
    for each in ("alone@current", *(form.format("alone") for form in SHADOWS), long):
        write_steps(sample, each, 2)
        for name, step in ((each, 2), (f"{each}@latest", 2), (f"{each}@latest~1", 1), (f"{each}@step-1", 1)):
            found = checkpoints(sample, "show", name, "--format", "json").data["state"]
            assert (found["session_id"], found["step_count"]) == (each, step), name
        current = checkpoints(sample, "diff", each, f"{each}@current", "--format", "json").data
        assert current["b"]["session_id"] == each
        assert checkpoints(sample, "restore", f"{each}@latest~1", "--no-input").code == 0
        assert len(ids_of(sample, each)) == 1


def test_a_name_of_two_checkpoints_is_wrong_usage(sample: CommittedDatabase) -> None:
    for each in (form.format(SAMPLE_ID) for form in SHADOWS):
        write_steps(sample, each, 2)
        for command in (["show"], ["restore", "--no-input"], ["branch"], ["diff", SAMPLE_ID]):
            ended = checkpoints(sample, command[0], *command[1:], each)
            assert (ended.code, ended.out) == (2, ""), (command, each)
            assert f"'{each}' is the id of a session, and names a checkpoint of the session" in ended.err
            assert f"{each}@latest" in ended.err
        assert checkpoints(sample, "show", f"{each}@latest").code == 0
        assert (len(ids_of(sample)), len(ids_of(sample, each))) == (3, 2)


def test_an_id_of_several_tenants_needs_the_tenant(sample: CommittedDatabase) -> None:
    write_sample(sample.alias, tenant="other")
    for arguments in (
        ["list", SAMPLE_ID],
        ["show", SAMPLE_ID],
        ["diff", SAMPLE_ID, SAMPLE_ID],
        ["restore", SAMPLE_ID, "--no-input"],
        ["branch", SAMPLE_ID],
        ["prune", SAMPLE_ID, "--keep", "1"],
    ):
        ended = checkpoints(sample, *arguments)
        assert (ended.code, ended.out) == (2, "")
        assert "Give --tenant." in ended.err
