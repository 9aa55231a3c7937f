"""The example's agent pauses for an approval, and another process answers it."""

from __future__ import annotations

from example_project.frameworks.pydantic_ai import ask, book
from helix_store.stores import DatabaseUsageStore
from tests.databases import CommittedDatabase
from tests.frameworks.pydantic_ai.conversations import store_of


async def test_an_approval_is_answered_later(committed_db: CommittedDatabase) -> None:
    store = store_of(committed_db)
    assert await ask(store, "trip", "How is Lisbon?", user="ada") == "Lisbon is sunny."
    assert await ask(store, "trip", "Book it.", user="ada") == "A person must approve the booking."
    assert await book(store_of(committed_db), "trip", approved=True, user="grace") == (
        "Nothing waits for an approval."
    )
    assert await book(store_of(committed_db), "trip", approved=True, user="ada") == (
        "Done: a room in Lisbon is booked"
    )
    assert await book(store, "trip", approved=True, user="ada") == "Nothing waits for an approval."
    usage = DatabaseUsageStore(committed_db.alias, tenant=committed_db.tenant)
    rollup = await usage.aget_rollup("trip")
    assert rollup is not None
    assert rollup.tokens_by_model.keys() == {"travel-1"}
    assert rollup.custom["pydantic_ai"] == {"requests": 3, "tool_calls": 1}
