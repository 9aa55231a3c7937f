"""An import stores nothing that a call would have refused."""

from __future__ import annotations

import io
from typing import Any

from django.test import override_settings

from helix_store.core.limits import Limits
from helix_store.core.types import StepInfo
from helix_store.items import ItemLog
from helix_store.stores import DatabaseStateStore
from helix_store.transfer import ExportFile
from tests.databases import CommittedDatabase, delete_all_rows
from tests.transfer.files import exported, imported, lines_of, simple_session, written

REFUSED: dict[str, tuple[str, str, Any]] = {
    "a session id with a control character": ("session", "session_id", "evil\x07"),
    "a long title": ("session", "title", "x" * 5_000),
    "an id with a control character": ("session", "user_id", "ada\x1b[2J"),
    "an empty id": ("session", "agent_type", ""),
    "an id of too many bytes": ("session", "workspace_id", "\U0001f600" * 255),
    "a long tag": ("session", "tags", ["x" * 20_000]),
    "a tag that is no text": ("session", "tags", [1]),
    "metadata that is no text": ("session", "metadata", {"a": 1}),
    "a long directory": ("session", "directory", "x" * 5_000),
    "a role with a control character": ("message", "role", "user\x7f"),
    "a large message": ("message", "payload", '"' + "x" * 2_000_000 + '"'),
    "a large item": ("item", "payload", '"' + "x" * 9_000_000 + '"'),
    "a checkpoint of a run with a control character": ("checkpoint", "run_id", "run\x07"),
    "a checkpoint id with a control character": ("checkpoint", "checkpoint_id", "id\x07"),
}


def _session(database: CommittedDatabase) -> list[dict[str, Any]]:
    """The records of an export of a session with messages, an item and a checkpoint. It is stored no more."""
    store = DatabaseStateStore(database.alias, tenant=database.tenant)
    state = store.create_session("session", agent_type="agent", user_id="ada", workspace_id="w", title="t")
    store.save_state_and_promote_staging(
        "session", state, [{"role": "user", "content": "hello"}], StepInfo("step", 1)
    )
    ItemLog("session", "lane", using=database.alias, tenant=database.tenant).append(["item"])
    records = lines_of(exported(database))
    store.delete_session("session")
    return records


def test_a_value_that_a_store_refuses_is_a_problem(committed_db: CommittedDatabase) -> None:
    records = _session(committed_db)
    problems: dict[str, list[str]] = {}
    for name, (record, column, value) in REFUSED.items():
        number = next(n for n, each in enumerate(records) if each["record"] == record)
        changed = [*records[:number], {**records[number], column: value}, *records[number + 1 :]]
        summary, _ = imported(committed_db, written(changed))
        problems[name] = [problem.text.partition(": ")[0].rpartition(" ")[2] for problem in summary.problems]
        assert summary.sessions == 0, name
    assert problems == {key: ["imported"] for key in REFUSED}
    store = DatabaseStateStore(committed_db.alias, tenant=committed_db.tenant)
    assert store.list_sessions().sessions == []
    summary, _ = imported(committed_db, written(records))
    assert (summary.sessions, summary.problems) == (1, [])


def test_a_tree_without_its_root_is_a_problem(committed_db: CommittedDatabase) -> None:
    store = DatabaseStateStore(committed_db.alias, tenant=committed_db.tenant)
    store.create_session("root", agent_type="agent")
    store.create_session("child", agent_type="agent", parent_session_id="root")
    whole, alone = exported(committed_db), exported(committed_db, session_ids=["child"])
    delete_all_rows(committed_db.alias)
    summary, _ = imported(committed_db, alone)
    (problem,) = summary.problems
    assert "tree of 'root', which is not stored" in problem.text
    summary, _ = imported(committed_db, whole)
    assert summary.problems == []


def test_a_line_without_end_is_not_read_whole(committed_db: CommittedDatabase) -> None:
    simple_session(committed_db, "first")
    simple_session(committed_db, "second")
    data = exported(committed_db)
    cut = data.index(b'{"record":"message"', data.index(b'"session_id":"second"'))
    endless = io.BytesIO(data[:cut] + bytes(70_000_000))
    with override_settings(HELIX_STORE={"LIMITS": dict.fromkeys(Limits.__slots__, 1_000)}):
        file = ExportFile(endless)
        assert [unit.name for unit in file.units() if unit.kind == "session"] == ["first"]
    (problem,) = file.problems
    assert "has more than 67,132,864 bytes" in problem.text
    assert endless.tell() < 68_000_000
    assert not file.is_complete
