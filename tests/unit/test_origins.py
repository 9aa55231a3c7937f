"""What a loaded state remembers: the full payload that its next step can be a delta from."""

from __future__ import annotations

import copy
import pickle
from dataclasses import replace

import pytest

from helix_store.core.payloads import encode
from helix_store.core.types import SessionState
from helix_store.sessions.deltas import apply_delta
from helix_store.sessions.state import (
    MAX_DELTAS,
    Origin,
    StoredPayload,
    loaded_of,
    set_loaded,
    stored_payload,
)
from tests.strategies import HIGH, LOW

BASE = encode({"kept": "x" * 1_000, "n": 1, "gone": None})
NEXT = encode({"kept": "x" * 1_000, "n": 1.0, "new": []})


def origin(text: str = BASE) -> Origin:
    return Origin(7, 70, 100, text)


def stored(payload: str, origin: Origin | None, *, version: int | None = 101) -> StoredPayload:
    return stored_payload(origin, payload, None, version=version)


@pytest.fixture
def loaded() -> SessionState:
    state = SessionState(session_id="s", agent_type="t", custom_state={"a": [1]})
    set_loaded(state, origin=origin())
    return state


def test_a_payload_becomes_a_delta_from_its_origin() -> None:
    made = stored(NEXT, origin())
    assert (made.base_id, made.base_key, made.is_delta) == (70, 7, True)
    assert len(made.text) < 100
    assert apply_delta(BASE, made.text) == NEXT


def test_without_an_origin_it_is_stored_in_full_under_a_new_key() -> None:
    made = [stored(NEXT, None) for _ in range(1_000)]
    assert {each.text for each in made} == {NEXT}
    assert {each.base_id for each in made} == {None}
    keys = {each.base_key for each in made}
    assert len(keys) == 1_000
    assert 0 <= min(keys) <= max(keys) < 2**63


@pytest.mark.parametrize(
    ("payload", "is_delta"),
    [
        ({"kept": "y" * 1_000}, False),
        ({"kept": "x" * 1_000, "pair": HIGH + LOW}, False),
        ({"kept": "x" * 1_000, "lone": HIGH}, True),
    ],
)
def test_a_state_that_has_become_another_one_is_stored_in_full(
    payload: dict[str, str], is_delta: bool
) -> None:
    assert stored(encode(payload), origin(), version=101).is_delta is is_delta


def test_deltas_build_on_a_full_payload_for_a_number_of_versions() -> None:
    assert stored(NEXT, origin(), version=100 + MAX_DELTAS).is_delta
    assert not stored(NEXT, origin(), version=101 + MAX_DELTAS).is_delta


def test_a_version_that_is_not_known_is_the_one_after_the_last() -> None:
    known = origin()
    for latest, is_delta in ((99 + MAX_DELTAS, True), (100 + MAX_DELTAS, False)):
        known.latest_version = latest
        assert stored(NEXT, known, version=None).is_delta is is_delta


def test_a_head_with_another_key_gets_the_whole_payload() -> None:
    known = origin()
    for key, is_delta in ((7, True), (8, False), (None, False)):
        assert stored_payload(known, NEXT, None, version=101, head_key=key).is_delta is is_delta


@pytest.mark.parametrize("text", [encode({HIGH + LOW: 1}), "[]", ""])
def test_a_payload_that_cannot_be_split_is_no_origin_of_deltas(text: str) -> None:
    assert origin(text).entries == {}
    assert not stored(NEXT, origin(text), version=101).is_delta


def test_a_made_state_has_no_origin() -> None:
    assert loaded_of(SessionState(session_id="s", agent_type="t")).origin is None


def test_an_origin_is_no_part_of_the_state(loaded: SessionState) -> None:
    made = SessionState(session_id="s", agent_type="t", custom_state={"a": [1]})
    assert loaded == made
    assert loaded.to_dict() == made.to_dict()
    assert repr(loaded) == repr(made)


def test_an_origin_is_neither_pickled_nor_copied_with_the_state(loaded: SessionState) -> None:
    for other in (pickle.loads(pickle.dumps(loaded)), copy.deepcopy(loaded), replace(loaded)):  # noqa: S301
        assert other == loaded
        assert loaded_of(other).origin is None
    assert len(pickle.dumps(loaded)) < len(BASE)
