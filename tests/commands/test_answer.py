"""``helix_sessions answer``: a person answers an open call from a terminal."""

from __future__ import annotations

from typing import Any
from uuid import uuid4

import pytest
from django.contrib.auth.models import Permission, User

from helix_store import call_digest
from helix_store.stores import DatabaseStateStore
from tests.cells import for_each
from tests.commands.running import Ended, run
from tests.databases import CommittedDatabase

BOOKING = {"tool_name": "book", "approval_id": "approval-1"}


@pytest.fixture
def store(empty_db: CommittedDatabase) -> DatabaseStateStore:
    store = DatabaseStateStore(empty_db.alias, tenant=empty_db.tenant)
    store.create_session("journey", agent_type="travel")
    return store


def waits_for(store: DatabaseStateStore, **calls: dict[str, Any]) -> None:
    store.add_pending_tool_calls("journey", calls)


def answer(store: DatabaseStateStore, *arguments: str) -> Ended:
    return run(store.alias, "helix_sessions", "answer", "journey", *arguments, "--tenant", store.tenant)


def answers(store: DatabaseStateStore) -> dict[str, dict[str, Any]]:
    taken = store.take_tool_results("journey")
    for given in taken.values():
        given.pop("submitted_at")
    return taken


@for_each(
    ("arguments", "expected"),
    [
        (["approve"], {"approved": True, "reason": None}),
        (["reject", "--reason", "too dear"], {"approved": False, "reason": "too dear"}),
        (["error", "no seats"], {"error": "no seats"}),
    ],
    ids=["approve", "reject", "error"],
)
def test_an_approval_is_decided_without_its_id(
    store: DatabaseStateStore, arguments: list[str], expected: dict[str, Any]
) -> None:
    waits_for(store, call_1=BOOKING)
    ended = answer(store, *arguments, "--format", "json")
    assert ended.code == 0, ended.err
    assert answers(store) == {"call_1": expected}
    version = ended.data.pop("version") if "version" in ended.data else None
    state = store.load_state("journey")
    assert state is not None
    assert ended.data | {"version": version} == {
        "tenant": store.tenant,
        "session_id": "journey",
        "tool_call_id": "call_1",
        "outcome": "accepted",
        "version": ended.data["version"],
    }


def test_a_call_that_only_its_agent_has_answered_is_open(store: DatabaseStateStore) -> None:
    waits_for(store, call_1=BOOKING, call_2={"tool_name": "search"})
    store.submit_tool_result("journey", "call_2", result=1)
    state = store.load_state("journey")
    assert state is not None
    state.pending_client_tool_calls["call_1"] |= {"approved": True, "submitted_at": 1_700_000_000_000}
    store.save_state("journey", state)
    ended = answer(store, "reject")
    assert ended.code == 0, ended.err
    assert answers(store)["call_1"] == {"approved": False, "reason": None}
    assert "is not waiting for an answer" in answer(store, "reject").err


@for_each(
    ("arguments", "result"),
    [
        (["result", '{"flight": "TP 1357"}'], {"flight": "TP 1357"}),
        (["result", "TP 1357"], "TP 1357"),
        (["result"], None),
    ],
    ids=["JSON", "text", "nothing"],
)
def test_a_result_is_json_or_a_text(store: DatabaseStateStore, arguments: list[str], result: Any) -> None:
    waits_for(store, call_1={"tool_name": "search"})
    assert answer(store, *arguments).code == 0
    assert answers(store) == {"call_1": {"result": result}}


def test_of_several_open_calls_one_is_named_by_the_start_of_its_id(store: DatabaseStateStore) -> None:
    waits_for(store, call_a1={"tool_name": "search"}, call_b1={"tool_name": "search"})
    unnamed = answer(store, "result", "1")
    assert (unnamed.code, unnamed.out) == (2, "")
    assert "call_a1 (search), call_b1 (search)" in unnamed.err
    assert answer(store, "result", "1", "--call", "call_").code == 2
    assert answer(store, "result", "1", "--call", "call_b").code == 0
    assert answers(store) == {"call_b1": {"result": 1}}
    # It is the only open call now.
    assert answer(store, "result", "2").code == 0


