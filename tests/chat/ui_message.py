"""What a client of the AI SDK holds, by the rules of its `processUIMessageStream`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from copy import deepcopy
from typing import Any

__all__ = ["merged"]


def merged(held: Mapping[str, Any] | None, parts: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """The message of a client that gets these parts of a response.

    ``held`` is the message that it has sent. A client that reads a response from its beginning has sent none.
    """
    client = _Client({"id": "", "role": "assistant", "parts": []} if held is None else deepcopy(dict(held)))
    for part in parts:
        client.take(part)
    return client.message


class _Client:
    def __init__(self, message: dict[str, Any]) -> None:
        self.message = message
        self._open: dict[str, dict[str, Any]] = {}

    @property
    def _parts(self) -> list[dict[str, Any]]:
        parts: list[dict[str, Any]] = self.message["parts"]
        return parts

    def _step(self) -> list[dict[str, Any]]:
        starts = [at for at, part in enumerate(self._parts) if part["type"] == "step-start"]
        return self._parts[starts[-1] + 1 :] if starts else list(self._parts)

    def take(self, part: Mapping[str, Any]) -> None:
        kind = part["type"]
        if kind == "start":
            self.message["id"] = part["messageId"]
        elif kind == "start-step":
            self._parts.append({"type": "step-start"})
        elif kind == "reset-step":
            del self._parts[len(self._parts) - len(self._step()) :]
            self._open.clear()
        elif kind.startswith(("text-", "reasoning-")):
            self._text(kind.partition("-")[0], kind.partition("-")[2], part)
        elif kind.startswith("tool-input-"):
            self._input(kind, part)
        elif kind.startswith("tool-"):
            self._answer(kind, part)
        elif kind == "file" or (kind.startswith("data-") and not part.get("transient")):
            self._parts.append(dict(part))
        if "messageMetadata" in part:
            self.message["metadata"] = self.message.get("metadata", {}) | part["messageMetadata"]

    def _text(self, kind: str, what: str, part: Mapping[str, Any]) -> None:
        if what == "start":
            own = {"id": part["id"]} if kind == "reasoning" else {}
            self._open[part["id"]] = {"type": kind, **own, "text": "", "state": "streaming"}
            self._parts.append(self._open[part["id"]])
        elif what == "delta":
            self._open[part["id"]]["text"] += part["delta"]
        else:
            self._open.pop(part["id"])["state"] = "done"

    def _input(self, kind: str, part: Mapping[str, Any]) -> None:
        call_id = part["toolCallId"]
        found = next((each for each in self._step() if each.get("toolCallId") == call_id), None)
        if kind == "tool-input-delta":
            assert found is not None, f"an input of {call_id}, which has not begun"
            found["input"] = "partial"
            return
        if found is None:
            found = {"toolCallId": call_id}
            self._parts.append(found)
        is_whole = kind == "tool-input-available"
        found |= {"type": f"tool-{part['toolName']}", "input": part.get("input")}
        found["state"] = "input-available" if is_whole else "input-streaming"

    def _answer(self, kind: str, part: Mapping[str, Any]) -> None:
        own_id = part.get("toolCallId", part.get("approvalId"))
        calls = [each for each in (*self._parts, *self._step()) if "toolCallId" in each]
        if "toolCallId" not in part:
            found = [each for each in calls if each.get("approval", {}).get("id") == own_id]
        else:
            found = [each for each in calls if each["toolCallId"] == own_id]
        assert found, f"{kind} of {own_id}, which the client does not know"
        self._set_answer(kind, part, found[-1])

    def _set_answer(self, kind: str, part: Mapping[str, Any], found: dict[str, Any]) -> None:
        if kind == "tool-approval-request":
            found["state"] = "approval-requested"
            found["approval"] = {"id": part["approvalId"], "descriptor": part["approvalDescriptor"]}
        elif kind == "tool-approval-response":
            found["state"] = "approval-responded"
            found["approval"] |= {key: part[key] for key in ("approved", "reason") if key in part}
        elif kind == "tool-output-denied":
            found["state"] = "output-denied"
        elif kind == "tool-output-error":
            found |= {"state": "output-error", "errorText": part["errorText"]}
        else:
            found |= {"state": "output-available", "output": part["output"]}
