"""``helix_streams tail``: what is there, what a writer of another process adds, and where it was stopped."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import threading
from collections.abc import Callable
from io import StringIO
from multiprocessing.synchronize import Event
from typing import Any

import pytest
from django.core.management import CommandError
from django.db import connections
from django.test import override_settings

from helix_store.exceptions import StreamNotFound
from helix_store.management.output import width_of
from helix_store.stores import DatabaseStreamManager
from tests.cells import for_each
from tests.commands.streams import run, write
from tests.databases import CommittedDatabase
from tests.processes import PROCESSES, WorkerProcess

PATIENCE = 30.0


@pytest.fixture
def streams(empty_db: CommittedDatabase, monkeypatch: pytest.MonkeyPatch) -> str:
    """The alias of a database with four streams, the last one of another tenant."""
    monkeypatch.setenv("COLUMNS", "80")
    alias = empty_db.alias
    write(alias, "over", 3)
    write(alias, "broken", 2, end="fail")
    write(alias, "open", 1, end=None)
    write(alias, "over", 4, tenant="other", end="pause")
    return alias


def lines_of(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


class Output(StringIO):
    """Calls a function with the number of lines so far, after each line."""

    def __init__(self, printed: Callable[[int], None]) -> None:
        super().__init__()
        self._printed = printed

    def write(self, text: str) -> int:
        size = super().write(text)
        if text.endswith("\n"):
            self._printed(self.getvalue().count("\n"))
        return size


def test_what_there_is_of_an_ended_stream(streams: str) -> None:
    printed, progress = run(streams, "tail", "over", "--tenant", "")
    assert printed.splitlines() == [f'     {number}  text  text="part {number}"' for number in (1, 2, 3)]
    assert progress == "The stream is ended, after sequence 3.\n"
    printed, _ = run(streams, "tail", "over", "--tenant", "", "--from", "2")
    assert printed == '     3  text  text="part 3"\n'
    assert run(streams, "tail", "over", "--tenant", "", verbosity=0)[1] == ""


def test_json_is_a_line_for_each_chunk_and_one_for_the_end(streams: str) -> None:
    printed, _ = run(streams, "tail", "over", "--tenant", "", "--from", "1", "--format", "json")
    assert lines_of(printed) == [
        {"chunk": {"type": "text", "text": "part 2"}, "sequence": 2},
        {"chunk": {"type": "text", "text": "part 3"}, "sequence": 3},
        {
            "tenant": "",
            "position": 3,
            "stream_id": "over",
            "status": "ended",
            "last_sequence": 3,
            "output": {"answer": 42},
            "error": None,
        },
    ]


def test_a_failed_stream_is_a_problem_after_its_chunks(streams: str) -> None:
    out = StringIO()
    with pytest.raises(CommandError, match="broken") as caught:
        run(streams, "tail", "broken", stdout=out)
    assert caught.value.returncode == 1
    assert "\x1b" not in str(caught.value)
    assert len(out.getvalue().splitlines()) == 2


def test_a_paused_stream_ends_the_tail(streams: str) -> None:
    assert run(streams, "tail", "over", "--tenant", "other")[1] == "The stream is paused, after sequence 4.\n"


def test_without_following_an_active_stream_is_read_to_its_end_of_now(streams: str) -> None:
    printed, progress = run(streams, "tail", "open", "--no-follow")
    assert len(printed.splitlines()) == 1
    assert progress.endswith("continue with: manage.py helix_streams tail open --from 1\n")
    assert run(streams, "tail", "open", "--no-follow", "--from", "1")[0] == ""
    assert run(streams, "tail", "open", "--no-follow", "--from", "9")[0] == ""


def test_an_id_of_several_tenants_needs_one(streams: str) -> None:
    with pytest.raises(CommandError, match="2 tenants have a stream over: '', 'other'") as caught:
        run(streams, "tail", "over")
    assert caught.value.returncode == 2
    for tenant in ([], ["--tenant", "other"]):
        with pytest.raises(CommandError) as unknown:
            run(streams, "tail", "nowhere", *tenant)
        assert unknown.value.returncode == 1
        assert isinstance(unknown.value.__cause__, StreamNotFound)


@pytest.mark.parametrize("count", [0, 2])
def test_a_pruned_stream_begins_at_its_oldest_chunk(streams: str, count: int) -> None:
    run(streams, "prune", "--tenant", "other", "--keep-chunks", str(count))
    shared = ("tail", "over", "--tenant", "other")
    printed, progress = run(streams, *shared)
    assert [line.split()[0] for line in printed.splitlines()] == ["3", "4"][:count]
    assert f"The first {4 - count} chunks were removed." in progress
    with pytest.raises(CommandError, match=f"--tenant other --from {4 - count}$") as caught:
        run(streams, *shared, "--from", "1")
    assert caught.value.returncode == 1


def test_lines_fit_the_terminal_and_control_nothing(
    empty_db: CommittedDatabase, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    write(empty_db.alias, "s", 0, end=None)
    streams = DatabaseStreamManager(empty_db.alias)
    streams.write_sync(
        "s", [{"type": "a\x1b[2J\u202e", "text": "\x9b2J \ud800 " + "x" * 500, "more": {"n": 1}}]
    )
    printed = run(empty_db.alias, "tail", "s", "--no-follow")[0]
    assert width_of(printed.rstrip("\n")) == 80
    wide = run(empty_db.alias, "tail", "s", "--no-follow", "--wide")[0]
    assert "x" * 500 + '" more={"n": 1}' in wide
    assert not {"\x1b", "\x9b", "\u202e", "\ud800"} & set(wide + printed)
    (line, _) = lines_of(run(empty_db.alias, "tail", "s", "--no-follow", "--format", "json")[0])
    assert line["chunk"]["text"].startswith("\x9b2J \ud800 xxx")


@for_each(
    "arguments",
    [["--from", "-1"], ["--from", "x"], ["--from", str(2**63)], ["--tenant", "a\nb"]],
    ids=" ".join,
    shared=True,
)
def test_a_wrong_argument_is_refused(streams: str, arguments: list[str]) -> None:
    with pytest.raises(CommandError):
        run(streams, "tail", "open", "--no-follow", *arguments)


def write_when_told(alias: str, tenant: str, go_on: Event, count: int, ends: bool) -> None:
    """Write one chunk, then the others once the first one was printed."""

    async def writing() -> None:
        streams = DatabaseStreamManager(alias, tenant=tenant)
        async with await streams.create_writer("live", "run-1", "travel") as writer:
            await writer.write({"type": "text", "text": "part 1"})
            assert await asyncio.to_thread(go_on.wait, PATIENCE)
            for number in range(2, count + 1):
                await writer.write({"type": "text", "text": f"part {number}"})
        if ends:
            await streams.end_stream("live")

    asyncio.run(writing())
    connections.close_all()


@pytest.mark.thorough
@pytest.mark.parametrize("notify", [True, False])
def test_it_prints_what_another_process_writes_until_the_stream_ends(
    committed_db: CommittedDatabase, notify: bool
) -> None:
    first_is_printed = PROCESSES.Event()
    write(committed_db.alias, "live", 0, tenant=committed_db.tenant, end=None)
    writer = WorkerProcess(
        write_when_told, committed_db.alias, committed_db.tenant, first_is_printed, 40, True
    )
    out = Output(lambda lines: first_is_printed.set())
    with override_settings(HELIX_STORE={"STREAMS": {"notify": notify, "poll_interval": 0.05}}):
        printed, progress = run(
            committed_db.alias,
            "tail",
            "live",
            "--tenant",
            committed_db.tenant,
            "--format",
            "json",
            stdout=out,
        )
    writer.outcome().unwrap()
    *chunks, end = lines_of(printed)
    assert [each["sequence"] for each in chunks] == list(range(1, 41))
    assert [each["chunk"]["text"] for each in chunks] == [f"part {number}" for number in range(1, 41)]
    assert (end["status"], end["position"]) == ("ended", 40)
    assert progress == "The stream is ended, after sequence 40.\n"


@pytest.mark.thorough
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_it_while_it_waits_and_it_says_where_to_go_on(
    committed_db: CommittedDatabase, number: signal.Signals
) -> None:
    alias, tenant = committed_db.alias, committed_db.tenant
    go_on = PROCESSES.Event()
    write(alias, "live", 0, tenant=tenant, end=None)
    writer = WorkerProcess(write_when_told, alias, tenant, go_on, 3, True)
    before = [signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGINT)]

    def stop(lines: int) -> None:
        # The signal comes after the line is written, while the command waits for the second chunk.
        threading.Timer(0.3, os.kill, [os.getpid(), number]).start()

    printed, progress = run(alias, "tail", "live", "--tenant", tenant, stdout=Output(stop))
    assert printed == '     1  text  text="part 1"\n'
    assert progress == (
        "Stopped after sequence 1; continue with: "
        f"manage.py helix_streams tail live --tenant {tenant} --from 1\n"
    )
    assert [signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGINT)] == before
    go_on.set()
    rest, _ = run(alias, *progress.split("helix_streams ")[1].split())
    writer.outcome().unwrap()
    assert [line.split()[0] for line in rest.splitlines()] == ["2", "3"]


def tail_live(alias: str, tenant: str, is_printing: Event) -> tuple[str, str]:
    """The command in a process of its own."""
    out = Output(lambda lines: is_printing.set())
    return run(alias, "tail", "live", "--tenant", tenant, "--format", "json", stdout=out)


@pytest.mark.thorough
def test_ctrl_c_of_another_process_loses_and_repeats_nothing(committed_db: CommittedDatabase) -> None:
    """The signal comes at any point while a writer writes without a pause."""
    alias, tenant = committed_db.alias, committed_db.tenant
    is_printing, go_on = PROCESSES.Event(), PROCESSES.Event()
    write(alias, "live", 0, tenant=tenant, end=None)
    writer = WorkerProcess(write_when_told, alias, tenant, go_on, 200, True)
    reader = WorkerProcess(tail_live, alias, tenant, is_printing)
    assert is_printing.wait(PATIENCE)
    go_on.set()
    os.kill(reader.pid, signal.SIGINT)
    printed, progress = reader.outcome().unwrap()
    *chunks, end = lines_of(printed)
    assert f"--from {end['position']}\n" in progress or end["status"] == "ended"
    rest, _ = run(
        alias, "tail", "live", "--tenant", tenant, "--from", str(end["position"]), "--format", "json"
    )
    writer.outcome().unwrap()
    sequences = [each["sequence"] for each in [*chunks, *lines_of(rest)[:-1]]]
    assert sequences == list(range(1, 201))
