"""Calls that are opened by a commit whose COMMIT, or its reply, is lost: people are told of them once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from django.test.utils import override_settings
from langgraph.checkpoint.base import empty_checkpoint
from langgraph.types import Interrupt

from helix_store import DatabaseStateStore
from helix_store.contrib.langgraph import DjangoSaver
from helix_store.contrib.openai_agents import RunStateStore
from tests.cells import for_each
from tests.faults.proxy import Cut
from tests.faults.wires import Wire
from tests.frameworks.langgraph.graphs import config_of
from tests.frameworks.waiting import asked

CALL: Final = {"tool_name": "ask"}


def _store(wire: Wire) -> DatabaseStateStore:
    store = DatabaseStateStore(wire.alias, tenant=wire.tenant)
    store.create_session("session", agent_type="agent")
    return store


def _suspend(wire: Wire) -> Callable[[], object]:
    store = _store(wire)
    return lambda: store.suspend("session", kind="suspended_client_tool", context={}, pending={"one": CALL})


def _add(wire: Wire) -> Callable[[], object]:
    store = _store(wire)
    return lambda: store.add_pending_tool_calls("session", {"one": CALL})


def _step(wire: Wire) -> Callable[[], object]:
    session = _store(wire).session("session")

    def ask() -> None:
        with session.step() as step:
            step.wait_for({"one": CALL})

    return ask


def _interrupt(wire: Wire) -> Callable[[], object]:
    saver, config = DjangoSaver(wire.alias, tenant=wire.tenant), config_of("session", "1")
    checkpoint: Any = {**empty_checkpoint(), "id": "1"}
    saver.put(config_of("session"), checkpoint, {"source": "loop", "step": 1}, {})
    return lambda: saver.put_writes(config, [("__interrupt__", (Interrupt("?", id="one"),))], "task")


def _run_state(wire: Wire) -> Callable[[], object]:
    states = RunStateStore(wire.alias, tenant=wire.tenant)
    states.save("session", "{}", state_id="zero")
    return lambda: states.save("session", "{}", state_id="one")


@for_each("prepare", [_suspend, _add, _step, _interrupt, _run_state])
@for_each("fast", [True, False])
@for_each("cut", list(Cut))
def test_what_a_lost_commit_opens_is_told_once(
    wire: Wire, prepare: Callable[[Wire], Callable[[], object]], fast: bool, cut: Cut
) -> None:
    with override_settings(HELIX_STORE={"FAST_PATHS": fast}):
        call = prepare(wire)
        with asked(wire.tenant) as told:
            wire.proxy.arm(cut)
            call()
            wire.proxy.wait_for_cut()
    assert told == [("session", ["one"], "session")]
