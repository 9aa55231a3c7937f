"""What clients of the two protocols hold after the events of a response, as the released ones do."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from helix_store.contrib.chat.agui import place_of_result

__all__ = ["held_by_ag_ui", "held_by_the_ai_sdk"]


def held_by_ag_ui(events: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages of a client of AG-UI."""
    held: list[dict[str, Any]] = []
    for event in events:
        owner = {"subagentRunId": event["subagentRunId"]} if "subagentRunId" in event else {}
        match event["type"]:
            case "MESSAGES_SNAPSHOT":
                held = [dict(message) for message in event["messages"]]
            case "TEXT_MESSAGE_START" | "REASONING_MESSAGE_START":
                assert not any(message["id"] == event["messageId"] for message in held), "begun twice"
                held.append({"id": event["messageId"], "role": event["role"], "content": "", **owner})
            case "TEXT_MESSAGE_CONTENT" | "REASONING_MESSAGE_CONTENT":
                _named(held, event["messageId"])["content"] += event["delta"]
            case "TOOL_CALL_START":
                function = {"name": event["toolCallName"], "arguments": ""}
                call = {"id": event["toolCallId"], "type": "function", "function": function}
                _named(held, event["parentMessageId"]).setdefault("toolCalls", []).append(call)
            case "TOOL_CALL_ARGS":
                calls = [call for message in held for call in message.get("toolCalls", ())]
                _named(calls, event["toolCallId"])["function"]["arguments"] += event["delta"]
            case "TOOL_CALL_RESULT":
                result = {"id": event["messageId"], "role": "tool", "toolCallId": event["toolCallId"]}
                at = place_of_result(held, event["toolCallId"])
                held.insert(at, {**result, "content": event["content"], **owner})
    return held


def _named(items: Iterable[dict[str, Any]], own_id: str) -> dict[str, Any]:
    return next(item for item in items if item["id"] == own_id)


def held_by_the_ai_sdk(parts: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the parts of the UI message of a client of the AI SDK."""
    held: list[dict[str, Any]] = []
    texts: dict[str, dict[str, Any]] = {}
    inputs: dict[str, str] = {}
    for part in parts:
        kind = part["type"]
        match kind:
            case "start-step":
                held.append({"type": "step-start"})
            case "reset-step":
                while held and held[-1]["type"] != "step-start":
                    held.pop()
            case "text-start" | "reasoning-start":
                own = {} if kind == "text-start" else {"id": part["id"]}
                texts[part["id"]] = {"type": kind.removesuffix("-start"), **own, "text": ""}
                held.append(texts[part["id"]])
            case "text-delta" | "reasoning-delta":
                texts[part["id"]]["text"] += part["delta"]
            case "text-end" | "reasoning-end":
                texts.pop(part["id"])["state"] = "done"
            case "tool-input-start":
                inputs[part["toolCallId"]] = ""
                held.append({"type": f"tool-{part['toolName']}", "toolCallId": part["toolCallId"]})
            case "tool-input-delta":
                inputs[part["toolCallId"]] += part["inputTextDelta"]
            case "tool-input-available":
                found = [each for each in held if each.get("toolCallId") == part["toolCallId"]]
                if not found:
                    held.append({"type": f"tool-{part['toolName']}", "toolCallId": part["toolCallId"]})
                elif part["toolCallId"] in inputs:
                    assert part["input"] == json.loads(inputs.pop(part["toolCallId"]) or "{}")
                shown = (found or held)[-1]
                shown |= {"state": "input-available", "input": part["input"]}
            case "tool-output-available":
                (shown,) = (each for each in held if each.get("toolCallId") == part["toolCallId"])
                shown |= {"state": "output-available", "output": part["output"]}
            case "tool-output-error":
                (shown,) = (each for each in held if each.get("toolCallId") == part["toolCallId"])
                shown |= {"state": "output-error", "errorText": part["errorText"]}
            case "file":
                held.append(dict(part))
            case _ if kind.startswith("data-") and not part.get("transient"):
                held.append(dict(part))
    return held
