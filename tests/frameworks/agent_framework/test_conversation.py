"""Messages of Microsoft Agent Framework for people to read. They are read without the framework."""

from __future__ import annotations

from typing import Any

import pytest

from helix_store.contrib.agent_framework.catalogue import CONVERSATION
from helix_store.core.transcript import CutText, Part


def parts(*contents: Any) -> list[Part]:
    said = CONVERSATION.says({"role": "assistant", "contents": [*contents]})
    assert said is not None
    assert said.role == "assistant"
    return said.parts


def test_texts_thoughts_calls_results_and_files_are_told_apart() -> None:
    assert parts(
        {"type": "text_reasoning", "text": "hm"},
        {"type": "text", "text": "It is"},
        {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": {"city": "Lisbon"}},
        {"type": "function_call", "call_id": "c2", "name": "weather", "arguments": "{}"},
        {"type": "function_result", "call_id": "c1", "result": "sunny"},
        {"type": "function_result", "call_id": "c2", "result": "no", "exception": "failed"},
        {"type": "data", "uri": "data:image/png;base64,AP8=", "media_type": "image/png"},
        {"type": "uri", "uri": "https://example.com/map.png", "media_type": "image/png"},
        {"type": "hosted_file", "file_id": "file-1"},
        {"type": "error", "message": "quota"},
        {"type": "usage", "usage_details": {}},
    ) == [
        Part(kind="thinking", text="hm"),
        Part(kind="text", text="It is"),
        Part(kind="call", text='{"city": "Lisbon"}', name="weather", call_id="c1"),
        Part(kind="call", text="{}", name="weather", call_id="c2"),
        Part(kind="result", text="sunny", call_id="c1"),
        Part(kind="result", text="no", call_id="c2", is_error=True, rest='{"exception": "failed"}'),
        Part(kind="file", text="2 bytes", name="image/png"),
        Part(kind="file", text="https://example.com/map.png", name="image/png"),
        Part(kind="file", text="file-1", name="hosted_file"),
        Part(kind="other", text="quota", name="error", is_error=True),
        Part(kind="other", text='{"type": "usage", "usage_details": {}}', name="usage"),
    ]


def test_a_file_that_is_cut_off_is_longer_than_its_start() -> None:
    picture = {"type": "data", "uri": CutText("data:image/png;base64,AP8="), "media_type": "image/png"}
    assert parts(picture) == [Part(kind="file", text="more than 2 bytes", name="image/png")]
    address = {"type": "uri", "uri": CutText("https://example.com/ma"), "media_type": "image/png"}
    assert parts(address) == [Part(kind="file", text="https://example.com/ma…", name="image/png")]


@pytest.mark.parametrize(
    "message",
    [
        {},
        {"role": 1, "contents": 1},
        {"contents": [1, {}, {"type": 1}, {"type": "text", "text": 1}, {"type": "function_call", "name": 1}]},
        {"contents": [{"type": "data", "uri": 1}, {"type": "function_result"}, {"type": "error"}]},
    ],
)
def test_a_damaged_message_raises_nothing(message: dict[str, Any]) -> None:
    assert CONVERSATION.says(message) is not None
