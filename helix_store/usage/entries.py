"""Usage entries: their validation, and the price of their tokens.

The library ``genai-prices`` (extra ``prices``) contains the prices, so no network request is sent.
"""

from __future__ import annotations

import math
from dataclasses import fields, replace
from datetime import datetime
from decimal import Decimal, InvalidOperation
from functools import cache, partial
from importlib import import_module
from types import ModuleType
from typing import Any, Final

from helix_store.core import validation
from helix_store.core.dicts import AnyUsageEntry
from helix_store.core.ids import new_id
from helix_store.core.types import UsageKind
from helix_store.core.usage import (
    MAX_COST_UNITS,
    TokenCounts,
    UsageEntry,
    UsageSource,
    cost_as_stored,
    cost_from_units,
    cost_units,
)
from helix_store.exceptions import InvalidPayload

MAX_AMOUNT: Final = 1e300
"""The largest custom amount: the sum of a hundred million such amounts is still a finite float."""

MAX_EXACT_AMOUNT: Final = 2**53
"""The largest whole custom amount: amounts are stored and summed as floats, which are exact up to here."""


def checked_entry(entry: UsageEntry | AnyUsageEntry, path: str = "") -> UsageEntry:
    """Return the entry as a read would, with an id. Raises `InvalidPayload` with a path below ``path``."""
    try:
        return _checked(entry if isinstance(entry, UsageEntry) else UsageEntry.from_dict(entry))
    except InvalidPayload as exc:
        raise InvalidPayload(path=path + exc.path, reason=exc.reason) from exc


def plain_amount(amount: float) -> int | float:
    """Return an amount in the form in which it would be read: a whole amount is an ``int``."""
    return int(amount) if amount <= MAX_EXACT_AMOUNT and amount == int(amount) else float(amount)


def _checked(entry: UsageEntry) -> UsageEntry:
    kind = validation.enum(UsageKind, entry.kind, "kind")
    rules = _RULES[kind]
    for name in _ALL_OWN_FIELDS - rules.keys():
        if getattr(entry, name) is not None:
            raise InvalidPayload(path=name, reason=f"an entry of kind {kind} has no such field")
    checked = validation.fields(entry, rules)
    if checked["id"] is None:
        checked["id"] = new_id()
    return replace(entry, kind=kind, **checked)


def _amount(value: Any, name: str) -> int | float:
    if type(value) is int:
        return validation.whole_number(value, name, maximum=MAX_EXACT_AMOUNT)
    if type(value) is not float or not math.isfinite(value):
        raise InvalidPayload(path=name, reason="expected a finite number")
    if not 0 <= value <= MAX_AMOUNT:
        raise InvalidPayload(path=name, reason=f"expected a number from 0 to {MAX_AMOUNT}")
    return plain_amount(value)


def checked_cost(value: Any, name: str) -> Decimal | None:
    """Return a cost, rounded to the stored decimal places. For a float, its shortest decimal form counts."""
    if value is None:
        return None
    if type(value) not in (Decimal, int, float, str):
        raise InvalidPayload(path=name, reason=f"expected a decimal number, got {type(value).__name__}")
    try:
        cost = Decimal(repr(value) if type(value) is float else value)
    except InvalidOperation as exc:
        raise InvalidPayload(path=name, reason="expected a decimal number") from exc
    if not cost.is_finite() or not 0 <= cost <= cost_from_units(MAX_COST_UNITS):
        reason = f"expected dollars from 0 to {cost_from_units(MAX_COST_UNITS)}"
        raise InvalidPayload(path=name, reason=reason)
    return cost_from_units(cost_units(cost))


_TOKENS: Final = validation.record(
    TokenCounts,
    {field.name: validation.optional(validation.whole_number, 0) for field in fields(TokenCounts)},
)
_SOURCE: Final = validation.record(
    UsageSource, {"type": validation.identifier, "name": validation.identifier}
)
_CALL: Final[dict[str, validation.Rule]] = {
    "success": lambda value, name: validation.instance(value, bool, name),
    "duration_ms": validation.milliseconds,
}
_OWN_FIELDS: Final[dict[UsageKind, dict[str, validation.Rule]]] = {
    UsageKind.TOKENS: {"model": validation.identifier, "tokens": _TOKENS},
    UsageKind.TOOL: {"tool_name": validation.identifier, **_CALL},
    UsageKind.SUBAGENT: {
        "agent_type": validation.identifier,
        "sub_session_id": validation.identifier,
        **_CALL,
    },
    UsageKind.CUSTOM: {
        "type": validation.identifier,
        "name": validation.identifier,
        "amount": _amount,
        "unit": partial(validation.optional_identifier, empty=True),
    },
}
_RULES: Final = {
    kind: {
        **own,
        "session_id": validation.identifier,
        "step_count": validation.whole_number,
        "timestamp": validation.epoch_milliseconds,
        "source": _SOURCE,
        "run_id": validation.optional_identifier,
        "id": validation.optional_identifier,
        "cost_usd": validation.optional(checked_cost),
    }
    for kind, own in _OWN_FIELDS.items()
}
_ALL_OWN_FIELDS: Final = frozenset(name for own_fields in _OWN_FIELDS.values() for name in own_fields)


def priced(entry: UsageEntry) -> UsageEntry:
    """Return a checked entry with the cost of its tokens, unless it has a cost or the price is unknown."""
    if entry.cost_usd is not None or entry.model is None or entry.tokens is None:
        return entry
    at = validation.milliseconds_to_datetime(entry.timestamp)
    return replace(entry, cost_usd=token_cost(entry.model, entry.tokens, at))


def token_cost(model: str, tokens: TokenCounts, at: datetime) -> Decimal | None:
    """Return the cost in dollars at the price of that time, or ``None`` if it is unknown: for an unknown
    model, for a total without prompt and completion tokens, and for more cached tokens than prompt tokens. A
    model may begin with its provider, followed by a slash or colon (``openai/gpt-4o``).
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
    # It is imported on first use, because the import takes 0.2 seconds and most processes record no usage.
    try:
        return import_module("genai_prices")
    except ImportError:
        return None
