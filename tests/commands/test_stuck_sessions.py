"""``helix_sessions wake`` and ``run-again``, and the conditions that ``list`` and ``show`` print."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from helix_store import Store
from helix_store.signals import session_ready
from tests.commands.running import Ended, run
from tests.databases import CommittedDatabase


class Broken(Exception):
    """An error of the agent."""


@pytest.fixture
def store(empty_db: CommittedDatabase) -> Store:
    store = Store(empty_db.alias, tenant=empty_db.tenant)
    for session_id in ("fine", "crashed", "abandoned"):
        store.new_session(session_id, agent_type="travel")
    with pytest.raises(Broken), store.session("crashed").turn():
        raise Broken
    lock = store.locks.acquire("abandoned")
    assert lock is not None
    store.sessions.start_run("abandoned", fencing_token=lock.fencing_token)
    lock.release()
    return store


@pytest.fixture
def ready() -> Iterator[list[tuple[str, str]]]:
    """The session and the reason of each signal."""
    received: list[tuple[str, str]] = []

    def receive(session_id: str, reason: str, **kwargs: Any) -> None:
        received.append((session_id, reason))

    session_ready.connect(receive)
    yield received
    session_ready.disconnect(receive)


def command(store: Store, name: str, *arguments: str) -> Ended:
    return run(store.alias, "helix_sessions", name, *arguments, "--tenant", store.tenant, "--format", "json")


def test_an_abandoned_session_is_woken(store: Store, ready: list[Any]) -> None:
    assert command(store, "wake").data == {"announced": 0, "ready": 1}
    assert ready == [("abandoned", "abandoned")]


def test_a_crashed_session_runs_again_when_somebody_asks(store: Store, ready: list[Any]) -> None:
    ended = command(store, "run-again", "crashed")
    assert ended.code == 0, ended.err
    assert ended.data == {"tenant": store.tenant, "session_id": "crashed", "reason": "again"}
    assert ready == [("crashed", "again")]


def test_a_session_that_is_driven_or_over_does_not_run_again(store: Store, ready: list[Any]) -> None:
    with store.session("fine").turn():
        refused = command(store, "run-again", "fine")
    assert refused.code == 1
    assert "holds the lock" in refused.err
    store.sessions.update_status("crashed", "failed")
    for session_id in ("crashed", "unknown"):
        assert command(store, "run-again", session_id).code == 1
    assert ready == []


def test_the_list_shows_conditions(store: Store) -> None:
    sessions = command(store, "list").data["sessions"]
    shown = {each["session_id"]: each["stuck"] and each["stuck"]["condition"] for each in sessions}
    assert shown == {"fine": None, "crashed": "crashed", "abandoned": "abandoned"}
    run_id = store.sessions.list_runs("crashed")[0].run_id
    (stuck,) = (each["stuck"] for each in sessions if each["session_id"] == "crashed")
    assert (stuck["detail"], stuck["run_id"]) == ("Broken", run_id)
    lines = run(store.alias, "helix_sessions", "list", "--tenant", store.tenant).out.splitlines()
    words = [word for line in lines for word in line.split()]
    # Two of them are ids too.
    assert [words.count(each) for each in ("crashed", "abandoned", "active")] == [2, 2, 1]


def test_the_list_of_a_condition(store: Store) -> None:
    def ids(*arguments: str) -> list[str]:
        return [each["session_id"] for each in command(store, "list", *arguments).data["sessions"]]

    assert ids("--condition", "crashed") == ["crashed"]
    assert ids("--condition", "crashed", "--condition", "abandoned") == ["crashed", "abandoned"]
    assert ids("--condition", "waiting") == []
    refused = command(store, "list", "--condition", "crashed", "--status", "active")
    assert refused.code != 0
    assert "other filters" in refused.err
    every = run(store.alias, "helix_sessions", "list", "--condition", "crashed", "--format", "json")
    assert [each["session_id"] for each in every.data["sessions"]] == ["crashed"]


def test_a_session_with_two_conditions_takes_one_place_in_the_list(store: Store) -> None:
    due_at = datetime.now(UTC) - timedelta(hours=1)
    store.sessions.post_message("crashed", {"role": "user"}, not_before=due_at)
    conditions = ("crashed", "unanswered", "abandoned")
    chosen = [word for each in conditions for word in ("--condition", each)]
    for limit, expected in (("1", ["crashed"]), ("2", ["crashed", "abandoned"])):
        listed = command(store, "list", *chosen, "--limit", limit).data["sessions"]
        assert [each["session_id"] for each in listed] == expected
        assert listed[0]["stuck"]["condition"] == "unanswered"


def test_a_session_is_shown_with_its_condition(store: Store) -> None:
    assert command(store, "show", "crashed").data["stuck"]["condition"] == "crashed"
    assert command(store, "show", "fine").data["stuck"] is None
    shown = run(store.alias, "helix_sessions", "show", "crashed", "--tenant", store.tenant).out
    assert "crashed since" in shown
    assert ": Broken" in shown
