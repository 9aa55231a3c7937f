"""Posts from several processes against turns that finish and posts that are withdrawn."""

from __future__ import annotations

import pytest

from helix_store.core.types import SessionStatus
from helix_store.exceptions import SessionEnded
from helix_store.stores import DatabaseStateStore
from tests.databases import CommittedDatabase
from tests.processes import run_in_processes

POSTS = 20
SESSIONS = 8


@pytest.fixture
def store(committed_db: CommittedDatabase) -> DatabaseStateStore:
    return DatabaseStateStore(committed_db.alias, tenant=committed_db.tenant)


def drive_or_post(alias: str, tenant: str, worker: int) -> tuple[list[str], int]:
    """Finish each session as soon as possible, or post to each; what was accepted, and the stale steps."""
    store = DatabaseStateStore(alias, tenant=tenant)
    accepted = []
    for number in range(SESSIONS):
        session = store.session(f"s{number}")
        if worker == 0:
            with session.turn() as turn:
                while turn.is_active:
                    with turn.step() as step:
                        step.say({"role": "assistant", "content": "answer"})
                        step.finish("done")
            continue
        for each in range(POSTS):
            text = f"{number} {worker} {each}"
            try:
                session.post({"role": "user", "content": text})
            except SessionEnded:
                break
            accepted.append(text)
    return accepted, worker


@pytest.mark.thorough
def test_every_accepted_post_is_received_once_before_its_session_ends(
    committed_db: CommittedDatabase, store: DatabaseStateStore
) -> None:
    for number in range(SESSIONS):
        store.create_session(f"s{number}", agent_type="agent")
    arguments = [(committed_db.alias, committed_db.tenant, worker) for worker in range(3)]
    outcomes = [outcome.unwrap() for outcome in run_in_processes(drive_or_post, arguments)]
    accepted = [text for texts, _ in outcomes for text in texts]
    received = []
    for number in range(SESSIONS):
        state = store.load_state(f"s{number}")
        assert state is not None
        assert state.status is SessionStatus.COMPLETED
        assert store.list_posts(f"s{number}").items == []
        history = store.get_messages(f"s{number}").messages
        received += [message["content"] for message in history if message["role"] == "user"]
        assert history[-1]["role"] == "assistant"
    assert sorted(received) == sorted(accepted)


def withdraw_or_receive(alias: str, tenant: str, worker: int) -> int:
    """How many posts this worker withdrew or received."""
    store = DatabaseStateStore(alias, tenant=tenant)
    posts = store.list_posts("s", states=("waiting", "received", "withdrawn"), limit=200).items
    if worker == 0:
        return sum(len(store.receive_posts("s", limit=3)) for _ in posts)
    return sum(store.withdraw_post("s", post.post_id) for post in reversed(posts))


@pytest.mark.thorough
def test_of_a_withdrawal_and_a_reception_one_wins(
    committed_db: CommittedDatabase, store: DatabaseStateStore
) -> None:
    store.create_session("s", agent_type="agent")
    for number in range(3 * POSTS):
        store.post_message("s", {"role": "user", "content": str(number)})
    arguments = [(committed_db.alias, committed_db.tenant, worker) for worker in range(3)]
    received, *withdrawn = [outcome.unwrap() for outcome in run_in_processes(withdraw_or_receive, arguments)]
    assert received + sum(withdrawn) == 3 * POSTS
    assert store.get_message_count("s") == received
    assert store.list_posts("s").items == []
    assert len(store.list_posts("s", states=("withdrawn",), limit=200).items) == sum(withdrawn)
