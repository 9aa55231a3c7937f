"""Entries that cannot be stored whole: the rest of the batch is stored, with a stand-in that keeps the chain.

The SDK would drop the whole batch, without raising an error.
"""

from __future__ import annotations

from typing import Any, Final, cast

import pytest
from claude_agent_sdk import MirrorErrorMessage, SessionKey, get_session_messages_from_store
from claude_agent_sdk._internal.message_parser import parse_message
from claude_agent_sdk._internal.transcript_mirror_batcher import TranscriptMirrorBatcher

from helix_store import DatabaseStateStore
from helix_store.contrib.claude_agent import DjangoSessionStore
from helix_store.exceptions import FencedOutError
from helix_store.stores import DatabaseLockManager, DatabaseUsageStore
from tests.databases import CommittedDatabase
from tests.frameworks.claude_agent.conftest import NewStore

SESSION_ID: Final = "7f1d6f0e-6f0e-4d0e-9a52-0f4d0f8a1c11"
KEY: Final[SessionKey] = {"project_key": "-srv-app", "session_id": SESSION_ID}
HUGE: Final = "x" * (9 * 1024 * 1024)


def entry(number: int, kind: str, content: Any, **fields: Any) -> Any:
    """An entry of a chain: each one names the one before it."""
    message = {"role": kind, "content": content, **fields.pop("message", {})}
    parent = f"u{number - 1}" if number else None
    known = {"type": kind, "uuid": f"u{number}", "parentUuid": parent, "sessionId": SESSION_ID}
    return {**known, "timestamp": "2026-11-20T10:00:00.000Z", "message": message, **fields}


def deep(levels: int) -> Any:
    value: Any = "bottom"
    for _ in range(levels):
        value = [value]
    return value


USAGE: Final = {"id": "m1", "model": "claude-opus-4-6", "usage": {"input_tokens": 10, "output_tokens": 5}}
RESULT: Final = {"type": "tool_result", "tool_use_id": "t1"}
IMAGE: Final = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": HUGE}}
CALL: Final = {"type": "tool_use", "id": "t1", "name": "Read"}

LARGE: Final[dict[str, tuple[Any, Any]]] = {
    "a long text": (entry(1, "user", HUGE), None),
    "a result": (entry(1, "user", [{**RESULT, "content": HUGE}], toolUseResult={"stdout": HUGE}), RESULT),
    "a result with an image": (entry(1, "user", [{**RESULT, "content": [IMAGE]}]), RESULT),
    "a call": (entry(1, "assistant", [{**CALL, "input": {"text": HUGE}}], message=USAGE), CALL),
    "many short texts": (entry(1, "user", [{**RESULT, "content": ["y" * 1_000] * 10_000}]), RESULT),
    "too many levels": (entry(1, "assistant", [{**CALL, "input": {"a": deep(300)}}], message=USAGE), CALL),
    "not a number, and long": (entry(1, "user", HUGE, score=float("nan")), None),
}
"""Entries, and the fields that their first block must keep."""


@pytest.mark.parametrize("name", list(LARGE))
async def test_the_rest_of_the_batch_is_stored_and_the_chain_holds(
    store: DjangoSessionStore, committed_db: CommittedDatabase, name: str
) -> None:
    large, kept = LARGE[name]
    before, after = entry(0, "user", "Read it"), entry(2, "assistant", [{"type": "text", "text": "Done."}])
    await store.append(KEY, [before, large, after])
    await store.append(KEY, [before, large, after])
    assert store.failure is None
    loaded = cast("list[Any]", await store.load(KEY))
    assert [loaded[0], loaded[2]] == [before, after]
    (stand_in,) = loaded[1:2]
    ids = ("type", "uuid", "parentUuid", "sessionId", "timestamp")
    assert {each: stand_in[each] for each in ids} == {each: large[each] for each in ids}
    # An entry that is only too deep may be stored as text, and then comes back whole.
    assert stand_in == large or stand_in["helix_store"]["left_out"]
    if kept is not None:
        (block,) = stand_in["message"]["content"]
        assert {each: block[each] for each in kept} == kept
    messages = await get_session_messages_from_store(store, SESSION_ID, directory="/srv/app")
    assert [message.uuid for message in messages] == ["u0", "u1", "u2"]


async def test_the_usage_of_a_large_entry_is_recorded(
    store: DjangoSessionStore, committed_db: CommittedDatabase
) -> None:
    large, _ = LARGE["a call"]
    await store.append(KEY, [large])
    ledger = DatabaseUsageStore(committed_db.alias, tenant=committed_db.tenant)
    rollup = await ledger.aget_rollup(store.session_id_of(KEY))
    assert rollup is not None
    assert rollup.tokens.total == 15


@pytest.mark.thorough
async def test_entries_that_no_single_call_can_store_are_stored_in_parts(store: DjangoSessionStore) -> None:
    entries = [entry(number, "user", "x" * (7 * 1024 * 1024)) for number in range(10)]
    await store.append(KEY, entries)
    assert await store.load(KEY) == entries


@pytest.mark.thorough
async def test_an_error_that_the_sdk_swallows_is_kept(
    new_store: NewStore, committed_db: CommittedDatabase
) -> None:
    locks = DatabaseLockManager(committed_db.alias, tenant=committed_db.tenant)
    name = DjangoSessionStore.session_id_of(KEY)
    superseded = await locks.aacquire(name)
    assert superseded is not None
    await locks.atake_over(name)
    store = new_store(tenant=committed_db.tenant, fencing_token=superseded.fencing_token)
    reported: list[Any] = []

    async def on_error(key: Any, error: str) -> None:
        data = {"type": "system", "subtype": "mirror_error", "key": key, "error": error}
        reported.append(parse_message(data))

    batcher = TranscriptMirrorBatcher(store, "/projects", on_error)
    batcher.enqueue(f"/projects/-srv-app/{SESSION_ID}.jsonl", [entry(0, "user", "hi")])
    await batcher.flush()
    assert isinstance(store.failure, FencedOutError)
    (message,) = reported
    assert isinstance(message, MirrorErrorMessage)
    assert message.key == KEY
    assert message.error == str(store.failure)


async def test_an_attempt_that_succeeds_later_is_no_failure(store: DjangoSessionStore) -> None:
    batch: list[Any] = ["no entry"]
    with pytest.raises(Exception, match="expected a dict"):
        await store.append(KEY, batch)
    assert store.failure is not None
    await store.append(KEY, [entry(0, "user", "another batch")])
    assert store.failure is not None
    batch[:] = [entry(1, "user", "the same batch")]
    await store.append(KEY, batch)
    assert store.failure is None


async def test_a_branch_is_a_session_of_the_sdk_under_the_key_of_its_id(
    store: DjangoSessionStore, committed_db: CommittedDatabase
) -> None:
    await store.append(KEY, [entry(0, "user", "Find it")])
    branch: SessionKey = {**KEY, "session_id": "2b1f9c51-0c7c-4a4e-8a44-7f3c5a3f9d22"}
    sessions = DatabaseStateStore(committed_db.alias, tenant=committed_db.tenant)
    await sessions.abranch_session(store.session_id_of(KEY), new_session_id=store.session_id_of(branch))
    await store.append(branch, [entry(1, "assistant", "Found.")])
    assert [each["uuid"] for each in cast("list[Any]", await store.load(branch))] == ["u0", "u1"]
    assert [each["uuid"] for each in cast("list[Any]", await store.load(KEY))] == ["u0"]
    listed = await store.list_sessions(KEY["project_key"])
    assert {each["session_id"] for each in listed} == {SESSION_ID, branch["session_id"]}
