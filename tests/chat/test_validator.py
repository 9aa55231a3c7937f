"""The validator of AG-UI finds nothing in the responses of a live server."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from tests.chat.live import Site, site
from tests.databases import CommittedDatabase
from tests.installed import installed_once

_PACKAGE = "ag-ui-validate==0.4.0"

_PROGRAM = """
import json, sys
from ag_ui_validate import create_validator
for line in sys.stdin:
    name, events = json.loads(line)
    validator = create_validator()
    for event in events:
        validator.feed(event)
    validator.finalize()
    report = validator.report()
    found = [f"{each.rule} {each.severity}: {each.message}" for each in report.diagnostics]
    print(json.dumps([name, [*found, *report.internal_errors]]))
"""


def _python() -> str:
    """An interpreter with the validator, in an environment of its own, or a skip with the reason."""
    folder = installed_once(
        f"agui-validate-{sys.version_info[0]}.{sys.version_info[1]}",
        [sys.executable, "-m", "venv", "."],
        ["bin/python", "-m", "pip", "install", "-q", _PACKAGE],
    )
    return str(folder / "bin" / "python")


def _approved(running: Site, thread: str, **payload: Any) -> list[dict[str, Any]]:
    end = running.say(thread, "m1", "approve think")[-1]
    (interrupt,) = end["outcome"]["interrupts"]
    entry = {"interruptId": interrupt["id"], "status": "cancelled"}
    if payload:
        entry = {**entry, "status": "resolved", "payload": {**payload, **interrupt["metadata"]}}
    return running.say(thread, "m2", "", resume=[entry])


def _answered(running: Site, thread: str) -> list[dict[str, Any]]:
    running.say(thread, "m1", "ask")
    messages = [
        {"id": "m1", "role": "user", "content": "ask"},
        {"id": "x", "role": "tool", "toolCallId": "ask-1", "content": "yes"},
    ]
    return running.say(thread, "m2", "", messages=messages)


def _stopped(running: Site, thread: str) -> list[dict[str, Any]]:
    found: list[list[dict[str, Any]]] = []
    saying = threading.Thread(target=lambda: found.append(running.say(thread, "m1", "long think")))
    saying.start()
    until = time.monotonic() + 20
    while time.monotonic() < until:
        _, body = running.request("POST", f"threads/{thread}/stop/")
        if json.loads(body).get("stopped"):
            break
    saying.join()
    return found[0]


_SCENARIOS: dict[str, Callable[[Site, str], list[dict[str, Any]]]] = {
    "text": lambda running, thread: running.say(thread, "m1", "hello"),
    "long text": lambda running, thread: running.say(thread, "m1", "long hello"),
    "reasoning": lambda running, thread: running.say(thread, "m1", "think"),
    "tools": lambda running, thread: running.say(thread, "m1", "weather"),
    "calls that were not streamed": lambda running, thread: running.say(thread, "m1", "silent weather"),
    "text that differs": lambda running, thread: running.say(thread, "m1", "differ think"),
    "approval": lambda running, thread: running.say(thread, "m1", "approve think"),
    "resume": lambda running, thread: _approved(running, thread, approved=True),
    "rejection": lambda running, thread: _approved(running, thread, approved=False),
    "cancelled interrupt": lambda running, thread: _approved(running, thread),
    "client tool": lambda running, thread: running.say(thread, "m1", "ask"),
    "client tool answered": _answered,
    "error": lambda running, thread: running.say(thread, "m1", "think fail"),
    "cancel": _stopped,
    "sub-agent": lambda running, thread: running.say(thread, "m1", "agent weather"),
    "sub-agents across steps": lambda running, thread: running.say(thread, "m1", "delegate agent"),
    "shared state": lambda running, thread: running.say(thread, "m1", "state weather"),
    "data and files": lambda running, thread: running.say(thread, "m1", "data file"),
    "a repeat": lambda running, thread: running.say("text", "m1", "hello"),
    "idle thread": lambda running, thread: running.events("GET", "agui/resume/"),
    "idle thread that waits": lambda running, thread: running.events("GET", "agui/approval/"),
}

_ENDS = {
    "approval": "interrupt",
    "idle thread that waits": "interrupt",
    "cancel": "cancelled",
}


def test_the_validator_finds_nothing(committed_db: CommittedDatabase) -> None:
    python = _python()
    with site(committed_db) as running:
        seen = {name: act(running, name.replace(" ", "-")) for name, act in _SCENARIOS.items()}
    for name, events in seen.items():
        if name == "error":
            assert events[-1]["type"] == "RUN_ERROR"
            assert "secret" not in json.dumps(events)
        else:
            assert events[-1]["outcome"]["type"] == _ENDS.get(name, "success"), (name, events[-1])
    lines = "\n".join(json.dumps([name, events]) for name, events in seen.items())
    checked = subprocess.run(
        [python, "-c", _PROGRAM], input=lines, capture_output=True, text=True, check=True, timeout=120
    )
    findings = [json.loads(line) for line in checked.stdout.splitlines()]
    assert len(findings) == len(_SCENARIOS)
    assert [each for each in findings if each[1]] == []
