"""A step whose COMMIT, or its reply, is lost on the way: it is stored once, and its caller learns so."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import pytest
from django.db import OperationalError, connections, transaction
from django.test.utils import override_settings

from helix_store.core.types import SessionState, StepCommit
from helix_store.engine import outcomes
from helix_store.exceptions import IdempotencyConflict, OutcomeUnknown, StaleStateError
from helix_store.stores import DatabaseStateStore, DatabaseUsageStore
from tests.faults.campaign import Trial, campaign
from tests.faults.conftest import Wire
from tests.faults.proxy import Cut

_MESSAGE: Final = {"role": "assistant", "content": "once"}
_SAVED: Final = {"saved": [1]}


def store_of(wire: Wire) -> DatabaseStateStore:
    return DatabaseStateStore(wire.alias, tenant=wire.tenant)


def new_session(wire: Wire, session_id: str) -> SessionState:
    """A session with one step, so that the next one can be a delta."""
    store = store_of(wire)
    state = store.create_session(session_id, agent_type="agent", custom_state={"kept": "x" * 200})
    commit = store.save_state_and_promote_staging(session_id, state, [_MESSAGE], step(1))
    loaded = store.load_state(session_id)
    assert loaded is not None
    assert loaded.version == commit.new_version
    return loaded


def step(number: int) -> dict[str, Any]:
    return {"step_id": f"step-{number}", "step_count": number}


def in_one_statement(wire: Wire, state: SessionState, cut: Cut) -> StepCommit:
    state.custom_state["saved"] = [1]
    wire.proxy.arm(cut)
    return store_of(wire).save_state_and_promote_staging(
        state.session_id, state, [_MESSAGE], step(2), expected_version=state.version
    )


def without_a_version(wire: Wire, state: SessionState, cut: Cut) -> StepCommit:
    state.custom_state["saved"] = [1]
    wire.proxy.arm(cut)
    return store_of(wire).save_state_and_promote_staging(state.session_id, state, [_MESSAGE], step(2))


def with_staging(wire: Wire, state: SessionState, cut: Cut) -> StepCommit:
    staged = {"tool_call_id": "call", "merge_changes": _SAVED}
    store_of(wire).stage_changes(state.session_id, "step-2", staged)
    wire.proxy.arm(cut)
    return store_of(wire).save_state_and_promote_staging(
        state.session_id, state, [_MESSAGE], step(2), expected_version=state.version
    )


def in_the_portable_form(wire: Wire, state: SessionState, cut: Cut) -> StepCommit:
    with override_settings(HELIX_STORE={"FAST_PATHS": False}):
        return in_one_statement(wire, state, cut)


def with_an_operation_id(wire: Wire, state: SessionState, cut: Cut) -> StepCommit:
    state.custom_state["saved"] = [1]
    wire.proxy.arm(cut)
    return store_of(wire).save_state_and_promote_staging(
        state.session_id,
        state,
        [_MESSAGE],
        step(2),
        expected_version=state.version,
        operation_id="operation",
    )


def in_a_turn(wire: Wire, state: SessionState, cut: Cut) -> StepCommit:
    with store_of(wire).session(state.session_id).turn() as turn, turn.step() as turn_step:
        turn_step.say(_MESSAGE)
        turn_step.state.custom_state["saved"] = [1]
        wire.proxy.arm(cut)
    assert turn_step.commit is not None
    return turn_step.commit


def in_a_turn_with_staging(wire: Wire, state: SessionState, cut: Cut) -> StepCommit:
    with store_of(wire).session(state.session_id).turn() as turn:
        turn.tokens(model="script", prompt=1, completion=1)
        with turn.step() as turn_step:
            turn_step.say(_MESSAGE)
            turn_step.stage("call", merge_changes=_SAVED)
            wire.proxy.arm(cut)
    assert turn_step.commit is not None
    entries = DatabaseUsageStore(wire.alias, tenant=wire.tenant).get_entries(state.session_id)
    assert len(entries) == 1
    return turn_step.commit


Write = Callable[[Wire, SessionState, Cut], StepCommit]
CALLS: Final[tuple[Write, ...]] = (
    in_one_statement,
    without_a_version,
    with_staging,
    in_the_portable_form,
    with_an_operation_id,
)
FORMS: Final[tuple[Write, ...]] = (*CALLS, in_a_turn, in_a_turn_with_staging)


def require_one_step(wire: Wire, session_id: str, commit: StepCommit) -> None:
    """The second step is stored once, and is what its caller was told."""
    store = store_of(wire)
    state = store.load_state(session_id)
    assert state is not None
    assert (state.step_count, state.version) == (2, commit.new_version)
    assert state.custom_state == {"kept": "x" * 200, **_SAVED}
    assert store.get_messages(session_id).messages == [_MESSAGE, _MESSAGE]
    heads = store.list_checkpoints(session_id).items
    assert [head.step_count for head in heads] == [2, 1]
    assert heads[0].checkpoint_id == commit.checkpoint_id
    assert store.get_staged_changes(session_id, "step-2") == []


@pytest.mark.campaign
def test_a_step_whose_commit_is_cut_is_stored_once_and_returned(wire: Wire) -> None:
    kinds = [(write, cut) for write in FORMS for cut in Cut]

    def cut_one(trial: Trial) -> None:
        write, cut = kinds[trial.seed % len(kinds)]
        state = new_session(wire, f"session-{trial.seed}")
        try:
            commit = write(wire, state, cut)
        except StaleStateError:
            trial.count("false stale")
            raise
        except OutcomeUnknown:
            trial.count("unknown")
            raise
        wire.proxy.wait_for_cut()
        require_one_step(wire, state.session_id, commit)
        trial.count(f"{write.__name__}, {cut.value}")

    with campaign("lost_commits", "postgres", sizes=(2 * len(kinds), 10_000, 100_000)) as made:
        made.run(cut_one)
    assert wire.proxy.cuts == made.trials


@pytest.mark.parametrize("cut", [Cut.BEFORE, Cut.AFTER], ids=lambda cut: cut.name.lower())
@pytest.mark.parametrize("write", CALLS, ids=lambda write: write.__name__)
def test_an_unreachable_server_leaves_an_id_that_resolves_the_outcome_later(
    wire: Wire, write: Write, cut: Cut, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outcomes, "_PATIENCE_SECONDS", 0.1)
    state = new_session(wire, "session")
    arm = wire.proxy.arm
    monkeypatch.setattr(wire.proxy, "arm", lambda cut: arm(cut, goes_down=True))
    with pytest.raises(OutcomeUnknown) as raised:
        write(wire, state, cut)
    operation_id = raised.value.operation_id
    assert operation_id
    wire.proxy.come_up()

    def repeat() -> StepCommit:
        return store_of(wire).save_state_and_promote_staging(
            "session",
            state,
            [_MESSAGE],
            step(2),
            expected_version=state.version,
            operation_id=operation_id,
        )

    commit = repeat()
    assert repeat() == commit
    require_one_step(wire, "session", commit)


def test_a_server_that_keeps_the_lost_transaction_leaves_the_outcome_open_for_a_bounded_time(
    wire: Wire, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outcomes, "_PATIENCE_SECONDS", 0.1)
    state = new_session(wire, "session")
    wire.proxy.half_open_seconds = 60.0
    with pytest.raises(OutcomeUnknown) as raised:
        with_an_operation_id(wire, state, Cut.UNDELIVERED)
    assert raised.value.operation_id == "operation"


def test_a_step_that_was_not_stored_meets_what_others_wrote_meanwhile(
    wire: Wire, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = new_session(wire, "session")
    arm = wire.proxy.arm

    def write_as_another(cut: Cut) -> None:
        with transaction.atomic(using="postgres"):
            DatabaseStateStore("postgres", tenant=wire.tenant).update_status("session", "paused")
        arm(cut)

    monkeypatch.setattr(wire.proxy, "arm", write_as_another)
    with pytest.raises(StaleStateError) as raised:
        with_an_operation_id(wire, state, Cut.BEFORE)
    assert raised.value.current_version == state.version + 1


def test_inside_a_block_of_the_caller_the_store_does_not_resolve(wire: Wire) -> None:
    state = new_session(wire, "session")

    def save() -> None:
        with transaction.atomic(using=wire.alias):
            in_one_statement(wire, state, Cut.BEFORE)

    with pytest.raises(OperationalError):
        save()
    loaded = store_of(wire).load_state("session")
    assert loaded is not None
    assert loaded.step_count == 1
    connections[wire.alias].close()


def test_the_id_of_a_lost_step_is_of_no_use_to_another_step(wire: Wire) -> None:
    state = new_session(wire, "session")
    commit = in_one_statement(wire, state, Cut.AFTER)
    with pytest.raises((StaleStateError, IdempotencyConflict)):
        store_of(wire).save_state_and_promote_staging(
            "session",
            state,
            [_MESSAGE],
            step(3),
            expected_version=state.version,
            operation_id=commit.checkpoint_id,
        )
