"""States stored as deltas: read everywhere as what they were, whatever is dropped around them."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random
from typing import Any

import pytest
from django.db.models import QuerySet
from django.test.utils import override_settings

from helix_store.core.types import StepInfo
from helix_store.exceptions import IntegrityFault
from helix_store.models import (
    Checkpoint,
    CheckpointKind,
    Session,
)
from helix_store.sessions.state import MAX_DELTAS, loaded_of
from helix_store.stores import DatabaseStateStore
from tests.cells import for_each
from tests.database.delta_steps import forget_origin, learn_origin, write_step
from tests.databases import CommittedDatabase
from tests.factories import MessageFactory, SessionFactory
from tests.invariants import broken_invariants
from tests.strategies import HIGH, exact_form

BALLAST = {f"ballast-{number}": "x" * 100 for number in range(5)}


@pytest.fixture(params=["sqlite", "postgres", "postgres without fast paths"])
def database(request: pytest.FixtureRequest) -> Iterator[CommittedDatabase]:
    name, _, without = request.param.partition(" ")
    with override_settings(HELIX_STORE={"FAST_PATHS": not without}):
        yield request.getfixturevalue(f"{name}_db")


@pytest.fixture
def store(database: CommittedDatabase) -> DatabaseStateStore:
    return DatabaseStateStore(database.alias, tenant=database.tenant)


@pytest.fixture
def session(database: CommittedDatabase) -> Iterator[Session]:
    yield SessionFactory.create(using=database.alias, tenant=database.tenant, session_id="s", user_id="u")
    assert broken_invariants(database) == []


def state_of_step(number: int) -> dict[str, Any]:
    return {**BALLAST, "step": number, "ratio": float(number), f"only in {number}": [HIGH]}


def write_steps(session: Session, count: int) -> list[Checkpoint]:
    """The first in full, the others as deltas from it; each after one more message."""
    rows = []
    for number in range(1, count + 1):
        MessageFactory.create(session=session, content=f"message {number}")
        rows.append(write_step(session, state_of_step(number)))
    assert [row.base_id for row in rows] == [None, *[rows[0].pk] * (count - 1)]
    return rows


def rows_of(session: Session) -> QuerySet[Checkpoint]:
    return session.checkpoints.order_by("version")


def kinds_of(session: Session) -> list[str]:
    return list(rows_of(session).values_list("kind", flat=True))


def read(store: DatabaseStateStore, row: Checkpoint) -> dict[str, Any]:
    checkpoint = store.get_checkpoint("s", str(row.checkpoint_id))
    assert checkpoint is not None
    return checkpoint.state.custom_state


def loaded(store: DatabaseStateStore, session_id: str = "s") -> dict[str, Any]:
    state = store.load_state(session_id)
    assert state is not None
    return state.custom_state


# --- Reading --------------------------------------------------------------------------------------


def test_every_reader_sees_the_whole_state(store: DatabaseStateStore, session: Session) -> None:
    rows = write_steps(session, 4)
    assert exact_form(loaded(store)) == exact_form(state_of_step(4))
    latest = store.get_latest_checkpoint("s")
    assert latest is not None
    assert exact_form(latest.state.custom_state) == exact_form(state_of_step(4))
    assert (latest.checkpoint_id, latest.message_count) == (rows[3].checkpoint_id, 4)
    for number, row in enumerate(rows, 1):
        assert exact_form(read(store, row)) == exact_form(state_of_step(number))
    listed = store.list_checkpoints("s").items
    assert [head.checkpoint_id for head in listed] == [row.checkpoint_id for row in reversed(rows)]


def test_a_suspended_session_resumes_with_the_whole_state(
    store: DatabaseStateStore, session: Session
) -> None:
    write_steps(session, 2)
    store.suspend("s", kind="suspended_step_partial", context={}, step_id="step-3")
    assert store.resume("s").custom_state == state_of_step(2)
    assert loaded(store) == state_of_step(2)


def test_a_branch_has_a_full_state_of_its_own(store: DatabaseStateStore, session: Session) -> None:
    rows = write_steps(session, 4)
    of_now = store.branch_session("s", new_session_id="now")
    of_then = store.branch_session("s", new_session_id="then", checkpoint_id=rows[1].checkpoint_id)
    of_message = store.branch_session("s", new_session_id="message", message_index=3)
    store.delete_session("s")
    states = [state.custom_state for state in (of_now, of_then, of_message)]
    assert states == [state_of_step(4), state_of_step(2), state_of_step(3)]
    assert [loaded(store, name) for name in ("now", "then", "message")] == states


def test_a_branch_of_a_session_whose_checkpoints_are_gone_has_its_state(
    store: DatabaseStateStore, session: Session
) -> None:
    write_steps(session, 3)
    store.prune_checkpoints("s", keep=0)
    assert store.branch_session("s").custom_state == state_of_step(3)


def test_a_loaded_state_remembers_what_its_next_step_may_build_on(
    store: DatabaseStateStore, session: Session
) -> None:
    first = write_steps(session, 1)[0]
    for number in (2, 3):
        forget_origin(session)
        origin = learn_origin(store, session)
        assert origin is not None
        assert (origin.key, origin.row_id) == (session.base_key, first.pk)
        assert write_step(session, state_of_step(number)).base_id == first.pk
        assert loaded(store) == state_of_step(number)


def test_a_state_that_is_no_step_is_nothing_to_build_on(store: DatabaseStateStore, session: Session) -> None:
    store.save_state("s", store.load_state("s"))  # type: ignore[arg-type]  # it is there
    state = store.load_state("s")
    assert state is not None
    assert state.custom_state == {}
    assert loaded_of(state).origin is None


def test_a_delta_whose_base_is_gone_is_a_fault_and_no_other_row_is_affected(
    store: DatabaseStateStore, session: Session
) -> None:
    write_steps(session, 3)
    session.base_key = None
    session.save(update_fields=["base_key"])
    forget_origin(session)
    whole = write_step(session, state_of_step(4))
    delta = write_step(session, state_of_step(5))
    for damage in ({"base_id": whole.pk + 10**9}, {"base_id": None, "payload": '["no state"]'}):
        rows_of(session).filter(pk=delta.pk).update(**damage)
        for call in (store.load_state, store.get_latest_checkpoint, store.branch_session):
            with pytest.raises(IntegrityFault):
                call("s")
        with pytest.raises(IntegrityFault):
            store.merge_custom_state("s", {"a": 1})
        assert read(store, whole) == state_of_step(4)
    rows_of(session).filter(pk=delta.pk).update(base_id=whole.pk, payload=delta.payload)
    assert loaded(store) == state_of_step(5)


# --- Writing between steps ------------------------------------------------------------------------


def test_what_changes_between_steps_is_written_in_full(store: DatabaseStateStore, session: Session) -> None:
    rows = write_steps(session, 3)
    store.merge_custom_state("s", {"merged": 1.0})
    assert exact_form(loaded(store)) == exact_form({**state_of_step(3), "merged": 1.0})
    store.stage_changes("s", "step-4", {"tool_call_id": "c", "merge_changes": {"promoted": True}})
    store.promote_staging("s", "step-4")
    assert exact_form(loaded(store)) == exact_form({**state_of_step(3), "merged": 1.0, "promoted": True})
    session.refresh_from_db()
    current = rows_of(session).get(pk=session.current_id or 0)
    assert (current.kind, current.base_id, session.base_key) == (CheckpointKind.STATE, None, None)
    assert read(store, rows[2]) == state_of_step(3)
    following = write_step(session, state_of_step(4))
    assert following.base_id is None, "a state that is overwritten in place is no base"
    assert [read(store, row) for row in [*rows, following]] == [state_of_step(n) for n in range(1, 5)]


@for_each("change", ["save", "merge", "promote"])
def test_a_state_of_its_own_that_was_a_delta_is_overwritten_in_full(
    store: DatabaseStateStore, session: Session, change: str
) -> None:
    write_steps(session, 3)
    store.prune_checkpoints("s", keep=0)
    assert kinds_of(session) == ["state"], "it needs no base any more"
    assert loaded(store) == state_of_step(3)
    if change == "save":
        state = store.load_state("s")
        assert state is not None
        state.custom_state["new"] = 1
        store.save_state("s", state)
    elif change == "merge":
        store.merge_custom_state("s", {"new": 1})
    else:
        store.stage_changes("s", "next", {"tool_call_id": "c", "merge_changes": {"new": 1}})
        store.promote_staging("s", "next")
    assert loaded(store) == {**state_of_step(3), "new": 1}
    assert rows_of(session).get(kind=CheckpointKind.STATE).base_id is None


# --- Dropping -------------------------------------------------------------------------------------


def test_a_pruned_base_stays_for_its_deltas_and_is_no_checkpoint(
    store: DatabaseStateStore, session: Session
) -> None:
    rows = write_steps(session, 4)
    assert store.prune_checkpoints("s", keep=2) == 2
    assert kinds_of(session) == ["base", "step", "step"]
    assert store.get_checkpoint("s", str(rows[0].checkpoint_id)) is None
    page = store.list_checkpoints("s")
    assert (len(page.items), page.total) == (2, 2)
    assert [read(store, row) for row in rows[2:]] == [state_of_step(3), state_of_step(4)]
    assert loaded(store) == state_of_step(4)
    following = write_step(session, state_of_step(5))
    assert following.base_id == rows[0].pk, "the next step may still build on it"
    assert store.prune_checkpoints("s", keep=2) == 1
    assert [read(store, rows[3]), read(store, following)] == [state_of_step(4), state_of_step(5)]


def test_a_base_goes_with_its_last_delta(store: DatabaseStateStore, session: Session) -> None:
    rows = write_steps(session, 3)
    session.base_key = None
    session.save(update_fields=["base_key"])
    whole = write_step(session, state_of_step(4))
    assert whole.base_id is None
    for row, kinds in zip(
        rows,
        (["base", "step", "step", "step"], ["base", "step", "step"], ["step"]),
        strict=True,
    ):
        assert store.delete_checkpoint("s", str(row.checkpoint_id))
        assert kinds_of(session) == kinds
    assert loaded(store) == state_of_step(4)


@pytest.mark.parametrize("in_full", [True, False])
def test_a_session_without_checkpoints_keeps_its_state_and_builds_on_nothing(
    store: DatabaseStateStore, session: Session, in_full: bool
) -> None:
    write_steps(session, 1 if in_full else 3)
    assert store.prune_checkpoints("s", keep=0) == (1 if in_full else 3)
    session.refresh_from_db()
    assert session.base_key is None
    assert kinds_of(session) == ["state"]
    assert loaded(store) == state_of_step(1 if in_full else 3)
    assert store.get_latest_checkpoint("s") is None
    following = write_step(session, state_of_step(4))
    assert following.base_id is None
    assert loaded(store) == state_of_step(4)


def test_truncated_messages_take_the_deltas_beyond_along(store: DatabaseStateStore, session: Session) -> None:
    rows = write_steps(session, 4)
    store.truncate_messages("s", 2)
    assert [read(store, row) for row in rows[:2]] == [state_of_step(1), state_of_step(2)]
    assert [store.get_checkpoint("s", str(row.checkpoint_id)) for row in rows[2:]] == [None, None]
    assert kinds_of(session) == ["step", "step", "state"]
    assert loaded(store) == state_of_step(4)
    store.truncate_messages("s", 0)
    assert kinds_of(session) == ["state"]
    assert loaded(store) == state_of_step(4)


@for_each("target", [0, 1, 3])
def test_a_restored_session_has_the_state_of_its_checkpoint_and_builds_on_nothing(
    store: DatabaseStateStore, session: Session, target: int
) -> None:
    rows = write_steps(session, 4)
    store.restore_checkpoint("s", str(rows[target].checkpoint_id))
    assert loaded(store) == state_of_step(target + 1)
    assert [read(store, row) for row in rows[: target + 1]] == [
        state_of_step(number) for number in range(1, target + 2)
    ]
    session.refresh_from_db()
    assert session.base_key is None
    following = write_step(session, state_of_step(9))
    assert following.base_id is None
    assert loaded(store) == state_of_step(9)


def test_a_restored_session_keeps_no_base_that_nothing_builds_on(
    store: DatabaseStateStore, session: Session
) -> None:
    first = write_steps(session, 1)[0]
    session.base_key = None
    session.save(update_fields=["base_key"])
    second = write_step(session, state_of_step(2))
    write_step(session, state_of_step(3))
    store.delete_checkpoint("s", str(second.checkpoint_id))
    assert kinds_of(session) == ["step", "base", "step"]
    store.restore_checkpoint("s", str(first.checkpoint_id))
    assert kinds_of(session) == ["step"]
    assert loaded(store) == state_of_step(1)


def test_a_deleted_session_leaves_no_base(store: DatabaseStateStore, session: Session) -> None:
    write_steps(session, 3)
    store.prune_checkpoints("s", keep=1)
    keys = list(rows_of(session).values_list("pk", flat=True))
    assert len(keys) == 2
    store.delete_session("s")
    assert not Checkpoint.objects.using(session._state.db).filter(pk__in=keys).exists()


# --- Any order ------------------------------------------------------------------------------------


def _changed(random: Random, state: dict[str, Any]) -> dict[str, Any]:
    """A state as an agent's next step may leave it: mostly what it was, at times in another order."""
    members = list(state.items())
    if random.random() < 0.1:
        random.shuffle(members)
    if random.random() < 0.1:
        members.pop(random.randrange(len(members)))
    changed = dict(members)
    for _ in range(random.randrange(3)):
        key = random.choice([*BALLAST, "a", "b", "é", "\x00", HIGH])
        changed[key] = random.choice([0, 0.0, -0.0, False, None, "", [], {}, HIGH, [1, 1.0, True], "x" * 100])
    return changed or {"never": "empty"}


