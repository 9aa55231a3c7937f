"""A step whose COMMIT, or its reply, is lost on the way: it is stored once, and its caller learns so."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Final

import pytest
from django.db import OperationalError, connections, transaction
from django.test.utils import override_settings

from helix_store.core.types import SessionState, SessionStatus, StepCommit
from helix_store.engine import statement as commits
from helix_store.exceptions import IdempotencyConflict, OutcomeUnknown, StaleStateError
from helix_store.signals import session_finished
from helix_store.stores import DatabaseStateStore, DatabaseUsageStore
from tests.cells import for_each
from tests.databases import CommittedDatabase
from tests.faults.campaign import Campaign, Trial, campaign
from tests.faults.proxy import Cut
from tests.faults.wires import Wire, opened_wire
from tests.processes import run_in_processes

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
KINDS: Final = [(write, cut) for write in FORMS for cut in Cut]
PROCESSES: Final = 4
_CUTS_AT_A_TIME = 400


def require_one_step(wire: Wire, session_id: str, commit: StepCommit) -> None:
    """The second step is stored once, and is what its caller was told."""
    store = DatabaseStateStore(wire.direct, tenant=wire.tenant)
    state = store.load_state(session_id)
    assert state is not None
    assert (state.step_count, state.version) == (2, commit.new_version)
    assert state.custom_state == {"kept": "x" * 200, **_SAVED}
    assert store.get_messages(session_id).messages == [_MESSAGE, _MESSAGE]
    heads = store.list_checkpoints(session_id).items
    assert [head.step_count for head in heads] == [2, 1]
    assert heads[0].checkpoint_id == commit.checkpoint_id
    assert store.get_staged_changes(session_id, "step-2") == []


def cut_one(wire: Wire, trial: Trial) -> None:
    write, cut = KINDS[trial.seed % len(KINDS)]
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


def cut_in_a_process(alias: str, tenant: str, seeds: list[int]) -> tuple[Campaign, int]:
    made = Campaign("lost_commits", "postgres")
    with opened_wire(alias, tenant) as wire:
        for seed in seeds:
            made.check(seed, partial(cut_one, wire))
        return made, wire.proxy.cuts


@pytest.mark.campaign
@pytest.mark.thorough
def test_a_step_whose_commit_is_cut_is_stored_once_and_returned(postgres_db: CommittedDatabase) -> None:
    with campaign("lost_commits", "postgres", sizes=(2 * len(KINDS), 10_000, 100_000)) as made:
        cuts = 0
        for seeds in made.batches(_CUTS_AT_A_TIME):
            # Most of a trial is waiting, and the portable form is a setting of a process.
            parts = [seeds[first::PROCESSES] for first in range(min(PROCESSES, len(seeds)))]
            arguments = [(postgres_db.alias, postgres_db.tenant, part) for part in parts]
            outcomes = run_in_processes(cut_in_a_process, arguments, timeout=120 + len(seeds))
            for part, cut in (outcome.unwrap() for outcome in outcomes):
                made.include(part)
                cuts += cut
        made.require_success()
    assert cuts == made.trials


@pytest.mark.thorough
@for_each("cut", [Cut.BEFORE, Cut.AFTER], ids=lambda cut: cut.name.lower())
@for_each("write", CALLS, ids=lambda write: write.__name__)
def test_an_unreachable_server_leaves_an_id_that_resolves_the_outcome_later(
    wire: Wire, write: Write, cut: Cut, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commits, "_PATIENCE_SECONDS", 0.1)
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


def test_a_transaction_that_the_server_keeps_for_a_lost_client_is_ended_and_written_again(wire: Wire) -> None:
    state = new_session(wire, "session")
    wire.proxy.half_open_seconds = 60.0
    commit = with_an_operation_id(wire, state, Cut.UNDELIVERED)
    require_one_step(wire, "session", commit)


@pytest.mark.parametrize("write", [in_one_statement, in_the_portable_form], ids=lambda write: write.__name__)
@pytest.mark.parametrize("cut", [Cut.BEFORE, Cut.AFTER], ids=lambda cut: cut.name.lower())
def test_a_step_that_ends_the_session_sends_its_signal_once_when_its_reply_is_lost(
    wire: Wire, write: Write, cut: Cut
) -> None:
    state = new_session(wire, "session")
    state.status = SessionStatus.COMPLETED
    told: list[str] = []

    def hear(session_id: str, tenant: str, **kwargs: Any) -> None:
        if tenant == wire.tenant:
            told.append(session_id)

    session_finished.connect(hear)
    try:
        write(wire, state, cut)
    finally:
        session_finished.disconnect(hear)
    assert told == ["session"]


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
