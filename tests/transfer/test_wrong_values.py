"""A wrong value in any column of any table: the import refuses it, or every call can read the row."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final

import pytest
from asgiref.sync import async_to_sync
from django.db import models

from helix_store import Store
from helix_store.catalogue import Table, tables
from helix_store.checkpointers import GraphCheckpointStore, SnapshotCheckpointer
from helix_store.exceptions import HelixStoreError, IntegrityFault, InvalidPayload
from helix_store.models.fields import CostField, IdentifierField, MomentField, PayloadField
from helix_store.transfer.records import Problem, Record, format_of
from tests.cells import Cells
from tests.commands.running import run
from tests.databases import CommittedDatabase, delete_all_rows
from tests.transfer.files import exported, fill, imported, lines_of, written

_WRONG: Final[dict[type, tuple[Any, ...]]] = {
    PayloadField: (1, "x", "1", '{"a":1}'),
    models.JSONField: ("x", [1], {"a": 1}),
    MomentField: (1, "2026-01-01"),
    CostField: (1, "-1.000000000000"),
    IdentifierField: (1, ""),
    models.CharField: (1, "x"),
    models.TextField: (1, "\x00"),
    models.BooleanField: (1,),
    models.FloatField: ("1", -1.0),
    models.IntegerField: ("1", -1),
}
_OF_UNIT: Final = ("tenant", "session_id", "stream_id", "recorded_for")
"""The columns that name a unit. `test_damaged_files` changes them."""

_Read = Callable[[], object]


_File = list[Record]
"""The header, the records of one unit and its end, and the trailer."""


def _files_of(records: list[Record]) -> Iterator[_File]:
    """A file of each unit; a child has none, because it needs its root."""
    unit: list[Record] = []
    for record in records[1:-1]:
        unit.append(record)
        if record["record"] == "end":
            if unit[0].get("parent_session_id") is None:
                yield [records[0], *unit, records[-1]]
            unit = []


def _rows_of(table: Table, files: list[_File]) -> Iterator[tuple[_File, int]]:
    """The first row of each kind of a table's rows, by its file and its place in it."""
    known: list[list[Any]] = []
    for file in files:
        for number, record in enumerate(file):
            kind = [record.get(name) for name in ("kind", "outcome", "is_final", "state")]
            if record["record"] == table.record and kind not in known:
                known.append(kind)
                yield file, number


def _wrong_values(table: Table, record: Record) -> Iterator[tuple[str, Any]]:
    fields: dict[str, Any] = {each.name: each for each in table.model._meta.concrete_fields}
    for name in sorted(format_of(table).names - {*_OF_UNIT}):
        of_type = next(values for cls, values in _WRONG.items() if isinstance(fields[name], cls))
        stored = record.get(name)
        for value in (*of_type, None):
            if value != stored or type(value) is not type(stored):
                yield name, value


def _calls(store: Store, head: Record) -> Iterator[_Read]:
    """The calls that read the rows of a unit, and some that change them."""
    match head["record"]:
        case "session":
            yield from _calls_of_session(store, head["session_id"])
        case "stream":
            stream_id = head["stream_id"]
            yield lambda: async_to_sync(store.streams.get_info)(stream_id)
            yield lambda: store.streams.read_after(stream_id, 0)
            yield lambda: _command(store, "helix_streams", "tail", stream_id, "--no-follow")
        case _:
            yield lambda: _command(store, "helix_usage", "--budgets")
            yield store.usage.query_usage
            yield store.locks.get_active_locks
    yield lambda: exported(CommittedDatabase(alias=store.alias, tenant=store.tenant))