class Story:
    """A session, and what every checkpoint of it has to be."""

    def __init__(self, store: DatabaseStateStore, session: Session, seed: int) -> None:
        self.store = store
        self.session = session
        self.random = Random(seed)  # noqa: S311  a story to be told again
        self.current: dict[str, Any] = {}
        self.checkpoints: dict[str, tuple[dict[str, Any], int]] = {}
        self.deltas = self.kept_bases = 0

    def go_on(self) -> None:
        chance = self.random.random()
        if chance < 0.65 or not self.checkpoints:
            self.make_step()
        elif chance < 0.72:
            # The next step is made by a worker that knows nothing, or one that has loaded the state.
            forget_origin(self.session)
            if self.random.random() < 0.5:
                learn_origin(self.store, self.session)
        elif chance < 0.78:
            self.store.merge_custom_state("s", {"merged": chance})
            self.current = {**self.current, "merged": chance}
        else:
            self.random.choice([*[self.delete] * 4, self.prune, self.truncate, self.restore])()

    def make_step(self) -> None:
        if self.random.random() < 0.5:
            MessageFactory.create(session=self.session)
        self.current = _changed(self.random, self.current or dict(BALLAST))
        row = write_step(self.session, self.current)
        self.checkpoints[str(row.checkpoint_id)] = (self.current, row.message_count)

    def delete(self) -> None:
        # The older half, so that most of those that go are needed by others.
        names = list(self.checkpoints)
        checkpoint_id = self.random.choice(names[: len(names) // 2 + 1])
        assert self.store.delete_checkpoint("s", checkpoint_id)
        del self.checkpoints[checkpoint_id]

    def prune(self) -> None:
        keep = self.random.choice([0, 1, 2, 3, 4, 6, 8])
        doomed = list(self.checkpoints)[: max(0, len(self.checkpoints) - keep)]
        assert self.store.prune_checkpoints("s", keep=keep) == len(doomed)
        for checkpoint_id in doomed:
            del self.checkpoints[checkpoint_id]

    def truncate(self) -> None:
        keep = max(0, self.store.get_message_count("s") - self.random.choice([0, 1, 2, 3, 20]))
        self.store.truncate_messages("s", keep)
        self.checkpoints = {name: each for name, each in self.checkpoints.items() if each[1] <= keep}
        self.session.refresh_from_db()

    def restore(self) -> None:
        checkpoint_id = self.random.choice(list(self.checkpoints))
        self.store.restore_checkpoint("s", checkpoint_id)
        names = list(self.checkpoints)
        for later in names[names.index(checkpoint_id) + 1 :]:
            del self.checkpoints[later]
        self.current = self.checkpoints[checkpoint_id][0]
        self.session.refresh_from_db()

    def check(self) -> None:
        assert exact_form(loaded(self.store)) == exact_form(self.current)
        listed = [head.checkpoint_id for head in self.store.list_checkpoints("s", limit=200).items]
        assert listed == list(reversed(self.checkpoints))
        for checkpoint_id, (custom_state, _) in self.checkpoints.items():
            read = self.store.get_checkpoint("s", checkpoint_id)
            assert read is not None
            assert exact_form(read.state.custom_state) == exact_form(custom_state)
        self.deltas = max(self.deltas, rows_of(self.session).filter(base__isnull=False).count())
        self.kept_bases = max(self.kept_bases, rows_of(self.session).filter(kind=CheckpointKind.BASE).count())


@for_each("seed", range(4))
def test_whatever_is_dropped_every_other_checkpoint_stays_what_it_was(
    store: DatabaseStateStore, session: Session, database: CommittedDatabase, seed: int
) -> None:
    story = Story(store, session, seed)
    for _ in range(60):
        story.go_on()
        story.check()
        assert broken_invariants(database) == []
    assert story.deltas >= 3
    assert story.kept_bases >= 1
    story.prune()
    store.prune_checkpoints("s", keep=0)
    store.merge_custom_state("s", {"in full": 1})
    store.prune_checkpoints("s", keep=0)
    assert kinds_of(session) == ["state"]


def test_a_long_session_is_mostly_deltas(store: DatabaseStateStore, session: Session) -> None:
    for number in range(3 * (MAX_DELTAS + 1)):
        write_step(session, {**BALLAST, "step": number})
    in_full = rows_of(session).filter(kind=CheckpointKind.STEP, base__isnull=True)
    assert in_full.count() == 3
    assert loaded(store) == {**BALLAST, "step": 3 * (MAX_DELTAS + 1) - 1}


def test_a_step_of_the_store_follows_a_delta(store: DatabaseStateStore, session: Session) -> None:
    rows = write_steps(session, 3)
    state = store.load_state("s")
    assert state is not None
    state.custom_state["next"] = 1
    state.step_count = 10**6
    commit = store.save_state_and_promote_staging("s", state, [], StepInfo("next", 10**6))
    assert loaded(store) == {**state_of_step(3), "next": 1}
    store.restore_checkpoint("s", str(rows[2].checkpoint_id))
    assert loaded(store) == state_of_step(3)
    assert store.get_checkpoint("s", commit.checkpoint_id) is None


@for_each("seed", range(5))
def test_steps_of_the_store_with_staged_changes_leave_exactly_what_they_said(
    store: DatabaseStateStore, seed: int
) -> None:
    """What a step stores in full has to be remembered with what was staged: later steps build on it."""
    random = Random(seed)  # noqa: S311  which case, no secret
    state = store.create_session("s", agent_type="t", custom_state=dict(BALLAST))
    rows = Checkpoint.objects.using(store.alias).filter(session__tenant=store.tenant)
    kinds = set()
    for number in range(3 * MAX_DELTAS):
        changed = list(BALLAST) if random.random() < 0.2 else random.sample(list(BALLAST), 1)
        state.custom_state |= {key: f"{key} of {number} ".ljust(100, "x") for key in changed}
        staged = {}
        if random.random() < 0.5:
            staged = {random.choice(list(BALLAST)): ["staged", number], f"new {number % 3}": float(number)}
            store.stage_changes("s", f"step-{number}", {"tool_call_id": "c", "merge_changes": staged})
        store.save_state_and_promote_staging("s", state, [], StepInfo(f"step-{number}", number))
        expected = exact_form({**state.custom_state, **staged})
        loaded, checkpoint = store.load_state("s"), store.get_latest_checkpoint("s")
        assert loaded is not None
        assert checkpoint is not None
        assert exact_form(loaded.custom_state) == exact_form(checkpoint.state.custom_state) == expected
        kinds.add((bool(staged), rows.latest("pk").base_id is None))
    assert len(kinds) == 4, "deltas and full states, both with and without staged changes"
