"""The base of the suite: `make_store`, the hooks that a back end may provide, and sample entries."""

from __future__ import annotations

from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

import pytest

from helix_store.core.usage import BudgetStatus
from helix_store.testing.base import SuiteTests

__all__ = ["BudgetTests", "amounts", "now_ms", "spent"]


class BudgetTests(SuiteTests):
    """The base class of every part. A subclass provides the store."""

    def make_store(self, *, tenant: str = "") -> Any:
        """Return a store with ``sessions``, ``locks``, ``usage`` and ``budgets``, such as `Store`.

        Stores of one test share their storage; tests share nothing.
        """
        raise NotImplementedError("Provide make_store() to run the suite.")

    @pytest.fixture
    def store(self) -> Any:
        return self.make_store()

    @pytest.fixture
    def session(self, store: Any) -> Any:
        """Create the session ``session`` of the user ``ada`` and the agent type ``writer``."""
        return store.new_session("session", agent_type="writer", user_id="ada")


def now_ms() -> int:
    return int(datetime.now(UTC).timestamp() * 1_000)


def spent(
    session_id: str = "session", usd: str | None = "1", tokens: int = 10, **given: Any
) -> dict[str, Any]:
    """Return an entry of a model that no price list knows."""
    return {
        "kind": "tokens",
        "session_id": session_id,
        "step_count": 1,
        "timestamp": now_ms(),
        "source": {"type": "agent", "name": "writer"},
        "model": "no-such-model",
        "tokens": {"prompt": tokens, "total": tokens},
        "cost_usd": None if usd is None else Decimal(usd),
        **given,
    }


def amounts(status: BudgetStatus) -> tuple[Any, ...]:
    return status.spent_usd, status.spent_tokens, status.held_usd, status.held_tokens
