"""Transcripts of Claude Agent SDK, beyond what the packaged suite looks at."""

from __future__ import annotations

import asyncio
import json
from typing import Any, cast

import pytest
from asgiref.sync import sync_to_async
from claude_agent_sdk import (
    InMemorySessionStore,
    SessionKey,
    delete_session_via_store,
    fork_session_via_store,
    get_session_messages_from_store,
    list_sessions_from_store,
    project_key_for_directory,
    rename_session_via_store,
)

from helix_store import DatabaseStateStore
from helix_store.contrib.claude_agent import DjangoSessionStore
from helix_store.contrib.claude_agent.models import ClaudeSession
from helix_store.exceptions import InvalidPayload, LimitExceeded
from helix_store.models import Item, Session, UsageEntry
from tests.cells import for_each
from tests.databases import CommittedDatabase
from tests.frameworks.claude_agent.conftest import NewStore
from tests.processes import run_in_processes

KEY: SessionKey = {"project_key": "-srv-app", "session_id": "s1"}
SUB: SessionKey = {**KEY, "subpath": "subagents/agent-1"}
SESSION_ID = "7f1d6f0e-6f0e-4d0e-9a52-0f4d0f8a1c11"


def said(text: str, uuid: str | None = None, **fields: Any) -> Any:
    """An entry of a user, as the SDK writes it."""
    entry = {"type": "user", "message": {"role": "user", "content": text}, **fields}
    return entry if uuid is None else {**entry, "uuid": uuid}


def answered(
    message_id: str, uuid: str, *, output: int = 20, model: str = "claude-opus-4-6", **fields: Any
) -> Any:
    """One entry of a model's response."""
    usage = {
        "input_tokens": 10,
        "cache_creation_input_tokens": 5,
        "cache_read_input_tokens": 100,
        "output_tokens": output,
    }
    message = {"id": message_id, "model": model, "role": "assistant", "content": [], "usage": usage}
    at = "2026-11-20T10:00:00.000Z"
    return {"type": "assistant", "uuid": uuid, "timestamp": at, "message": message, **fields}


@sync_to_async
def rows_of(db: CommittedDatabase) -> dict[str, int]:
    """The number of rows of the tenant in each table that the store writes."""
    sessions = Session.objects.using(db.alias).filter(tenant=db.tenant)
    return {
        "session": sessions.count(),
        "item": Item.objects.using(db.alias).filter(session__in=sessions).count(),
        "claude": ClaudeSession.objects.using(db.alias).filter(tenant=db.tenant).count(),
        "usage": UsageEntry.objects.using(db.alias).filter(tenant=db.tenant).count(),
    }


NOTHING = {"session": 0, "item": 0, "claude": 0, "usage": 0}


# --- What is stored --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "value",
    [
        "\x00",
        "\ud800",
        "\udc00\ud800",
        "\ud83d" + "\ude00",
        10**400,
        json.loads("1e400"),
        float("nan"),
        -0.0,
        {"": [None]},
    ],
    ids=["NUL", "high", "low high", "pair", "long integer", "1e400", "NaN", "zero", "nested"],
)
async def test_any_json_value_comes_back_as_it_was(store: DjangoSessionStore, value: Any) -> None:
    entry = {"type": "x", "uuid": "u", "value": value}
    await store.append(KEY, [cast("Any", entry)])
    loaded = await store.load(KEY)
    assert loaded is not None
    assert repr(loaded) == repr([entry])


@for_each("value", [{1: "a"}, (1, 2), {"a", "b"}, b"bytes"])
async def test_what_is_not_json_is_refused_and_nothing_is_stored(
    store: DjangoSessionStore, committed_db: CommittedDatabase, value: Any
) -> None:
    for large in ("", "x" * 9 * 1024 * 1024):
        entry = {"type": "x", "value": value, "large": large}
        with pytest.raises(InvalidPayload) as refused:
            await store.append(KEY, [said("before"), cast("Any", entry)])
        assert refused.value.path.startswith("/entries/1/value")
    assert await store.load(KEY) is None
    assert (await rows_of(committed_db))["item"] == 0


async def test_an_entry_that_looks_like_one_kept_as_text_comes_back_as_it_was(
    store: DjangoSessionStore,
) -> None:
    entries = cast("Any", [{"~json": "x"}, {"~json": "[1]"}, {"~json": float("inf")}])
    for batch in ([entries[0]], [entries[1]], entries):
        await store.append(KEY, batch)
    assert await store.load(KEY) == [*entries[:2], *entries]


