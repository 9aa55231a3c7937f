"""Byte limits: the contract's defaults, and no setting that would switch one off."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, asdict, replace
from typing import Any

import pytest

from helix_store.core.limits import (
    MAX_DEPTH,
    MAX_INT_DIGITS,
    Limits,
)
from tests.cells import for_each


def test_the_defaults_are_those_of_the_contract() -> None:
    assert asdict(Limits()) == {
        "max_state_bytes": 8 * 1024 * 1024,
        "max_message_bytes": 1024 * 1024,
        "max_staged_bytes": 1024 * 1024,
        "max_chunk_bytes": 256 * 1024,
        "max_waiting_posts": 1_000,
        "max_effects": 10_000,
    }
    assert (MAX_DEPTH, MAX_INT_DIGITS) == (200, 1_000)


@for_each("name", list(asdict(Limits())))
def test_one_limit_changes_alone(name: str) -> None:
    assert asdict(replace(Limits(), **{name: 1})) == asdict(Limits()) | {name: 1}


@for_each("name", list(asdict(Limits())))
@for_each("value", [0, -1, None, True, 1.5, "1024", float("inf")])
def test_a_limit_is_a_positive_whole_number(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=name):
        Limits(**{name: value})


def test_limits_are_given_by_name_and_never_change() -> None:
    with pytest.raises(TypeError):
        Limits(1)  # type: ignore[call-arg]
    with pytest.raises(FrozenInstanceError):
        Limits().max_state_bytes = 1  # type: ignore[misc]
