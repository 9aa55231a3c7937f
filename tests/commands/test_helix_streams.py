"""``helix_streams list`` and ``prune``: across tenants, page by page, and in a pipe."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from django.core.management import CommandError
from django.db import connections

from helix_store.management.output import width_of
from helix_store.models import Stream, StreamChunk
from helix_store.streams.database import list_streams
from tests.cells import for_each
from tests.commands.streams import run, write
from tests.databases import CommittedDatabase


@pytest.fixture
def streams(empty_db: CommittedDatabase, monkeypatch: pytest.MonkeyPatch) -> str:
    """The alias of a database with five streams, the last one of another tenant."""
    monkeypatch.setenv("COLUMNS", "80")
    alias = empty_db.alias
    write(alias, "over", 3)
    write(alias, "broken", 2, end="fail")
    write(alias, "open", 1, end=None)
    write(alias, "lost", 1, end=None)
    Stream.objects.using(alias).filter(stream_id="lost").update(
        lease_expires_at=datetime.now(UTC) - timedelta(hours=1),
        updated_at=datetime.now(UTC) - timedelta(hours=30),
    )
    write(alias, "over", 4, tenant="other", end="pause")
    return alias


def test_a_list_shows_the_newest_first(streams: str) -> None:
    heading, *rows = run(streams, "list")[0].splitlines()
    assert heading.split() == ["tenant", "stream", "status", "chunks", "last", "age", "writer", "lease"]
    assert [row.split()[:4] for row in rows] == [
        ["other", "over", "paused", "4"],
        ["lost", "active", "1", "1"],
        ["open", "active", "1", "1"],
        ["broken", "failed", "2", "2"],
        ["over", "ended", "3", "3"],
    ]
    assert rows[1].split()[4:] == ["1d", "travel", "run-1", "lost"]
    assert rows[2].split()[5:] == ["travel", "run-1", "alive"]
    assert rows[4].split()[5:] == ["travel", "run-1"]


def test_a_list_as_json_has_every_field(streams: str) -> None:
    data = json.loads(run(streams, "list", "--format", "json")[0])
    assert data.keys() == {"streams", "next_cursor"}
    assert data["streams"][0].keys() == {
        "tenant",
        "stream_id",
        "status",
        "chunk_count",
        "last_sequence",
        "age_seconds",
        "writer",
        "run_id",
        "agent_name",
        "writer_id",
        "lease_expires_at",
        "created_at",
        "updated_at",
        "ended_at",
    }
    states = {(each["tenant"], each["stream_id"]): each["writer"] for each in data["streams"]}
    assert states == {
        ("other", "over"): "none",
        ("", "lost"): "lost",
        ("", "open"): "alive",
        ("", "broken"): "none",
        ("", "over"): "none",
    }
    assert {each["ended_at"] is None for each in data["streams"] if each["status"] == "ended"} == {False}
    ages = {each["stream_id"]: each["age_seconds"] for each in data["streams"] if not each["tenant"]}
    assert ages["lost"] == pytest.approx(30 * 3600, abs=600)
    assert 0 <= ages["open"] < 600


def test_a_list_is_filtered_and_continued(streams: str) -> None:
    def ids(*arguments: str) -> list[str]:
        data = json.loads(run(streams, "list", "--format", "json", *arguments)[0])
        return [each["stream_id"] for each in data["streams"]]

    assert ids("--status", "active") == ["lost", "open"]
    assert ids("--tenant", "other") == ["over"]
    assert ids("--tenant", "", "--status", "ended") == ["over"]
    assert ids("--tenant", "nobody") == []
    printed, progress = run(streams, "list", "--limit", "3")
    assert len(printed.splitlines()) == 4
    cursor = progress.split()[-1]
    assert ids("--cursor", cursor) == ["broken", "over"]
    with pytest.raises(CommandError) as caught:
        ids("--cursor", cursor, "--status", "ended")
    assert caught.value.returncode == 2
    assert "tenant" not in run(streams, "list", "--tenant", "other")[0]


def test_a_list_longer_than_a_page_is_read_page_by_page(empty_db: CommittedDatabase) -> None:
    write(empty_db.alias, "stream", 1)
    stream = Stream.objects.using(empty_db.alias).get()
    copies = []
    for number in range(449):
        fields = {field.attname: getattr(stream, field.attname) for field in stream._meta.concrete_fields}
        copies.append(Stream(**{**fields, "id": None, "stream_id": f"stream-{number}"}))
    Stream.objects.using(empty_db.alias).bulk_create(copies)
    assert len(run(empty_db.alias, "list", "--limit", "1000")[0].splitlines()) == 451
    data = json.loads(run(empty_db.alias, "list", "--limit", "430", "--format", "json")[0])
    ids = [each["stream_id"] for each in data["streams"]]
    assert len(set(ids)) == 430
    rest = json.loads(run(empty_db.alias, "list", "--cursor", data["next_cursor"], "--format", "json")[0])
    assert {*ids, *(each["stream_id"] for each in rest["streams"])} == {
        "stream",
        *(f"stream-{number}" for number in range(449)),
    }
    assert rest["next_cursor"] is None


def test_a_list_names_a_stream_with_an_unreadable_time(sqlite_db: CommittedDatabase) -> None:
    for column in ("created_at", "updated_at"):
        write(sqlite_db.alias, f"damaged-{column}", 1, tenant=sqlite_db.tenant)
        with connections[sqlite_db.alias].cursor() as cursor:
            cursor.execute(
                f"UPDATE helix_store_stream SET {column} = 'soon' WHERE stream_id = %s", [f"damaged-{column}"]
            )
        with pytest.raises(CommandError, match=f"'damaged-{column}' cannot be read"):
            run(sqlite_db.alias, "list", "--tenant", sqlite_db.tenant)


def test_a_list_of_nothing(empty_db: CommittedDatabase) -> None:
    assert json.loads(run(empty_db.alias, "list", "--format", "json")[0]) == {
        "streams": [],
        "next_cursor": None,
    }
    assert len(run(empty_db.alias, "list")[0].splitlines()) == 1
    assert list_streams(using=empty_db.alias).streams == []


@pytest.mark.parametrize("columns", [80, 120])
def test_no_line_of_a_list_is_wider_than_the_terminal(
    empty_db: CommittedDatabase, monkeypatch: pytest.MonkeyPatch, columns: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    write(empty_db.alias, "s" * 255, 1, tenant="\N{CJK UNIFIED IDEOGRAPH-4E00}" * 200, end=None)
    printed = run(empty_db.alias, "list")[0].splitlines()
    assert max(map(width_of, printed)) <= columns
    assert "s" * 255 in run(empty_db.alias, "list", "--wide")[0]


def test_a_list_goes_through_a_pipe(streams: str) -> None:
    printed = run(streams, "list", "--format", "json")[0]
    if shutil.which("jq"):
        command = ["jq", "-r", '.streams[] | select(.writer == "lost") | .stream_id']
        piped = subprocess.run(command, input=printed, capture_output=True, text=True, check=True)
        assert piped.stdout == "lost\n"
    else:
        command = [sys.executable, "-m", "json.tool"]
        piped = subprocess.run(command, input=printed, capture_output=True, text=True, check=True)
        assert json.loads(piped.stdout) == json.loads(printed)


# --- prune -----------------------------------------------------------------------------------------


def test_pruning_says_what_it_did_and_a_dry_run_what_it_would_do(streams: str) -> None:
    arguments = ("prune", "--older-than", "0s", "--keep-chunks", "1", "--format", "json")
    expected = {"streams": 3, "chunks": 3 + 2 + 3, "failed": 1}
    assert json.loads(run(streams, *arguments, "--dry-run")[0]) == expected
    assert StreamChunk.objects.using(streams).count() == 11
    # The stream of the lost writer fails first, and then it has ended.
    assert json.loads(run(streams, *arguments)[0]) == {"streams": 4, "chunks": 9, "failed": 1}
    assert StreamChunk.objects.using(streams).count() == 2
    assert json.loads(run(streams, *arguments)[0]) == {"streams": 0, "chunks": 0, "failed": 0}
    assert Stream.objects.using(streams).count() == 5


def test_pruning_of_one_tenant_and_by_date(streams: str) -> None:
    tomorrow = (datetime.now(UTC) + timedelta(days=2)).date().isoformat()
    run(streams, "prune", "--older-than", "2020-01-01")
    assert StreamChunk.objects.using(streams).count() == 11
    printed, _ = run(streams, "prune", "--tenant", "other", "--older-than", tomorrow, "--keep-chunks", "3")
    assert [line.split() for line in printed.splitlines()] == [
        ["streams", "1"],
        ["chunks", "1"],
        ["failed", "0"],
    ]
    run(streams, "prune", "--older-than", tomorrow)
    assert StreamChunk.objects.using(streams).count() == 3 + 1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_stops_pruning_after_the_current_stream(
    empty_db: CommittedDatabase, number: signal.Signals
) -> None:
    for name in range(6):
        write(empty_db.alias, f"stream-{name}", 2)

    deleted = 0

    def send(execute: Any, sql: str, params: Any, many: bool, context: Any) -> Any:
        nonlocal deleted
        deleted += sql.startswith("DELETE")
        if sql.startswith("DELETE") and deleted == 2:
            os.kill(os.getpid(), number)
        return execute(sql, params, many, context)

    with connections[empty_db.alias].execute_wrapper(send):
        printed, progress = run(empty_db.alias, "prune", "--older-than", "0s", "--format", "json")
    assert json.loads(printed) == {"streams": 2, "chunks": 4, "failed": 0}
    assert progress == "Stopped after 2 streams; run it again to continue.\n"
    assert (
        json.loads(run(empty_db.alias, "prune", "--older-than", "0s", "--format", "json")[0])["streams"] == 4
    )


@for_each(
    "arguments",
    [["--older-than", "soon"], ["--keep-chunks", "-1"], ["--keep-chunks", str(2**70)], ["--tenant", "a\nb"]],
    ids=" ".join,
)
def test_pruning_refuses_a_wrong_argument(streams: str, arguments: list[str]) -> None:
    with pytest.raises(CommandError):
        run(streams, "prune", *arguments)
    assert StreamChunk.objects.using(streams).count() == 11
