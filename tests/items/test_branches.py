"""A branch of a session has the items up to its checkpoint."""

from __future__ import annotations

from helix_store import DatabaseStateStore, ItemLog, StepInfo
from tests.databases import CommittedDatabase


def test_a_branch_has_the_items_up_to_its_checkpoint(committed_db: CommittedDatabase) -> None:
    names = {"using": committed_db.alias, "tenant": committed_db.tenant}
    store = DatabaseStateStore(committed_db.alias, tenant=committed_db.tenant)
    state = store.create_session("s", agent_type="t")
    ItemLog("s", "lane", **names).append(["a", "b"], keys=["1", None])
    commit = store.save_state_and_promote_staging("s", state, [], StepInfo("step", 1))
    ItemLog("s", "lane", **names).append(["c"])
    store.branch_session("s", new_session_id="now")
    store.branch_session("s", new_session_id="then", checkpoint_id=commit.checkpoint_id)
    found = {
        branch: [(item.key, item.payload) for item in ItemLog(branch, "lane", **names).tail()]
        for branch in ("s", "now", "then")
    }
    assert found["then"] == [("1", "a"), (None, "b")]
    assert found["now"] == found["s"] == [*found["then"], (None, "c")]
