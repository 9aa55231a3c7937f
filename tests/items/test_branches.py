"""A branch of a session has the items up to its checkpoint."""

from __future__ import annotations

from typing import Any

from helix_store import DatabaseStateStore, StepInfo
from helix_store.items import ItemLog
from helix_store.models import Item
from tests.databases import CommittedDatabase


def test_a_branch_has_the_items_up_to_its_checkpoint(committed_db: CommittedDatabase) -> None:
    names: dict[str, Any] = {"using": committed_db.alias, "tenant": committed_db.tenant}
    store = DatabaseStateStore(committed_db.alias, tenant=committed_db.tenant)
    state = store.create_session("s", agent_type="t")
    ItemLog("s", "lane", **names).append(["a", "b"], keys=["1", None])
    commit = store.save_state_and_promote_staging("s", state, [], StepInfo("step", 1))
    ItemLog("s", "lane", **names).append(["c"])
    store.branch_session("s", new_session_id="latest")
    store.branch_session("s", new_session_id="then", checkpoint_id=commit.checkpoint_id)
    found = {
        branch: [(item.key, item.payload) for item in ItemLog(branch, "lane", **names).tail()]
        for branch in ("s", "latest", "then")
    }
    assert found["then"] == [("1", "a"), (None, "b")]
    assert found["latest"] == found["then"]
    assert found["s"] == [*found["then"], (None, "c")]


def test_a_branch_of_a_session_without_checkpoints_has_all_items(committed_db: CommittedDatabase) -> None:
    names: dict[str, Any] = {"using": committed_db.alias, "tenant": committed_db.tenant}
    ItemLog("s", "lane", **names).append(["a", "b"])
    DatabaseStateStore(committed_db.alias, tenant=committed_db.tenant).branch_session(
        "s", new_session_id="branch"
    )
    assert [item.payload for item in ItemLog("branch", "lane", **names).tail()] == ["a", "b"]


def test_items_of_an_earlier_release_are_branched_by_their_time(committed_db: CommittedDatabase) -> None:
    names: dict[str, Any] = {"using": committed_db.alias, "tenant": committed_db.tenant}
    store = DatabaseStateStore(committed_db.alias, tenant=committed_db.tenant)
    state = store.create_session("s", agent_type="t")
    log = ItemLog("s", "lane", **names)
    log.append(["a"])
    store.save_state_and_promote_staging("s", state, [], StepInfo("step", 1))
    log.append(["b"])
    Item.objects.using(committed_db.alias).filter(session__tenant=committed_db.tenant).update(
        session_version=None
    )
    store.branch_session("s", new_session_id="branch")
    assert [item.payload for item in ItemLog("branch", "lane", **names).tail()] == ["a"]
