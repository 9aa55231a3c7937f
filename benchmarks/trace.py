"""``python -m benchmarks.trace``: which files of helix_store one step enters, and how often it changes file.

Traced are the step of a handle, without and with a staged change, the turn of the README, the request by
which a user of the admin approves a call, the `put` of LangGraph's saver, and the call
`save_state_and_promote_staging`: a state of 4 KB that `load_state` returned and that was changed in two of
its keys, two messages, one staged change, an expected version. It is the last of several steps of its
session, so that caches and prepared statements are warm.

What is counted, of functions whose code lies in a file of the package ``helix_store``:

- calls: how often such a function starts; a generator also starts when it goes on;
- functions: how many of them there are by file and name;
- depth: how many of them are on the stack at most;
- changes of file: the current file is the file of the innermost such function on the stack. Each call and
  each return after which the current file is another one is a change. Functions of other packages do not
  count: a call from one file through Django into another file is one change. The first call and the last
  return are not changes.

It uses public names only, so that a copy of this file traces another checkout:
``PYTHONPATH=CHECKOUT python -P trace.py``.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any

from benchmarks.payloads import message, staged_changes, state_of
from benchmarks.server import benchmark_server, create_database

__all__ = ["BOUNDS", "Trace", "traced"]

BOUNDS = {
    "fast path": (9, 66),
    "portable": (13, 110),
    "SQLite": (13, 96),
    "handle": (11, 75),
    "handle, staging": (13, 113),  # staging also writes the session's row, so that a stale snapshot fails
    "turn": (21, 321),  # it asks whether the session is at rest, and reserves what its next step may spend
    "answer": (22, 146),  # an answer stores a decision; the page asks for tenants and the session's condition
    "put": (8, 62),
}
"""The most files and changes of file of a step, by the end of the call's name: what a step takes today.

