"""The budget of the chat: what its agent may use in a day, and what a visitor reads when it is used up."""

from __future__ import annotations

from typing import Final
from urllib.parse import urlencode

from django.urls import reverse

from example_project.chat.guide import GUIDE
from helix_store import Store
from helix_store.exceptions import NotFoundError
from helix_store.models import Budget

__all__ = ["BUDGET", "address_to_raise", "require_budget", "used_up"]

BUDGET: Final = "chat"
_TOKENS_PER_DAY: Final = 2_000
"""Enough for about six answers, so that you see soon what happens then."""


def require_budget(store: Store) -> None:
    """Set the budget if it is missing. One that an operator has raised stays as it is."""
    if store.budgets.get_budget(BUDGET) is None:
        store.budgets.set_budget(
            BUDGET, scope="agent_type", value=GUIDE, period="day", limit_tokens=_TOKENS_PER_DAY
        )


def used_up(store: Store, session_id: str) -> str:
    """Return why the budget has stopped the newest turn, or an empty text if nothing stops the next one."""
    runs = store.sessions.list_runs(session_id, limit=1)
    if not runs or runs[0].completion_reason != f"budget:{BUDGET}":
        return ""
    try:
        status = store.budgets.status(BUDGET)
    except NotFoundError:
        return ""
    if status.remaining_tokens != 0:
        return ""
    return (
        f"The guide has used {status.spent_tokens:,} of its {status.limit_tokens:,} tokens of today. "
        "It can go on after midnight UTC, or when somebody raises the limit."
    )


def address_to_raise(session_id: str) -> str:
    """Return the address of the admin's form that changes the budget, and then leads back to the chat."""
    key = Budget.objects.values_list("pk", flat=True).get(tenant="", name=BUDGET)
    form = reverse("admin:helix_store_budget_operation", args=[key, "change-budget"])
    return f"{form}?{urlencode({'next': reverse('chat', args=[session_id])})}"
