"""Approvals in turns, by Django users, at deadlines, and on a third party's store."""

from __future__ import annotations

from typing import Any
from uuid import uuid4

import pytest
from asgiref.sync import async_to_sync
from django.contrib.auth.models import AnonymousUser, Permission, User

from helix_store import call_digest
from helix_store.cleanup import expired_session_cleanup
from helix_store.core.approvals import ApprovedCall
from helix_store.exceptions import (
    ApprovalUsed,
    InvalidPayload,
    NotApproved,
    NotPermitted,
    NotSupportedOnBackend,
)
from helix_store.testing.state_store.approvals import forge_answer
from helix_store.testing.state_store.tool_calls import LONG_AGO
from tests.cells import for_each
from tests.databases import CommittedDatabase
from tests.handles.worlds import World, database_world

PAY: dict[str, Any] = {
    "tool_name": "pay",
    "input": {"amount": 7},
    "approval_id": "call",
    "on_expiry": "reject",
    "deadline": LONG_AGO,
}
APPROVED: dict[str, Any] = {"approved": True, "approval_id": "call"}


def asked(world: World, **demands: Any) -> None:
    session = world.new_session()
    with world.turn(session) as turn, turn.step() as step:
        step.wait_for({"call": {**PAY, **demands}})


def approve(world: World, **given: Any) -> str:
    return world.store.submit_tool_result("session", "call", **{**APPROVED, **given}).outcome.value


def requires_support(world: World) -> None:
    if world.is_foreign:
        pytest.skip("a third party's store does not keep what was approved")


def test_a_turn_uses_what_was_approved(world: World) -> None:
    requires_support(world)
    asked(world)
    assert approve(world, actor="ann") == "accepted"
    with world.turn(world.session()) as turn:
        assert turn.results["call"]["actors"] == ["ann"]
        with turn.step("pays") as step:
            call = step.use_approval("call")
            assert call == ApprovedCall(
                tool_name="pay", input={"amount": 7}, actors=["ann"], digest=call_digest("pay", {"amount": 7})
            )
        with pytest.raises(ApprovalUsed, match="pays"), turn.step() as step:
            step.use_approval("call")
        with turn.step() as step:
            step.finish()
    assert "input" not in world.loaded().completed_client_tool_calls["call"]


@pytest.mark.thorough
@for_each("answer", [{"approved": True}, {"approved": False}, {"error": "no"}], ids=repr)
def test_a_turn_waits_for_an_approval_that_its_agent_has_answered(
    world: World, answer: dict[str, Any]
) -> None:
    requires_support(world)
    asked(world)
    forge_answer(world.store, "session", answer={**answer, "submitted_at": LONG_AGO})
    with world.turn(world.session()) as turn:
        assert (turn.is_active, turn.results) == (False, {})
    assert approve(world, approved=False, actor="ann") == "accepted"
    with world.turn(world.session()) as turn:
        assert turn.is_active
        assert turn.results["call"]["actors"] == ["ann"]


def test_a_turn_gets_no_answer_of_its_agent(world: World) -> None:
    requires_support(world)
    session = world.new_session()
    world.store.add_pending_tool_calls("session", {"call": PAY, "ask": {"tool_name": "ask"}})
    forge_answer(world.store, "session")
    world.store.submit_tool_result("session", "ask", result=1)
    with world.turn(session) as turn:
        assert list(turn.results) == ["ask"]
        with turn.step() as step:
            step.end_turn()
    assert approve(world, actor="ann") == "accepted"
    with world.turn(world.session()) as turn:
        assert turn.results["call"]["actors"] == ["ann"]


@for_each("kind", ["approved", "used", "rejected", "failed", "expired"])
@for_each("is_saved", [False, True])
def test_a_turn_goes_on_after_an_answer(world: World, kind: str, is_saved: bool) -> None:
    requires_support(world)
    asked(world)
    if kind == "expired":
        assert expired_session_cleanup(state_store=world.own).defaults_applied == 1
    elif kind == "failed":
        assert approve(world, approved=None, error="no") == "accepted"
    else:
        assert approve(world, approved=kind != "rejected") == "accepted"
    if kind == "used":
        with world.session().effect("call", approval=True) as effect:
            effect.done(True)
    if is_saved:
        world.store.save_state("session", world.loaded())
    with world.turn(world.session()) as turn:
        assert (turn.is_active, list(turn.results)) == (True, ["call"])


