"""What a process remembers: within its bytes, what was used last, and nothing of its parent's."""

from __future__ import annotations

import os
import signal
import threading

import pytest

from helix_store.engine.database import Database
from helix_store.sessions.database.recent import Recent
from helix_store.sessions.database.staged_here import StagedHere, StagedRow

SCOPE = Database("default", "tenant", None)


@pytest.fixture
def recent() -> Recent[str]:
    return Recent(100)


def test_what_was_used_last_stays_within_the_bytes_given(recent: Recent[str]) -> None:
    for place in "abcd":
        recent.put(place, place.upper(), 25)
    assert (recent.size, recent.get("a")) == (100, "A")
    recent.put("e", "E", 50)
    assert [recent.get(place) for place in "abcde"] == ["A", None, None, "D", "E"]
    assert recent.size == 100


def test_a_value_takes_the_place_and_the_room_of_an_earlier_one(recent: Recent[str]) -> None:
    recent.put("a", "old", 40)
    recent.put("a", "new", 10)
    assert (recent.get("a"), recent.size) == ("new", 10)
    assert (recent.take("a"), recent.take("a"), recent.size) == ("new", None, 0)


def test_one_value_does_not_push_all_others_out(recent: Recent[str]) -> None:
    recent.put("small", "kept", 10)
    recent.put("large", "old", 50)
    recent.put("large", "huge", 51)
    assert (recent.get("large"), recent.get("small"), recent.size) == (None, "kept", 10)


def test_threads_share_it() -> None:
    recent: Recent[int] = Recent(500)
    start = threading.Barrier(4)

    def work(thread: int) -> None:
        start.wait()
        for number in range(2_000):
            place = (thread * number) % 13
            with recent.lock:
                recent.put(place, (recent.take(place) or 0) + 1, 10 * (number % 30))
            recent.get(number % 13)

    threads = [threading.Thread(target=work, args=(thread,)) for thread in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert 0 <= recent.size <= 500
    for place in range(13):
        recent.take(place)
    assert recent.size == 0


@pytest.mark.skipif(not hasattr(os, "fork"), reason="a system without fork has no children to protect")
def test_a_forked_child_begins_with_nothing_and_a_free_lock(recent: Recent[str]) -> None:
    recent.put("a", "of the parent", 10)
    reading, writing = os.pipe()
    held, done = threading.Event(), threading.Event()
    # By a thread that the child does not have: the lock of its own thread it could take again.
    holder = threading.Thread(target=_hold, args=(recent, held, done))
    holder.start()
    held.wait()
    child = os.fork()
    if child == 0:
        signal.alarm(30)  # ends a child that waits for a lock
        seen = recent.get("a") is None and recent.size == 0
        os.write(writing, b"nothing" if seen else b"something")
        os._exit(0)
    done.set()
    holder.join()
    os.close(writing)
    os.waitpid(child, 0)
    with os.fdopen(reading, "rb") as answer:
        assert answer.read() == b"nothing"
    assert recent.get("a") == "of the parent"


def _hold(recent: Recent[str], held: threading.Event, done: threading.Event) -> None:
    with recent.lock:
        held.set()
        done.wait()


class TestStagedHere:
    def test_a_step_takes_its_changes_in_staging_order_and_once(self) -> None:
        staged = StagedHere()
        first, second, again = StagedRow("1:1", "a"), StagedRow("2:1", "b"), StagedRow("1:2", "c")
        staged.add(SCOPE, "s", "step", "call-1", first)
        staged.add(SCOPE, "s", "step", "call-2", second)
        staged.add(SCOPE, "s", "other step", "call-1", first)
        staged.add(SCOPE, "s", "step", "call-1", again)
        assert staged.take(SCOPE, "s", "step") == [again, second]
        assert staged.take(SCOPE, "s", "step") == []
        assert staged.take(SCOPE, "s", "other step") == [first]

    @pytest.mark.parametrize(
        ("db", "session_id"),
        [
            (Database("other", "tenant", None), "s"),
            (Database("default", "other", None), "s"),
            (SCOPE, "other"),
        ],
    )
    def test_another_step_has_no_part_in_them(self, db: Database, session_id: str) -> None:
        staged = StagedHere()
        staged.add(SCOPE, "s", "step", "call", StagedRow("1:1", "a"))
        assert staged.take(db, session_id, "step") == []

    def test_steps_that_nobody_commits_are_forgotten(self) -> None:
        staged = StagedHere(most_bytes=20_000)
        row = StagedRow("1:1", "x" * 1_000)
        for number in range(100):
            staged.add(SCOPE, "s", f"step-{number}", "call", row)
        known = [number for number in range(100) if staged.take(SCOPE, "s", f"step-{number}")]
        assert known == list(range(100 - len(known), 100))
        assert 5 <= len(known) <= 20