async def test_an_entry_that_is_no_dict_is_refused(store: DjangoSessionStore) -> None:
    with pytest.raises(InvalidPayload) as refused:
        await store.append(KEY, cast("Any", [said("hi"), "text"]))
    assert refused.value.path == "/entries/1"


async def test_a_repeated_batch_is_stored_once(store: DjangoSessionStore) -> None:
    batch = [said("one", "a"), said("two", "b")]
    await store.append(KEY, batch)
    await store.append(KEY, [*batch, said("three", "c"), said("three again", "c")])
    loaded = await store.load(KEY)
    assert loaded == [*batch, said("three", "c")]


async def test_an_entry_without_a_usable_uuid_is_always_added(store: DjangoSessionStore) -> None:
    entries = [said("x"), said("x", ""), said("x", cast("Any", 7)), said("x", "\x00"), said("x", "u" * 1001)]
    await store.append(KEY, entries)
    await store.append(KEY, entries)
    assert await store.load(KEY) == entries * 2


async def test_a_uuid_belongs_to_one_transcript(store: DjangoSessionStore) -> None:
    await store.append(KEY, [said("main", "a")])
    await store.append(SUB, [said("sub", "a")])
    assert await store.load(KEY) == [said("main", "a")]
    assert await store.load(SUB) == [said("sub", "a")]


async def test_keys_of_a_thousand_characters_are_kept_apart(
    store: DjangoSessionStore, committed_db: CommittedDatabase
) -> None:
    long: SessionKey = {"project_key": "p" * 1000, "session_id": "s" * 999 + "1", "subpath": "x" * 1000}
    other: SessionKey = {**long, "session_id": "s" * 999 + "2"}
    for key in (long, other):
        await store.append(key, [said(key["session_id"])])
        await store.append({"project_key": key["project_key"], "session_id": key["session_id"]}, [said("m")])
    assert await store.load(long) == [said(long["session_id"])]
    assert await store.load(other) == [said(other["session_id"])]
    assert await store.list_subkeys({"project_key": "p" * 1000, "session_id": "s" * 999 + "1"}) == [
        "x" * 1000
    ]
    listed = await store.list_sessions("p" * 1000)
    assert {entry["session_id"] for entry in listed} == {long["session_id"], other["session_id"]}


@for_each(
    ("key", "error"),
    [
        ({"project_key": "p" * 1001, "session_id": "s"}, LimitExceeded),
        ({"project_key": "", "session_id": "s"}, InvalidPayload),
        ({"project_key": "p", "session_id": "a\x00"}, InvalidPayload),
        ({"project_key": "p"}, InvalidPayload),
        ({"project_key": "p", "session_id": "s", "subpath": 7}, InvalidPayload),
    ],
)
async def test_a_wrong_key_is_a_typed_error(
    store: DjangoSessionStore, committed_db: CommittedDatabase, key: Any, error: type[Exception]
) -> None:
    for call in (store.append(key, [said("x")]), store.load(key), store.delete(key)):
        with pytest.raises(error):
            await call
    assert await rows_of(committed_db) == NOTHING


async def test_parts_of_keys_do_not_run_into_each_other(store: DjangoSessionStore) -> None:
    await store.append({"project_key": "a", "session_id": "b/c"}, [said("1")])
    await store.append({"project_key": "a/b", "session_id": "c"}, [said("2")])
    assert await store.load({"project_key": "a", "session_id": "b/c"}) == [said("1")]
    assert await store.load({"project_key": "a/b", "session_id": "c"}) == [said("2")]


async def test_a_long_transcript_is_loaded_in_order(store: DjangoSessionStore) -> None:
    entries = [said(str(n), str(n)) for n in range(2_100)]
    await store.append(KEY, entries)
    assert await store.load(KEY) == entries
    await store.append(KEY, [said("last")])
    assert await store.load(KEY) == [*entries, said("last")]


# --- Summaries -------------------------------------------------------------------------------------


