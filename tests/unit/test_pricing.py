"""What tokens cost, with and without a price list."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from decimal import Decimal
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from helix_store.core.usage import TokenCounts, cost_as_stored
from helix_store.stores import InMemoryUsageStore
from helix_store.testing.usage.base import rolled_up, tokens
from helix_store.usage.ledger import token_cost
from tests.cells import for_each

with_prices = pytest.mark.skipif(
    find_spec("genai_prices") is None, reason="genai-prices, the extra `prices`, is not installed"
)
AT = datetime(2025, 6, 1, tzinfo=UTC)


LATE = datetime(2026, 11, 1, tzinfo=UTC)

KINDS: dict[str, tuple[str, dict[str, int]]] = {
    "cached": ("cache_read_mtok", {"prompt": 100, "cached": 100}),
    "cache_write": ("cache_write_mtok", {"prompt": 100, "cache_write": 100}),
    "cache_write_1h": ("cache_write_1h_mtok", {"prompt": 100, "cache_write": 100}),
    "audio_prompt": ("input_audio_mtok", {"prompt": 100, "audio_prompt": 100}),
    "audio_completion": ("output_audio_mtok", {"completion": 100, "audio_completion": 100}),
}
"""For each kind of token: the name of its price in the list, and counts with only such tokens."""


def _cells() -> list[tuple[str, str, TokenCounts, int, Decimal | None]]:
    """For each model and kind with a price of its own: its name, the kind, counts and their cost."""
    from genai_prices.data_snapshot import get_snapshot

    snapshot = get_snapshot()
    cells = []
    for provider in snapshot.providers:
        for model in provider.models:
            # The id of an entry may not be a name that it matches, or be matched by an earlier entry.
            name, found = next(
                (name, found)
                for name in _names(model.id, model.match)
                if (found := provider.find_model(name))
            )
            prices = found.get_prices(LATE)
            per_request = Decimal(str(prices.requests_kcount or 0)) / 1_000
            for kind, (price_name, counts) in KINDS.items():
                price = getattr(prices, price_name)
                if price is not None:
                    expected = getattr(price, "base", price) * 100 / 1_000_000 + per_request
                    for_an_hour = 100 if kind == "cache_write_1h" else 0
                    reference = f"{provider.id}/{name}"
                    cost = cost_as_stored(expected)
                    cells.append((reference, kind, TokenCounts(**counts), for_an_hour, cost))
    return cells


def _names(own: str, match: Any) -> Iterator[str]:
    yield own
    for clause in getattr(match, "or_", None) or getattr(match, "and_", None) or [match]:
        yield from (value for value in vars(clause).values() if isinstance(value, str))


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

    @for_each("model", ["no-such-model", "openai/no-such-model", "no-provider/gpt-4o", "/", "a/"])
    def test_an_unknown_model_has_no_price(self, model: str) -> None:
        assert cost(model, prompt=100) is None

    def test_counts_that_do_not_say_what_was_spent_have_no_price(self) -> None:
        contradictions = [
            {"total": 10},
            {"prompt": 10, "cached": 11},
            {"prompt": 10, "cache_write": 11},
            {"prompt": 10, "cached": 6, "cache_write": 5},
            {"prompt": 10, "audio_prompt": 11},
            {"completion": 10, "reasoning": 11},
            {"completion": 10, "audio_completion": 11},
            {"completion": 10, "reasoning": 6, "audio_completion": 5},
        ]
        models = ("gpt-4o", "claude-sonnet-4-5", "gpt-4o-audio-preview")
        priced = [
            (model, counts)
            for model in models
            for counts in contradictions
            if cost(model, at=LATE, **counts) is not None
        ]
        assert not priced
        one_hour = TokenCounts(prompt=10, cache_write=4)
        assert token_cost("claude-sonnet-4-5", one_hour, LATE, cache_write_1h=5) is None

    def test_a_price_beyond_what_can_be_kept_is_none(self) -> None:
        assert cost("gpt-4o", prompt=2**63 - 1) is None

    @pytest.mark.thorough
    def test_every_kind_of_token_costs_what_the_list_says(self) -> None:
        """The table: each model of the list by each kind of token that the list prices apart."""
        cells = _cells()
        wrong = {
            (reference, kind): (paid, expected)
            for reference, kind, tokens, for_an_hour, expected in cells
            if (paid := token_cost(reference, tokens, LATE, cache_write_1h=for_an_hour)) != expected
        }
        assert not wrong, f"{len(wrong)} of {len(cells)}: {dict(list(wrong.items())[:20])}"
        kinds = {kind for _, kind, *_ in cells}
        assert kinds == {"cached", "cache_write", "cache_write_1h", "audio_prompt", "audio_completion"}
        assert len(cells) > 1_000

    def test_tokens_written_to_a_cache_are_a_dearer_part_of_the_prompt(self) -> None:
        """With Claude Sonnet 4.5: 3 dollars for a million, 3.75 if they are written to the cache."""
        counts = {"prompt": 100_510, "completion": 0, "cache_write": 100_000}
        assert cost("claude-sonnet-4-5", at=LATE, **counts) == Decimal("0.37653")
        del counts["cache_write"]
        assert cost("claude-sonnet-4-5", at=LATE, **counts) == Decimal("0.30153")

    def test_audio_may_be_cached(self) -> None:
        """Text counts as cached first: of 100 tokens, 80 are audio and 50 cached, so 30 are cached audio."""
        audio = {"prompt": 100, "audio_prompt": 80}
        model = "gpt-4o-audio-preview"
        prices = [cost(model, at=LATE, **audio, cached=count) for count in (0, 20, 50, 100)]
        known = [price for price in prices if price is not None]
        assert sorted(known, reverse=True) == prices

    @pytest.mark.parametrize(
        ("model", "provider"),
        [
            ("anthropic.claude-3-5-sonnet-20240620-v1:0", "bedrock"),
            ("us.anthropic.claude-sonnet-4-5-20250929-v1:0", "bedrock"),
            ("us-gov.anthropic.claude-sonnet-4-5-20250929-v1:0", "bedrock"),
            ("amazon.nova-lite-v1:0", "bedrock"),
            ("meta.llama3-70b-instruct-v1:0", "bedrock"),
        ],
    )
    def test_an_id_of_bedrock_needs_no_provider(self, model: str, provider: str) -> None:
        expected = cost(f"{provider}/{model}", at=LATE, prompt=1_000)
        assert expected
        arn = f"arn:aws:bedrock:us-east-1:123456789012:inference-profile/{model}"
        assert [cost(name, at=LATE, prompt=1_000) for name in (model, arn)] == [expected, expected]

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

    @pytest.mark.thorough
    def test_pricing_never_asks_the_network(self) -> None:
        code = """
