"""Who may write to a thread: the last one who claimed it."""

from __future__ import annotations

import uuid
from typing import Any

import pytest
from langgraph.checkpoint.base import empty_checkpoint

from helix_store.contrib.langgraph import DjangoSaver
from helix_store.exceptions import FencedOutError, InvalidPayload
from helix_store.models import Session
from helix_store.stores import DatabaseLockManager
from tests.cells import for_each
from tests.databases import CommittedDatabase


@pytest.fixture
def saver(committed_db: CommittedDatabase) -> DjangoSaver:
    return DjangoSaver(committed_db.alias, tenant=committed_db.tenant)


def _config(checkpoint_id: str | None = None, thread_id: str = "thread") -> Any:
    configurable = {"thread_id": thread_id, "checkpoint_ns": ""}
    return {"configurable": configurable | ({"checkpoint_id": checkpoint_id} if checkpoint_id else {})}


def _put(saver: DjangoSaver, parent: Any = None, *, thread_id: str = "thread") -> Any:
    config = parent or _config(thread_id=thread_id)
    return saver.put(config, empty_checkpoint(), {"source": "loop", "step": 0, "parents": {}}, {})


def _stored(saver: DjangoSaver) -> list[str]:
    return [found.checkpoint["id"] for found in saver.list(_config())]


def _pending(saver: DjangoSaver, config: Any) -> list[Any]:
    found = saver.get_tuple(config)
    assert found is not None
    return [value for _, _, value in found.pending_writes or []]


def test_an_owner_writes_checkpoints_and_the_writes_of_tasks(saver: DjangoSaver) -> None:
    owner = saver.claim_write_ownership("thread")
    stored = _put(owner)
    owner.put_writes(stored, [("channel", "mine")], "task")
    owner.put_writes(stored, [("channel", "again")], "task")
    assert _pending(saver, stored) == ["mine"]
    assert _stored(saver) == [stored["configurable"]["checkpoint_id"]]
    owner.check_write_ownership()


def test_a_superseded_owner_cannot_fork_the_chain(saver: DjangoSaver) -> None:
    former = saver.claim_write_ownership("thread")
    first = _put(former)
    current = saver.claim_write_ownership("thread")
    second = _put(current, first)
    for _ in range(2):
        with pytest.raises(FencedOutError) as refused:
            _put(former, first)
        assert getattr(refused.value, "is_stale_write_owner_error", False) is True
    ids = [second["configurable"]["checkpoint_id"], first["configurable"]["checkpoint_id"]]
    assert _stored(saver) == ids


@for_each("channel", ["channel", "__resume__", "__error__", "__interrupt__"])
def test_a_superseded_owner_cannot_replace_a_write(saver: DjangoSaver, channel: str) -> None:
    former = saver.claim_write_ownership("thread")
    stored = _put(former)
    current = saver.claim_write_ownership("thread")
    current.put_writes(stored, [(channel, "current")], "task")
    for task in ("task", "other"):
        with pytest.raises(FencedOutError):
            former.put_writes(stored, [(channel, "stale")], task)
    assert _pending(saver, stored) == ["current"]


def test_a_superseded_owner_of_an_unknown_thread_creates_nothing(
    saver: DjangoSaver, committed_db: CommittedDatabase
) -> None:
    former = saver.claim_write_ownership("thread")
    saver.claim_write_ownership("thread")
    with pytest.raises(FencedOutError):
        former.put_writes(_config(str(uuid.uuid4())), [("channel", "stale")], "task")
    with pytest.raises(FencedOutError):
        _put(former)
    assert list(saver.list(None)) == []
    assert not Session.objects.using(committed_db.alias).filter(tenant=committed_db.tenant).exists()


def test_the_owner_of_a_thread_is_not_that_of_another_one(saver: DjangoSaver) -> None:
    owner = saver.claim_write_ownership("thread")
    saver.claim_write_ownership("other")
    _put(owner)
    with pytest.raises(InvalidPayload):
        _put(owner, thread_id="other")


def test_a_lock_of_the_session_supersedes_the_owner(
    saver: DjangoSaver, committed_db: CommittedDatabase
) -> None:
    owner = saver.claim_write_ownership("thread")
    DatabaseLockManager(committed_db.alias, tenant=committed_db.tenant).take_over("thread")
    with pytest.raises(FencedOutError):
        owner.check_write_ownership()
    saver.check_write_ownership()
    _put(saver)


async def test_an_async_owner_learns_that_it_was_superseded(saver: DjangoSaver) -> None:
    former = await saver.aclaim_write_ownership("thread")
    await former.acheck_write_ownership()
    current = await saver.aclaim_write_ownership("thread")
    with pytest.raises(FencedOutError):
        await former.acheck_write_ownership()
    with pytest.raises(FencedOutError):
        await former.aput_writes(_config(str(uuid.uuid4())), [("channel", "stale")], "task")
    stored = await current.aput(
        _config(), empty_checkpoint(), {"source": "loop", "step": 0, "parents": {}}, {}
    )
    found = await saver.aget_tuple(_config())
    assert found is not None
    assert found.config == stored