def test_an_approval_that_was_taken_earlier_can_be_used(world: World) -> None:
    requires_support(world)
    asked(world)
    approve(world)
    with world.turn(world.session()) as turn:
        for _ in range(2):
            with turn.step() as step:
                step.say({"role": "assistant", "content": "hm"})
        with turn.step() as step:
            assert step.use_approval("call").input == {"amount": 7}


def test_a_lost_step_uses_nothing(world: World) -> None:
    requires_support(world)
    asked(world)
    approve(world)
    with pytest.raises(ZeroDivisionError), world.turn(world.session()) as turn, turn.step() as step:
        step.use_approval("call")
        raise ZeroDivisionError
    with world.turn(world.session()) as turn, turn.step() as step:
        assert step.use_approval("call") == step.use_approval("call")


def test_a_committed_step_that_is_repeated_does_not_run_its_tool_again(world: World) -> None:
    requires_support(world)
    asked(world)
    approve(world)
    with world.session().step(operation_id="pay once") as step:
        step.use_approval("call")
    before = world.contents()
    with pytest.raises(ApprovalUsed), world.session().step(operation_id="pay once") as step:
        step.use_approval("call")
    assert world.contents() == before


def test_the_async_form(world: World) -> None:
    requires_support(world)
    asked(world, approvals=2)

    async def work() -> None:
        for name, outcome in (("ann", "recorded"), ("bob", "accepted")):
            answer = await world.store.asubmit_tool_result("session", "call", **APPROVED, actor=name)
            assert answer.outcome == outcome
        async with world.turn(world.session()) as turn, turn.step() as step:
            assert (await step.ause_approval("call")).actors == ["ann", "bob"]

    async_to_sync(work)()
    with pytest.raises(ApprovalUsed), world.session().step() as step:
        step.use_approval("call")


@for_each("default", ["reject", "fail"])
def test_a_default_needs_no_permission_and_no_number(world: World, default: str) -> None:
    asked(world, permission="auth.add_user", requester="ann", approvals=3, on_expiry=default)
    if world.is_foreign:
        pytest.skip("the cleanup knows no other way to answer on a third party's store")
    with pytest.raises(NotApproved, match="open"), world.session().step() as step:
        step.use_approval("call")
    summary = expired_session_cleanup(state_store=world.store, workspace_providers={})
    assert summary.defaults_applied == 1
    with pytest.raises(NotApproved, match="expired"), world.session().step() as step:
        step.use_approval("call")


def test_a_third_partys_store_does_not_keep_what_was_approved(world: World) -> None:
    asked(world)
    approve(world)
    if not world.is_foreign:
        pytest.skip("this store keeps it")
    with pytest.raises(NotSupportedOnBackend), world.session().step() as step:
        step.use_approval("call")
    with world.turn(world.session()) as turn:
        assert turn.results["call"]["approved"] is True


# Django users


@pytest.fixture
def own_world(committed_db: CommittedDatabase) -> World:
    return database_world(committed_db, is_foreign=False)


@pytest.fixture
def user(own_world: World) -> User:
    return User.objects.create_user(f"ann-{uuid4().hex}")


def test_a_user_with_the_permission_answers(own_world: World, user: User) -> None:
    asked(own_world, permission="auth.add_user")
    with pytest.raises(NotPermitted):
        approve(own_world, actor=user)
    user.user_permissions.add(Permission.objects.get(codename="add_user"))
    user = User.objects.get(pk=user.pk)
    assert approve(own_world, actor=user) == "accepted"
    assert own_world.store.take_tool_results("session")["call"]["actors"] == [f"user:{user.pk}"]


def test_an_inactive_superuser_does_not_answer(own_world: World, user: User) -> None:
    asked(own_world, permission="auth.add_user")
    user.is_superuser, user.is_active = True, False
    with pytest.raises(NotPermitted):
        approve(own_world, actor=user)


def test_a_requesting_user_does_not_answer(own_world: World, user: User) -> None:
    asked(own_world, requester=f"user:{user.pk}")
    with pytest.raises(NotPermitted):
        approve(own_world, actor=user)


def test_a_requesting_user_does_not_answer_by_name_or_key(own_world: World, user: User) -> None:
    asked(own_world, requester=user)
    for actor in (user, user.get_username(), str(user.pk)):
        with pytest.raises(NotPermitted):
            approve(own_world, actor=actor)
    assert approve(own_world, actor="bob") == "accepted"


@pytest.mark.parametrize("actor", [AnonymousUser(), User(username="nobody")], ids=["anonymous", "unsaved"])
def test_a_user_who_is_not_stored_is_no_actor(own_world: World, actor: Any) -> None:
    asked(own_world)
    with pytest.raises(InvalidPayload):
        approve(own_world, actor=actor)
