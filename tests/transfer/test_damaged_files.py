"""Files that were cut or altered: found, told with the line, and nothing of what is broken is stored."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import pytest

from helix_store.core.ids import new_id
from helix_store.models import Message, Session
from helix_store.transfer import ExportFile, NotAnExport
from helix_store.transfer.records import line_of
from tests.cells import for_each
from tests.databases import CommittedDatabase, delete_all_rows
from tests.invariants import broken_invariants
from tests.transfer.files import exported, fill, imported, lines_of, rehashed, simple_session, written


@pytest.fixture
def data(committed_db: CommittedDatabase) -> bytes:
    """An export of three sessions and their locks, which are stored no longer."""
    for session_id in ("a", "b", "c"):
        simple_session(committed_db, session_id)
    data = exported(committed_db)
    delete_all_rows(committed_db.alias)
    return data


def _stored(database: CommittedDatabase) -> list[str]:
    sessions = Session.objects.using(database.alias).filter(tenant=database.tenant)
    return list(sessions.order_by("session_id").values_list("session_id", flat=True))


def _number(data: bytes, **wanted: Any) -> int:
    """The number of the first line whose record has these values."""
    for number, record in enumerate(lines_of(data), start=1):
        if wanted.items() <= record.items():
            return number
    raise AssertionError(wanted)


@pytest.mark.thorough
def test_a_file_that_is_cut_anywhere_is_found_and_its_whole_sessions_are_stored(
    committed_db: CommittedDatabase, data: bytes
) -> None:
    lines = data.splitlines(keepends=True)
    for count in range(1, len(lines)):
        summary, file = imported(committed_db, b"".join(lines[:count]))
        assert not file.is_complete
        assert file.problems[-1].line == count
        assert summary.problems == []
        ends = sum(record.get("of") == "session" for record in lines_of(b"".join(lines[:count])))
        assert _stored(committed_db) == ["a", "b", "c"][:ends]
        assert broken_invariants(committed_db) == []
    summary, file = imported(committed_db, data)
    assert file.is_complete
    assert summary.identical["session"] == 3


@for_each("cut", [1, 2, 10])
def test_a_line_that_is_cut_is_found(committed_db: CommittedDatabase, data: bytes, cut: int) -> None:
    _, file = imported(committed_db, data[:-cut])
    assert not file.is_complete
    assert [problem.line for problem in file.problems][-1] == len(data.splitlines())
    assert _stored(committed_db) == ["a", "b", "c"]


def _without(data: bytes, number: int) -> bytes:
    lines = data.splitlines(keepends=True)
    return b"".join(lines[: number - 1] + lines[number:])


def _twice(data: bytes, number: int) -> bytes:
    lines = data.splitlines(keepends=True)
    return b"".join(lines[:number] + lines[number - 1 :])


def _swapped(data: bytes, number: int) -> bytes:
    lines = data.splitlines(keepends=True)
    lines[number - 1], lines[number] = lines[number], lines[number - 1]
    return b"".join(lines)


def _other_letter(data: bytes, number: int) -> bytes:
    lines = data.splitlines(keepends=True)
    lines[number - 1] = lines[number - 1].replace(b"user", b"usee", 1)
    return b"".join(lines)


def _nonsense(data: bytes, number: int) -> bytes:
    lines = data.splitlines(keepends=True)
    lines[number - 1] = b'{"record":"message",]}\n'
    return b"".join(lines)


def _empty_line(data: bytes, number: int) -> bytes:
    lines = data.splitlines(keepends=True)
    return b"".join([*lines[:number], b"\n", *lines[number:]])


@pytest.mark.thorough
@for_each("change", [_without, _twice, _swapped, _other_letter, _nonsense, _empty_line])
def test_an_altered_session_is_not_stored_and_the_others_are(
    committed_db: CommittedDatabase, data: bytes, change: Callable[[bytes, int], bytes]
) -> None:
    start = _number(data, record="session", session_id="b")
    message = start + 1 + [each["record"] for each in lines_of(data)[start:]].index("message")
    summary, file = imported(committed_db, change(data, message))
    assert not file.is_complete
    assert start < (file.problems[0].line or 0) <= message + 4
    assert "'b'" in file.problems[0].text
    assert _stored(committed_db) == ["a", "c"]
    assert summary.imported["session"] == 2
    assert Message.objects.using(committed_db.alias).filter(session__tenant=committed_db.tenant).count() == 4


def test_a_session_that_was_taken_out_is_missed(committed_db: CommittedDatabase, data: bytes) -> None:
    start = _number(data, record="session", session_id="b")
    end = start + [each["record"] for each in lines_of(data)[start:]].index("end")
    lines = data.splitlines(keepends=True)
    _, file = imported(committed_db, b"".join(lines[: start - 1] + lines[end + 1 :]))
    assert [problem.line for problem in file.problems] == [len(lines) - (end + 1 - start + 1)]
    assert "trailer" in file.problems[0].text


@for_each("kind", ["header", "end", "trailer"])
def test_every_line_is_needed(committed_db: CommittedDatabase, data: bytes, kind: str) -> None:
    number = _number(data, record=kind)
    if kind == "header":
        with pytest.raises(NotAnExport):
            imported(committed_db, _without(data, number))
        return
    _, file = imported(committed_db, _without(data, number))
    assert not file.is_complete
    assert file.problems


def test_what_follows_the_trailer_is_found(committed_db: CommittedDatabase, data: bytes) -> None:
    _, file = imported(committed_db, data + data)
    assert not file.is_complete
    assert file.problems[0].line == len(data.splitlines()) + 1


@for_each(
    "text",
    [b"", b"\n", b"{}\n", b"nonsense", b'{"record":"header"}\n', b"\xff\xfe\n", b"[" * 5_000],
)
def test_another_file_is_refused(committed_db: CommittedDatabase, text: bytes) -> None:
    with pytest.raises(NotAnExport):
        imported(committed_db, text)


def test_a_newer_format_is_refused(committed_db: CommittedDatabase, data: bytes) -> None:
    with pytest.raises(NotAnExport, match="format 2"):
        imported(committed_db, data.replace(b'"version":1}', b'"version":2}', 1))


def test_a_failed_session_is_told_again(committed_db: CommittedDatabase, data: bytes) -> None:
    lines = data.splitlines(keepends=True)
    end = _number(data, record="end", of="session")
    lines[end - 1] = b'{"record":"failed","of":"session","problem":"It is broken."}\n'
    _, file = imported(committed_db, b"".join(lines))
    assert "It is broken." in file.problems[0].text
    assert _stored(committed_db) == ["b", "c"]


_OF_NO_UNIT: list[Any] = [
    ["session"],
    {"session": 1},
    {"session": []},
    [[]],
    {},
    None,
    1.5,
    10**400,
    "",
    "\ud800",
]


@for_each(
    ("kind", "name", "value"),
    [
        (kind, name, value)
        for kind, names in {
            "failed": ("of", "tenant", "name", "problem"),
            "end": ("of", "counts", "sha256"),
            "trailer": ("counts", "failed", "sha256"),
        }.items()
        for name in names
        for value in _OF_NO_UNIT
    ],
    shared=True,
)
def test_a_wrong_value_in_a_line_that_ends_something_is_a_problem_of_this_line(
    data: bytes, kind: str, name: str, value: Any
) -> None:
    failed = {"record": "failed", "of": "session", "tenant": "t", "name": "n", "problem": "It is broken."}
    *records, trailer = lines_of(data)
    whole = written([*records, failed, {**trailer, "failed": 1}])
    number = _number(whole, record=kind)
    changed = lines_of(whole)
    changed[number - 1][name] = value
    file = ExportFile(io.BytesIO(written(changed) if kind == "failed" else b"".join(map(line_of, changed))))
    assert len(list(file.units())) >= 3
    assert number in [problem.line for problem in file.problems]
    assert file.is_complete is (kind == "failed")


def test_a_record_of_a_missing_app_does_not_make_the_file_look_altered(
    committed_db: CommittedDatabase, data: bytes
) -> None:
    """The trailer counts the rows of sessions that are not imported too."""
    lines = data.splitlines(keepends=True)
    for number in reversed([at for at, record in enumerate(lines_of(data)) if record["record"] == "message"]):
        lines[number] = lines[number].replace(b'"record":"message"', b'"record":"unknown_row"')
    changed = (
        b"".join(lines)
        .replace(b'"message":2', b'"unknown_row":2')
        .replace(b'"message":6', b'"unknown_row":6')
    )
    _, file = imported(committed_db, rehashed(changed))
    assert len(file.problems) == 3
    assert all("no app in INSTALLED_APPS has registered" in problem.text for problem in file.problems)
    assert (file.is_complete, _stored(committed_db)) == (True, [])


@pytest.mark.thorough
def test_a_failed_unit_counts_in_whatever_state_the_reader_is(
    committed_db: CommittedDatabase, data: bytes
) -> None:
    failed = b'{"record":"failed","of":"session","problem":"It is broken."}\n'
    lines = data.splitlines(keepends=True)
    start, end = _number(data, record="session", session_id="a"), _number(data, record="end", of="session")
    unknown = [b'{"record":"unknown_row"}\n']
    for rows in (lines[start - 1 : start], [], [*lines[start - 1 : start], *unknown]):
        whole = [*lines[: start - 1], *rows, failed, *lines[end:]]
        records = lines_of(b"".join(whole))
        for name in ("session", "checkpoint", "message"):
            kept = [each for each in records[:-1] if each["record"] == "end" and name in each["counts"]]
            records[-1]["counts"][name] = sum(each["counts"][name] for each in kept)
        records[-1]["failed"] = 1
        _, file = imported(committed_db, written(records))
        assert (file.is_complete, len(file.problems)) == (True, 1), rows
        # A failed unit that the trailer does not count was put there.
        records[-1]["failed"] = 0
        assert not imported(committed_db, written(records))[1].is_complete


def test_a_problem_shows_nothing_that_a_terminal_obeys(committed_db: CommittedDatabase, data: bytes) -> None:
    lines = data.splitlines(keepends=True)
    end = _number(data, record="end", of="session")
    lines[end - 1] = b'{"record":"failed","of":"session","problem":"\\u001b[2J"}\n'
    changed = b"".join(lines).replace(b'"session_id":"b",', b'"session_id":"b","\\u001b[2J":1,')
    changed = changed.replace(b'"session_id":"c",', b'"session_id":"\\u001b[2J",')
    summary, file = imported(committed_db, rehashed(changed))
    assert len(file.problems) == 2
    assert len(summary.problems) == 2
    assert "\x1b" not in "".join(problem.text for problem in file.problems + summary.problems)


# --- Files that another program has written: counted and hashed, but wrong --------------------------

WRONG_VALUES: list[tuple[str, str, Any]] = [
    ("session", "status", "asleep"),
    ("session", "status", None),
    ("session", "version", "1"),
    ("session", "version", True),
    ("session", "version", 2**63),
    ("session", "tags", "text"),
    ("session", "title", "\x00"),
    ("session", "agent_type", "x" * 256),
    ("session", "created_at", "2026-01-01"),
    ("session", "created_at", "2026-01-01T00:00:00.000000+01:00"),
    ("session", "created_at", 5),
    ("session", "current_is_checkpoint", 1),
    ("session", "no_such_column", 1),
    ("session", "base_key", 1),
    ("session", "id", 1),
    ("session", "current", ["step", "", 99]),
    ("session", "current", "step"),
    ("session", "stream_id", ""),
    ("session", "user_id", ""),
    ("session", "version", 0),
    ("session", "stopped_by", "x"),
    ("session", "live_decisions", {"call": 1}),
    ("session", "live_decisions", []),
    ("session", "typed_metadata", "1"),
    ("checkpoint", "status", "x"),
    ("checkpoint", "payload", "1"),
    ("checkpoint", "envelope", "{}"),
    ("decision", "content", "1"),
    ("decision", "content", "[]"),
    ("effect", "actors", "1"),
    ("effect", "actors", "[1]"),
    ("sub_session_ref", "remote", "1"),
    ("checkpoint", "base", ["step", "", 99]),
    ("checkpoint", "base", [1, 2, 3]),
    ("message", "payload", None),
    ("message", "sequence", 1.0),
    ("message", "session_id", 1),
    ("usage_entry", "cost_usd", "1"),
    ("usage_entry", "cost_usd", "99999999.000000000000"),
    ("usage_entry", "cost_usd", 1.5),
    ("usage_entry", "tenant", "another"),
    ("usage_entry", "kind", "unknown"),
    ("usage_entry", "amount", "much"),
]


@pytest.fixture
def full_data(committed_db: CommittedDatabase) -> bytes:
    """An export of something of everything."""
    fill(committed_db)
    return exported(committed_db)


@pytest.mark.thorough
@for_each(("kind", "column", "value"), WRONG_VALUES, shared=True)
def test_a_wrong_value_is_a_problem_and_leaves_nothing(
    committed_db: CommittedDatabase, full_data: bytes, kind: str, column: str, value: Any
) -> None:
    records = lines_of(full_data)
    delete_all_rows(committed_db.alias)
    first = next(index for index, each in enumerate(records) if each["record"] == "session")
    index = next(index for index, each in enumerate(records) if index >= first and each["record"] == kind)
    changed = {**records[index], column: value}
    records[index] = {name: each for name, each in changed.items() if each is not None}
    summary, file = imported(committed_db, written(records))
    assert file.is_complete
    problem, *of_children = summary.problems
    assert "cannot be imported" in problem.text
    assert all("which is not stored" in each.text for each in of_children)
    before = records[: index + 1]
    owner = max(n for n, each in enumerate(before) if each["record"] in ("session", "kept_usage"))
    assert problem.line in (owner + 1, index + 1)
    sessions = [each["session_id"] for each in records if each["record"] == "session"]
    expected = sorted(set(sessions) - {records[owner]["session_id"]})
    assert _stored(committed_db) == expected
    assert broken_invariants(committed_db) == []


@for_each(
    "line",
    [
        b'{"record":"message","sequence":NaN}',
        b'{"record":"message",}',
        b'{"record":"message","record":"run"}',
        b'{"record":"message","payload":' + b"[" * 5_000 + b"}",
        b'{"record":"message","payload":"\xff"}',
    ],
)
def test_a_line_that_is_no_record_is_a_problem_also_with_its_hash(
    committed_db: CommittedDatabase, data: bytes, line: bytes
) -> None:
    lines = data.splitlines(keepends=True)
    number = _number(data, record="message")
    lines[number - 1] = line + b"\n"
    summary, _ = imported(committed_db, rehashed(b"".join(lines)))
    assert [problem.line for problem in summary.problems] == [number]
    assert _stored(committed_db) == ["b", "c"]


@pytest.mark.thorough
def test_an_entry_of_usage_that_another_session_has_is_refused(committed_db: CommittedDatabase) -> None:
    fill(committed_db)
    data = exported(committed_db)
    session = _number(data, record="usage_entry", recorded_for="gone")
    entry = lines_of(data)[session - 1]
    delete_all_rows(committed_db.alias)
    imported(committed_db, data)
    taken = data.replace(b'"session_id":"gone"', b'"session_id":"went"').replace(
        b'"recorded_for":"gone"', b'"recorded_for":"went"'
    )
    summary, _ = imported(committed_db, rehashed(taken))
    assert entry["entry_id"] != new_id()
    assert ["refused a row" in problem.text for problem in summary.problems] == [True]
