"""An argument of a wrong type: a typed error that names the argument, no statement, and nothing stored."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any, Final, NamedTuple

import pytest
from django.db import connections
from django.test.utils import CaptureQueriesContext

from helix_store import InMemoryStore, InvalidPayload, SessionHandle, Step, Store, Turn
from tests.cells import for_each
from tests.databases import ALIASES, CommittedDatabase

AnyStore = Store | InMemoryStore


class Place(NamedTuple):
    store: AnyStore
    session: SessionHandle
    turn: Turn
    step: Step


async def _change(state: object) -> None:
    """A coroutine function: called as a function, it changes nothing."""


_NO_TEXT: Final[tuple[Any, ...]] = (5, "", ["id"], {})
_NO_FLAG: Final = ("no", 1, None)
_NO_MANAGER: Final = (object(), "locks", 5)

_CALLS: Final[dict[str, tuple[Callable[[Place, Any], object], str, tuple[Any, ...]]]] = {
    "turn locks": (lambda at, wrong: at.session.turn(locks=wrong), "locks", _NO_MANAGER),
    "turn usage": (lambda at, wrong: at.session.turn(usage=wrong), "usage", _NO_MANAGER),
    "turn owner": (lambda at, wrong: at.session.turn(owner=wrong), "owner", _NO_TEXT),
    "turn receive": (lambda at, wrong: at.session.turn(receive=wrong), "receive", _NO_FLAG),
    "turn rest": (lambda at, wrong: at.session.turn(rest=wrong), "rest", _NO_FLAG),
    "step id": (lambda at, wrong: at.session.step(wrong), "step_id", _NO_TEXT),
    "step run": (lambda at, wrong: at.session.step(run_id=wrong), "run_id", _NO_TEXT),
    "step operation": (lambda at, wrong: at.session.step(operation_id=wrong), "operation_id", _NO_TEXT),
    "turn step id": (lambda at, wrong: at.turn.step(wrong), "step_id", _NO_TEXT),
    "turn step operation": (lambda at, wrong: at.turn.step(operation_id=wrong), "operation_id", _NO_TEXT),
    "prompt": (lambda at, wrong: at.turn.tokens(model="m", prompt=wrong), "prompt", ("1", None, 1.5, [])),
    "completion": (
        lambda at, wrong: at.turn.tokens(model="m", completion=wrong),
        "completion",
        ("1", None, 1.5, {}),
    ),
    "asked call": (lambda at, wrong: at.step.ask_approval(wrong, "pay", 1), "call_id", (5, ["id"], {})),
    "asked default": (
        lambda at, wrong: at.step.ask_approval("call", "pay", 1, on_expiry=wrong),
        "on_expiry",
        ("approve", 5, []),
    ),
    "used call": (lambda at, wrong: at.step.use_approval(wrong), "tool_call_id", _NO_TEXT),
    "failure": (lambda at, wrong: at.step.fail(wrong), "reason", (5, [], ValueError("broken"))),
    "tree": (lambda at, wrong: at.session.usage(wrong), "tree", _NO_FLAG),
    "ledger": (lambda at, wrong: at.session.usage(usage=wrong), "usage", _NO_MANAGER),
    "change": (lambda at, wrong: at.session.update(wrong), "change", (object(), None, _change)),
    "deleted usage": (lambda at, wrong: at.session.delete(keep_usage=wrong), "keep_usage", _NO_FLAG),
    "tags": (lambda at, wrong: at.store.new_session(agent_type="a", tags=wrong), "tags", (5, "a", None, {})),
    "sought tags": (lambda at, wrong: at.store.list_sessions(tags=wrong), "tags", (5, "a", {})),
    "count": (lambda at, wrong: at.store.list_sessions(count=wrong), "count", _NO_FLAG),
    "rollup": (
        lambda at, wrong: at.store.usage.get_rollup("session", include_sub_agents=wrong),
        "include_sub_agents",
        _NO_FLAG,
    ),
    "supersede": (
        lambda at, wrong: at.store.sessions.start_run("session", supersede=wrong),
        "supersede",
        _NO_FLAG,
    ),
    "thinking": (
        lambda at, wrong: at.store.sessions.get_messages("session", include_thinking=wrong),
        "include_thinking",
        _NO_FLAG,
    ),
}


class _Undone(Exception):
    """Leaves the step without a commit."""


@pytest.fixture(params=["memory", *ALIASES])
def store(request: pytest.FixtureRequest) -> Iterator[AnyStore]:
    if request.param == "memory":
        yield InMemoryStore()
        return
    database: CommittedDatabase = request.getfixturevalue(f"{request.param}_db")
    yield Store(database.alias, tenant=database.tenant)


def _contents(store: AnyStore) -> Any:
    """The stored sessions, and what belongs to them."""
    heads = store.list_sessions().sessions
    usage = store.usage.get_entries("session")
    return heads, store.session("session").load(), store.sessions.list_runs("session"), usage


@pytest.mark.thorough
@for_each("call", _CALLS)
def test_a_wrong_type_is_refused_before_sql(store: AnyStore, call: str) -> None:
    make, argument, wrong_values = _CALLS[call]
    session = store.new_session("session", agent_type="agent")
    try:
        with session.turn() as turn, turn.step() as step:
            before = _contents(store)
            for wrong in wrong_values:
                sent = CaptureQueriesContext(connections[store.alias]) if isinstance(store, Store) else None
                with nullcontext() if sent is None else sent, pytest.raises(InvalidPayload) as refused:
                    make(Place(store, session, turn, step), wrong)
                assert refused.value.path.startswith(f"/{argument}"), wrong
                assert sent is None or not sent.captured_queries
            assert _contents(store) == before
            raise _Undone
    except _Undone:
        pass
    assert store.session("session").load().step_count == 0
