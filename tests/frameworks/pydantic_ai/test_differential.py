"""Every primitive gives what `InMemoryConversationStore` gives, and leaves the same entries."""

from __future__ import annotations

import pytest
from pydantic_ai.conversation_store import InMemoryConversationStore

from helix_store.contrib.pydantic_ai import DjangoConversationStore
from helix_store.contrib.pydantic_ai.models import ConversationEntry
from tests.databases import CommittedDatabase
from tests.frameworks.pydantic_ai.differential import Differential

PRIMITIVES = 320


@pytest.mark.thorough
@pytest.mark.parametrize("number", range(2))
async def test_a_random_sequence_of_calls_gives_what_the_store_in_memory_gives(
    committed_db: CommittedDatabase, request: pytest.FixtureRequest, number: int
) -> None:
    """Every run has other sequences; ``--seed`` repeats them."""
    memory = InMemoryConversationStore()
    store = DjangoConversationStore(committed_db.alias, tenant=committed_db.tenant)
    differential = Differential(memory, store, 2 * request.config.option.seed + number)
    await differential.run(PRIMITIVES)
    assert differential.store.calls >= PRIMITIVES
    rows = ConversationEntry.objects.using(committed_db.alias).filter(tenant=committed_db.tenant)
    assert {row.entry_id async for row in rows} == memory._entries.keys()
