"""Run states in an export."""

from __future__ import annotations

from helix_store.contrib.openai_agents import RunStateStore
from helix_store.stores import DatabaseStateStore
from tests.databases import CommittedDatabase
from tests.transfer.files import exported, imported, lines_of

SECRET = '{"key": "not for everybody"}'


def test_a_run_state_is_exported_and_imported(empty_db: CommittedDatabase) -> None:
    states = RunStateStore(empty_db.alias, tenant=empty_db.tenant)
    state_id = states.save("chat", SECRET, owner="alice")
    claim = states.claim("chat", state_id, resumer="worker", owner="alice")
    assert claim is not None
    data = exported(empty_db)
    assert "openai_run_state" in {record["record"] for record in lines_of(data)}
    DatabaseStateStore(empty_db.alias, tenant=empty_db.tenant).delete_session("chat")
    assert states.load("chat", state_id) is None

    imported(empty_db, data)
    again = states.claim("chat", state_id, resumer="other", owner="alice")
    assert again is not None
    assert again.text == SECRET
    assert again.token > claim.token