`.ci/run` checks them, so that a step does not grow unnoticed. Lower them whenever a change allows it.
The portable form locks, decides and writes in statements of its own, so its way is longer.
"""

_STEPS = 4
"""The last one is traced: what the first two prepare and remember, the third and the fourth find."""
_COLUMNS = ("call", "files", "lines in them", "functions", "calls", "changes of file", "depth")


@dataclass(kw_only=True)
class Trace:
    """The calls and returns of functions in the files below a directory."""

    root: Path
    calls: list[tuple[str, str]] = field(default_factory=list)
    """File and name of each function that was called, in order."""
    path: list[str] = field(default_factory=list)
    """The current file after each call and each return."""
    depth: int = 0
    _stack: list[str] = field(default_factory=list)

    def observe(self, frame: FrameType, event: str, argument: Any) -> None:
        """Take one event of `sys.setprofile`."""
        prefix = f"{self.root}/"
        if event not in ("call", "return") or not frame.f_code.co_filename.startswith(prefix):
            return
        if event == "call":
            file = frame.f_code.co_filename.removeprefix(prefix)
            self.calls.append((file, frame.f_code.co_name))
            self._stack.append(file)
            self.depth = max(self.depth, len(self._stack))
        else:
            self._stack.pop()
        if self._stack:
            self.path.append(self._stack[-1])

    @property
    def files(self) -> set[str]:
        return {file for file, _ in self.calls}

    @property
    def lines(self) -> int:
        return sum(len((self.root / file).read_text().splitlines()) for file in self.files)

    @property
    def functions(self) -> int:
        return len(set(self.calls))

    @property
    def visits(self) -> list[str]:
        """The ordered sequence of files, each where it becomes the current one."""
        return self.path[:1] + [after for before, after in pairwise(self.path) if before != after]

    @property
    def changes(self) -> int:
        return len(self.visits) - 1

    def is_within_bounds(self, name: str) -> bool:
        most_files, most_changes = next(most for end, most in BOUNDS.items() if name.endswith(end))
        return len(self.files) <= most_files and self.changes <= most_changes


def main() -> int:
    arguments = _arguments()
    with benchmark_server() as cluster:
        create_database(cluster, "default")
        traces = dict(_traces())
    print(f"helix_store of {next(iter(traces.values())).root}\n")
    print(f"| {' | '.join(_COLUMNS)} |\n|---{'|---:' * (len(_COLUMNS) - 1)}|")
    for name, trace in traces.items():
        figures = (trace.lines, trace.functions, len(trace.calls), trace.changes, trace.depth)
        print(f"| {name} | {' | '.join(f'{figure:,}' for figure in (len(trace.files), *figures))} |")
    for name, trace in traces.items() if arguments.path else ():
        print(f"\n{name}:\n  " + "\n  ".join(trace.visits))
    outside = [name for name, trace in traces.items() if not trace.is_within_bounds(name)]
    print(f"\nOutside of its bounds (files, changes of file: {BOUNDS}): {'; '.join(outside) or 'no call'}.")
    return 1 if outside else 0


def traced(call: Callable[[], Any]) -> tuple[Trace, Any]:
    """Trace one call; the second value is its result."""
    import helix_store

    trace = Trace(root=Path(helix_store.__file__).parent)
    sys.setprofile(trace.observe)
    try:
        result = call()
    finally:
        sys.setprofile(None)
    return trace, result


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.trace",
        description="Which files of helix_store one step enters, and how often it changes file.",
    )
    parser.add_argument("--path", action="store_true", help="print the ordered sequence of files too")
    return parser.parse_args()


def _traces() -> Iterator[tuple[str, Trace]]:
    from django.core.management import call_command
    from django.test.utils import override_settings

    call_command("migrate", database="sqlite", verbosity=0, skip_checks=True)
    yield "step, PostgreSQL, fast path", _traced_step("default", "fast")
    with override_settings(HELIX_STORE={"FAST_PATHS": False}):
        yield "step, PostgreSQL, portable", _traced_step("default", "portable")
    yield "step, SQLite", _traced_step("sqlite", "sqlite")
    yield "step, PostgreSQL, handle", _traced_handle("step", stages=False)
    yield "step, PostgreSQL, handle, staging", _traced_handle("staging", stages=True)
    yield "README, PostgreSQL, turn", _traced_turn()
    yield "admin, PostgreSQL, answer", _traced_answer()
    yield "LangGraph, PostgreSQL, put", _traced_put()


def _traced_step(alias: str, session_id: str) -> Trace:
    from helix_store.core.types import StepInfo
    from helix_store.stores import DatabaseStateStore

    store = DatabaseStateStore(alias)
    store.create_session(session_id, agent_type="traced", custom_state=state_of(4))
    for number in range(1, _STEPS + 1):
        step = StepInfo(f"step-{number}", number)
        store.stage_changes(session_id, step.step_id, staged_changes()[0])
        state = store.load_state(session_id)
        assert state is not None
        before = state.version
        state.step_count = number
        state.custom_state |= state_of(4, number)
        save = partial(
            store.save_state_and_promote_staging,
            session_id,
            state,
            [message(1), message(2)],
            step,
            expected_version=before,
        )
        trace, commit = traced(save)
        assert commit.new_version == before + 1
    return trace


def _traced_handle(session_id: str, *, stages: bool) -> Trace:
    from helix_store import Store

    session = Store("default").new_session(session_id, agent_type="traced", custom_state=state_of(4))

    def step_of(number: int) -> None:
        with session.step() as step:
            step.state.custom_state |= state_of(4, number)
            step.say(message(1), message(2))
            if stages:
                step.stage("call-1", merge_changes={"order": "A-17"})

    for number in range(1, _STEPS + 1):
        trace, _ = traced(partial(step_of, number))
    return trace


def _traced_turn() -> Trace:
    """The turn that the README shows."""
    from helix_store import Store

    store = Store("default")

    def drive(session_id: str) -> None:
        with store.session(session_id).turn() as turn:
            while turn.is_active:
                with turn.step() as step:
                    turn.tokens(model="gpt-4o", prompt=100, completion=50)
                    step.stage("call-1", merge_changes={"order": "A-17"})
                    step.say({"role": "assistant", "content": "A-17 arrives tomorrow."})
                    step.finish()

    for number in range(1, _STEPS + 1):
        store.new_session(f"turn-{number}", agent_type="traced")
        trace, _ = traced(partial(drive, f"turn-{number}"))
    return trace


def _traced_put() -> Trace:
    """The checkpoint of a superstep that LangGraph's saver stores."""
    from langgraph.checkpoint.base import empty_checkpoint

    from helix_store.contrib.langgraph import DjangoSaver

    saver = DjangoSaver("default")
    config: Any = {"configurable": {"thread_id": "put", "checkpoint_ns": ""}}
    version: str | None = None
    for number in range(1, _STEPS + 1):
        version = saver.get_next_version(version, None)
        checkpoint = empty_checkpoint()
        checkpoint["channel_values"] = {"state": state_of(4, number), "messages": [message(number)]}
        versions: Any = dict.fromkeys(checkpoint["channel_values"], version)
        checkpoint["channel_versions"] = versions
        metadata: Any = {"source": "loop", "step": number, "parents": {}}
        trace, config = traced(partial(saver.put, config, checkpoint, metadata, versions))
    return trace


def _traced_answer() -> Trace:
    """The request by which a user of the admin approves a call."""
    from django.contrib.auth import get_user_model
    from django.test import Client
    from django.urls import reverse

    from helix_store import call_digest
    from helix_store.core.types import RunStatus
    from helix_store.models import Session
    from helix_store.stores import DatabaseStateStore

    store = DatabaseStateStore("default")
    client = Client()
    client.force_login(get_user_model().objects.create_superuser("traced"))
    call = {"tool_name": "book", "input": {"to": "Oslo"}, "approval_id": "approval-1"}
    form = {
        "call": "call-1",
        "approval": "approval-1",
        "answer": "approve",
        "reason": "fine",
        "digest": call_digest("book", {"to": "Oslo"}),
    }

    for number in range(1, _STEPS + 1):
        session_id = f"answer-{number}"
        store.create_session(session_id, agent_type="traced")
        store.start_run(session_id)
        store.suspend(session_id, kind=RunStatus.SUSPENDED_CLIENT_TOOL, context={}, pending={"call-1": call})
        row = Session.objects.get(session_id=session_id)
        address = reverse("admin:helix_store_session_operation", args=[row.pk, "answer"])
        trace, response = traced(partial(client.post, address, form))
        assert response.status_code == 302
        assert "call-1" in store.take_tool_results(session_id)
    return trace


if __name__ == "__main__":
    sys.exit(main())
