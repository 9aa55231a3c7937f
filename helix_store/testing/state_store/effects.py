"""Effects: calls of the world, which are attempted once and settled by people if nobody knows the outcome."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any, Final, cast

import pytest
from asgiref.sync import async_to_sync

from helix_store.core.effects import Effect, effect_key
from helix_store.core.limits import Limits
from helix_store.exceptions import (
    ApprovalUsed,
    ConflictError,
    EffectUnknown,
    FencedOutError,
    IdempotencyConflict,
    InvalidCursor,
    InvalidPayload,
    InvalidQuery,
    LimitExceeded,
    NotApproved,
    NotFoundError,
    NotPermitted,
    SessionNotFound,
)
from helix_store.stores import SessionHandle
from helix_store.testing.cells import table
from helix_store.testing.state_store.approvals import approve, ask_approval, forge_answer, step_of
from helix_store.testing.state_store.base import StoreTests
from helix_store.testing.state_store.samples import contents
from helix_store.testing.state_store.tool_calls import APPROVE, create_family

__all__ = ["EffectContract"]

_CALL: Final[dict[str, Any]] = {"tool_name": "refund", "input": {"amount": 7}}


class _Lost(Exception):
    """Stands for a connection that breaks after the request was sent."""


class _User:
    def __init__(self, *permissions: str, is_active: bool = True, pk: int | None = 7) -> None:
        self.permissions, self.is_active, self.pk = permissions, is_active, pk

    def has_perm(self, perm: str, obj: Any = None) -> bool:
        return perm in self.permissions


class EffectContract(StoreTests):
    """Tests for `SessionHandle.effect`, `settle_effect` and the lists, for a store that has effects."""

    @pytest.fixture
    def store(self) -> Any:
        # The calls for effects are not part of the protocol of every state store.
        return cast(Any, self.make_store())

    def _session(self, store: Any, session_id: str, token: int | None = None) -> SessionHandle:
        return SessionHandle(store, session_id, token)

    def _one(self, store: Any, session_id: str) -> Effect:
        (effect,) = store.list_effects(session_id).items
        return cast(Effect, effect)

    def _make_unknown(self, store: Any, session_id: str, effect_id: str = "e", **call: Any) -> None:
        with pytest.raises(_Lost), self._session(store, session_id).effect(effect_id, **call):
            raise _Lost

    # The four ways

    def test_the_intent_is_stored_before_the_block(self, store: Any, session_id: str) -> None:
        before = contents(store, session_id)
        with self._session(store, session_id).effect("e", **_CALL) as effect:
            assert (effect.is_done, effect.attempt, effect.result) == (False, 1, None)
            assert effect.key == effect_key(store.tenant, session_id, "e") == self._one(store, session_id).key
            assert self._one(store, session_id).started_at == effect.started_at
            assert abs(effect.started_at - datetime.now(UTC)) < timedelta(minutes=1)
            effect.done({"receipt": "A-1"})
            assert (effect.is_done, effect.state, effect.result) == (True, "done", {"receipt": "A-1"})
        stored = self._one(store, session_id)
        assert (stored.id, stored.tool_name, stored.input) == ("e", "refund", {"amount": 7})
        assert (stored.state, stored.result, stored.error) == ("done", {"receipt": "A-1"}, None)
        assert stored.ended_at is not None
        assert stored.ended_at >= stored.started_at
        assert contents(store, session_id) == before

    def test_a_done_effect_is_not_attempted_again(self, store: Any, session_id: str) -> None:
        with self._session(store, session_id).effect("e", **_CALL) as effect:
            effect.done([1, 2])
        for options in ({}, {"retry": True}, {"reconcile": self._never}):
            with self._session(store, session_id).effect("e", **_CALL, **options) as again:
                assert (again.is_done, again.result, again.attempt) == (True, [1, 2], 1)
                with pytest.raises(ConflictError):
                    again.done()
                with pytest.raises(ConflictError):
                    again.not_done()
        assert self._one(store, session_id).result == [1, 2]

    def test_an_effect_that_was_not_done_is_attempted_again(self, store: Any, session_id: str) -> None:
        with self._session(store, session_id).effect("e") as effect:
            effect.not_done("the card was declined")
            assert (effect.is_done, effect.state) == (False, "not_done")
            with pytest.raises(ConflictError):
                effect.done()
        assert self._one(store, session_id).error == {"reason": "the card was declined"}
        with self._session(store, session_id).effect("e") as again:
            assert (again.attempt, again.error) == (2, None)
            again.done()
        assert (self._one(store, session_id).attempt, self._one(store, session_id).result) == (2, None)

    def test_an_exception_leaves_it_unknown_and_nobody_repeats_it(self, store: Any, session_id: str) -> None:
        with pytest.raises(_Lost), self._session(store, session_id).effect("e", **_CALL):
            raise _Lost("no answer")
        stored = self._one(store, session_id)
        assert (stored.state, stored.error and stored.error["type"]) == ("unknown", "_Lost")
        with pytest.raises(EffectUnknown) as error, self._session(store, session_id).effect("e", **_CALL):
            pytest.fail("the block ran")
        found = error.value
        assert (found.effect_id, found.tool_name, found.started_at) == ("e", "refund", stored.started_at)
        assert found.reason == "effect:e"
        assert self._one(store, session_id) == stored

    @table("error", [KeyboardInterrupt, SystemExit, GeneratorExit], shared=True)
    def test_every_exception_leaves_it_unknown(
        self, store: Any, session_id: str, error: type[BaseException]
    ) -> None:
        with pytest.raises(error), self._session(store, session_id).effect(error.__name__):
            raise error
        assert store.list_effects(session_id).items[-1].state == "unknown"

    def test_a_block_says_what_happened(self, store: Any, session_id: str) -> None:
        with pytest.raises(ConflictError, match="neither"), self._session(store, session_id).effect("e"):
            pass
        assert self._one(store, session_id).state == "unknown"

    def test_an_exception_after_the_end_changes_nothing(self, store: Any, session_id: str) -> None:
        def work() -> None:
            with self._session(store, session_id).effect("e") as effect:
                effect.done(1)
                raise _Lost

        with pytest.raises(_Lost):
            work()
        assert self._one(store, session_id).state == "done"

    # Entering again

    def test_retry_attempts_it_again_with_the_same_key(self, store: Any, session_id: str) -> None:
        self._make_unknown(store, session_id)
        with self._session(store, session_id).effect("e", retry=True) as effect:
            assert (effect.attempt, effect.key) == (2, effect_key(store.tenant, session_id, "e"))
            effect.done()
        assert self._one(store, session_id).state == "done"

    @table("told", ["done", "not_done", "nothing", "nothing, with retry"])
    def test_reconcile_asks_first(self, store: Any, session_id: str, told: str) -> None:
        self._make_unknown(store, session_id, **_CALL)
        seen = []

        def ask(effect: Any) -> None:
            seen.append((effect.id, effect.input, effect.attempt, effect.state))
            if told in ("done", "not_done"):
                getattr(effect, told)("found" if told == "done" else "")

        again = self._session(store, session_id).effect(
            "e", **_CALL, reconcile=ask, retry=told.endswith("retry")
        )
        if told == "nothing":
            with pytest.raises(EffectUnknown), again:
                pytest.fail("the block ran")
        else:
            with again as effect:
                assert effect.is_done is (told == "done")
                assert effect.result == ("found" if told == "done" else None)
                assert effect.attempt == (1 if told == "done" else 2)
                if not effect.is_done:
                    effect.done()
        assert seen == [("e", {"amount": 7}, 1, "unknown")]
        assert self._one(store, session_id).state == ("unknown" if told == "nothing" else "done")

    def test_an_error_of_reconcile_leaves_it_unknown(self, store: Any, session_id: str) -> None:
        self._make_unknown(store, session_id)

        def ask(effect: Any) -> None:
            raise _Lost

        with pytest.raises(_Lost), self._session(store, session_id).effect("e", reconcile=ask, retry=True):
            pytest.fail("the block ran")
        assert (self._one(store, session_id).state, self._one(store, session_id).attempt) == ("unknown", 1)

    @table(
        "other",
        [{"input": {"amount": 8}}, {"tool_name": "pay"}, {"input": {"amount": 7.0}}, {"input": None}],
    )
    def test_the_same_id_is_the_same_call(self, store: Any, session_id: str, other: dict[str, Any]) -> None:
        with self._session(store, session_id).effect("e", **_CALL) as effect:
            effect.done()
        before = self._one(store, session_id)
        with (
            pytest.raises(IdempotencyConflict),
            self._session(store, session_id).effect("e", **{**_CALL, **other}),
        ):
            pytest.fail("the block ran")
        assert self._one(store, session_id) == before

    def test_a_late_end_of_an_attempt_that_was_repeated_is_refused(self, store: Any, session_id: str) -> None:
        def work() -> None:
            with self._session(store, session_id).effect("e") as late:
                with self._session(store, session_id).effect("e", retry=True) as effect:
                    effect.done("second")
                late.done("first")

        with pytest.raises(ConflictError):
            work()
        assert (self._one(store, session_id).result, self._one(store, session_id).state) == ("second", "done")

    def test_a_late_end_of_an_attempt_that_is_being_repeated_is_refused(
        self, store: Any, session_id: str
    ) -> None:
        late = self._session(store, session_id).effect("e").__enter__()
        with self._session(store, session_id).effect("e", retry=True) as effect:
            with pytest.raises(ConflictError):
                late.done("first")
            effect.done("second")
        assert (self._one(store, session_id).result, self._one(store, session_id).state) == ("second", "done")

    def test_two_that_begin_at_once_attempt_it_once(self, store: Any, session_id: str) -> None:
        def attempt() -> int:
            with self._session(store, session_id).effect("e", **_CALL) as effect:
                if not effect.is_done:
                    effect.done()
                return effect.attempt

        outcomes = self.at_once(*(attempt for _ in range(4)))
        assert self._one(store, session_id).attempt == 1
        assert all(each == 1 or isinstance(each, EffectUnknown) for each in outcomes)

    # Locks

    def _held(self, session_id: str) -> tuple[Any, Any]:
        """Return a lock manager and the lock of a session; skip the test where there is none."""
        manager = self.make_lock_manager()
        if manager is None:
            pytest.skip("no lock manager is provided")
        lock = manager.acquire(session_id)
        assert lock is not None
        return manager, lock

    def test_a_former_holder_stores_nothing(self, store: Any, session_id: str) -> None:
        manager, first = self._held(session_id)
        handle = self._session(store, session_id, first.fencing_token)

        def work() -> None:
            with handle.effect("e") as effect:
                assert self._one(store, session_id).state == "started"
                with pytest.raises(ConflictError):
                    store.settle_effect(session_id, "e", done=True)
                with pytest.raises(ConflictError, match="attempts"), handle.effect("e", retry=True):
                    pytest.fail("the block ran")
                first.release()
                assert self._one(store, session_id).state == "unknown"
                second = manager.acquire(session_id)
                assert second is not None
                successor = self._session(store, session_id, second.fencing_token)
                with pytest.raises(EffectUnknown), successor.effect("e"):
                    pytest.fail("the block ran")
                effect.done()

        with pytest.raises(FencedOutError):
            work()
        assert self._one(store, session_id).state == "unknown"
        with pytest.raises(FencedOutError), handle.effect("other"):
            pytest.fail("the block ran")
        assert [each.id for each in store.list_effects(session_id).items] == ["e"]

    @table("is_settled", [False, True])
    def test_a_late_end_of_a_former_holder_is_a_conflict_too(
        self, store: Any, session_id: str, is_settled: bool
    ) -> None:
        manager, first = self._held(session_id)
        handle = self._session(store, session_id, first.fencing_token)
        late = handle.effect("e").__enter__()
        first.release()
        second = manager.acquire(session_id)
        assert second is not None
        if is_settled:
            assert store.settle_effect(session_id, "e", done=True, result="settled")
        else:
            successor = self._session(store, session_id, second.fencing_token)
            with successor.effect("e", retry=True) as effect:
                effect.done("repeated")
        with pytest.raises(ConflictError) as caught:
            late.done("late")
        assert isinstance(caught.value, FencedOutError)
        assert pickle.loads(pickle.dumps(caught.value)).to_dict() == caught.value.to_dict()  # noqa: S301
        (stored,) = store.list_effects(session_id).items
        assert (stored.state, stored.result) == ("done", "settled" if is_settled else "repeated")

    def test_the_lock_of_another_tenant_is_another_lock(self, store: Any, session_id: str) -> None:
        own, other = self.make_lock_manager(), self.make_lock_manager(tenant="other")
        if own is None or other is None:
            pytest.skip("no lock manager is provided")
        lock = own.acquire(session_id)
        assert lock is not None
        self._session(store, session_id, lock.fencing_token).effect("e").__enter__()
        lock.release()
        others = other.acquire(session_id)
        assert others is not None
        assert others.fencing_token == lock.fencing_token
        assert self._one(store, session_id).state == "unknown"

    def test_a_former_holder_does_not_enter_what_is_done(self, store: Any, session_id: str) -> None:
        manager, first = self._held(session_id)
        handle = self._session(store, session_id, first.fencing_token)
        ask_approval(store, session_id)
        approve(store, session_id)
        calls: list[dict[str, Any]] = [{"effect_id": "e"}, {"effect_id": "call", "approval": True}]
        for call in calls:
            with handle.effect(**call) as effect:
                effect.done()
        first.release()
        assert manager.acquire(session_id) is not None
        for call in calls:
            with pytest.raises(FencedOutError), handle.effect(**call):
                pytest.fail("the block ran")

    # Approvals

    def test_an_approved_effect_uses_its_approval(self, store: Any, session_id: str) -> None:
        ask_approval(store, session_id)
        with pytest.raises(NotApproved), self._session(store, session_id).effect("call", approval=True):
            pytest.fail("the block ran")
        approve(store, session_id, actor="ann")
        with self._session(store, session_id).effect("call", approval=True) as effect:
            assert (effect.tool_name, effect.input) == (APPROVE["tool_name"], APPROVE["input"])
            assert effect.actors == ["ann"]
            with pytest.raises(ApprovalUsed) as used, step_of(store, session_id) as step:
                step.use_approval("call")
            assert (used.value.effect_id, used.value.step_id) == ("call", None)
            effect.done(7)
        with self._session(store, session_id).effect("call", approval=True) as again:
            assert (again.is_done, again.result) == (True, 7)

    @table("answer", [{"approved": False}, {"error": "no card"}])
    def test_an_effect_of_a_rejected_call_does_not_begin(
        self, store: Any, session_id: str, answer: dict[str, Any]
    ) -> None:
        ask_approval(store, session_id)
        approve(store, session_id, **{"approved": None, "actor": "ann", **answer})
        with (
            pytest.raises(NotApproved) as refused,
            self._session(store, session_id).effect("call", approval=True),
        ):
            pytest.fail("the block ran")
        assert refused.value.reason == "rejected"
        assert store.list_effects(session_id).items == []

    def test_an_approval_that_a_step_has_used_serves_no_effect(self, store: Any, session_id: str) -> None:
        ask_approval(store, session_id)
        approve(store, session_id, actor="ann")
        with step_of(store, session_id, "pays") as step:
            step.use_approval("call")
        with (
            pytest.raises(ApprovalUsed) as used,
            self._session(store, session_id).effect("call", approval=True),
        ):
            pytest.fail("the block ran")
        assert (used.value.effect_id, used.value.step_id) == (None, "pays")
        assert store.list_effects(session_id).items == []

    @table("moment", ["open", "approved", "rejected", "used"])
    def test_nobody_walks_around_an_approval(self, store: Any, session_id: str, moment: str) -> None:
        ask_approval(store, session_id)
        if moment != "open":
            approve(store, session_id, approved=moment != "rejected")
        if moment == "used":
            with self._session(store, session_id).effect("call", approval=True) as effect:
                effect.not_done()
        with pytest.raises(InvalidPayload, match="approval=True"):
            self._session(store, session_id).effect("call", **_CALL).__enter__()
        assert len(store.list_effects(session_id).items) == (moment == "used")

    def test_an_id_of_an_effect_that_becomes_one_of_an_approval_needs_it(
        self, store: Any, session_id: str
    ) -> None:
        with self._session(store, session_id).effect("call", **_CALL) as effect:
            effect.done()
        ask_approval(store, session_id)
        for _ in ("open", "approved"):
            with pytest.raises(InvalidPayload, match="approval=True"):
                self._session(store, session_id).effect("call", **_CALL).__enter__()
            approve(store, session_id)
        store.take_tool_results(session_id)
        with pytest.raises(InvalidPayload, match="approval=True"):
            self._session(store, session_id).effect("call", **_CALL).__enter__()

    @table("answer", [{"approved": True}, {"approved": False}, {"error": "no"}])
    def test_nobody_walks_around_an_approval_in_a_branch(
        self, store: Any, session_id: str, answer: dict[str, Any]
    ) -> None:
        ask_approval(store, session_id)
        store.submit_tool_result(session_id, "call", approval_id=APPROVE["approval_id"], **answer)
        store.take_tool_results(session_id)
        branch = store.branch_session(session_id).session_id
        for branched in (branch, store.branch_session(branch).session_id):
            with pytest.raises(InvalidPayload, match="approval=True"):
                self._session(store, branched).effect("call", **_CALL).__enter__()
            with pytest.raises(NotApproved):
                self._session(store, branched).effect("call", approval=True).__enter__()
            assert store.list_effects(branched).items == []

    def test_a_failed_call_that_was_no_approval_is_free_in_a_branch(
        self, store: Any, session_id: str
    ) -> None:
        store.add_pending_tool_calls(session_id, {"call": {"tool_name": "look"}})
        store.submit_tool_result(session_id, "call", error="broken")
        store.take_tool_results(session_id)
        branch = store.branch_session(session_id).session_id
        with self._session(store, branch).effect("call", **_CALL) as effect:
            effect.done()
        assert [each.state for each in store.list_effects(branch).items] == ["done"]

    def test_a_step_and_an_effect_do_not_use_the_same_approval(self, store: Any, session_id: str) -> None:
        ask_approval(store, session_id)
        approve(store, session_id)

        def work() -> None:
            with step_of(store, session_id) as step:
                step.use_approval("call")
                with self._session(store, session_id).effect("call", approval=True) as effect:
                    effect.done()

        with pytest.raises(ConflictError):
            work()
        assert store.load_state(session_id).step_count == 0
        with pytest.raises(ApprovalUsed) as used, step_of(store, session_id) as step:
            step.use_approval("call")
        assert (used.value.effect_id, used.value.step_id) == ("call", None)

    @table("newest", ["none", "open", "rejected", "the same call", "another call"])
    def test_the_newest_asking_decides_about_another_attempt(
        self, store: Any, session_id: str, newest: str
    ) -> None:
        with step_of(store, session_id) as step:
            step.say({"role": "user", "content": "hello"})
        assert step.commit is not None
        ask_approval(store, session_id)
        approve(store, session_id, actor="ann")
        self._make_unknown(store, session_id, "call", approval=True)
        before = self._one(store, session_id)
        store.restore_checkpoint(session_id, step.commit.checkpoint_id)
        if newest != "none":
            ask_approval(store, session_id, {**APPROVE, "input": 8} if newest == "another call" else APPROVE)
        if newest not in ("none", "open"):
            approve(store, session_id, approved=newest != "rejected", actor="bob")
        refusals: dict[str, type[Exception]] = {
            "open": NotApproved,
            "rejected": NotApproved,
            "another call": IdempotencyConflict,
        }
        again = self._session(store, session_id).effect("call", approval=True, retry=True)
        if newest in refusals:
            with pytest.raises(refusals[newest]) as refused, again:
                pytest.fail("the block ran")
            assert getattr(refused.value, "reason", "") in ("", newest)
            assert self._one(store, session_id) == before
            store.settle_effect(session_id, "call", done=True, result="by hand")
        else:
            with again as effect:
                assert (effect.attempt, effect.input) == (2, before.input)
                assert effect.actors == (["ann"] if newest == "none" else ["ann", "bob"])
                effect.done("by hand")
            assert self._one(store, session_id).actors == effect.actors
        once_more = self._session(store, session_id).effect("call", approval=True)
        if newest == "another call":
            with pytest.raises(IdempotencyConflict), once_more:
                pytest.fail("the block ran")
        else:
            with once_more as effect:
                assert effect.result == "by hand"

    def test_an_unknown_effect_stays_bound_to_its_approval(self, store: Any, session_id: str) -> None:
        ask_approval(store, session_id)
        approve(store, session_id, actor="ann")
        self._make_unknown(store, session_id, "call", approval=True)
        with pytest.raises(EffectUnknown), self._session(store, session_id).effect("call", approval=True):
            pytest.fail("the block ran")
        assert store.settle_effect(session_id, "call", done=False, actor="bob")
        with self._session(store, session_id).effect("call", approval=True) as effect:
            assert (effect.attempt, effect.actors) == (2, ["ann", "bob"])
            effect.done()

    def test_the_approvals_of_a_child_are_its_own(self, store: Any) -> None:
        """Their owners are recorded on the root."""
        create_family(store)
        for owner in ("root", "child", "grandchild"):
            ask_approval(store, owner, tool_call_id=f"call of {owner}")
            forge_answer(store, owner, f"call of {owner}", is_taken=True)
            for effect_id, reason in ((f"call of {owner}", "open"), ("call of nobody", "unknown")):
                with pytest.raises(NotApproved) as refused:
                    self._session(store, owner).effect(effect_id, approval=True).__enter__()
                assert refused.value.reason == reason

    # Settling

    @table("is_done", [True, False])
    def test_settling_decides(self, store: Any, session_id: str, is_done: bool) -> None:
        self._make_unknown(store, session_id)
        result = {"receipt": "by hand"} if is_done else None
        assert store.settle_effect(session_id, "e", done=is_done, result=result, actor="ann") is True
        assert store.settle_effect(session_id, "e", done=not is_done) is False
        stored = self._one(store, session_id)
        assert (stored.state, stored.result) == ("done" if is_done else "not_done", result)
        assert stored.actors == ["ann"]
        with self._session(store, session_id).effect("e") as effect:
            assert (effect.is_done, effect.attempt) == (is_done, 1 if is_done else 2)
            if not is_done:
                effect.done()

    def test_a_late_end_of_a_settled_attempt_is_refused(self, store: Any, session_id: str) -> None:
        def work() -> None:
            with self._session(store, session_id).effect("e") as effect:
                store.settle_effect(session_id, "e", done=True, result="by hand")
                effect.done("too late")

        with pytest.raises(ConflictError):
            work()
        assert self._one(store, session_id).result == "by hand"

    def test_a_user_needs_the_permission_to_settle(self, store: Any, session_id: str) -> None:
        self._make_unknown(store, session_id)
        permission = "helix_store.settle_effect"
        anonymous = _User(is_active=False, pk=None)
        for user in (_User(), _User(permission, is_active=False), anonymous):
            with pytest.raises(NotPermitted) as refused:
                store.settle_effect(session_id, "e", done=True, actor=user)
            assert refused.value.permission == permission
        with pytest.raises(InvalidPayload, match="not stored"):
            store.settle_effect(session_id, "e", done=True, actor=_User(permission, pk=None))
        assert self._one(store, session_id).state == "unknown"
        assert store.settle_effect(session_id, "e", done=True, actor=_User(permission))
        assert self._one(store, session_id).actors == ["user:7"]

    def test_what_does_not_exist_cannot_be_settled(self, store: Any, session_id: str) -> None:
        with pytest.raises(NotFoundError):
            store.settle_effect(session_id, "e", done=True)
        for call in (
            lambda: store.settle_effect("unknown", "e", done=True),
            lambda: store.list_effects("unknown"),
            lambda: self._session(store, "unknown").effect("e").__enter__(),
            lambda: self._session(store, "unknown").effect("e", approval=True).__enter__(),
        ):
            with pytest.raises(SessionNotFound):
                call()

    # Lists

    def test_effects_are_listed_in_order_and_by_state(self, store: Any, session_id: str) -> None:
        with self._session(store, session_id).effect("first") as effect:
            effect.done()
        with self._session(store, session_id).effect("second") as effect:
            effect.not_done()
        self._make_unknown(store, session_id, "third")
        names = [each.id for each in store.list_effects(session_id).items]
        assert names == ["first", "second", "third"]
        chosen = store.list_effects(session_id, states=["unknown", "done"]).items
        assert [each.id for each in chosen] == ["first", "third"]
        page = store.list_effects(session_id, limit=2)
        assert [each.id for each in page] == ["first", "second"]
        rest = store.list_effects(session_id, limit=2, cursor=page.next_cursor)
        assert ([each.id for each in rest], rest.next_cursor) == (["third"], None)
        assert store.list_effects(session_id, states=[]).items == []
        with pytest.raises(InvalidCursor):
            store.list_effects(session_id, states=["done"], cursor=page.next_cursor)
        for states in ("done", ["gone"], 7):
            with pytest.raises(InvalidQuery):
                store.list_effects(session_id, states=states)

    def test_unknown_effects_of_all_sessions_are_found_the_oldest_first(
        self, store: Any, session_id: str
    ) -> None:
        other = store.create_session(agent_type="agent").session_id
        self._make_unknown(store, other, "first")
        with self._session(store, session_id).effect("done") as effect:
            effect.done()
        self._make_unknown(store, session_id, "second")
        found = store.find_unknown_effects()
        assert [(each.session_id, each.id) for each in found] == [(other, "first"), (session_id, "second")]
        assert store.find_unknown_effects(limit=1) == found[:1]
        assert cast(Any, self.make_store(tenant="other")).find_unknown_effects() == []

    # An effect belongs to the world

    def test_a_rewind_keeps_it_and_a_branch_begins_without_any(self, store: Any, session_id: str) -> None:
        with step_of(store, session_id) as step:
            step.say({"role": "user", "content": "hello"})
        assert step.commit is not None
        with self._session(store, session_id).effect("e", **_CALL) as effect:
            effect.done(1)
        store.restore_checkpoint(session_id, step.commit.checkpoint_id)
        assert self._one(store, session_id).result == 1
        branch = store.branch_session(session_id).session_id
        assert store.list_effects(branch).items == []
        store.delete_session(session_id)
        store.create_session(session_id, agent_type="agent")
        assert store.list_effects(session_id).items == []

    # Arguments

    @table(
        "arguments",
        [
            {"effect_id": ""},
            {"effect_id": 7},
            {"tool_name": 7},
            {"tool_name": "x" * 300},
            {"input": float("nan")},
            {"input": {1: 2}},
            {"approval": 1},
            {"retry": "yes"},
            {"reconcile": "ask"},
            {"approval": True, "input": {}},
            {"approval": True, "tool_name": "pay"},
        ],
        shared=True,
    )
    def test_arguments_are_checked_before_anything_is_read(
        self, store: Any, session_id: str, arguments: dict[str, Any]
    ) -> None:
        handle = self._session(store, session_id)
        with self.storage_untouched(), pytest.raises(InvalidPayload):
            handle.effect(**{"effect_id": "e", **arguments})

    @table(
        "arguments",
        [
            {"effect_id": ""},
            {"done": 1},
            {"done": False, "result": 1},
            {"result": float("nan")},
            {"actor": 7},
            {"actor": "user:7"},
            {"actor": _User("helix_store.settle_effect", pk=None)},
        ],
        shared=True,
    )
    def test_arguments_of_a_settlement_are_checked_first(
        self, store: Any, session_id: str, arguments: dict[str, Any]
    ) -> None:
        with self.storage_untouched(), pytest.raises(InvalidPayload):
            store.settle_effect(session_id, **{"effect_id": "e", "done": True, **arguments})

    def test_the_limits_of_inputs_results_and_their_number(self) -> None:
        store = cast(Any, self.make_store(limits=Limits(max_message_bytes=20, max_effects=2)))
        session_id = store.create_session(agent_type="agent").session_id
        with pytest.raises(LimitExceeded):
            self._session(store, session_id).effect("e", input="x" * 20)
        with self._session(store, session_id).effect("first") as effect:
            with pytest.raises(LimitExceeded):
                effect.done("x" * 20)
            effect.done("x")
        with self._session(store, session_id).effect("second") as effect:
            effect.not_done()
        with pytest.raises(LimitExceeded) as error, self._session(store, session_id).effect("third"):
            pytest.fail("the block ran")
        assert (error.value.name, error.value.limit) == ("max_effects", 2)
        with self._session(store, session_id).effect("second") as effect:
            effect.done()

    def test_an_effect_is_entered_once(self, store: Any, session_id: str) -> None:
        effect = self._session(store, session_id).effect("e")
        with pytest.raises(ConflictError):
            effect.done()
        with effect:
            effect.done()
        with pytest.raises(ConflictError):
            effect.done()
        with pytest.raises(ConflictError), effect:
            pytest.fail("the block ran")

    # Async

    @table("is_coroutine", [True, False])
    def test_the_async_form(self, store: Any, session_id: str, is_coroutine: bool) -> None:
        def tell(effect: Any) -> None:
            effect.done("found")

        async def atell(effect: Any) -> None:
            await effect.adone("found")

        reconcile: Callable[[Any], Any] = atell if is_coroutine else tell

        async def lose() -> None:
            async with self._session(store, session_id).effect("e", **_CALL) as effect:
                assert effect.attempt == 1
                raise _Lost

        async def work() -> None:
            with pytest.raises(_Lost):
                await lose()
            with pytest.raises(EffectUnknown):
                async with self._session(store, session_id).effect("e", **_CALL):
                    pytest.fail("the block ran")
            async with self._session(store, session_id).effect("e", **_CALL, reconcile=reconcile) as effect:
                assert (effect.is_done, effect.result) == (True, "found")
            async with self._session(store, session_id).effect("other") as effect:
                await effect.anot_done("refused")
            assert not await store.asettle_effect(session_id, "e", done=False)
            assert await store.afind_unknown_effects() == []
            assert len((await store.alist_effects(session_id)).items) == 2

        async_to_sync(work)()

    @table(("options", "attempt", "state"), [({}, 1, "not_done"), ({"retry": True}, 2, "unknown")])
    def test_a_task_that_is_cancelled_while_it_enters(
        self, store: Any, session_id: str, options: dict[str, Any], attempt: int, state: str
    ) -> None:
        if options:
            self._make_unknown(store, session_id)

        async def work() -> None:
            begins = asyncio.Event()

            async def enter() -> None:
                begins.set()
                async with self._session(store, session_id).effect("e", **options):
                    pytest.fail("the block ran")

            task = asyncio.create_task(enter())
            await begins.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

        async_to_sync(work)()
        assert (self._one(store, session_id).attempt, self._one(store, session_id).state) == (attempt, state)

    def test_a_coroutine_function_needs_async_with(self, store: Any, session_id: str) -> None:
        async def ask(effect: Any) -> None:
            await effect.adone()

        self._make_unknown(store, session_id)
        with (
            pytest.raises(InvalidPayload, match="async with"),
            self._session(store, session_id).effect("e", reconcile=ask),
        ):
            pytest.fail("the block ran")
        assert self._one(store, session_id).state == "unknown"

    @staticmethod
    def _never(effect: Any) -> None:
        pytest.fail("reconcile was called")