@for_each(
    "arguments",
    [
        ["approve"],
        ["result", "1", "--reason", "because"],
        ["error"],
        ["result", "1", "--call", "other"],
    ],
    ids=" ".join,
)
def test_an_answer_that_does_not_fit_is_refused(store: DatabaseStateStore, arguments: list[str]) -> None:
    waits_for(store, call_1={"tool_name": "search"})
    ended = answer(store, *arguments)
    assert ended.code in (1, 2)
    assert ended.out == ""
    assert ended.err
    assert answers(store) == {}


def test_an_approval_takes_no_value(store: DatabaseStateStore) -> None:
    waits_for(store, call_1=BOOKING)
    assert answer(store, "approve", "yes").code == 2
    assert answer(store, "result", "yes").code == 2
    assert answers(store) == {}


def test_a_second_answer_changes_nothing(store: DatabaseStateStore) -> None:
    waits_for(store, call_1=BOOKING)
    assert answer(store, "approve", "--call", "call_1").code == 0
    late = answer(store, "reject", "--call", "call_1")
    assert (late.code, late.out) == (1, "")
    assert "answered before" in late.err
    nothing = answer(store, "approve")
    assert (nothing.code, nothing.out) == (1, "")
    assert "is not waiting for an answer" in nothing.err
    assert answers(store) == {"call_1": {"approved": True, "reason": None}}


@pytest.fixture
def user(store: DatabaseStateStore) -> Any:
    return User.objects.create_user(f"ann-{uuid4().hex}")


def test_a_user_or_another_actor_is_kept_with_the_answer(store: DatabaseStateStore, user: Any) -> None:
    waits_for(store, call_1={**BOOKING, "approvals": 2})
    first = answer(store, "approve", "--as", user.username, "--format", "json")
    assert (first.code, first.data["outcome"]) == (0, "recorded")
    again = answer(store, "approve", "--as", user.username)
    assert again.code == 1
    assert "has already approved the call call_1" in again.err
    second = answer(store, "approve", "--actor", "the pager", "--format", "json")
    assert second.data["outcome"] == "accepted"
    assert answers(store)["call_1"]["actors"] == [f"user:{user.pk}", "the pager"]


def test_a_call_with_a_permission_is_refused_without_it(store: DatabaseStateStore, user: Any) -> None:
    waits_for(store, call_1={**BOOKING, "permission": "auth.add_user"})
    for arguments in ([], ["--actor", "ann"], ["--as", user.username]):
        ended = answer(store, "approve", *arguments)
        assert ended.code == 1
        assert "may not answer the call" in ended.err
    user.user_permissions.add(Permission.objects.get(codename="add_user"))
    assert answer(store, "approve", "--as", user.username).code == 0


def test_an_answer_to_another_digest_changes_nothing(store: DatabaseStateStore) -> None:
    waits_for(store, call_1=BOOKING)
    ended = answer(store, "approve", "--digest", "0" * 64)
    assert ended.code == 1
    assert "another digest" in ended.err
    assert answer(store, "approve", "--digest", call_digest("book", None)).code == 0


def test_an_editable_call_is_approved_with_another_input(store: DatabaseStateStore) -> None:
    waits_for(store, call_1={**BOOKING, "editable": True})
    assert answer(store, "approve", "--input", '{"seat": 4}').code == 0
    assert answers(store)["call_1"]["input"] == {"seat": 4}


def test_an_input_that_is_not_json_is_refused(store: DatabaseStateStore) -> None:
    waits_for(store, call_1=BOOKING)
    assert "argument --input: expected JSON, got '{seat'" in answer(store, "approve", "--input", "{seat").err
    assert answers(store) == {}


@for_each(
    "arguments",
    [
        ["approve", "--as", "nobody at all"],
        ["approve", "--as", "ann", "--actor", "ann"],
        ["approve", "--actor", "user:1"],
        ["approve", "--input", "1"],
        ["reject", "--input", "1"],
    ],
)
def test_options_that_do_not_apply_are_refused(store: DatabaseStateStore, arguments: list[str]) -> None:
    waits_for(store, call_1=BOOKING)
    assert answer(store, *arguments).code == 2
    assert answers(store) == {}
