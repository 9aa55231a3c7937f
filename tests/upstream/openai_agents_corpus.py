"""The snapshots of runs in upstream's tests come back from `RunStateStore` as the same texts."""

from __future__ import annotations

from pathlib import Path

import pytest

from helix_store.contrib.openai_agents import RunStateStore
from tests.databases import CommittedDatabase
from tests.upstream.sdists import unpacked

CORPUS = unpacked("openai-agents") / "tests" / "fixtures" / "run_state"
FILES = sorted(CORPUS.rglob("*.json"))


def test_the_corpus_is_there() -> None:
    assert len(FILES) >= 47


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.relative_to(CORPUS).as_posix())
def test_a_snapshot_comes_back_as_the_same_text(committed_db: CommittedDatabase, file: Path) -> None:
    store = RunStateStore(committed_db.alias, tenant=committed_db.tenant)
    text = file.read_text()
    state_id = store.save("session", text)
    stored = store.load("session", state_id)
    assert stored is not None
    assert stored.text == text
