"""The card service of the demo: another company's system, in which nothing of this project can undo a charge.

It stands for a service without idempotency keys: it charges the card as often as it is asked to, and keeps a
list of its charges, in a file that no database of this project knows.
"""

from __future__ import annotations

import json
from typing import Any

from django.conf import settings

__all__ = ["charge", "charges"]


def charge(amount_eur: int, *, reference: str) -> dict[str, Any]:
    """Charge the card, and return the receipt."""
    receipt = {"charged_eur": amount_eur}
    with settings.CARD_SERVICE.open("a") as file:
        file.write(f"{json.dumps({'reference': reference, 'receipt': receipt})}\n")
    return receipt


def charges(reference: str) -> list[dict[str, Any]]:
    """Return the receipts of all charges with this reference, as a person reads them at the service."""
    if not settings.CARD_SERVICE.exists():
        return []
    with settings.CARD_SERVICE.open() as file:
        entries = [json.loads(line) for line in file]
    return [entry["receipt"] for entry in entries if entry["reference"] == reference]
