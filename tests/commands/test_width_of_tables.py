"""A table has whole cells unless it fits a width: that of a terminal, or ``COLUMNS``."""

from __future__ import annotations

from typing import Any, Final

import pytest
from asgiref.sync import async_to_sync

from helix_store.doctor import RULES
from helix_store.management.output import width_of
from helix_store.models import Session
from helix_store.stores import DatabaseStateStore, DatabaseStreamManager, DatabaseUsageStore
from helix_store.testing.usage.base import tokens
from tests.cells import Cells
from tests.commands.running import run
from tests.databases import CommittedDatabase, delete_all_rows

_ID: Final = "session-" + "0123456789" * 20
_PARENT: Final = "parent-" + "0123456789" * 20
_RUN: Final = "run-" + "0123456789" * 20
_RESULT: Final = "r" * 300
_RULE: Final = RULES["version-zero"]

_COMMANDS: Final[dict[str, tuple[str, ...]]] = {
    "helix_sessions list": (_ID, _PARENT),
    f"helix_sessions show {_ID} --messages 9": (_ID, _PARENT, _RUN, _RESULT),
    f"helix_sessions tree {_PARENT}": (_ID, _PARENT),
    f"helix_sessions posts {_ID}": ("a" * 200,),
    f"helix_checkpoints list {_ID}": ("s" * 100,),
    f"helix_checkpoints show {_ID}": (_ID, _RUN, "v" * 300),
    f"helix_checkpoints diff {_ID} {_ID}@current": ("v" * 300,),
    "helix_usage --by session": (_ID,),
    "helix_usage --by tree": (_PARENT,),
    "helix_usage --by user": ("u" * 200,),
    "helix_streams list": (_ID,),
    f"helix_streams tail {_ID} --no-follow": ("c" * 300,),
    "helix_doctor": (_ID, f"{_RULE.what} {_RULE.advice}"),
}
"""What each command prints as a whole: ids, and lines of text."""


@pytest.fixture
def filled(sqlite_db: CommittedDatabase) -> str:
    alias = sqlite_db.alias
    delete_all_rows(alias)
    store = DatabaseStateStore(alias)
    store.create_session(_PARENT, agent_type="planner")
    state = store.create_session(_ID, agent_type="planner", parent_session_id=_PARENT, user_id="u" * 200)
    store.start_run(_ID, _RUN)
    state.custom_state = {"value": "v" * 300}
    said: list[dict[str, Any]] = [
        {"role": "assistant", "tool_calls": [{"id": "c", "function": {"name": "look", "arguments": "{}"}}]},
        {"role": "tool", "tool_call_id": "c", "content": "\n".join([_RESULT] * 40)},
    ]
    step = {"step_id": "s" * 100, "step_count": 1}
    store.save_state_and_promote_staging(_ID, state, said, step, run_id=_RUN)
    store.post_message(_ID, {"role": "user", "content": "now"}, author="a" * 200)
    later = store.load_state(_ID)
    assert later is not None
    later.custom_state = {"value": "w"}
    store.save_state(_ID, later)
    DatabaseUsageStore(alias).record_entries([{**tokens(total=5, cost_usd="0.25"), "session_id": _ID}])
    _write_stream(alias)
    Session.objects.using(alias).filter(session_id=_ID).update(version=0)
    return alias


@async_to_sync
async def _write_stream(alias: str) -> None:
    streams = DatabaseStreamManager(alias)
    writer = await streams.create_writer(_ID, "run-1", "travel")
    await writer.write({"type": "text", "text": "c" * 300})
    await streams.end_stream(_ID)


def test_without_a_terminal_cells_are_whole(filled: str) -> None:
    with Cells() as cells:
        for command, expected in _COMMANDS.items():
            with cells.check(command):
                out = run(filled, *command.split()).out
                assert [text for text in expected if text not in out] == []


@pytest.mark.parametrize("terminal", [False, True], ids=["COLUMNS", "terminal"])
def test_a_terminal_and_columns_give_a_width(
    filled: str, monkeypatch: pytest.MonkeyPatch, terminal: bool
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    with Cells() as cells:
        for command in _COMMANDS:
            with cells.check(command):
                ended = run(filled, *command.split(), "--no-color", terminal=terminal)
                assert max(map(width_of, ended.lines)) <= 100
                wide = run(filled, *command.split(), "--no-color", "--wide", terminal=terminal)
                assert [text for text in _COMMANDS[command] if text not in wide.out] == []


def test_columns_without_a_number_give_no_width(filled: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with Cells() as cells:
        for columns in ("", "0", "many", "-1"):
            monkeypatch.setenv("COLUMNS", columns)
            with cells.check(repr(columns)):
                assert _ID in run(filled, "helix_sessions", "list").out


def test_long_results_are_cut_by_lines_in_a_pipe_too(filled: str) -> None:
    shown = run(filled, "helix_sessions", "show", _ID, "--messages", "9").out
    wide = run(filled, "helix_sessions", "show", _ID, "--messages", "9", "--wide").out
    assert (shown.count(_RESULT), wide.count(_RESULT)) == (11, 40)
    assert "29 more lines; --wide prints them" in shown
