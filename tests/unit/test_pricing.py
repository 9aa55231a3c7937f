"""What tokens cost, with and without a price list."""

from __future__ import annotations

import subprocess
import sys
from datetime import UTC, datetime
from decimal import Decimal
from importlib.util import find_spec

import pytest

from helix_store.core.usage import TokenCounts
from helix_store.stores import InMemoryUsageStore
from helix_store.testing.usage.base import rolled_up, tokens
from helix_store.usage.entries import token_cost

with_prices = pytest.mark.skipif(
    find_spec("genai_prices") is None, reason="genai-prices, the extra `prices`, is not installed"
)
AT = datetime(2025, 6, 1, tzinfo=UTC)


def cost(model: str, at: datetime = AT, **counts: int) -> Decimal | None:
    return token_cost(model, TokenCounts(**counts), at)


@with_prices
class TestWithAPriceList:
    def test_tokens_have_the_price_of_their_model(self) -> None:
        """2.50 dollars for a million prompt tokens of gpt-4o, 10 for completion tokens."""
        assert cost("gpt-4o", prompt=1_000_000) == Decimal("2.5")
        assert cost("gpt-4o", completion=1_000_000) == Decimal(10)
        assert cost("gpt-4o", prompt=100, completion=50, total=150) == Decimal("0.00075")

    def test_cached_tokens_are_a_cheaper_part_of_the_prompt(self) -> None:
        assert cost("gpt-4o", prompt=1_000_000, cached=1_000_000) == Decimal("1.25")
        assert cost("gpt-4o", prompt=1_000_000, cached=500_000) == Decimal("1.875")

    def test_a_cost_is_exact_to_the_last_token(self) -> None:
        assert cost("gpt-4o-mini", prompt=1) == Decimal("0.00000015")
        assert cost("gpt-4o-mini", prompt=1, cached=1) == Decimal("0.000000075")

    def test_nothing_costs_nothing(self) -> None:
        assert cost("gpt-4o") == 0

    @pytest.mark.parametrize("model", ["openai/gpt-4o", "openai:gpt-4o", "openrouter/openai/gpt-4o"])
    def test_a_model_may_name_its_provider(self, model: str) -> None:
        assert cost(model, prompt=100, completion=50) == Decimal("0.00075")

    @pytest.mark.parametrize(
        "model", ["no-such-model", "openai/no-such-model", "no-provider/gpt-4o", "/", "a/"]
    )
    def test_an_unknown_model_has_no_price(self, model: str) -> None:
        assert cost(model, prompt=100) is None

    @pytest.mark.parametrize("counts", [{"total": 10}, {"prompt": 10, "cached": 11}])
    def test_counts_that_do_not_say_what_was_spent_have_no_price(self, counts: dict[str, int]) -> None:
        assert token_cost("gpt-4o", TokenCounts(**counts), AT) is None

    def test_a_price_beyond_what_can_be_kept_is_none(self) -> None:
        assert cost("gpt-4o", prompt=2**63 - 1) is None

    def test_the_price_is_that_of_the_entrys_time(self) -> None:
        """On 10 June 2025 the price of o3 fell to a fifth."""
        before = cost("o3", at=datetime(2025, 6, 1, tzinfo=UTC), prompt=1_000_000)
        after = cost("o3", at=datetime(2025, 7, 1, tzinfo=UTC), prompt=1_000_000)
        assert (before, after) == (Decimal(10), Decimal(2))

    def test_recording_fills_the_cost_in(self) -> None:
        usage = InMemoryUsageStore()
        usage.record_entries([tokens(model="gpt-4o", prompt=100, completion=50), tokens(prompt=100)])
        assert [entry.cost_usd for entry in usage.get_entries("session")] == [Decimal("0.00075"), None]
        assert rolled_up(usage).cost_usd == Decimal("0.00075")

    def test_a_cost_that_is_given_stands(self) -> None:
        usage = InMemoryUsageStore()
        usage.record_entry(tokens(model="gpt-4o", prompt=100, cost_usd=0))
        assert usage.get_entries("session")[0].cost_usd == 0

    def test_pricing_never_asks_the_network(self) -> None:
        code = """
import sys
asked = []
sys.addaudithook(lambda event, arguments: event.startswith("socket.") and asked.append(event))
from helix_store.core.usage import TokenCounts
from helix_store.usage.entries import token_cost
from datetime import datetime, UTC
at = datetime(2025, 6, 1, tzinfo=UTC)
assert token_cost("gpt-4o", TokenCounts(prompt=100), at) is not None
assert token_cost("no-such-model", TokenCounts(prompt=100), at) is None
connections = [event for event in asked if event not in ("socket.__new__", "socket.gethostname")]
assert not connections, connections
"""
        assert _run(code) == ""


def test_without_a_price_list_nothing_has_a_price() -> None:
    code = """
import sys
sys.modules["genai_prices"] = None
from helix_store.core.usage import TokenCounts
from helix_store.usage.entries import token_cost
from datetime import datetime, UTC
assert token_cost("gpt-4o", TokenCounts(prompt=100), datetime(2025, 6, 1, tzinfo=UTC)) is None
"""
    assert _run(code) == ""


def test_the_price_list_is_not_loaded_before_it_is_needed() -> None:
    code = """
import sys, os
os.environ["DJANGO_SETTINGS_MODULE"] = "example_project.settings"
import django
django.setup()
import helix_store.stores
assert "genai_prices" not in sys.modules
"""
    assert _run(code) == ""


def _run(code: str) -> str:
    """What a fresh interpreter prints, errors included."""
    done = subprocess.run(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    return done.stdout
