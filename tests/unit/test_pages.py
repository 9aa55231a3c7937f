"""Every page of a list is a sequence of its items."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

import helix_store
from helix_store.checkpointers.graph.types import GraphPage
from helix_store.core.payloads import Page
from helix_store.stores import InMemoryStateStore, InMemoryUsageStore, MemoryWorld
from helix_store.testing.state_store.samples import commit_step, message
from helix_store.testing.usage.base import custom

PAGES: dict[str, Callable[[InMemoryStateStore, InMemoryUsageStore], Any]] = {
    "sessions": lambda store, usage: store.list_sessions(),
    "messages": lambda store, usage: store.get_messages("session"),
    "items": lambda store, usage: store.list_checkpoints("session"),
    "entries": lambda store, usage: usage.query_usage(),
}


@pytest.mark.parametrize("field", PAGES)
def test_a_page_is_a_sequence_of_its_items(field: str) -> None:
    world = MemoryWorld()
    store, usage = InMemoryStateStore(world=world), InMemoryUsageStore(world=world)
    store.create_session("session", agent_type="agent")
    empty = PAGES[field](store, usage)
    store.create_session("another", agent_type="agent")
    for number in (1, 2):
        commit_step(store, "session", number)
        store.append_messages("session", [message(number)])
        usage.record_entry(custom("session"))
    page = PAGES[field](store, usage)
    items = getattr(page, field)
    assert list(page) == items
    assert len(page) == len(items) > len(empty) == len(getattr(empty, field))
    assert page[0] == items[0]
    assert page[-1:] == items[-1:]
    assert items[0] in page
    assert isinstance(page, Sequence)


def test_every_public_page_is_one() -> None:
    pages = [
        GraphPage,
        *(getattr(helix_store, name) for name in helix_store.__all__ if name.endswith("Page")),
    ]
    assert len(pages) == 7
    assert all(issubclass(page, Page) for page in pages)
