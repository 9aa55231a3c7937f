"""``helix_usage --budgets``, and the budgets of ``helix_sessions show``."""

from __future__ import annotations

import re

import pytest

from helix_store import Store
from tests.cells import for_each
from tests.commands.running import run
from tests.databases import CommittedDatabase


@pytest.fixture
def store(empty_db: CommittedDatabase, monkeypatch: pytest.MonkeyPatch) -> Store:
    """Two budgets of a tenant, of which one is reached, and one of another tenant."""
    monkeypatch.setenv("COLUMNS", "140")
    store = Store(empty_db.alias, tenant="acme")
    store.budgets.set_budget("free-plan", scope="user", period="day", limit_usd="0.50", limit_tokens=1_000)
    store.budgets.set_budget("total", scope="tenant", limit_usd=10)
    for user, cost in (("ada", "0.5"), ("bob", "0.125"), ("ada", "0")):
        _spend(store, user, cost)
    Store(empty_db.alias, tenant="zeta").budgets.set_budget("quiet", scope="agent_type", limit_tokens=5)
    return store


def _spend(store: Store, user: str, cost: str) -> None:
    known = store.sessions.session_exists(f"of-{user}")
    session = store.session(f"of-{user}") if known else None
    session = session or store.new_session(f"of-{user}", agent_type="a", user_id=user)
    with session.turn(rest=False) as turn, turn.step() as step:
        turn.tokens(model="m", prompt=90, completion=10, cost_usd=cost)
        step.end_turn()


def test_every_budget_has_a_line_and_a_bar_for_each_limit(store: Store) -> None:
    listed = run(store.sessions.alias, "helix_usage", "--budgets")
    lines = [re.sub(r" (20\d\d-.*|-)$", "", " ".join(line.split())) for line in listed.lines]
    assert lines[1:] == [
        "acme free-plan each user, highest of 2: ada day USD 0.50 0.00 0.50 0.00 reached",
        "tokens 100 0 1,000 900 █▎",
        "acme total the tenant total USD 0.62 0.00 10.00 9.38 ▊",
        "zeta quiet each agent type total tokens 0 0 5 5",
    ]
    narrow = run(store.sessions.alias, "helix_usage", "--budgets", "--tenant", "zeta")
    assert len(narrow.lines) == 2


def test_json_has_exact_amounts_and_the_reset(store: Store) -> None:
    ended = run(store.sessions.alias, "helix_usage", "--budgets", "--tenant", "acme", "--format", "json")
    free, total = ended.data["budgets"]
    assert (ended.data["tenant"], free["name"], free["value"]) == ("acme", "free-plan", "ada")
    assert (free["scope"], free["period"], free["is_for_each"], free["value_count"]) == (
        "user",
        "day",
        True,
        2,
    )
    assert (free["spent_usd"], free["held_usd"], free["remaining_usd"]) == ("0.5", "0", "0")
    assert free["resets_at"].endswith("T00:00:00+00:00")
    assert (total["spent_usd"], total["limit_tokens"], total["resets_at"]) == ("0.625", None, None)


def test_without_budgets_the_command_says_so(empty_db: CommittedDatabase) -> None:
    assert run(empty_db.alias, "helix_usage", "--budgets").out == "No budgets.\n"
    ended = run(empty_db.alias, "helix_usage", "--budgets", "--format", "json")
    assert ended.data == {"tenant": None, "budgets": []}


@for_each("option", ["--csv", "--since=7d", "--user=ada", "--limit=3"], shared=True)
def test_options_of_the_usage_are_wrong_usage(store: Store, option: str) -> None:
    ended = run(store.sessions.alias, "helix_usage", "--budgets", option)
    assert (ended.code, ended.err) == (2, f"--budgets does not take {option.partition('=')[0]}.")


def test_the_page_of_a_session_explains_a_run_that_a_budget_has_ended(store: Store) -> None:
    shown = run(store.sessions.alias, "helix_sessions", "show", "of-ada").out
    assert "BUDGETS" in shown
    words = " ".join(shown.split())
    assert "the budget free-plan did not allow the last step; the next turn tries again" in words
    assert "each user: ada day USD 0.50 0.00 0.50 0.00 reached" in words
    assert "stopped" not in run(store.sessions.alias, "helix_sessions", "show", "of-bob").out
    ended = run(store.sessions.alias, "helix_sessions", "show", "of-bob", "--format", "json")
    assert [budget["name"] for budget in ended.data["budgets"]] == ["free-plan", "total"]