async def test_the_summary_is_that_of_the_store_in_memory(store: DjangoSessionStore) -> None:
    oracle = InMemorySessionStore()
    batches = [
        [said("\x00 first \ud800", "a", cwd="/srv", gitBranch="main", timestamp="2026-11-20T10:00:00Z")],
        [{"type": "custom-title", "customTitle": "Plan"}, {"type": "tag", "tag": "work"}],
        [said("more", "b"), {"type": "tag", "tag": ""}],
    ]
    for batch in batches:
        await oracle.append(KEY, cast("Any", batch))
        await store.append(KEY, cast("Any", batch))
    (expected,) = await oracle.list_session_summaries(KEY["project_key"])
    (found,) = await store.list_session_summaries(KEY["project_key"])
    assert found["data"] == expected["data"]
    assert found["session_id"] == "s1"


async def test_a_late_repeat_does_not_take_the_summary_back(store: DjangoSessionStore) -> None:
    old = said("x", "a", customTitle="old")
    await store.append(KEY, [old])
    await store.append(KEY, [said("y", "b", customTitle="new")])
    await store.append(KEY, [old])
    await store.append(KEY, [old, said("z", "c")])
    (summary,) = await store.list_session_summaries(KEY["project_key"])
    assert summary["data"]["custom_title"] == "new"


async def test_a_session_with_a_sub_agent_only_is_not_listed(store: DjangoSessionStore) -> None:
    await store.append(SUB, [said("early", "a")])
    assert await store.list_sessions(KEY["project_key"]) == []
    assert await store.list_session_summaries(KEY["project_key"]) == []
    assert await store.load(KEY) is None
    await store.append(KEY, [said("main", "b")])
    assert [entry["session_id"] for entry in await store.list_sessions(KEY["project_key"])] == ["s1"]


async def test_the_time_is_that_of_the_database_and_grows_with_each_write(
    store: DjangoSessionStore, committed_db: CommittedDatabase
) -> None:
    times = []
    for n in range(20):
        await store.append(KEY, [said("x", str(n), timestamp="1999-01-01T00:00:00Z")])
        ((listed,), (summary,)) = (
            await store.list_sessions(KEY["project_key"]),
            await store.list_session_summaries(KEY["project_key"]),
        )
        assert listed["mtime"] == summary["mtime"]
        times.append(listed["mtime"])
    assert times == sorted(set(times))
    now = await store._storage.aread(lambda db: db.now())
    assert abs(now.timestamp() * 1000 - times[-1]) < 60_000


async def test_the_time_grows_also_when_the_clock_was_set_back(
    store: DjangoSessionStore, committed_db: CommittedDatabase
) -> None:
    await store.append(KEY, [said("x")])
    later = 4_102_444_800_000
    rows = ClaudeSession.objects.using(committed_db.alias).filter(tenant=committed_db.tenant)
    await store._storage.aread(lambda _: rows.update(mtime_ms=later))
    await store.append(KEY, [said("y")])
    assert [entry["mtime"] for entry in await store.list_sessions(KEY["project_key"])] == [later + 1]


# --- Several writers -------------------------------------------------------------------------------


async def test_twenty_overlapping_appends_lose_nothing(store: DjangoSessionStore) -> None:
    batches = [[said(f"{n}.{m}", f"{n}.{m}") for m in range(n + 1)] for n in range(20)]
    await asyncio.gather(*(store.append(KEY, batch) for batch in batches))
    loaded = cast("list[Any]", await store.load(KEY))
    assert len(loaded) == 210
    assert {entry["uuid"] for entry in loaded} == {entry["uuid"] for batch in batches for entry in batch}
    for n in range(20):
        mine = [entry["uuid"] for entry in loaded if entry["uuid"].startswith(f"{n}.")]
        assert mine == [f"{n}.{m}" for m in range(n + 1)]


def append_batches(alias: str, tenant: str, worker: int) -> None:
    store = DjangoSessionStore(alias, tenant=tenant)

    async def append_all() -> None:
        for n in range(10):
            entry = said(f"{worker}.{n}", f"{worker}.{n}", **{f"only{worker}": 1})
            await store.append(KEY, [entry, said("shared", f"shared.{n}", customTitle=f"{n}")])

    asyncio.run(append_all())


@pytest.mark.thorough
async def test_processes_that_append_at_once_fold_one_summary(
    store: DjangoSessionStore, committed_db: CommittedDatabase
) -> None:
    workers = [(committed_db.alias, committed_db.tenant, worker) for worker in range(2)]
    for outcome in await asyncio.to_thread(run_in_processes, append_batches, workers):
        outcome.unwrap()
    loaded = cast("list[Any]", await store.load(KEY))
    assert len({entry["uuid"] for entry in loaded}) == len(loaded) == 30
    titles = [entry["customTitle"] for entry in loaded if "customTitle" in entry]
    (summary,) = await store.list_session_summaries(KEY["project_key"])
    assert summary["data"]["custom_title"] == titles[-1]
    assert await rows_of(committed_db) == {"session": 1, "item": 30, "claude": 1, "usage": 0}


