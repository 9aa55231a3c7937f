"""What tokens cost, by the price list of the library ``genai-prices`` (extra ``prices``), if it is installed.

The library brings its list along: nothing here asks the network.
"""

from __future__ import annotations

from datetime import datetime
from decimal import Decimal
from functools import cache
from importlib import import_module
from types import ModuleType

from helix_store.core.usage import (
    MAX_COST_UNITS,
    TokenCounts,
    cost_from_units,
    cost_units,
)

__all__ = ["token_cost"]


def token_cost(model: str, tokens: TokenCounts, at: datetime) -> Decimal | None:
    """The cost in dollars at the price of that moment; ``None`` where the list cannot tell.

    That is an unknown model, and counts that do not say what was spent: a total alone, or more cached tokens
    than prompt tokens. A model may name its provider before a slash or colon (``openai/gpt-4o``).
    """
    library = _library()
    if library is None or (tokens.total and not tokens.prompt and not tokens.completion):
        return None
    usage = library.Usage(
        input_tokens=tokens.prompt,
        cache_read_tokens=tokens.cached,
        output_tokens=tokens.completion,
        output_reasoning_tokens=tokens.reasoning,
    )
    provider, _, name = model.replace(":", "/", 1).partition("/")
    for reference, provider_id in ((model, None), (name, provider)):
        try:
            price = library.calc_price(
                usage, reference, provider_id=provider_id, genai_request_timestamp=at
            ).total_price
        except LookupError:
            continue
        except ValueError:
            return None
        units = cost_units(price)
        return cost_from_units(units) if units <= MAX_COST_UNITS else None
    return None


@cache
def _library() -> ModuleType | None:
    # On first use: it takes a fifth of a second to import, and most processes record no usage.
    try:
        return import_module("genai_prices")
    except ImportError:
        return None
