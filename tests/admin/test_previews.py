"""A message in one line, from the beginning of its stored text."""

from __future__ import annotations

import re
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from helix_store.admin.records import item_preview, message_preview
from helix_store.core.payloads import encode
from helix_store.core.transcript import parts_of
from helix_store.reports.payloads import PREVIEW_SOURCE, read_start
from tests.cells import for_each


def _preview(message: Any) -> str | None:
    return message_preview(encode(message)[: PREVIEW_SOURCE + 1])


def _call(name: Any, arguments: Any) -> dict[str, Any]:
    return {"id": "1", "type": "function", "function": {"name": name, "arguments": arguments}}


def _picture(data: str) -> dict[str, Any]:
    return {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}}


@for_each(
    ("message", "expected"),
    [
        ({"role": "user", "content": "Hello\n  there"}, "Hello there"),
        ({"role": "user", "content": None}, ""),
        ({"role": "user"}, ""),
        (
            {"role": "user", "content": [{"type": "text", "text": "A"}, _picture("AAAA"), "B"]},
            "A [image/png] 3 bytes B",
        ),
        ({"role": "user", "content": {"k": 1}}, '[part] {"k": 1}'),
        (
            {"role": "assistant", "content": None, "tool_calls": [_call("f", "{}"), _call("g", "")]},
            "→ f({}) → g()",
        ),
        (
            {"role": "assistant", "content": "Hm", "tool_calls": [_call("f", "{}"), 3, {"function": 1}]},
            "Hm → f({}) [call] 3 → ?()",
        ),
        ({"role": "assistant", "tool_calls": 7}, '{"tool_calls": 7}'),
        ({"role": "assistant", "content": "Hm", "tool_calls": 7}, "Hm"),
        ({"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"}, "→ f({})"),
        ({"type": "reasoning", "summary": [{"type": "summary_text", "text": "Hm."}]}, "Hm."),
        ({"type": "function_call_output", "call_id": "1", "output": "found"}, "found"),
        (
            {"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "f", "input": {}}]},
            "→ f({})",
        ),
        (
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": ["found"]}]},
            "found",
        ),
        ({"kind": "request", "parts": [{"part_kind": "user-prompt", "content": "Hello"}]}, "Hello"),
        ([], None),
        ("text", None),
    ],
)
def test_a_preview_says_what_the_message_says(message: Any, expected: str | None) -> None:
    assert _preview(message) == expected


@for_each("before", ["", "x", "\\", '"', "\n", "\x00", "é", "\ud83d", "\ud83d\ude00", "😀"])
def test_a_long_message_is_previewed_wherever_the_cut_goes(before: str) -> None:
    for shift in range(8):
        message = {"role": "user", "content": "Hello " + "-" * shift + before * PREVIEW_SOURCE}
        preview = _preview(message)
        assert preview is not None
        assert preview.startswith("Hello")


def test_a_long_message_in_parts_is_read_up_to_the_cut() -> None:
    content = [{"type": "text", "text": "Look"}, _picture("A" * 2 * PREVIEW_SOURCE)]
    text = encode({"role": "user", "content": content})
    message, is_cut = read_start(text[: PREVIEW_SOURCE + 1])
    assert is_cut
    assert message is not None
    looked, seen = parts_of(message)
    assert looked.text == "Look"
    assert seen.kind == "file"
    assert re.fullmatch(r"more than 1,\d{3} bytes", seen.text)


@for_each("length", [1, 2 * PREVIEW_SOURCE])
@for_each("kind", [{}, {"type": "embedding"}], ids=["no type", "a type"])
def test_an_item_that_is_no_message_is_previewed_as_json(length: int, kind: dict[str, str]) -> None:
    stored = encode({"vector": "x" * length, **kind})
    assert item_preview(stored[: PREVIEW_SOURCE + 1]).startswith('{"vector":"x')


def test_a_preview_ends_with_an_ellipsis_where_it_is_cut() -> None:
    assert _preview({"role": "user", "content": "a " * 5_000}) == ("a " * 90).strip() + "…"


@for_each("stored", ["", "{", "nothing", "~", "{" * PREVIEW_SOURCE * 2, "x" * PREVIEW_SOURCE * 2])
def test_a_text_that_is_no_message_has_no_preview(stored: str) -> None:
    assert message_preview(stored[: PREVIEW_SOURCE + 1]) is None


texts = st.text(max_size=20)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | texts,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4),
    max_leaves=10,
)
messages = st.fixed_dictionaries(
    {"role": texts}, optional={"content": json_values, "tool_calls": json_values, "other": json_values}
)


@given(messages, st.integers(min_value=0, max_value=200))
def test_every_message_has_a_preview_also_when_it_is_cut_anywhere(message: Any, kept: int) -> None:
    assert _preview(message) is not None
    long = encode({"role": "user", "before": message, "content": "x" * 2 * PREVIEW_SOURCE})
    preview = message_preview(long[: PREVIEW_SOURCE + 1 + kept])
    assert preview is not None
    assert preview.endswith("…")
