"""A handle says the id and the fence of a session once."""

from __future__ import annotations

from typing import Any

import pytest

from helix_store.core.types import SessionState
from helix_store.exceptions import (
    ConflictError,
    FencedOutError,
    InvalidPayload,
    InvalidQuery,
    SessionNotFound,
    StaleStateError,
)
from helix_store.handles import SessionHandle
from helix_store.stores import InMemoryStateStore
from tests.handles.worlds import World


def said(*texts: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text} for text in texts]


def test_a_store_gives_handles_on_new_and_known_sessions() -> None:
    store = InMemoryStateStore()
    session = store.new_session("s", agent_type="agent", title="A trip")
    assert isinstance(session, SessionHandle)
    assert (session.id, session.store, session.load().title) == ("s", store, "A trip")
    assert store.session("s", fencing_token=7).fencing_token == 7
    assert store.session(session.id).load() == session.load()


def test_what_is_no_store_has_no_handle() -> None:
    with pytest.raises(TypeError, match="load_state"):
        SessionHandle(object(), "s")  # type: ignore[arg-type]
    for bad in ({"session_id": ""}, {"session_id": "s", "fencing_token": -1}):
        with pytest.raises(InvalidPayload):
            InMemoryStateStore().session(**bad)


def test_every_call_about_an_unknown_session_says_so(world: World) -> None:
    nobody = world.session("nobody")
    for call in (
        nobody.load,
        nobody.messages,
        nobody.checkpoints,
        lambda: nobody.say(*said("hello")),
        lambda: nobody.update(lambda state: None),
        lambda: nobody.rewind("cpv1-nobody-s1-t1900000000000-abcdef"),
        nobody.branch,
        nobody.step().__enter__,
        world.turn(nobody).__enter__,
    ):
        with pytest.raises(SessionNotFound):
            call()
    assert nobody.delete() == 0
    assert world.locks.get_active_locks() == []
    lock = world.locks.acquire("nobody")
    assert lock is not None
    assert lock.fencing_token == 1, "a turn of nobody's session has stored a lock"


def test_messages_are_all_or_the_last_ones_oldest_first(world: World) -> None:
    session = world.new_session()
    assert session.say(*said("a", "b")) == 2
    assert session.say(*said("c")) == 3
    assert session.messages() == said("a", "b", "c")
    assert session.messages(last=2) == said("b", "c")
    assert session.messages(9) == said("a", "b", "c")
    with pytest.raises(InvalidQuery):
        session.messages(0)


def test_an_update_saves_what_was_changed_and_returns_what_can_be_saved_again(world: World) -> None:
    session = world.new_session()

    def change(state: SessionState) -> None:
        state.custom_state["n"] = 1

    state = session.update(change)
    assert state.version == 2
    assert world.loaded().custom_state == {"n": 1}
    state.title = "again"
    assert world.store.save_state("session", state, expected_version=state.version) == 3


def test_an_update_starts_again_on_a_fresh_state(world: World) -> None:
    session = world.new_session()
    seen = []

    def change(state: SessionState) -> None:
        seen.append(state.version)
        if len(seen) < 4:
            world.store.append_messages("session", said("meanwhile"))
        state.custom_state["seen"] = len(seen)

    assert session.update(change).version == 5
    assert seen == [1, 2, 3, 4]
    assert world.loaded().custom_state == {"seen": 4}


def test_an_update_that_never_finds_peace_raises_the_last_error(world: World) -> None:
    session = world.new_session()
    attempts = []

    def change(state: SessionState) -> None:
        attempts.append(state.version)
        world.store.append_messages("session", said("meanwhile"))

    with pytest.raises(StaleStateError) as caught:
        session.update(change, attempts=3)
    assert attempts == [1, 2, 3]
    assert (caught.value.expected_version, caught.value.current_version) == (3, 4)
    with pytest.raises(InvalidPayload):
        session.update(change, attempts=0)
    assert len(attempts) == 3


def test_an_exception_of_the_change_saves_nothing(world: World) -> None:
    session = world.new_session()
    before = world.contents()

    def change(state: SessionState) -> None:
        state.title = "half"
        raise KeyError("no")

    with pytest.raises(KeyError):
        session.update(change)
    assert world.contents() == before


def test_every_write_carries_the_fence(world: World) -> None:
    session = world.new_session()
    with session.step() as step:
        step.say(*said("a"))
    checkpoint_id = session.checkpoints().items[0].checkpoint_id
    tokens = []
    for _ in range(2):
        lock = world.locks.acquire("session")
        assert lock is not None
        lock.release()
        tokens.append(lock.fencing_token)
    before = world.contents()
    former = world.session(fencing_token=tokens[0])
    with pytest.raises(FencedOutError):
        former.say(*said("late"))
    with pytest.raises(FencedOutError):
        former.update(lambda state: None)
    with pytest.raises(FencedOutError):
        former.rewind(checkpoint_id)
    with pytest.raises(FencedOutError), former.step() as step:
        step.say(*said("late"))
    assert world.contents() == before
    assert world.session(fencing_token=tokens[1]).say(*said("b")) == 2


def test_the_calls_of_the_store_have_short_names(world: World) -> None:
    session = world.new_session()
    for text in ("a", "b"):
        with session.step() as step:
            step.say(*said(text))
    newest, oldest = session.checkpoints().items
    assert [head.step_id for head in (newest, oldest)] == ["step-2", "step-1"]
    branch = session.branch(message_index=1, new_session_id="branch", title="a branch")
    assert (branch.id, branch.fencing_token, branch.load().title) == ("branch", None, "a branch")
    assert branch.messages() == said("a")
    assert session.rewind(oldest.checkpoint_id) == world.loaded().version
    assert session.messages() == said("a")
    assert len(session.checkpoints(limit=1).items) == 1
    world.usage.record_entry(
        {
            "kind": "custom",
            "session_id": "session",
            "step_count": 1,
            "timestamp": 1_900_000_000_000,
            "source": {"type": "agent", "name": "agent"},
            "type": "pages",
            "name": "read",
            "amount": 3,
        }
    )
    for tree in (False, True):
        rollup = session.usage(tree, usage=world.usage)
        assert rollup is not None
        assert rollup.entry_count == 1
    assert session.delete() == 1
    assert not world.store.session_exists("session")


def test_a_handle_does_not_write_beside_its_own_step(world: World) -> None:
    session = world.new_session()
    with session.step() as step:
        for call in (lambda: session.say(*said("b")), lambda: session.update(lambda state: None)):
            with pytest.raises(ConflictError, match="write in the step"):
                call()
        step.say(*said("a"))
    assert session.messages() == said("a")
