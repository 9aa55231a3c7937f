"""The conformance suite that Claude Agent SDK ships."""

from __future__ import annotations

from claude_agent_sdk.testing import run_session_store_conformance

from helix_store.contrib.claude_agent import DjangoSessionStore
from tests.frameworks.claude_agent.conftest import NewStore

CONTRACTS = 14


async def test_the_packaged_suite_passes_without_leaving_a_contract_out(new_store: NewStore) -> None:
    made: list[DjangoSessionStore] = []

    def make() -> DjangoSessionStore:
        made.append(new_store())
        return made[-1]

    await run_session_store_conformance(make)
    # It asks for a store once to see which methods there are, and then for each contract.
    assert len(made) - 1 == CONTRACTS
