"""What a process remembers of full payloads: bounded, the last used, and never more than it was told."""

from __future__ import annotations

import threading

import pytest

from helix_store.core.payloads import encode
from helix_store.engine.database import Database
from helix_store.sessions.database.bases import Bases, new_base_key
from helix_store.sessions.deltas import MAX_DELTAS, apply_deltas
from tests.strategies import HIGH, LOW

SCOPE = Database("default", "tenant", None)
BASE = encode({"kept": "x" * 1_000, "n": 1, "gone": None})
NEXT = encode({"kept": "x" * 1_000, "n": 1.0, "new": []})


@pytest.fixture
def known() -> Bases:
    known = Bases()
    known.keep(SCOPE, "s", 7, 70, BASE)
    return known


def test_a_payload_becomes_a_delta_from_the_base_of_its_session(known: Bases) -> None:
    base = known.get(SCOPE, "s")
    assert base is not None
    delta = base.delta_to(NEXT)
    assert delta is not None
    assert (delta.base_id, delta.base_key) == (70, 7)
    assert len(delta.text) < 100
    assert apply_deltas(BASE, [delta.text]) == NEXT


@pytest.mark.parametrize(
    ("db", "session_id"),
    [
        (SCOPE, "another"),
        (Database("default", "another", None), "s"),
        (Database("postgres", "tenant", None), "s"),
    ],
)
def test_another_session_has_no_part_in_it(known: Bases, db: Database, session_id: str) -> None:
    assert known.get(db, session_id) is None


def test_a_state_that_has_become_another_one_is_stored_in_full(known: Bases) -> None:
    base = known.get(SCOPE, "s")
    assert base is not None
    assert base.delta_to(encode({"kept": "y" * 1_000})) is None
    assert base.delta_to(encode({"kept": "x" * 1_000, "pair": HIGH + LOW})) is None
    assert base.delta_to(encode({"kept": "x" * 1_000, "lone": HIGH})) is not None


def test_a_base_is_used_for_a_number_of_deltas(known: Bases) -> None:
    base = known.get(SCOPE, "s")
    assert base is not None
    assert all(base.delta_to(NEXT) for _ in range(MAX_DELTAS))
    assert base.delta_to(NEXT) is None
    known.keep(SCOPE, "s", 7, 70, BASE)
    assert known.get(SCOPE, "s") is base, "reading it again is not a reason to build on it for ever"
    known.keep(SCOPE, "s", 8, 80, NEXT)
    renewed = known.get(SCOPE, "s")
    assert renewed is not None
    delta = renewed.delta_to(BASE)
    assert delta is not None
    assert (delta.base_id, delta.base_key) == (80, 8)


def test_a_payload_that_no_delta_can_be_made_from_is_not_kept() -> None:
    known = Bases()
    for payload in (encode({HIGH + LOW: 1}), "[]", ""):
        known.keep(SCOPE, "s", 1, 1, payload)
        base = known.get(SCOPE, "s")
        assert base is not None
        assert base.delta_to(NEXT) is None
        assert known.get(SCOPE, "s") is None
        assert known.size == 0


def test_the_bases_used_last_stay_within_the_bytes_given() -> None:
    known = Bases(most_bytes=20_000)
    for number in range(100):
        known.keep(SCOPE, f"s-{number}", number, number, BASE)
        assert known.get(SCOPE, f"s-{number}") is not None
        assert known.get(SCOPE, "s-0") is not None
        assert known.size <= 20_000
    remembered = {number for number in range(100) if known.get(SCOPE, f"s-{number}") is not None}
    assert remembered == {0, *range(100 - len(remembered) + 1, 100)}
    assert len(remembered) >= 5


def test_one_base_does_not_push_all_others_out() -> None:
    known = Bases(most_bytes=20_000)
    known.keep(SCOPE, "small", 1, 1, BASE)
    known.keep(SCOPE, "huge", 2, 2, encode({"kept": "x" * 15_000}))
    assert known.get(SCOPE, "huge") is None
    assert known.get(SCOPE, "small") is not None


def test_many_short_members_count_with_all_the_memory_that_they_take() -> None:
    known = Bases(most_bytes=100_000)
    known.keep(SCOPE, "s", 1, 1, encode({str(number): 0 for number in range(1_000)}))
    assert 0 < known.size < 20_000
    known.get(SCOPE, "s")
    assert known.get(SCOPE, "s") is None
    assert known.size == 0


def test_what_is_forgotten_takes_no_room(known: Bases) -> None:
    known.forget(SCOPE, "s")
    known.forget(SCOPE, "s")
    assert known.get(SCOPE, "s") is None
    assert known.size == 0


def test_threads_share_it() -> None:
    known = Bases(most_bytes=15_000)
    start = threading.Barrier(4)
    faults: list[str] = []

    def work(thread: int) -> None:
        start.wait()
        for number in range(500):
            session_id = f"s-{(thread + number) % 7}"
            known.keep(SCOPE, session_id, number, number, BASE)
            base = known.get(SCOPE, session_id)
            delta = None if base is None else base.delta_to(NEXT)
            if delta is not None and apply_deltas(BASE, [delta.text]) != NEXT:
                faults.append(delta.text)
            if number % 5 == thread:
                known.forget(SCOPE, session_id)

    threads = [threading.Thread(target=work, args=(thread,)) for thread in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    for number in range(7):
        known.forget(SCOPE, f"s-{number}")
    assert faults == []
    assert known.size == 0


def test_keys_do_not_repeat_and_fit_the_column() -> None:
    keys = {new_base_key() for _ in range(1_000)}
    assert len(keys) == 1_000
    assert 0 <= min(keys) <= max(keys) < 2**63
