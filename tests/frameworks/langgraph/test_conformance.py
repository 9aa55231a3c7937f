"""The clauses that LangGraph packages for checkpointers, all of them on both databases.

``python -m tests.upstream.langgraph_conformance`` runs them from a source tree of LangGraph too.
"""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator

from langgraph.checkpoint.base import BaseCheckpointSaver
from langgraph.checkpoint.conformance import checkpointer_test, validate
from langgraph.checkpoint.conformance.capabilities import ALL_CAPABILITIES

from helix_store.contrib.langgraph import DjangoSaver
from tests.databases import CommittedDatabase

FEWEST_CLAUSES = int(os.environ.get("HELIX_CONFORMANCE_CLAUSES", "81"))
"""Those of the released suite; a later one has more."""


async def test_every_packaged_clause_passes(committed_db: CommittedDatabase) -> None:
    @checkpointer_test(name="DjangoSaver")
    async def saver() -> AsyncGenerator[BaseCheckpointSaver[str], None]:
        yield DjangoSaver(committed_db.alias, tenant=committed_db.tenant)

    report = await validate(saver)

    results = report.results
    assert results.keys() == {capability.value for capability in ALL_CAPABILITIES}
    assert all(result.detected for result in results.values())
    assert [failure for result in results.values() for failure in result.failures] == []
    passed = sum(result.tests_passed for result in results.values())
    print(f"{committed_db.vendor}: {passed} clauses, {len(results)} capabilities")  # noqa: T201
    assert passed >= FEWEST_CLAUSES
