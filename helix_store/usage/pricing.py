"""Token prices of the library ``genai-prices`` (extra ``prices``), if it is installed.

The library contains its price list, so no network request is sent.
"""

from __future__ import annotations

from datetime import datetime
from decimal import Decimal
from functools import cache
from importlib import import_module
from types import ModuleType

from helix_store.core.usage import TokenCounts, cost_as_stored

__all__ = ["token_cost"]


def token_cost(model: str, tokens: TokenCounts, at: datetime) -> Decimal | None:
    """Return the cost in dollars at the price of that time, or ``None`` if it is unknown: for an unknown
    model, for a total without prompt and completion tokens, and for more cached tokens than prompt tokens. A
    model may contain its provider before a slash or colon (``openai/gpt-4o``).
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
        return cost_as_stored(price)
    return None


@cache
def _library() -> ModuleType | None:
    # Imported on first use: the import takes 0.2 seconds, and most processes record no usage.
    try:
        return import_module("genai_prices")
    except ImportError:
        return None
