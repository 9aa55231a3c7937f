"""A world and a store in it, and steps to commit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from helix_store.core.types import SessionState, StepInfo
from helix_store.engine.memory import MemoryWorld
from helix_store.stores.store import InMemoryStateStore


@pytest.fixture
def world() -> MemoryWorld:
    return MemoryWorld()


@pytest.fixture
def store(world: MemoryWorld) -> InMemoryStateStore:
    return InMemoryStateStore(world=world)


def loaded(store: InMemoryStateStore, session_id: str) -> SessionState:
    state = store.load_state(session_id)
    assert state is not None
    return state


def commit_step(
    store: InMemoryStateStore,
    session_id: str,
    number: int,
    *,
    custom_state: dict[str, Any] | None = None,
    messages: int = 1,
    **options: Any,
) -> str:
    """Commit a step that says its number in the custom state, and return the checkpoint's id."""
    state = replace(loaded(store, session_id), step_count=number)
    state.custom_state = {"number": number} if custom_state is None else custom_state
    texts = [{"role": "user", "content": f"{number}.{index}"} for index in range(messages)]
    step = StepInfo(step_id=f"step-{number}", step_count=number)
    commit = store.save_state_and_promote_staging(session_id, state, texts, step, **options)
    return commit.checkpoint_id