async def test_a_cancelled_append_has_ended_before_the_caller_goes_on(store: DjangoSessionStore) -> None:
    task = asyncio.ensure_future(store.append(KEY, [said("x", "a")]))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await store.load(KEY) == [said("x", "a")]


# --- The session in this store ---------------------------------------------------------------------


async def test_a_session_has_the_agent_type_and_the_user_of_the_store(
    new_store: NewStore, committed_db: CommittedDatabase
) -> None:
    store = new_store(tenant=committed_db.tenant, user_id="ada", agent_type="coder")
    await store.append(KEY, [said("x")])
    sessions = DatabaseStateStore(using=committed_db.alias, tenant=committed_db.tenant)
    state = await sessions.aload_state(store.session_id_of(KEY))
    assert state is not None
    assert (state.agent_type, state.user_id) == ("coder", "ada")


async def test_a_batch_without_entries_creates_nothing(
    store: DjangoSessionStore, committed_db: CommittedDatabase
) -> None:
    await store.append(KEY, [])
    assert await store.load(KEY) is None
    assert await rows_of(committed_db) == NOTHING


async def test_a_tenant_sees_its_own_transcripts(new_store: NewStore) -> None:
    one, other = new_store(), new_store()
    await one.append(KEY, [said("mine")])
    assert await other.load(KEY) is None
    assert await other.list_sessions(KEY["project_key"]) == []
    await other.delete(KEY)
    assert await one.load(KEY) == [said("mine")]


async def test_a_deleted_session_leaves_no_row(
    store: DjangoSessionStore, committed_db: CommittedDatabase
) -> None:
    await store.append(KEY, [said("x"), answered("m", "a")])
    await store.append(SUB, [said("y")])
    assert await rows_of(committed_db) == {"session": 1, "item": 3, "claude": 1, "usage": 1}
    await store.delete(KEY)
    assert await rows_of(committed_db) == NOTHING
    await store.delete(KEY)


async def test_of_a_session_of_the_application_only_the_transcripts_go(
    store: DjangoSessionStore, committed_db: CommittedDatabase
) -> None:
    sessions = DatabaseStateStore(using=committed_db.alias, tenant=committed_db.tenant)
    session_id = store.session_id_of(KEY)
    await sessions.acreate_session(session_id, agent_type="chat")
    await store.append(KEY, [said("x")])
    await store.delete(KEY)
    assert await rows_of(committed_db) == {"session": 1, "item": 0, "claude": 0, "usage": 0}


async def test_the_helpers_of_the_sdk_work_on_the_store(store: DjangoSessionStore) -> None:
    directory = "/srv/app"
    project = project_key_for_directory(directory)
    key: SessionKey = {"project_key": project, "session_id": SESSION_ID}
    first, second = "0f4d0f8a-0000-4000-8000-000000000001", "0f4d0f8a-0000-4000-8000-000000000002"
    base: Any = {"sessionId": SESSION_ID, "timestamp": "2026-11-20T10:00:00.000Z", "cwd": directory}
    await store.append(
        key,
        [
            said("Find the bug", first, parentUuid=None, **base),
            answered("m1", second, parentUuid=first, **base),
        ],
    )
    await rename_session_via_store(store, SESSION_ID, "The bug", directory=directory)
    (info,) = await list_sessions_from_store(store, directory=directory)
    assert (info.session_id, info.summary, info.first_prompt) == (SESSION_ID, "The bug", "Find the bug")
    messages = await get_session_messages_from_store(store, SESSION_ID, directory=directory)
    assert [message.uuid for message in messages] == [first, second]
    fork = await fork_session_via_store(store, SESSION_ID, directory=directory)
    forked = await get_session_messages_from_store(store, fork.session_id, directory=directory)
    assert [message.type for message in forked] == ["user", "assistant"]
    assert len(await list_sessions_from_store(store, directory=directory)) == 2
    await delete_session_via_store(store, SESSION_ID, directory=directory)
    assert [each.session_id for each in await list_sessions_from_store(store, directory=directory)] == [
        fork.session_id
    ]
