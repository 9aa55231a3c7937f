"""The payloads: a state of 4 or 16 KB, messages of 1 KB, staged changes of about 200 bytes."""

from __future__ import annotations

import random
from typing import Any

__all__ = ["message", "staged_changes", "state_of"]

_WORDS = (
    "alpha",
    "bravo",
    "charlie",
    "delta",
    "echo",
    "foxtrot",
    "golf",
    "hotel",
    "india",
    "juliett",
    "kilo",
)


def _text(size: int, seed: int) -> str:
    chance = random.Random(seed)  # noqa: S311  repeatable text
    words: list[str] = []
    length = 0
    while length < size:
        words.append(chance.choice(_WORDS))
        length += len(words[-1]) + 1
    return " ".join(words)[:size]


def state_of(kib: int) -> dict[str, Any]:
    """24 top-level keys, together about so many KiB of JSON."""
    share = kib * 1024 // 24 - 40
    return {
        f"key_{number:02}": {"text": _text(share, number), "count": number, "done": number % 2 == 0}
        for number in range(24)
    }


def message(number: int) -> dict[str, Any]:
    return {"role": "assistant", "content": _text(1_000, number)}


def staged_changes() -> list[dict[str, Any]]:
    """What two tool calls of a step stage, about 216 bytes each."""
    return [
        {"tool_call_id": f"call-{number}", "merge_changes": {f"result_{number}": _text(150, number)}}
        for number in (1, 2)
    ]
