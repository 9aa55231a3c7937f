"""A world and a store in it."""

from __future__ import annotations

import pytest

from helix_store.engine.memory import MemoryWorld
from helix_store.stores.memory import InMemoryStateStore


@pytest.fixture
def world() -> MemoryWorld:
    return MemoryWorld()


@pytest.fixture
def store(world: MemoryWorld) -> InMemoryStateStore:
    return InMemoryStateStore(world=world)
