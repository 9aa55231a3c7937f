"""A site with one chat, whose agent does what the last message of the user says."""

from __future__ import annotations

import json
import os
import time
from contextlib import suppress
from typing import Any

from django.http import HttpRequest
from django.urls import path

from helix_store import NotApproved
from helix_store.contrib.chat import Chat

SECONDS = float(os.environ.get("CHAT_SECONDS", "0.005"))


def answer(turn: Any, out: Any) -> None:
    if turn.results:
        with turn.step() as step:
            for call_id, result in turn.results.items():
                content = json.dumps(result.get("result", result.get("error")))
                if "approved" in result:
                    try:
                        content = json.dumps({"booked": step.use_approval(call_id).input})
                    except NotApproved as error:
                        content = f"not approved: {error.reason}"
                step.say({"role": "tool", "tool_call_id": call_id, "content": content})
    while turn.is_active:
        _step(turn, out, turn.messages())


def _step(turn: Any, out: Any, history: list[dict[str, Any]]) -> None:
    wish = next((each["content"] for each in reversed(history) if each["role"] == "user"), "")
    wish = wish if isinstance(wish, str) else "".join(part.get("text", "") for part in wish)
    number = sum(each["role"] == "user" for each in history)
    is_answered = history[-1]["role"] == "tool"
    calls: list[dict[str, Any]] = []
    if "stumble" in wish and history[-1]["role"] == "assistant":
        _speak(out.text, "And then ")
        raise ValueError("secret detail")
    if "unsaid" in wish and turn.state.custom_state.get("unsaid") != number:
        _speak(out.text, "Never mind. ")
        with turn.step() as step:
            step.state.custom_state["unsaid"] = number
        return
    if "think" in wish and not is_answered:
        _speak(out.reasoning, "Let me think about it. ")
    if "agent" in wish and not is_answered:
        with out.agent("researcher") as sub:
            _speak(sub.text, "I look it up. ")
            sub.tool_call(f"sub-{number}", "lookup", {"q": wish})
            sub.tool_result(f"sub-{number}", {"found": 3})
            _speak(sub.text, "Found it. ")
    if "delegate" in wish and not is_answered:
        _across_steps(turn, out)
    text = f"You said {wish}. " if not is_answered else f"That is all about {wish}. "
    if "silent" not in wish:
        _speak(out.text, text * (20 if "long" in wish else 1))
        text = text * (20 if "long" in wish else 1)
    if "fail" in wish:
        raise ValueError("secret detail")
    if "file" in wish:
        out.file("https://example.com/a.png", "image/png")
    if "data" in wish:
        out.data("demo.progress", {"done": 1})
        out.data("demo.noise", 1, transient=True)
    results: list[tuple[str, Any]] = []
    for kind in ("weather", "approve", "ask"):
        if kind in wish and not is_answered:
            call_id = f"{kind}-{number}"
            value = {"city": "Łódź", "number": number}
            calls.append(_call(call_id, kind, value))
            if "silent" not in wish:
                for part in json.dumps(value, ensure_ascii=False).split(" "):
                    out.tool_input(call_id, kind, part + (" " if not part.endswith("}") else ""))
                out.tool_call(call_id, kind, value)
            if kind == "weather":
                if "silent" not in wish:
                    out.tool_result(call_id, {"degrees": 21})
                results.append((call_id, {"degrees": 21}))
    turn.tokens(model="model-1", prompt=10, completion=5)
    with turn.step() as step:
        message: dict[str, Any] = {"role": "assistant", "content": text if "differ" not in wish else "Else."}
        if not (calls and "mute" in wish):
            step.say({**message, "tool_calls": calls} if calls else message)
        for call_id, value in results:
            step.say({"role": "tool", "tool_call_id": call_id, "content": json.dumps(value)})
        if "state" in wish:
            step.state.custom_state["count"] = step.state.custom_state.get("count", 0) + 1
            step.state.custom_state.setdefault("a/b", {})[str(number)] = [1, 2]
        for call in calls:
            name, value = call["function"]["name"], json.loads(call["function"]["arguments"])
            if name == "approve":
                step.ask_approval(call["id"], name, value, editable=True)
            elif name == "ask":
                step.wait_for({call["id"]: {"tool_name": name, "input": value}})
        if not calls and "stumble" not in wish:
            step.end_turn()


def _across_steps(turn: Any, out: Any) -> None:
    """Let a sub-agent speak in three steps, of which one fails."""
    with out.agent("researcher") as sub:
        _speak(sub.text, "I look it up. ")
        with turn.step() as step:
            step.say({"role": "assistant", "content": "Interim. "})
        with suppress(LookupError), sub.agent("inner") as inner:
            _speak(inner.text, "Nothing. ")
            with turn.step():
                raise LookupError
        with sub.agent("inner") as inner:
            _speak(inner.text, "Here. ")
            with turn.step() as step:
                step.say({"role": "assistant", "content": "More. "})
        _speak(sub.text, "Found it. ")


def _call(call_id: str, name: str, value: Any) -> dict[str, Any]:
    function = {"name": name, "arguments": json.dumps(value, ensure_ascii=False)}
    return {"id": call_id, "type": "function", "function": function}


def _speak(say: Any, text: str) -> None:
    for word in text.split(" "):
        if word:
            say(f"{word} ")
            time.sleep(SECONDS)


def _owner(request: HttpRequest) -> str | None:
    return request.headers.get("X-Owner")


def _tenant(request: HttpRequest) -> str:
    return request.headers.get("X-Tenant", "")


chat = Chat("test-agent", answer, name="test", owner=_owner, tenant=_tenant)
urlpatterns = [path("chat/", chat.urls)]