import sys
asked = []
sys.addaudithook(lambda event, arguments: event.startswith("socket.") and asked.append(event))
from helix_store.core.usage import TokenCounts
from helix_store.usage.ledger import token_cost
from datetime import datetime, UTC
at = datetime(2025, 6, 1, tzinfo=UTC)
assert token_cost("gpt-4o", TokenCounts(prompt=100), at) is not None
assert token_cost("no-such-model", TokenCounts(prompt=100), at) is None
connections = [event for event in asked if event not in ("socket.__new__", "socket.gethostname")]
assert not connections, connections
"""
        assert _run(code) == ""


@pytest.mark.thorough
def test_without_a_price_list_nothing_has_a_price() -> None:
    code = """
import sys
sys.modules["genai_prices"] = None
from helix_store.core.usage import TokenCounts
from helix_store.usage.ledger import token_cost
from datetime import datetime, UTC
assert token_cost("gpt-4o", TokenCounts(prompt=100), datetime(2025, 6, 1, tzinfo=UTC)) is None
"""
    assert _run(code) == ""


@pytest.mark.thorough
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
    """What a fresh interpreter of the project prints, errors included."""
    done = subprocess.run(
        [sys.executable, "-c", f"import django\ndjango.setup()\n{code}"],
        cwd=Path(__file__).resolve().parents[2],
        env={**os.environ, "DJANGO_SETTINGS_MODULE": "tests.settings"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    return done.stdout
