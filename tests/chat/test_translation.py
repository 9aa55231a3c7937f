"""The two pure translations: stored messages and chunks as messages, events and parts."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, replace
from typing import Any

import pytest

from helix_store.contrib.chat import agui, aisdk, threads
from helix_store.contrib.chat.agui import Events, Outcome
from helix_store.contrib.chat.aisdk import Call, Held, Parts
from helix_store.contrib.chat.stored import entries, is_added, is_of_agent, is_of_user, without_own_keys
from helix_store.contrib.chat.turns import Client, digest_of, patch
from helix_store.core.patches import apply_patches
from tests.cells import Cells, for_each

_USER = {"role": "user", "content": "Hi", "id": "u"}
_CALL = {"id": "c", "type": "function", "function": {"name": "look", "arguments": '{"a": 1}'}}
_RESULT = {"role": "tool", "tool_call_id": "c", "content": '{"b": 2}', "id": "r"}


def _assistant(content: Any = "Yes.", **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, "id": "m", **more}


def _agui_call(arguments: str = '{"a": 1}') -> dict[str, Any]:
    return {"id": "c", "type": "function", "function": {"name": "look", "arguments": arguments}}


AGUI: dict[str, tuple[list[dict[str, Any]], list[dict[str, Any]]]] = {
    "text": (
        [_USER, _assistant()],
        [{"id": "u", "role": "user", "content": "Hi"}, {"id": "m", "role": "assistant", "content": "Yes."}],
    ),
    "a message without an id": (
        [{"role": "user", "content": "Hi"}],
        [{"id": "message-1", "role": "user", "content": "Hi"}],
    ),
    "a call and its result": (
        [_assistant("", tool_calls=[_CALL]), _RESULT],
        [
            {"id": "m", "role": "assistant", "content": "", "toolCalls": [_agui_call()]},
            {"id": "r", "role": "tool", "toolCallId": "c", "content": '{"b": 2}'},
        ],
    ),
    "a result that comes late": (
        [_assistant("", tool_calls=[_CALL]), {**_assistant("Wait."), "id": "n"}, _RESULT],
        [
            {"id": "m", "role": "assistant", "content": "", "toolCalls": [_agui_call()]},
            {"id": "r", "role": "tool", "toolCallId": "c", "content": '{"b": 2}'},
            {"id": "n", "role": "assistant", "content": "Wait."},
        ],
    ),
    "reasoning": (
        [_assistant(reasoning="Well")],
        [
            {"id": "m-reasoning", "role": "reasoning", "content": "Well"},
            {"id": "m", "role": "assistant", "content": "Yes."},
        ],
    ),
    "reasoning after the text": (
        [
            _assistant(
                reasoning="Well",
                chat={"parts": [{"type": "text", "length": 4}, {"type": "reasoning", "length": 4}]},
            )
        ],
        [
            {"id": "m", "role": "assistant", "content": "Yes."},
            {"id": "m-reasoning", "role": "reasoning", "content": "Well"},
        ],
    ),
    "a sub-agent": (
        [
            _assistant(
                chat={
                    "parts": [
                        {
                            "type": "agent",
                            "agent": {"id": "s", "name": "helper"},
                            "message": {"role": "assistant", "id": "i", "content": "Done."},
                        },
                        {"type": "text", "length": 4},
                    ]
                }
            )
        ],
        [
            {"id": "i", "role": "assistant", "content": "Done.", "subagentRunId": "s"},
            {"id": "m", "role": "assistant", "content": "Yes."},
        ],
    ),
    "the shape of a handle's example": (
        [_assistant("", tool_calls=[{"id": "c", "name": "look", "input": {"a": 1}}])],
        [{"id": "m", "role": "assistant", "content": "", "toolCalls": [_agui_call()]}],
    ),
    "the shape of Anthropic": (
        [
            {
                "role": "assistant",
                "id": "m",
                "content": [
                    {"type": "thinking", "thinking": "Well"},
                    {"type": "text", "text": "Yes."},
                    {"type": "tool_use", "id": "c", "name": "look", "input": {"a": 1}},
                ],
            }
        ],
        [
            {"id": "m-reasoning", "role": "reasoning", "content": "Well"},
            {"id": "m", "role": "assistant", "content": "Yes.", "toolCalls": [_agui_call()]},
        ],
    ),
    "the roles of LangChain": (
        [{"role": "human", "content": "Hi", "id": "u"}, {"role": "ai", "content": "Yes.", "id": "m"}],
        [{"id": "u", "role": "user", "content": "Hi"}, {"id": "m", "role": "assistant", "content": "Yes."}],
    ),
    "the shape of Gemini": (
        [
            {"role": "user", "id": "u", "parts": [{"text": "Hi"}]},
            {"role": "model", "id": "m", "parts": [{"functionCall": {"name": "look", "args": {"a": 1}}}]},
            {
                "role": "user",
                "id": "r",
                "parts": [{"functionResponse": {"name": "look", "response": {"b": 2}}}],
            },
            {"role": "model", "id": "n", "parts": [{"text": "Yes."}]},
        ],
        [
            {"id": "u", "role": "user", "content": "Hi"},
            {
                "id": "m",
                "role": "assistant",
                "content": "",
                "toolCalls": [{**_agui_call(), "id": "m-call-1"}],
            },
            {"id": "r", "role": "tool", "toolCallId": "m-call-1", "content": '{"b": 2}'},
            {"id": "n", "role": "assistant", "content": "Yes."},
        ],
    ),
    "a function of chat completions": (
        [
            _assistant("", function_call={"name": "look", "arguments": '{"a": 1}'}),
            {"role": "function", "name": "look", "content": '{"b": 2}', "id": "r"},
        ],
        [
            {
                "id": "m",
                "role": "assistant",
                "content": "",
                "toolCalls": [{**_agui_call(), "id": "m-call-1"}],
            },
            {"id": "r", "role": "tool", "toolCallId": "m-call-1", "content": '{"b": 2}'},
        ],
    ),
    "results of Anthropic, with and without text": (
        [
            {
                "role": "user",
                "id": "r",
                "content": [
                    {"type": "tool_result", "tool_use_id": "c", "content": [{"type": "text", "text": "1"}]},
                    {"type": "tool_result", "tool_use_id": "d", "content": "No.", "is_error": True},
                ],
            },
            {
                "role": "user",
                "id": "s",
                "content": [
                    {"type": "tool_result", "tool_use_id": "e", "content": "3"},
                    {"type": "text", "text": "And?"},
                ],
            },
        ],
        [
            {"id": "r", "role": "tool", "toolCallId": "c", "content": "1"},
            {"id": "r-result-1", "role": "tool", "toolCallId": "d", "content": "No.", "error": "No."},
            {"id": "s-result-0", "role": "tool", "toolCallId": "e", "content": "3"},
            {"id": "s", "role": "user", "content": [{"type": "text", "text": "And?"}]},
        ],
    ),
    "several results of a tool's message": (
        [
            {
                "role": "tool",
                "id": "r",
                "content": [
                    {"type": "tool_result", "tool_use_id": each, "content": each.upper()} for each in "cd"
                ],
                "chat": {"results": ["r", "streamed"]},
            }
        ],
        [
            {"id": "r", "role": "tool", "toolCallId": "c", "content": "C"},
            {"id": "streamed", "role": "tool", "toolCallId": "d", "content": "D"},
        ],
    ),
    "a failure of LangChain": (
        [{"role": "tool", "tool_call_id": "c", "content": "No.", "status": "error", "id": "r"}],
        [{"id": "r", "role": "tool", "toolCallId": "c", "content": "No.", "error": "No."}],
    ),
    "parts that do not refer to all that the message says": (
        [
            _assistant(
                [
                    {"type": "text", "text": "Yes."},
                    {"type": "tool_use", "id": "c", "name": "look", "input": 1},
                ],
                chat={"parts": [{"type": "data", "name": "n", "value": 1}]},
            )
        ],
        [{"id": "m", "role": "assistant", "content": "Yes.", "toolCalls": [_agui_call("1")]}],
    ),
    "parts that refer to one of two calls with the same id": (
        [
            _assistant(
                tool_calls=[_CALL, {"id": "c", "name": "look", "args": {}}],
                chat={"parts": [{"type": "call", "id": "c"}, {"type": "text", "length": 4}]},
            )
        ],
        [{"id": "m", "role": "assistant", "content": "Yes.", "toolCalls": [_agui_call(), _agui_call("{}")]}],
    ),
    "parts of users in other shapes": (
        [
            {
                "role": "user",
                "id": "u",
                "content": [
                    "Hi",
                    {"type": "input_text", "text": "See"},
                    {
                        "type": "image",
                        "source": {"type": "base64", "media_type": "image/png", "data": "aGk="},
                    },
                ],
            }
        ],
        [
            {
                "id": "u",
                "role": "user",
                "content": [
                    {"type": "text", "text": "Hi"},
                    {"type": "text", "text": "See"},
                    {
                        "type": "image",
                        "source": {
                            "type": "url",
                            "value": "data:image/png;base64,aGk=",
                            "mimeType": "image/png",
                        },
                    },
                ],
            }
        ],
    ),
    "files of a user": (
        [
            {
                "role": "user",
                "id": "u",
                "content": [
                    {"type": "text", "text": "See"},
                    {
                        "type": "image_url",
                        "image_url": {"url": "https://e.org/a.png"},
                        "media_type": "image/png",
                    },
                ],
            }
        ],
        [
            {
                "id": "u",
                "role": "user",
                "content": [
                    {"type": "text", "text": "See"},
                    {
                        "type": "image",
                        "source": {"type": "url", "value": "https://e.org/a.png", "mimeType": "image/png"},
                    },
                ],
            }
        ],
    ),
}


def test_stored_messages_in_ag_ui() -> None:
    wrong = {
        name: found
        for name, (stored, expected) in AGUI.items()
        if (found := agui.messages_of(entries(stored))) != expected
    }
    assert not wrong


_STEP = {"type": "step-start"}
_TEXT = {"type": "text", "text": "Yes.", "state": "done"}
_INPUT = {"type": "tool-look", "toolCallId": "c", "input": {"a": 1}}
_APPROVAL = {"id": "c", "descriptor": {"digest": "d"}}
_ASKED = Call(id="c", name="look", input={"a": 1}, digest="d", approval="c")


def _decided(approved: bool) -> dict[str, Any]:
    return {**_RESULT, "chat": {"approval": {"id": "c", "approved": approved, "digest": "d"}}}


AI: dict[str, tuple[list[dict[str, Any]], dict[str, Call], list[Any]]] = {
    "text": ([_assistant()], {}, [_STEP, _TEXT]),
    "reasoning and a call": (
        [_assistant(reasoning="Well", tool_calls=[_CALL]), _RESULT],
        {},
        [
            _STEP,
            {"type": "reasoning", "id": "m-reasoning", "text": "Well", "state": "done"},
            _TEXT,
            {**_INPUT, "state": "output-available", "output": {"b": 2}},
        ],
    ),
    "two messages of a step": (
        [
            _assistant(tool_calls=[_CALL], chat={"step": 1}),
            _RESULT,
            {**_assistant("So."), "id": "n", "chat": {"step": 1}},
        ],
        {},
        [
            *(_STEP, _TEXT, {**_INPUT, "state": "output-available", "output": {"b": 2}}),
            {"type": "text", "text": "So.", "state": "done"},
        ],
    ),
    "an open call": (
        [_assistant(tool_calls=[_CALL])],
        {},
        [_STEP, _TEXT, {**_INPUT, "state": "input-available"}],
    ),
    "an open approval": (
        [_assistant(tool_calls=[_CALL])],
        {"c": _ASKED},
        [_STEP, _TEXT, {**_INPUT, "state": "approval-requested", "approval": _APPROVAL}],
    ),
    "an approved call": (
        [_assistant(tool_calls=[_CALL]), _decided(True)],
        {},
        [
            *(_STEP, _TEXT),
            {
                **_INPUT,
                "state": "output-available",
                "output": {"b": 2},
                "approval": {**_APPROVAL, "approved": True},
            },
        ],
    ),
    "a rejected call": (
        [_assistant(tool_calls=[_CALL]), _decided(False)],
        {},
        [*(_STEP, _TEXT), {**_INPUT, "state": "output-denied", "approval": {**_APPROVAL, "approved": False}}],
    ),
    "a failed tool": (
        [_assistant(tool_calls=[_CALL]), {**_RESULT, "error": "No network"}],
        {},
        [*(_STEP, _TEXT), {**_INPUT, "state": "output-error", "errorText": "No network"}],
    ),
    "a file and data": (
        [
            _assistant(
                chat={
                    "parts": [
                        {"type": "file", "url": "/a", "media_type": "image/png"},
                        {"type": "data", "name": "n", "value": 1},
                        {"type": "text", "length": 4},
                    ]
                }
            )
        ],
        {},
        [
            _STEP,
            {"type": "file", "url": "/a", "mediaType": "image/png"},
            {"type": "data-n", "data": 1},
            _TEXT,
        ],
    ),
}


def test_stored_messages_in_the_ai_sdk() -> None:
    wrong = {}
    for name, (stored, calls, expected) in AI.items():
        _, answer = aisdk.messages_of(entries([_USER, *stored]), calls)
        if answer["parts"] != expected:
            wrong[name] = answer["parts"]
    assert not wrong


def test_content_that_clients_post_comes_back_as_it_was() -> None:
    agui_contents: list[Any] = [
        "Hi",
        [
            {"type": "text", "text": "See"},
            {"type": "image", "source": {"type": "data", "value": "aGk=", "mimeType": "image/png"}},
            {"type": "document", "source": {"type": "url", "value": "https://e.org/a.pdf"}, "id": "d"},
            {"type": "audio", "source": {"type": "data", "value": "aGk="}},
            {"type": "audio", "source": {"type": "data", "value": "aGk=", "mimeType": "a;base64,b"}},
        ],
    ]
    for content in agui_contents:
        stored = {"role": "user", "id": "u", "content": agui.posted(content)}
        assert json.dumps(stored).count("aGk=") == json.dumps(content).count("aGk=")
        assert agui.messages_of(entries([stored]))[0]["content"] == content
    ai_parts: list[list[dict[str, Any]]] = [
        [{"type": "text", "text": "Hi"}],
        [
            {"type": "file", "mediaType": "image/png", "url": "data:image/png;base64,aGk=", "filename": "a"},
            {"type": "text", "text": "See"},
        ],
        [{"type": "text", "text": "See"}, {"type": "data-place", "id": "p", "data": {"city": "Łódź"}}],
        [{"type": "data-place", "data": None}, {"type": "text", "text": ""}],
    ]
    for parts in ai_parts:
        stored = {"role": "user", "id": "u", "content": aisdk.posted(parts)}
        assert json.dumps(stored).count("aGk=") == json.dumps(parts).count("aGk=")
        assert aisdk.messages_of(entries([stored]), {})[0]["parts"] == parts


_STRANGE: list[Any] = [None, 5, "x", [], ["x"], {"x": 1}, [{"type": ["x"]}]]
"""Values that no message should have."""
_KEYS_OF_PARTS = ("type", "text", "image_url", "file", "ui", "ag_ui", "source", "media_type", "input", "name")
_KEYS_OF_MESSAGES = ("role", "id", "content", "parts", "tool_calls", "reasoning", "refusal", "error", "chat")
_OWN_KEYS = (
    *("step", "parts", "calls", "results", "results_of", "approval", "approvals", "usage", "asks", "added"),
    *("answer", "client", "metadata", "reasoning"),
)
_OWN_PARTS: list[Any] = [
    {"type": kind, **more}
    for kind in ("text", "call", "file", "data", "agent", "else")
    for more in (
        {},
        {"length": "1", "id": [], "number": {}, "url": 1, "name": 2, "message": [], "agent": []},
        {"number": 9, "media_type": "", "agent": {"id": "a", "name": "b"}, "message": {"role": "tool"}},
    )
]


def _strange() -> Iterator[dict[str, Any]]:
    """Messages of each role, each of which has a strange value at one place."""
    part = {"type": "text", "text": "Hi"}
    call = {"id": "k", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    usual = {"content": [part], "tool_calls": [call]}
    for role in ("user", "assistant", "tool", "system"):
        for value in _STRANGE:
            yield from ({"role": role, **usual, key: value} for key in _KEYS_OF_MESSAGES)
            yield from (
                {"role": role, "content": [part, {"type": kind, **part, key: value}]}
                for kind in ("text", "file", "data-x", "tool_result")
                for key in _KEYS_OF_PARTS
            )
            yield from ({"role": role, **usual, "chat": {key: value}} for key in _OWN_KEYS)
            yield {"role": role, "tool_calls": [{**call, "function": value}, {**call, "id": value}, value]}
        yield from ({"role": role, **usual, "chat": {"parts": [own]}} for own in _OWN_PARTS)
        for text in ("NaN", "[1e999]", "[" * 500 + "]" * 500, "[" * 5_000, "9" * 5_000):
            yield {"role": role, "content": text, "tool_call_id": "k"}
            yield {"role": role, "tool_calls": [{**call, "function": {"name": "look", "arguments": text}}]}


def test_every_message_can_be_read() -> None:
    """Agents, imports and other code can store any JSON object as a message."""
    caller = _assistant(id="m", tool_calls=[{"id": "k", "function": {"name": "look", "arguments": "{}"}}])
    reads: dict[str, Callable[[dict[str, Any]], object]] = {
        "the AI SDK": lambda message: aisdk.messages_of(entries([_USER, caller, message]), {}),
        "a response of AG-UI": lambda message: _events([_USER, caller, message], []),
        "a response of the AI SDK": lambda message: _parts([_USER, caller, message], []),
        "a model": without_own_keys,
        "whose it is": lambda message: (is_of_user(message), is_of_agent(message), is_added(message)),
        "the client": lambda message: asdict(Client(**threads.client_of(message))),
    }
    messages = list(_strange())
    with Cells() as cells:
        for name, read in reads.items():
            with cells.check(name):
                for message in messages:
                    json.dumps(read(message), allow_nan=False)


def test_a_model_sees_no_keys_of_the_chat() -> None:
    stored = _assistant(reasoning="Well", chat={"reasoning": True, "step": 1})
    assert without_own_keys(stored) == {"role": "assistant", "content": "Yes."}
    own = _assistant(reasoning="Mine", chat={"step": 1})
    assert without_own_keys(own) == {"role": "assistant", "content": "Yes.", "reasoning": "Mine"}


@pytest.mark.parametrize("kind", ["image", "document"])
def test_a_model_sees_parts_of_a_user_as_the_chat_completions_api_has_them(kind: str) -> None:
    url = "data:image/png;base64,aGk=" if kind == "image" else "data:application/pdf;base64,aGk="
    media_type = url[5:].partition(";")[0]
    content = [
        {"type": "text", "text": "See"},
        {"type": kind, "source": {"type": "data", "value": "aGk=", "mimeType": media_type}},
    ]
    parts = [content[0], {"type": "file", "mediaType": media_type, "url": url}]
    file = {"image": {"type": "image_url", "image_url": {"url": url}}}.get(
        kind, {"type": "file", "file": {"file_data": url}}
    )
    for posted in (agui.posted(content), aisdk.posted(parts)):
        assert without_own_keys({"role": "user", "id": "u", "content": posted})["content"] == [
            content[0],
            file,
        ]


def test_data_of_a_user_is_for_clients_of_the_ai_sdk_alone() -> None:
    text = {"type": "text", "text": "See"}
    content = aisdk.posted([text, {"type": "data-place", "data": {"city": "Łódź"}}])
    stored = {"role": "user", "id": "u", "content": content}
    assert agui.messages_of(entries([stored]))[0]["content"] == [text]
    assert without_own_keys(stored) == {"role": "user", "content": [text]}


def test_a_patch_leads_from_one_state_to_the_other() -> None:
    states: list[Any] = [
        {},
        {"a": 1, "b": {"c": [1]}},
        {"a": True, "b": {"c": [1, 2], "d/e~f": None}},
        {"b": {}},
        {"a": 1.0},
    ]
    wrong = []
    for before in states:
        for after in states:
            operations = list(patch(before, after))
            if digest_of(apply_patches(before, operations)) != digest_of(after):
                wrong.append((before, after, operations))
            if (not operations) is not (digest_of(before) == digest_of(after)):
                wrong.append((before, after, operations))
    assert not wrong


# --- Chunks ------------------------------------------------------------------------------------------

_STREAMED: list[dict[str, Any]] = [
    {"type": "run"},
    {"type": "step", "n": 1},
    {"type": "reasoning", "m": "m", "i": 0, "d": "Well"},
    {"type": "text", "m": "m", "i": 0, "d": "Ye"},
    {"type": "text", "m": "m", "i": 0, "d": "s."},
    {"type": "input", "m": "m", "c": "c", "name": "look", "d": '{"a": 1}'},
    {"type": "call", "m": "m", "c": "c"},
    {"type": "result", "m": "r", "c": "c", "content": '{"b": 2}'},
    {
        "type": "commit",
        "snapshot": False,
        "received": [],
        "asked": [],
        "said": [{"id": "m", "role": "assistant"}, {"id": "r", "role": "tool", "call": "c"}],
    },
]
_STORED = [_USER, _assistant(reasoning="Well", tool_calls=[_CALL], chat={"step": 1}), _RESULT]


def _events(stored: Sequence[dict[str, Any]], chunks: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    events = Events("t", "r", held=[("u", "user")], now=lambda: 1, digest=digest_of)
    found = [events.started(), *events.snapshot(entries(stored), [], {})]
    for chunk in chunks:
        found += events.take(chunk, entries(stored), [], {}, has_thread=chunk["type"] in ("run", "reset"))
    return [*found, *events.finished(Outcome())]


def test_chunks_in_ag_ui() -> None:
    assert [event["type"] for event in _events([_USER], _STREAMED)] == [
        *("RUN_STARTED", "STATE_SNAPSHOT", "MESSAGES_SNAPSHOT", "STEP_STARTED"),
        *("REASONING_START", "REASONING_MESSAGE_START", "REASONING_MESSAGE_CONTENT"),
        *("REASONING_MESSAGE_END", "REASONING_END"),
        *("TEXT_MESSAGE_START", "TEXT_MESSAGE_CONTENT", "TEXT_MESSAGE_CONTENT"),
        *("TOOL_CALL_START", "TOOL_CALL_ARGS", "TOOL_CALL_END", "TEXT_MESSAGE_END", "TOOL_CALL_RESULT"),
        *("STEP_FINISHED", "RUN_FINISHED"),
    ]


def test_a_message_of_calls_alone_is_an_empty_text_first() -> None:
    chunks = [chunk for chunk in _STREAMED if chunk["type"] not in ("reasoning", "text")]
    types = [event["type"] for event in _events([_USER], chunks)]
    at = types.index("TOOL_CALL_START")
    assert types[at - 2 : at] == ["TEXT_MESSAGE_START", "TEXT_MESSAGE_END"]


def test_what_a_snapshot_has_is_not_streamed_again() -> None:
    types = [event["type"] for event in _events(_STORED, _STREAMED)]
    assert types == [
        *("RUN_STARTED", "STATE_SNAPSHOT", "MESSAGES_SNAPSHOT"),
        *("STEP_STARTED", "STEP_FINISHED", "RUN_FINISHED"),
    ]


_DATA: dict[str, dict[str, Any]] = {
    "lasting": {"type": "data", "m": "m", "name": "n", "value": 1},
    "transient": {"type": "data", "m": "m", "name": "n", "value": 1, "transient": True},
    "of a sub-agent": {"type": "data", "m": "i", "name": "n", "value": 1, "a": "s"},
}
_WITH_DATA = _assistant(chat={"parts": [{"type": "data", "name": "n", "value": 1}]})


@for_each("kind", list(_DATA))
def test_a_custom_event_is_sent_although_the_snapshot_has_its_message(kind: str) -> None:
    # The thread that was loaded for a chunk may be ahead of it, and no snapshot has custom events.
    inner = {"type": "agent", "agent": {"id": "s", "name": "helper"}, "message": {**_assistant(), "id": "i"}}
    stored = [_USER, _assistant(chat={"parts": [inner]})]
    chunks = [*_STREAMED[:2], {"type": "agent", "agent": {"id": "s", "name": "helper"}}, _DATA[kind]]
    events = _events(stored, chunks)
    assert "TEXT_MESSAGE_START" not in [event["type"] for event in events]
    (custom,) = (event for event in events if event["type"] == "CUSTOM")
    assert (custom["name"], custom["value"]) == ("n", 1)
    assert custom.get("subagentRunId") == _DATA[kind].get("a")


@for_each("kind, expected", [("lasting", 1), ("transient", 2), ("of a sub-agent", 1)])
@for_each("is_ahead", [False, True])
def test_data_is_sent_once_although_its_message_is_stored(kind: str, expected: int, is_ahead: bool) -> None:
    parts, before, after = Parts(after="u"), entries([_USER]), entries([_USER, _WITH_DATA])
    found = list(parts.begin(after if is_ahead else before, {}))
    for chunk in [*_STREAMED[:2], _DATA[kind]]:
        found += parts.take(chunk, after, {}, has_thread=chunk["type"] == "run")
    data = [part for part in found if part["type"] == "data-n"]
    # The stored part of the message, and transient data, which no message has.
    assert len(data) == expected
    assert [part for part in data if part.get("transient")] == [
        {"type": "data-n", "data": 1, "transient": True}
    ] * (expected - 1)


def test_a_step_that_is_taken_back_is_followed_by_what_is_stored() -> None:
    events = _events([_USER], [*_STREAMED[:5], {"type": "reset"}])
    shown = [event["messages"] for event in events if event["type"] == "MESSAGES_SNAPSHOT"]
    # A client drops reasoning only after it has taken it for an answer.
    assert shown[1:] == [
        [],
        [{"id": "m-reasoning", "role": "assistant", "content": ""}],
        [],
        [{"id": "u", "role": "user", "content": "Hi"}],
    ]


def _attempt(agent: str) -> list[dict[str, Any]]:
    """What a sub-agent says whose calls have the same ids in each attempt."""
    return [
        {"type": "run"},
        {"type": "step", "n": 1},
        {"type": "agent", "agent": {"id": agent, "name": "helper"}},
        {"type": "input", "m": f"m-{agent}", "c": "c", "name": "look", "d": "{", "a": agent},
        {"type": "input", "m": f"m-{agent}", "c": "c", "name": "look", "d": "}", "a": agent},
        {"type": "call", "m": f"m-{agent}", "c": "c", "a": agent},
        {"type": "result", "m": f"r-{agent}", "c": "c", "content": "1", "a": agent},
        {"type": "text", "m": f"m-{agent}", "i": 0, "d": "One.", "a": agent},
    ]


def test_a_call_that_another_attempt_repeats_under_its_id_follows_as_a_snapshot() -> None:
    events = Events("t", "r", held=[("u", "user")], now=lambda: 1, digest=digest_of)
    found = [*events.snapshot(entries([_USER]), [], {})]
    ended = {"type": "agent_end", "a": "second"}
    for chunk in [*_attempt("first"), *_attempt("second"), ended]:
        found += events.take(chunk, entries([_USER]), [], {}, has_thread=chunk["type"] == "run")
    of_calls = [event for event in found if event["type"].startswith("TOOL_CALL")]
    # The reference client refuses an event of a call by another sub-agent than the one that began it.
    assert {event["subagentRunId"] for event in of_calls} == {"first"}
    commit = {**_STREAMED[-1], "said": [{"id": "m", "role": "assistant"}]}
    assert events.needs_thread(commit)
    inner = {"role": "assistant", "id": "m-second", "content": "One.", "tool_calls": [_CALL]}
    own = {"parts": [{"type": "agent", "agent": {"id": "second", "name": "helper"}, "message": inner}]}
    shown = list(events.take(commit, entries([_USER, _assistant(chat=own)]), [], {}, has_thread=True))
    assert shown[-1]["type"] == "MESSAGES_SNAPSHOT"
    assert [message["id"] for message in shown[-1]["messages"]][:2] == ["u", "m-second"]


_HELPER = {"id": "s", "name": "helper"}
_INNER_HELPER = {"id": "t", "name": "inner", "parent": "s"}
_COMMITTED = {**_STREAMED[-1], "said": [{"id": "m", "role": "assistant"}]}


def _of_helper(message_id: str, agent: str = "s") -> dict[str, Any]:
    return {"type": "text", "m": message_id, "i": 0, "d": "Look. ", "a": agent}


def _with_helper(*agents: dict[str, Any]) -> list[dict[str, Any]]:
    """A history with a step in which sub-agents have said something."""
    parts = [
        {
            "type": "agent",
            "agent": agent,
            "message": {"role": "assistant", "id": f"i-{agent['id']}", "content": "Look. "},
        }
        for agent in agents
    ]
    return [_USER, _assistant("", chat={"step": 1, "parts": parts})]


def _named(events: Iterable[dict[str, Any]]) -> list[tuple[str, Any]]:
    """The events about sub-agents and their texts, with the run of each."""
    kinds = ("SUBAGENT_", "TEXT_MESSAGE_START")
    return [(each["type"], each["subagentRunId"]) for each in events if each["type"].startswith(kinds)]


@for_each("then", [_COMMITTED, {"type": "reset"}], ids=["stored", "taken back"])
@for_each("error", [None, "No."], ids=["finished", "failed"])
def test_a_sub_agent_goes_on_after_a_step(then: dict[str, Any], error: str | None) -> None:
    ended: dict[str, Any] = {"type": "agent_end", "a": "s", **({} if error is None else {"error": error})}
    chunks: list[dict[str, Any]] = [
        *({"type": "run"}, {"type": "step", "n": 1}, {"type": "agent", "agent": _HELPER}),
        *(_of_helper("i-s"), then, {"type": "step", "n": 2}, _of_helper("k"), ended, _COMMITTED),
    ]
    events = _events([_USER], chunks)
    # The released client refuses to begin a sub-agent anew that has ended.
    assert _named(events) == [
        *(("SUBAGENT_STARTED", "s"), ("TEXT_MESSAGE_START", "s"), ("TEXT_MESSAGE_START", "s")),
        ("SUBAGENT_FINISHED" if error is None else "SUBAGENT_ERROR", "s"),
    ]
    steps = [event["type"] for event in events if event["type"].startswith("STEP_")]
    assert steps == ["STEP_STARTED", "STEP_FINISHED"] * 2


@for_each("end", [{"type": "run"}, None], ids=["another worker", "the end"])
def test_a_sub_agent_that_does_not_end_is_ended(end: dict[str, Any] | None) -> None:
    chunks: list[dict[str, Any]] = [
        *({"type": "run"}, {"type": "step", "n": 1}, {"type": "agent", "agent": _HELPER}, _of_helper("i")),
        *(_COMMITTED, *([] if end is None else [end])),
    ]
    assert _named(_events([_USER], chunks))[-1] == ("SUBAGENT_ERROR", "s")


@for_each("comes_back", [False, True], ids=["from the beginning", "after a chunk"])
def test_a_sub_agent_that_began_in_an_earlier_step_is_begun_first(comes_back: bool) -> None:
    stored = entries(_with_helper(_HELPER, _INNER_HELPER))
    events = Events("t", "r", held=[("u", "user")], now=lambda: 1, digest=digest_of)
    found: list[dict[str, Any]] = []
    chunks = [{"type": "step", "n": 2}, _of_helper("k", "t"), {"type": "agent_end", "a": "t"}]
    if comes_back:
        events.resume(stored)
        for chunk in chunks[:2]:
            events.absorb(chunk)
        found += events.reopened()
        chunks = chunks[2:]
    else:
        found += events.snapshot(stored, [], {})
    innermost = {"id": "v", "name": "innermost", "parent": "t"}
    for chunk in [{"type": "agent", "agent": innermost}, *chunks, {"type": "agent_end", "a": "s"}]:
        found += events.take(chunk)
    begun = [event for event in found if event["type"] == "SUBAGENT_STARTED"]
    # The released client refuses a parent that has not begun.
    assert [(event["name"], event.get("parentSubagentRunId")) for event in begun] == [
        *(("helper", None), ("inner", "s"), ("innermost", "t")),
    ]
    assert _named(found)[-2:] == [("SUBAGENT_FINISHED", "t"), ("SUBAGENT_FINISHED", "s")]


def test_a_sub_agent_that_nothing_names_is_begun_once() -> None:
    chunks = [{"type": "step", "n": 2}, _of_helper("k"), {"type": "agent_end", "a": "s"}, _of_helper("l")]
    assert _named(_events([_USER], chunks)) == [
        *(("SUBAGENT_STARTED", "s"), ("TEXT_MESSAGE_START", "s"), ("SUBAGENT_FINISHED", "s")),
        ("TEXT_MESSAGE_START", "s"),
    ]


def _parts(stored: Sequence[dict[str, Any]], chunks: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    parts = Parts(after="u")
    found = list(parts.begin(entries(stored), {}))
    for chunk in chunks:
        found += parts.take(chunk, entries(stored), {}, has_thread=chunk["type"] == "run")
    return [*found, *parts.finished(Outcome())]


def test_chunks_in_the_ai_sdk() -> None:
    assert [part["type"] for part in _parts([_USER], _STREAMED)] == [
        *("start", "start-step", "reasoning-start", "reasoning-delta", "reasoning-end"),
        *("text-start", "text-delta", "text-delta", "text-end"),
        *("tool-input-start", "tool-input-delta", "tool-input-available", "tool-output-available"),
        *("finish-step", "finish"),
    ]


def test_a_stored_answer_is_replayed_as_it_was_streamed() -> None:
    live, replayed = _parts([_USER], _STREAMED), _parts(_STORED, [])
    assert live[0] == replayed[0]
    merged = [
        part["type"] for part in live if part["type"] != "tool-input-start" and "Delta" not in str(part)
    ]
    assert [each for each in merged if each != "text-delta"] == [
        part["type"] for part in replayed if part["type"] != "text-delta"
    ]


def test_a_step_that_fails_is_reset_before_its_error() -> None:
    parts = Parts(after="u")
    found = list(parts.begin(entries([_USER]), {}))
    for chunk in [*_STREAMED[1:5], {"type": "reset"}]:
        found += parts.take(chunk)
    found += parts.finished(Outcome(kind="error", message="No."))
    assert [part["type"] for part in found][-2:] == ["reset-step", "error"]


@for_each("kind, end", [("error", "error"), ("cancelled", "abort"), ("success", "finish")])
@for_each("content", ["Yes.", ""], ids=["with a part", "without parts"])
def test_the_tokens_of_an_answer_are_told_however_it_ends(kind: str, end: str, content: str) -> None:
    own = {"step": 1, "usage": [{"prompt": 2, "completion": 1}]}
    stored = entries([_USER, _assistant(content, chat=own)])
    for begins_with in (stored, stored[:1]):
        parts = Parts(after="u")
        found = list(parts.begin(begins_with, {}))
        found += parts.take({"type": "run"}, stored, {}, has_thread=True)
        found += parts.finished(Outcome(kind=kind))
        # A client would make a message with an id of its own for metadata before the start.
        assert (found[0]["type"], found[-1]["type"]) == ("start", end)
        told = [part["messageMetadata"] for part in found if "messageMetadata" in part]
        assert told == [aisdk.messages_of(stored, {})[1]["metadata"]]


def test_an_answer_without_tokens_fails_without_metadata() -> None:
    for stored in ([_USER], [_USER, _assistant()]):
        parts = Parts(after="u")
        found = [*parts.begin(entries(stored), {}), *parts.finished(Outcome(kind="error"))]
        assert "message-metadata" not in [part["type"] for part in found]
        assert found[-1]["type"] == "error"


@for_each("kind", ["run", "reset"])
@for_each("begins_with", [_STORED, [_USER]], ids=["from the beginning", "caught up"])
def test_no_chunk_takes_back_what_is_stored(begins_with: list[dict[str, Any]], kind: str) -> None:
    # A worker that is killed after its commit leaves a step that no chunk of the stream ends.
    parts = Parts(after="u")
    found = list(parts.begin(entries(begins_with), {}))
    more: list[dict[str, Any]] = [{"type": "step", "n": 2}, {"type": "text", "m": "n", "i": 0, "d": "More."}]
    for chunk in [{"type": "run"}, {"type": kind}, *more]:
        found += parts.take(chunk, entries(_STORED), {}, has_thread=chunk["type"] == "run")
    found += parts.finished(Outcome())
    types = [part["type"] for part in found]
    assert "reset-step" not in types
    assert (types.count("start-step"), types.count("finish-step")) == (2, 2)
    assert [part["delta"] for part in found if "delta" in part] == ["Well", "Yes.", "More."]


def test_a_live_step_after_a_stored_one_is_taken_back_alone() -> None:
    chunks: list[dict[str, Any]] = [
        {"type": "step", "n": 1},
        {"type": "text", "m": "n", "i": 0, "d": "More."},
        {"type": "reset"},
    ]
    types = [part["type"] for part in _parts(_STORED, chunks)]
    assert types[types.index("finish-step") :] == [
        *("finish-step", "start-step", "text-start", "text-delta", "reset-step", "finish-step", "finish")
    ]


# A step that streams something and says nothing: it is stored without a message.
_UNSAID: list[dict[str, Any]] = [
    {"type": "step", "n": 1},
    {"type": "text", "m": "n", "i": 0, "d": "Well, "},
    {"type": "input", "m": "n", "c": "c", "name": "look", "d": "{}"},
    {"type": "call", "m": "n", "c": "c"},
    {"type": "commit", "snapshot": True, "received": [], "asked": [], "said": []},
]


def test_a_step_that_says_nothing_of_what_it_streamed_is_taken_back() -> None:
    parts = Parts(after="u")
    found = list(parts.begin(entries([_USER]), {}))
    for chunk in _UNSAID:
        found += parts.take(chunk, entries([_USER]), {}, has_thread=parts.needs_thread(chunk))
    assert found[-1]["type"] == "reset-step"
    result = {"type": "result", "m": "r", "c": "c", "content": "1"}
    said = {**_STREAMED[-1], "said": [{"id": "r", "role": "tool", "call": "c"}, {"id": "m", "role": ""}]}
    later: list[dict[str, Any]] = []
    text = {"type": "text", "m": "m", "i": 0, "d": "Yes."}
    chunks: list[dict[str, Any]] = [{"type": "step", "n": 2}, result, text, said]
    for chunk in chunks:
        later += parts.take(chunk)
    # The client has kept the beginning of the step, and does not know the call.
    assert [part["type"] for part in later] == ["text-start", "text-delta", "text-end", "finish-step"]


@for_each("begins_with", [[_USER], _STORED[:2]], ids=["live", "stored"])
def test_the_output_of_an_earlier_step_is_shown_when_it_is_stored(begins_with: list[dict[str, Any]]) -> None:
    parts = Parts(after="u")
    list(parts.begin(entries(begins_with), {}))
    for chunk in [*_STREAMED[1:7], {**_STREAMED[-1], "said": [{"id": "m", "role": "assistant"}]}]:
        list(parts.take(chunk))
    # `reset-step` would not take it back.
    for chunk in [{"type": "step", "n": 2}, _STREAMED[7], {"type": "reset"}, _STREAMED[7]]:
        assert list(parts.take(chunk)) == []
    commit = {**_STREAMED[-1], "said": [{"id": "r", "role": "tool", "call": "c"}]}
    assert [part["type"] for part in parts.take(commit)] == ["tool-output-available"]


def test_a_step_that_is_stored_without_a_part_of_what_it_streamed_is_shown_once() -> None:
    parts = Parts(after="u")
    list(parts.begin(entries(_STORED), {}))
    commit = {**_UNSAID[-1], "said": _STREAMED[-1]["said"]}
    found: list[dict[str, Any]] = []
    for chunk in [*_UNSAID[:2], commit]:
        found += parts.take(chunk, entries(_STORED), {}, has_thread=chunk is commit)
    assert [part["type"] for part in found] == [
        *("finish-step", "start-step", "text-start", "text-delta", "reset-step")
    ]


def test_a_step_that_says_nothing_of_what_it_streamed_is_followed_by_what_is_stored() -> None:
    events = Events("t", "r", held=[("u", "user")], now=lambda: 1, digest=digest_of)
    list(events.snapshot(entries([_USER]), [], {}))
    found: list[dict[str, Any]] = []
    for chunk in _UNSAID:
        found += events.take(chunk, entries([_USER]), [], {}, has_thread=events.needs_thread(chunk))
    assert found[-1]["type"] == "MESSAGES_SNAPSHOT"
    assert [message["id"] for message in found[-1]["messages"]] == ["u"]


def test_a_message_that_was_not_received_has_no_answer() -> None:
    parts = Parts(after="later")
    found = list(parts.begin(entries([_USER, _assistant(tool_calls=[_CALL])]), {"c": _ASKED}))
    found += parts.take({"type": "run"}, entries([_USER]), {}, has_thread=True)
    # The released client refuses the start of a message without an id.
    assert [*found, *parts.finished(Outcome(pending=["c"]))] == [
        {"type": "finish", "finishReason": "tool-calls"}
    ]


_APPROVED = Held(
    id=aisdk.messages_of(entries([_USER, _assistant()]), {})[1]["id"],
    steps=[[_TEXT, {**_INPUT, "state": "approval-responded", "approval": {**_APPROVAL, "approved": True}}]],
)
_ANSWERED = [_USER, _assistant(tool_calls=[_CALL]), _decided(True)]
_NEXT = {"role": "user", "content": "And?", "id": "u2"}


@for_each("then", [[_NEXT], [_NEXT, {**_assistant("So."), "id": "n"}]], ids=["received", "answered"])
@for_each("is_ahead", [False, True], ids=["while the turn begins", "before a repeated request"])
def test_an_answer_is_continued_although_the_next_message_was_received(
    then: list[dict[str, Any]], is_ahead: bool
) -> None:
    parts = Parts(held=_APPROVED)
    stored = entries([*_ANSWERED, *then])
    found = list(parts.begin(stored if is_ahead else entries(_ANSWERED[:2]), {"c": _ASKED}))
    for chunk in [{"type": "run"}, *_STREAMED[1:4]]:
        found += parts.take(chunk, stored, {}, has_thread=chunk["type"] == "run")
    found += parts.finished(Outcome())
    assert parts.is_over
    assert [part["type"] for part in found] == [
        *("start", "tool-approval-response", "tool-output-available", "finish"),
    ]
    assert found[0]["messageId"] == aisdk.messages_of(stored, {})[1]["id"]


def test_a_turn_that_has_received_the_next_message_ends_the_answer() -> None:
    parts = Parts(after="u")
    list(parts.begin(entries(_STORED), {}))
    assert list(parts.take({"type": "run"}, entries([*_STORED, _NEXT]), {}, has_thread=True)) == []
    assert parts.is_over
    assert [part["type"] for part in parts.finished(Outcome())] == ["finish-step", "finish"]


def test_a_call_that_is_approved_and_still_open_is_asked_about_again() -> None:
    stored, parts = entries(_ANSWERED[:2]), Parts(held=_APPROVED)
    found = list(parts.begin(stored, {"c": _ASKED}))
    found += parts.take({"type": "run"}, stored, {"c": _ASKED}, has_thread=True)
    found += parts.finished(Outcome(interrupts=[{}]))
    assert [part["type"] for part in found] == ["start", "tool-approval-request", "finish"]


def test_a_decision_that_waits_for_another_one_is_told() -> None:
    decided = replace(_ASKED, approved=True, reason="Yes.")
    for held, expected in ((None, ["tool-approval-request", "tool-approval-response"]), (_APPROVED, [])):
        stored, parts = entries(_ANSWERED[:2]), Parts(after="u", held=held)
        list(parts.begin(stored, {"c": _ASKED}))
        list(parts.take({"type": "run"}, stored, {"c": decided}, has_thread=True))
        told = [part["type"] for part in parts.finished(Outcome()) if "step" not in part["type"]]
        assert told == [*expected, "finish"]


def test_a_client_that_goes_on_after_any_chunk_gets_the_rest() -> None:
    tokens = {"usage": [{"prompt": 2, "completion": 1}]}
    one = _assistant(reasoning="Well", tool_calls=[_CALL], chat={"step": 1, **tokens})
    two = {**_assistant("So."), "id": "n", "chat": {"step": 2, **tokens}}
    stored = entries([_USER, one, _RESULT, two])
    chunks = [
        *_STREAMED,
        {"type": "step", "n": 2},
        {"type": "text", "m": "n", "i": 0, "d": "So"},
        {"type": "text", "m": "n", "i": 0, "d": "."},
        {**_STREAMED[-1], "said": [{"id": "n", "role": "assistant"}]},
    ]
    of_chunks = [*[stored[:1]] * 8, *[stored[:3]] * 4, stored]

    def taken(parts: Parts, first: int, end: int) -> Iterable[dict[str, Any]]:
        for chunk, thread in zip(chunks[first:end], of_chunks[first:end], strict=True):
            yield from parts.take(chunk, thread, {}, has_thread=parts.needs_thread(chunk))

    def ended(parts: Parts) -> Iterable[dict[str, Any]]:
        yield from parts.take({"type": "run"}, stored, {}, has_thread=True)
        yield from parts.finished(Outcome())

    whole = Parts(after="u")
    expected = [*whole.begin(of_chunks[0], {}), *taken(whole, 0, len(chunks)), *ended(whole)]
    assert expected[-1]["messageMetadata"]["usage"]["totalTokens"] == 6
    wrong = {}
    for at in range(3, len(chunks) + 1):  # the first chunk with a part is the third one
        first = Parts(after="u")
        seen = [*first.begin(of_chunks[0], {}), *taken(first, 0, at)]
        # The thread may be ahead of the chunk.
        for is_ahead in (False, True):
            parts = Parts()
            parts.resume(stored if is_ahead else of_chunks[at - 1])
            for chunk in chunks[9 if at >= 9 else 1 : at]:  # those of the open step
                list(parts.take(chunk))
            found = [*taken(parts, at, len(chunks)), *ended(parts)]
            if [*seen, *found] != expected:
                wrong[at, is_ahead] = found
    assert not wrong
