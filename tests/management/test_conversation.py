"""A conversation on a terminal."""

from __future__ import annotations

from typing import Any

from helix_store.core.transcript import turns
from helix_store.management.output import Layout, width_of
from helix_store.management.session_page import conversation

MESSAGES: list[dict[str, Any]] = [
    {"role": "user", "content": "Is there rain in Kyōto? " * 6},
    {
        "role": "assistant",
        "thinking": "I look it up.",
        "content": "Wait.",
        "tool_calls": [
            {"id": "c-1", "function": {"name": "weather", "arguments": '{"city": "Kyōto"}'}},
            {"id": "c-2", "function": {"name": "clock", "arguments": "{}"}},
        ],
    },
    {"role": "tool", "tool_call_id": "c-2", "content": "noon"},
    {"role": "tool", "tool_call_id": "c-1", "content": "\n".join(f"hour {hour}: rain" for hour in range(24))},
    {"role": "tool", "tool_call_id": "elsewhere", "name": "old", "content": "late"},
    {"role": "assistant\x1b[31m", "content": "Yes.\x1b[2J\u202e\nTake an umbrella."},
]


def blocks(layout: Layout = Layout(60)) -> list[str]:  # noqa: B008  it is frozen
    return list(conversation(turns(enumerate(MESSAGES, start=7)), layout))


def test_a_conversation_can_be_read() -> None:
    first, second, third, last = blocks()
    assert first.splitlines()[0] == "7  user"
    assert max(map(len, first.splitlines())) <= 60
    assert second.splitlines()[:6] == [
        "8  assistant",
        "    I look it up.",
        "    Wait.",
        '    → weather({"city": "Kyōto"})',
        "      ← hour 0: rain",
        "      hour 1: rain",
    ]
    assert second.splitlines()[-2:] == ["    → clock({})", "      ← noon"]
    # Its call is not among these messages.
    assert third.splitlines() == ["11  tool", "      ← old: late"]
    assert last.splitlines() == [
        "12  assistant\\x1b[31m",
        "    Yes.\\x1b[2J\\u202e",
        "    Take an umbrella.",
    ]


def test_long_results_are_cut_unless_the_output_is_wide() -> None:
    for layout in (Layout(60), Layout()):
        assert "      … 13 more lines; --wide prints them" in blocks(layout)[1].splitlines()
    wide = blocks(Layout(is_whole=True))
    assert "hour 23: rain" in wide[1]
    assert len(wide[0].splitlines()) == 2


def test_thinking_is_dimmed() -> None:
    coloured = blocks(Layout(60, has_colours=True))[1]
    assert "\x1b[2m    I look it up.\x1b[0m" in coloured
    assert "\x1b[1;32m8  assistant\x1b[0m" in coloured


def test_wide_characters_fit() -> None:
    messages = [(1, {"role": "user", "content": "日本語の長い文章です。" * 30})]
    (block,) = conversation(turns(messages), Layout(40))
    assert max(map(width_of, block.splitlines())) <= 40
