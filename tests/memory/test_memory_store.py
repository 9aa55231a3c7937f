"""What only the in-memory state store has: test helpers, shared worlds, and values that it must not share."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from helix_store.core.limits import Limits
from helix_store.core.types import (
    StagedChanges,
    StepInfo,
    SubSessionRef,
)
from helix_store.engine.memory import MemoryWorld
from helix_store.exceptions import (
    InvalidPayload,
    LimitExceeded,
    SessionExists,
    SessionNotFound,
)
from helix_store.stores.store import InMemoryStateStore
from helix_store.usage.store import InMemoryUsageStore
from tests.memory.conftest import commit_step, loaded


class TestHelpersForTests:
    def test_all_session_ids_are_given_in_the_order_of_creation(self, store: InMemoryStateStore) -> None:
        for session_id in ("b", "c", "a"):
            store.create_session(session_id, agent_type="planner")
        store.update_status("c", "paused")
        assert store.get_all_session_ids() == ["b", "c", "a"]

    def test_the_list_of_session_ids_is_the_callers_own(self, store: InMemoryStateStore) -> None:
        store.create_session("a", agent_type="planner")
        store.get_all_session_ids().clear()
        assert store.get_all_session_ids() == ["a"]

    def test_get_sync_gives_what_load_state_gives(self, store: InMemoryStateStore) -> None:
        store.create_session("a", agent_type="planner", custom_state={"n": 1})
        assert store.get_sync("a") == store.load_state("a")
        assert store.get_sync("unknown") is None

    def test_clear_forgets_every_session_of_the_tenant_and_no_other(self, world: MemoryWorld) -> None:
        mine, other = (InMemoryStateStore(tenant=tenant, world=world) for tenant in ("mine", "other"))
        for store in (mine, other):
            store.create_session("a", agent_type="planner")
        mine.clear()
        assert mine.get_all_session_ids() == []
        assert mine.load_state("a") is None
        assert other.get_all_session_ids() == ["a"]

    def test_an_id_is_free_again_after_clear(self, store: InMemoryStateStore) -> None:
        store.create_session("a", agent_type="planner")
        commit_step(store, "a", 1)
        store.clear()
        store.clear()
        assert store.create_session("a", agent_type="planner").version == 1
        assert store.get_latest_checkpoint("a") is None
        assert store.get_message_count("a") == 0


class TestWorlds:
    def test_stores_of_one_world_and_tenant_see_each_other(self, world: MemoryWorld) -> None:
        first, second = (InMemoryStateStore(tenant="t", world=world) for _ in range(2))
        first.create_session("a", agent_type="planner")
        second.append_messages("a", [{"role": "user", "content": "hello"}])
        assert first.get_message_count("a") == 1
        with pytest.raises(SessionExists):
            second.create_session("a", agent_type="planner")

    def test_a_store_without_a_world_has_its_own(self) -> None:
        first, second = InMemoryStateStore(), InMemoryStateStore()
        first.create_session("a", agent_type="planner")
        assert not second.session_exists("a")

    def test_another_tenants_session_does_not_exist(self, world: MemoryWorld) -> None:
        InMemoryStateStore(tenant="mine", world=world).create_session("a", agent_type="planner")
        other = InMemoryStateStore(tenant="other", world=world)
        assert other.load_state("a") is None
        assert other.delete_session("a") == 0
        with pytest.raises(SessionNotFound):
            other.update_status("a", "completed")
        assert other.create_session("a", agent_type="planner").version == 1

    def test_a_tenant_is_checked_like_every_id(self) -> None:
        with pytest.raises(InvalidPayload):
            InMemoryStateStore(tenant="a\nb")

    def test_usage_goes_with_its_session_unless_it_is_kept(
        self, world: MemoryWorld, store: InMemoryStateStore
    ) -> None:
        usage = InMemoryUsageStore(world=world)
        source = {"type": "agent", "name": "planner"}
        for session_id in ("kept", "gone", "untouched"):
            store.create_session(session_id, agent_type="planner")
            entry = {"kind": "custom", "session_id": session_id, "step_count": 1, "timestamp": 0}
            usage.record_entry({**entry, "source": source, "type": "api", "name": "search", "amount": 1})
        store.delete_session("kept", keep_usage=True)
        store.delete_session("gone")
        assert usage.get_all_session_ids() == ["kept", "untouched"]

    def test_limits_of_the_store_hold_for_what_a_merge_makes(self, world: MemoryWorld) -> None:
        store = InMemoryStateStore(world=world, limits=Limits(max_state_bytes=2_000))
        store.create_session("a", agent_type="planner", custom_state={"notes": ["x" * 700]})
        with pytest.raises(LimitExceeded):
            store.merge_custom_state("a", {"notes": ["y" * 1_500]})
        assert loaded(store, "a").custom_state == {"notes": ["x" * 700]}
        assert loaded(store, "a").version == 1


class TestDetachment:
    """Nothing that a caller holds is what the store holds."""

    def test_what_was_given_can_be_changed_afterwards(self, store: InMemoryStateStore) -> None:
        tags, metadata, custom_state = ["one"], {"key": "value"}, {"list": [1]}
        store.create_session(
            "a", agent_type="planner", tags=tags, metadata=metadata, custom_state=custom_state
        )
        state = loaded(store, "a")
        message: dict[str, Any] = {"role": "user", "content": [{"type": "text"}]}
        store.save_state_and_promote_staging("a", state, [message], StepInfo("step-1", 1))
        patches = [{"op": "add", "path": "/x", "value": {"deep": 1}}]
        store.stage_changes("a", "step-2", StagedChanges(tool_call_id="call", patches=patches))

        tags.append("two")
        metadata["more"] = "value"
        custom_state["list"].append(2)
        state.tags.append("three")
        state.metadata["most"] = "value"
        state.custom_state["list"].append(3)
        message["content"].append("more")
        patches.clear()

        stored = loaded(store, "a")
        assert (stored.tags, stored.metadata, stored.custom_state) == (
            ["one"],
            {"key": "value"},
            {"list": [1]},
        )
        assert store.get_messages("a").messages == [{"role": "user", "content": [{"type": "text"}]}]
        assert len(store.get_staged_changes("a", "step-2")[0].patches) == 1
        checkpoint = store.get_latest_checkpoint("a")
        assert checkpoint is not None
        assert (checkpoint.state.tags, checkpoint.state.custom_state) == (["one"], {"list": [1]})

    def test_what_was_returned_can_be_changed_afterwards(self, store: InMemoryStateStore) -> None:
        created = store.create_session(
            "a", agent_type="planner", tags=["one"], metadata={"key": "value"}, custom_state={"list": [1]}
        )
        store.add_sub_session_refs(
            "a",
            [SubSessionRef(sub_session_id="sub", agent_type="x", location="remote", remote={"url": ["u"]})],
        )
        store.start_run("a", "run")
        store.update_run("a", "run", status="failed", error={"trace": []})
        commit_step(store, "a", 1, custom_state={"list": [1]}, run_id="run")

        def everything() -> list[Any]:
            return [
                store.load_state("a"),
                store.list_sessions().sessions,
                store.get_messages("a").messages,
                store.get_latest_checkpoint("a"),
                store.get_sub_session_refs("a"),
                store.list_runs("a"),
            ]

        before = copy.deepcopy(everything())
        state, heads, messages, checkpoint, refs, runs = everything()
        for value in (created, state, checkpoint.state):
            value.tags.append("two")
            value.metadata["more"] = "value"
            value.custom_state["list"].append(2)
        heads[0].tags.append("two")
        heads[0].metadata["more"] = "value"
        messages[0]["content"] = "changed"
        refs[0].remote["url"].append("v")
        runs[0].error["trace"].append("line")
        assert everything() == before

    def test_a_branch_shares_nothing_with_its_source(self, store: InMemoryStateStore) -> None:
        store.create_session("a", agent_type="planner", tags=["one"], custom_state={"list": [1]})
        store.append_messages("a", [{"role": "user", "content": "first"}])
        store.branch_session("a", new_session_id="b")
        store.append_messages("b", [{"role": "user", "content": "second"}])
        store.merge_custom_state("b", {"list": [2]})
        assert store.get_message_count("a") == 1
        assert loaded(store, "a").custom_state == {"list": [1]}
        assert loaded(store, "b").custom_state == {"list": [1, 2]}


class TestTrees:
    def test_a_cycle_of_parents_and_refs_is_deleted_once(self, store: InMemoryStateStore) -> None:
        store.create_session("a", agent_type="planner")
        store.create_session("b", agent_type="planner", parent_session_id="a")
        store.create_session("c", agent_type="planner")
        store.create_session("far", agent_type="planner")
        local = [SubSessionRef(sub_session_id=name, agent_type="planner") for name in ("a", "c", "missing")]
        remote = SubSessionRef(sub_session_id="far", agent_type="planner", location="remote")
        store.add_sub_session_refs("b", [*local, remote])
        assert store.delete_session("a") == 3
        assert store.get_all_session_ids() == ["far"]
