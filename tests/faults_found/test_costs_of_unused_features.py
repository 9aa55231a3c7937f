"""A feature costs no statements where it is not used: budgets of others, posts that are not due."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any, Final

import pytest
from django.test import override_settings

from helix_store.core import moments
from helix_store.stores import Store
from helix_store.testing.usage.base import tokens
from tests.database.test_statements import sent_by
from tests.databases import CommittedDatabase, fresh_tenant

HELLO: Final = {"role": "user", "content": "hello"}
TOMORROW: Final = timedelta(days=1)

FEATURES: Final[dict[str, Callable[[Store], object]]] = {
    "a post that is due tomorrow": lambda store: store.sessions.post_message(
        "session", HELLO, not_before=moments.now() + TOMORROW
    ),
    "a budget of another user": lambda store: store.budgets.set_budget(
        "bob", scope="user", value="bob", limit_usd=1
    ),
    "a budget of another tree": lambda store: store.budgets.set_budget(
        "tree", scope="tree", value="other", limit_usd=1
    ),
    "a budget of another agent type": lambda store: store.budgets.set_budget(
        "type", scope="agent_type", value="other", limit_usd=1
    ),
    "a budget of each user": lambda store: store.budgets.set_budget("each", scope="user", limit_usd=1),
}


def _turn(store: Store) -> None:
    with store.session("session").turn() as turn, turn.step() as step:
        step.say(HELLO)


CALLS: Final[dict[str, Callable[[Store], object]]] = {
    "record_entry": lambda store: store.usage.record_entry(tokens("session", id="entry", total=1)),
    "turn": _turn,
}
MORE: Final = {("turn", feature): 1 for feature in FEATURES if "budget" in feature}
"""A turn asks once whether one of the budgets of its tenant applies."""


def count_of(database: CommittedDatabase, call: str, feature: str | None) -> int:
    store = Store(database.alias, tenant=fresh_tenant())
    # The session has no user.
    store.new_session("session", agent_type="agent")
    if feature is not None:
        FEATURES[feature](store)
    return len(sent_by(database.alias, lambda: CALLS[call](Store(database.alias, tenant=store.tenant))))


@pytest.mark.thorough
def test_a_feature_that_does_not_apply_costs_no_statements(committed_db: CommittedDatabase) -> None:
    wrong: list[Any] = []
    for fast in (True, False):
        with override_settings(HELIX_STORE={"FAST_PATHS": fast}):
            for call in CALLS:
                least = count_of(committed_db, call, None)
                for feature in FEATURES:
                    found, expected = (
                        count_of(committed_db, call, feature),
                        least + MORE.get((call, feature), 0),
                    )
                    if found != expected:
                        wrong.append(f"{call} beside {feature}, fast {fast}: {found} instead of {expected}")
    assert not wrong, "\n".join(wrong)
