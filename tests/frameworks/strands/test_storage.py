"""`DjangoStorage` beside Strands' own storages, and with its session manager."""

from __future__ import annotations

import random
from typing import Any

import pytest
from asgiref.sync import sync_to_async
from strands import Agent
from strands.types import exceptions

from example_project.frameworks.strands import ScriptedModel, weather
from helix_store import DatabaseLockManager, DatabaseStateStore, DatabaseUsageStore
from helix_store.cleanup import erase
from helix_store.exceptions import ConflictError, FencedOutError
from helix_store.models import Item
from tests.databases import CommittedDatabase

# Releases before 1.62 may have no such storage.
theirs = pytest.importorskip("strands.storage")
SnapshotSessionManager: Any = pytest.importorskip(
    "strands.session.snapshot_session_manager"
).SnapshotSessionManager


def storage_of(db: CommittedDatabase, **options: Any) -> Any:
    from helix_store.contrib.strands import DjangoStorage

    return DjangoStorage(db.alias, tenant=db.tenant, **options)


def agent_of(db: CommittedDatabase, session_id: str = "trip", **options: Any) -> Agent:
    manager = SnapshotSessionManager(
        session_id, storage=storage_of(db, model="claude-opus-4-6"), save_latest_on="message", **options
    )
    return Agent(
        agent_id="guide",
        model=ScriptedModel(),
        tools=[weather],
        session_manager=manager,
        callback_handler=None,
    )


@pytest.mark.thorough
async def test_it_does_what_the_storage_in_memory_does(committed_db: CommittedDatabase) -> None:
    choose = random.Random(7)  # noqa: S311  a sequence to repeat
    ours, memory = storage_of(committed_db), theirs.InMemoryStorage()
    keys = ["a", "A", "a/b", "/a//b/", "session/s/x", "session/s/x/y", "session/S/x", "session/t%/x_", "ä 🚂"]
    prefixes = ["", "a", "A", "/a", "session", "session/", "session/s", "session/s/", "session/s/x/", "z"]
    values = [b"", b"text", "ä\x00".encode(), b"\xff\xfe", b'{"messages": []}']
    for _ in range(150):
        key, call = choose.choice(keys), choose.choice(["write", "write", "read", "delete", "list"])
        if call == "write":
            value = choose.choice(values)
            await ours.write(key, value)
            await memory.write(key, value)
        elif call == "list":
            prefix = choose.choice(prefixes)
            assert await ours.list(prefix) == await memory.list(prefix), prefix
        else:
            assert await getattr(ours, call)(key) == await getattr(memory, call)(key), key
    for bad in ("", "/", "a/../b", "a\\b"):
        for storage in (ours, memory):
            with pytest.raises(exceptions.StorageError):
                await storage.write(bad, b"")


def test_an_agent_goes_on_in_another_process(committed_db: CommittedDatabase) -> None:
    assert str(agent_of(committed_db)("How is the weather?")).strip() == "Sunny in Lisbon."
    again = agent_of(committed_db)
    assert [each["role"] for each in again.messages] == ["user", "assistant"] * 2
    again("And tomorrow?")
    assert len(agent_of(committed_db).messages) == 8
    assert agent_of(committed_db, "other").messages == []


def test_what_the_model_spent_is_in_the_ledger_once(committed_db: CommittedDatabase) -> None:
    agent_of(committed_db)("How is the weather?")
    agent_of(committed_db)("And tomorrow?")
    usage = DatabaseUsageStore(committed_db.alias, tenant=committed_db.tenant)
    rollup = usage.get_rollup("trip")
    assert rollup is not None
    assert (rollup.entry_count, rollup.tokens.completion) == (4, 40)
    assert set(rollup.tokens_by_model) == {"claude-opus-4-6"}


async def test_a_session_and_a_branch_have_their_own_snapshots(committed_db: CommittedDatabase) -> None:
    storage = storage_of(committed_db, user_id="ada")
    await storage.write("session/trip/state.json", b"one")
    store = DatabaseStateStore(committed_db.alias, tenant=committed_db.tenant)
    await store.abranch_session("trip", new_session_id="copy")
    await storage.write("session/trip/state.json", b"two")
    assert await storage.read("session/copy/state.json") == b"one"
    state = await store.aload_state("trip")
    assert state is not None
    assert state.user_id == "ada"
    manager = SnapshotSessionManager("trip", storage=storage)
    await manager.delete_session()
    assert await storage.list("session/") == ["session/copy/state.json"]
    with pytest.raises(ConflictError):
        await storage_of(committed_db, user_id="bob").write("session/copy/state.json", b"three")


async def test_a_superseded_writer_is_refused(committed_db: CommittedDatabase) -> None:
    locks = DatabaseLockManager(committed_db.alias, tenant=committed_db.tenant)
    old = await locks.aacquire("trip", owner="old")
    assert old is not None
    storage = storage_of(committed_db, fencing_token=old.fencing_token)
    await storage.write("session/trip/x", b"1")
    await locks.atake_over("trip", owner="new")
    for write in (storage.write("session/trip/x", b"2"), storage.delete("session/trip/x")):
        with pytest.raises(FencedOutError):
            await write
    assert await storage.read("session/trip/x") == b"1"
    assert (
        await Item.objects.using(committed_db.alias).filter(session__tenant=committed_db.tenant).acount() == 1
    )


async def test_keys_of_no_session_belong_to_no_user(committed_db: CommittedDatabase) -> None:
    for user in (None, "ada", "bob"):
        await storage_of(committed_db, user_id=user).write(f"tools/{user}", b"shared by all")
    await storage_of(committed_db, user_id="ada").write("session/trip/x", b"of Ada")
    await sync_to_async(erase)(using=committed_db.alias, tenant=committed_db.tenant, user_id="ada")
    shared = storage_of(committed_db, user_id="bob")
    assert await shared.list() == ["tools/None", "tools/ada", "tools/bob"]
    await shared.delete("tools/ada")
    assert await shared.read("tools/ada") is None
