"""An effect whose intent or result loses its reply on the way: it is stored once, and its caller goes on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import pytest

from helix_store.stores import DatabaseStateStore, SessionHandle
from tests.cells import for_each
from tests.faults.proxy import Cut
from tests.faults.wires import Wire

_APPROVE: Final[dict[str, Any]] = {"tool_name": "pay", "input": [7], "approval_id": "call"}
_MOMENTS: Final = ("intent", "approved intent", "second attempt", "done", "not_done", "unknown")


def _handle(wire: Wire, moment: str) -> SessionHandle:
    store = DatabaseStateStore(wire.alias, tenant=wire.tenant)
    session = store.new_session(agent_type="agent")
    store.add_pending_tool_calls(session.id, {"call": _APPROVE})
    store.submit_tool_result(session.id, "call", approved=True, approval_id="call", actor="ann")
    if moment == "second attempt":
        with session.effect("effect") as effect:
            effect.not_done()
    return session


def fail_after(call: Callable[[], object]) -> None:
    call()
    raise ZeroDivisionError


@for_each("cut", list(Cut), ids=lambda cut: cut.name.lower(), shared=True)
@pytest.mark.parametrize("moment", _MOMENTS)
def test_an_effect_whose_reply_is_cut_is_stored_once(wire: Wire, moment: str, cut: Cut) -> None:
    session = _handle(wire, moment)
    is_approved = moment == "approved intent"
    effect = session.effect("call" if is_approved else "effect", approval=is_approved)
    if moment in ("intent", "approved intent", "second attempt"):
        wire.proxy.arm(cut)
    if moment == "unknown":
        with pytest.raises(ZeroDivisionError), effect:
            fail_after(lambda: wire.proxy.arm(cut))
    else:
        with effect:
            assert not effect.is_done
            if moment in ("done", "not_done"):
                wire.proxy.arm(cut)
            effect.not_done() if moment == "not_done" else effect.done([moment])
    wire.proxy.wait_for_cut()
    (stored,) = session.store.list_effects(session.id).items  # type: ignore[attr-defined]
    expected = {"not_done": ("not_done", None), "unknown": ("unknown", None)}
    assert (stored.state, stored.result) == expected.get(moment, ("done", [moment]))
    assert stored.attempt == effect.attempt == (2 if moment == "second attempt" else 1)
