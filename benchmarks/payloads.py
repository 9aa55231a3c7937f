"""The payloads: a state of 24 keys and 4 or 16 KB, messages of 1 KB, staged changes of about 200 bytes."""

from __future__ import annotations

import random
from functools import cache
from typing import Any

__all__ = ["KEYS", "STATES", "message", "staged_changes", "state_of"]

KEYS = 24
"""Top-level keys of a state."""
STATES = 24
"""How many states there are before they repeat."""

_VOCABULARY = 2_000
_SYLLABLES = [consonant + vowel for consonant in "bcdfghklmnprstvwz" for vowel in "aeiou"]


def state_of(kib: int, step: int = 0) -> dict[str, Any]:
    """A state after so many steps, together about so many KiB of JSON; each step changes two of its keys."""
    share = kib * 1024 // KEYS - 40
    return {
        f"key_{number:02}": {
            "text": _text(share, number + KEYS * _changes(number, step)),
            "count": number,
            "done": number % 2 == 0,
        }
        for number in range(KEYS)
    }


def message(number: int) -> dict[str, Any]:
    return {"role": "assistant", "content": _text(1_000, number)}


def staged_changes() -> list[dict[str, Any]]:
    """What two tool calls of a step stage."""
    return [
        {"tool_call_id": f"call-{number}", "merge_changes": {f"result_{number}": _text(150, number)}}
        for number in (1, 2)
    ]


def _changes(number: int, step: int) -> int:
    """How often a key has changed by a step: the keys change in pairs, one pair after the other.

    Every second change takes the one before it back, so that there are only so many states.
    """
    pairs = KEYS // 2
    return (step + pairs - 1 - number // 2) // pairs % 2


@cache
def _words() -> list[str]:
    """As many as make text that PostgreSQL compresses by a third: fewer words would make it a toy."""
    chance = random.Random(0)  # noqa: S311  repeatable words
    lengths = (1, 1, 2, 2, 3, 4)
    return ["".join(chance.choices(_SYLLABLES, k=chance.choice(lengths))) for _ in range(_VOCABULARY)]


@cache
def _text(size: int, seed: int) -> str:
    chance = random.Random(seed)  # noqa: S311  repeatable text
    words: list[str] = []
    length = 0
    while length < size:
        # Some words are used much more often than others.
        words.append(_words()[int(_VOCABULARY * chance.random() ** 2)])
        length += len(words[-1]) + 1
    return " ".join(words)[:size]
