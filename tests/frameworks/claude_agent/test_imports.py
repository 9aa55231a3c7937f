"""The SDK's own import of local transcripts, into `DjangoSessionStore`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from claude_agent_sdk import import_session_to_store

from helix_store.contrib.claude_agent import DjangoSessionStore
from tests.databases import CommittedDatabase
from tests.frameworks.claude_agent.test_transcripts import answered, rows_of, said

SESSION = "7f1d6f0e-6f0e-4d0e-9a52-0f4d0f8a1c11"
PROJECT = "-srv-app"


async def test_local_transcripts_are_imported_once(
    store: DjangoSessionStore,
    committed_db: CommittedDatabase,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CLAUDE_CONFIG_DIR", str(tmp_path))
    main: list[Any] = [said("hi 日本", "u"), answered("m1", "a"), said("again", "v")]
    agent: list[Any] = [said("look", "s"), answered("m2", "t")]
    project = tmp_path / "projects" / PROJECT
    _write(project / f"{SESSION}.jsonl", main)
    _write(project / SESSION / "subagents" / "agent-x.jsonl", agent)
    for _ in range(2):
        await import_session_to_store(SESSION, store)
    key: Any = {"project_key": PROJECT, "session_id": SESSION}
    assert await store.load(key) == main
    assert await store.list_subkeys(key) == ["subagents/agent-x"]
    assert await store.load(key | {"subpath": "subagents/agent-x"}) == agent
    assert await rows_of(committed_db) == {"session": 1, "item": 5, "claude": 1, "usage": 2}


def _write(file: Path, entries: list[Any]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(f"{json.dumps(each)}\n" for each in entries), encoding="utf-8")
