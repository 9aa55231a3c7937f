"""Reading a message: each framework's texts, thinking, calls and results."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helix_store.core.transcript import Part, parts_of, role_of, turns
from tests.cells import for_each
from tests.strategies import json_values

TEXT = Part(kind="text", text="Hello")
THINKING = Part(kind="thinking", text="Hm.")
CALL = Part(kind="call", text='{"city": "Kyōto"}', name="weather", call_id="c-1")
RESULT = Part(kind="result", text="Rain", call_id="c-1")


@for_each(
    ("message", "parts"),
    [
        ({"role": "user", "content": "Hello"}, [TEXT]),
        ({"role": "assistant", "content": None}, []),
        ({"role": "assistant", "content": ""}, []),
        ({"role": "assistant", "thinking": "Hm.", "content": "Hello"}, [THINKING, TEXT]),
        (
            {
                "role": "assistant",
                "content": "Hello",
                "tool_calls": [
                    {"id": "c-1", "function": {"name": "weather", "arguments": '{"city":\n "Kyōto"}'}}
                ],
            },
            [TEXT, CALL],
        ),
        ({"role": "tool", "tool_call_id": "c-1", "content": "Rain"}, [RESULT]),
        (
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "Hm."},
                    {"type": "text", "text": "Hello"},
                    {"type": "tool_use", "id": "c-1", "name": "weather", "input": {"city": "Kyōto"}},
                ],
            },
            [THINKING, TEXT, CALL],
        ),
        (
            {
                "role": "user",
                "content": [
                    {
                        "type": "tool_result",
                        "tool_use_id": "c-1",
                        "is_error": True,
                        "content": [{"type": "text", "text": "Rain"}],
                    }
                ],
            },
            [Part(kind="result", text="Rain", call_id="c-1", is_error=True)],
        ),
        (
            {
                "role": "assistant",
                "type": "function_call",
                "call_id": "c-1",
                "name": "weather",
                "arguments": '{"city": "Kyōto"}',
            },
            [CALL],
        ),
        ({"role": "tool", "type": "function_call_output", "call_id": "c-1", "output": "Rain"}, [RESULT]),
        (
            {
                "role": "assistant",
                "type": "reasoning",
                "summary": [{"type": "summary_text", "text": "Hm."}],
            },
            [THINKING],
        ),
        ({"role": "assistant", "content": [{"type": "output_text", "text": "Hello"}]}, [TEXT]),
        (
            {
                "role": "assistant",
                "tool_calls": [{"id": "c-1", "name": "weather", "args": {"city": "Kyōto"}}],
            },
            [CALL],
        ),
        (
            {
                "role": "assistant",
                "parts": [
                    {"part_kind": "thinking", "content": "Hm."},
                    {"part_kind": "text", "content": "Hello"},
                    {
                        "part_kind": "tool-call",
                        "tool_name": "weather",
                        "args": {"city": "Kyōto"},
                        "tool_call_id": "c-1",
                    },
                ],
            },
            [THINKING, TEXT, CALL],
        ),
        (
            {
                "role": "tool",
                "parts": [
                    {"part_kind": "tool-return", "tool_name": "w", "content": "Rain", "tool_call_id": "c-1"}
                ],
            },
            [Part(kind="result", text="Rain", name="w", call_id="c-1")],
        ),
        (
            {"role": "user", "content": [{"type": "image", "source": {"id": 7}}, "Hello"]},
            [Part(kind="other", text='{"type": "image", "source": {"id": 7}}', name="image"), TEXT],
        ),
        (
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "https://a/b.png"}}]},
            [Part(kind="file", text="https://a/b.png", name="image_url")],
        ),
        (
            {"role": "user", "content": [{"type": "input_image", "image_url": "data:image/png;base64,AAAA"}]},
            [Part(kind="file", text="3 bytes", name="image/png")],
        ),
        (
            {
                "role": "user",
                "content": [
                    {"type": "document", "title": "a.pdf", "source": {"type": "base64", "data": "AAAAAA=="}}
                ],
            },
            [Part(kind="file", text="4 bytes", name="a.pdf")],
        ),
        (
            {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Hm."}], "content": None},
            [THINKING],
        ),
        (
            {
                "role": "assistant",
                "content": [{"type": "tool_use", "id": "c-1", "name": "weather", "input": {"city": "Kyōto"}}],
                "tool_calls": [{"id": "c-1", "name": "weather", "args": {"city": "Kyōto"}}],
            },
            [CALL],
        ),
        ({"role": "user", "content": {"a": 1}}, [Part(kind="other", text='{"a": 1}', name="part")]),
    ],
)
def test_each_shape_is_read(message: dict[str, Any], parts: list[Part]) -> None:
    assert parts_of(message) == parts


@pytest.mark.thorough
@given(
    st.dictionaries(
        st.sampled_from(["role", "content", "type", "tool_calls", "parts", "thinking"]), json_values()
    )
)
def test_no_message_is_too_strange_to_read(message: dict[str, Any]) -> None:
    assert isinstance(role_of(message), str)
    assert all(isinstance(part.text, str) and isinstance(part.name, str) for part in parts_of(message))


def _called(call_id: str) -> dict[str, Any]:
    return {"role": "assistant", "content": [{"type": "tool_use", "id": call_id, "name": "f", "input": {}}]}


def _returned(call_id: str, text: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call_id, "content": text}


def test_a_result_stands_at_its_call_and_its_message_is_left_out() -> None:
    first, last = turns([(1, _called("a")), (2, _returned("a", "found")), (3, {"role": "user"})])
    (own,) = first.parts
    assert own.result is not None
    assert (own.part.kind, own.result.text, own.result_sequence) == ("call", "found", 2)
    assert (last.sequence, last.role, last.parts) == (3, "user", [])


def test_a_result_without_its_call_is_not_lost() -> None:
    (alone,) = turns([(7, _returned("a", "from the page before"))])
    assert [(own.part.kind, own.part.text) for own in alone.parts] == [("result", "from the page before")]


def test_an_id_that_is_used_again_has_its_results_in_order() -> None:
    said = [_called("a"), _returned("a", "1"), _called("a"), _returned("a", "2"), _returned("a", "3")]
    found = turns(enumerate(said, start=1))
    assert [turn.sequence for turn in found] == [1, 3, 5]
    texts = [own.part.text if own.result is None else own.result.text for turn in found for own in turn.parts]
    assert texts == ["1", "2", "3"]