def _calls_of_session(store: Store, session_id: str) -> Iterator[_Read]:
    sessions, session = store.sessions, store.session(session_id)
    yield session.load
    yield session.messages
    yield sessions.list_sessions
    yield lambda: sessions.list_runs(session_id)
    yield lambda: sessions.list_effects(session_id)
    yield lambda: sessions.list_posts(session_id)
    yield lambda: sessions.check_interrupt(session_id)
    yield lambda: sessions.get_sub_session_refs(session_id)
    yield lambda: sessions.get_latest_checkpoint(session_id)
    yield lambda: [
        sessions.get_checkpoint(session_id, each.checkpoint_id)
        for each in sessions.list_checkpoints(session_id)
    ]
    yield lambda: sessions.get_staged_changes(session_id, "own-step")
    yield lambda: store.usage.get_entries(session_id)
    yield lambda: session.usage(tree=True)
    yield lambda: [store.items(session_id, lane).tail() for lane in ("", "lane é")]
    graphs = GraphCheckpointStore(store.alias, tenant=store.tenant)
    yield lambda: [each.readable() for each in [graphs.get_session(session_id)] if each is not None]
    yield lambda: [each.readable() for each in graphs.list_checkpoints(session_id)]
    snapshots = SnapshotCheckpointer(store.alias, tenant=store.tenant)
    yield lambda: [snapshots.get(session_id, each.id) for each in snapshots.list(session_id)]
    yield store.find_stuck
    yield lambda: _command(store, "helix_sessions", "show", session_id)
    yield lambda: sessions.settle_effect(session_id, "own-operation", done=True)

    def work() -> None:
        with session.turn() as turn, turn.step() as step:
            step.say({"role": "user", "content": "hello"})

    def pay() -> None:
        with session.turn() as turn, turn.step() as step:
            step.use_approval("call")

    def repeat() -> None:
        with session.turn() as turn, turn.effect("effect", input=1) as effect:
            effect.done(1)

    yield from (repeat, pay, work)
    yield lambda: session.branch("branch")


def _command(store: Store, *arguments: str) -> None:
    ended = run(store.alias, *arguments, "--tenant", store.tenant)
    assert ended.code == 0, ended.err


def _filled(database: CommittedDatabase) -> list[_File]:
    """The files of something of everything, which is stored no longer."""
    fill(database)
    store = Store(database.alias, tenant=database.tenant)
    with store.new_session("working", agent_type="agent", user_id="ada").turn() as turn:
        turn.tokens(model="gpt-4o", prompt=3, completion=2)
        turn.tool("search", True, 3)
        with turn.effect("effect", input=1) as effect:
            effect.done({"result": 1})
        with turn.step() as step:
            step.say({"role": "user", "content": "hello"})
            step.ask_approval("call", "pay", {"euros": 5})
    store.sessions.submit_tool_result("working", "call", approved=True, approval_id="call", actor="ann")
    store.budgets.set_budget("daily", scope="user", period="day", limit_usd=3)
    files = list(_files_of(lines_of(exported(database))))
    delete_all_rows(database.alias)
    return files


def _check(database: CommittedDatabase, table: Table, file: _File, number: int, changed: Record) -> None:
    summary, _ = imported(database, written([*file[:number], changed, *file[number + 1 :]]))
    try:
        if summary.problems:
            _check_problem(database, table, file, number, *summary.problems)
        else:
            head = changed if number == 1 else file[1]
            _check_calls(Store(database.alias, tenant=database.tenant), head)
    finally:
        if summary.records:
            delete_all_rows(database.alias)


def _check_problem(
    database: CommittedDatabase, table: Table, file: _File, number: int, problem: Problem
) -> None:
    assert problem.line == number + 1
    # An error of Python or of the database has no rule that names the column.
    assert " for one of its values" not in problem.text
    assert "refused a row" not in problem.text
    # Only rows that stand alone are stored without the wrong one.
    others = [each for each in file if each["record"] == table.record and table.is_of_tenant][1:]
    is_alone = file[1]["record"] in ("locks", "tenant_rows")
    assert table.model._base_manager.using(database.alias).count() == len(others) * is_alone


def _check_calls(store: Store, head: Record) -> None:
    for call in _calls(store, head):
        try:
            call()
        except (IntegrityFault, InvalidPayload) as exc:
            raise AssertionError(f"A call cannot read the imported row: {exc}") from exc
        except HelixStoreError:
            pass  # The value explains the refusal, as the status of an ended session does.


@pytest.mark.thorough
def test_a_wrong_value_is_a_problem_of_its_record_or_every_call_reads_it(
    committed_db: CommittedDatabase,
) -> None:
    files = _filled(committed_db)
    with Cells() as cells:
        for table in [each for each in tables() if each.is_own]:
            rows = list(_rows_of(table, files))
            assert rows, f"{table.record} is new. Store a row of it in _filled of {__name__}."
            for file, number in rows:
                for name, value in _wrong_values(table, file[number]):
                    changed = {**file[number], name: value}
                    if value is None:
                        del changed[name]
                    with cells.check(f"{table.record} {name} {value!r}"):
                        _check(committed_db, table, file, number, changed)
