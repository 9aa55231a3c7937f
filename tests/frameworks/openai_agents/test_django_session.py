"""`DjangoSession` with the runner of the SDK, and alone."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from enum import StrEnum
from inspect import getsource
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from agents import Runner, SessionSettings, set_tracing_disabled
from agents.extensions.memory import AdvancedSQLiteSession
from agents.memory import OpenAIResponsesCompactionSession, Session
from agents.memory import session as sdk_session
from agents.memory.session import _session_accepts_wrapper
from agents.usage import Usage

from helix_store import DatabaseLockManager, DatabaseStateStore, DatabaseUsageStore
from helix_store.contrib.openai_agents import DjangoSession
from helix_store.core.usage import TokenCounts
from helix_store.exceptions import FencedOutError, InvalidPayload
from helix_store.items import ItemLog
from helix_store.models import Item
from tests.databases import CommittedDatabase
from tests.frameworks.openai_agents.models import talking_agent

set_tracing_disabled(True)


def session_of(db: CommittedDatabase, session_id: str = "chat", **options: Any) -> DjangoSession:
    return DjangoSession(session_id, using=db.alias, tenant=db.tenant, **options)


def user(words: str) -> Any:
    return {"role": "user", "content": words}


@pytest.fixture
def session(committed_db: CommittedDatabase) -> DjangoSession:
    return session_of(committed_db)


async def contents(session: DjangoSession, **options: Any) -> list[Any]:
    return [item["content"] for item in await session.get_items(**options)]  # type: ignore[typeddict-item]


async def test_the_runner_finds_what_an_earlier_run_said(committed_db: CommittedDatabase) -> None:
    first, second = talking_agent("Paris."), talking_agent("Seine.")
    await Runner.run(first, "Capital of France?", session=session_of(committed_db))
    await Runner.run(second, "And its river?", session=session_of(committed_db))
    asked = second.model.inputs[0]  # type: ignore[union-attr]
    assert [item.get("content") for item in asked][::2] == ["Capital of France?", "And its river?"]
    assert len(await session_of(committed_db).get_items()) == 4


async def test_it_is_a_session_of_the_sdk_that_takes_the_run_context(session: DjangoSession) -> None:
    assert isinstance(session, Session)
    assert _session_accepts_wrapper(session)


async def test_a_limit_beats_the_settings_and_a_negative_one_means_all(
    committed_db: CommittedDatabase,
) -> None:
    session = session_of(committed_db, session_settings=SessionSettings(limit=2))
    await session.add_items([user("a"), user("b"), user("c")])
    assert await contents(session) == ["b", "c"]
    assert await contents(session, limit=1) == ["c"]
    assert await contents(session, limit=0) == []
    assert await contents(session, limit=-1) == ["a", "b", "c"]


async def test_items_are_kept_exactly(session: DjangoSession) -> None:
    item: Any = {"b": "\x00\ud800", "a": [1.0, 10**40, None], "role": "user", "content": ""}
    await session.add_items([item])
    assert repr(await session.get_items()) == repr([item])


async def test_an_item_with_a_tuple_is_stored_as_json_has_it(session: DjangoSession) -> None:
    item: Any = {"role": "user", "content": ({"type": "input_text"},)}
    await session.add_items([item])
    assert await session.get_items() == [{"role": "user", "content": [{"type": "input_text"}]}]


@pytest.mark.parametrize(
    ("term", "turns"),
    [("PARIS", [1, 2]), ('"paris"', [2]), ("input_text", []), ("É", [2]), ("é", []), ("(", [])],
)
async def test_turns_are_found_by_the_texts_of_the_user(
    session: DjangoSession, term: str, turns: list[int]
) -> None:
    parts: Any = [{"type": "input_image", "image_url": "x"}, {"type": "input_text", "text": 'To "paris", É'}]
    await session.add_items([{"role": "user", "content": "Paris"}, {"role": "user", "content": parts}])
    assert [turn["turn"] for turn in await session.find_turns_by_content(term)] == turns


class Role(StrEnum):
    USER = "user"


@pytest.mark.parametrize(
    "item", [{"role": Role.USER, "content": "a"}, OrderedDict(role="user", content="a")], ids=repr
)
async def test_an_item_that_is_equal_to_its_json_is_stored_as_json_has_it(
    session: DjangoSession, item: Any
) -> None:
    await session.add_items([item])
    assert repr(await session.get_items()) == repr([{"role": "user", "content": "a"}])


def test_a_branch_without_a_name_is_refused(committed_db: CommittedDatabase) -> None:
    with pytest.raises(InvalidPayload, match="branch"):
        session_of(committed_db, branch="")


async def test_a_batch_that_cannot_be_stored_changes_nothing(session: DjangoSession) -> None:
    with pytest.raises(InvalidPayload):
        await session.add_items([user("a"), {"role": object()}])  # type: ignore[list-item]
    assert await session.get_items() == []


async def test_an_item_that_cannot_be_read_hides_no_other(
    session: DjangoSession, committed_db: CommittedDatabase
) -> None:
    await session.add_items([user("a"), user("b"), user("bad")])
    rows = Item._base_manager.using(committed_db.alias).filter(session__tenant=committed_db.tenant)
    assert await rows.filter(payload__contains="bad").aupdate(payload="{") == 1
    assert await contents(session, limit=2) == ["a", "b"]
    assert await session.pop_item() == user("b")


async def test_two_pops_at_once_get_different_items(session: DjangoSession) -> None:
    await session.add_items([user(str(number)) for number in range(10)])
    popped: list[Any] = await asyncio.gather(*(session.pop_item() for _ in range(11)))
    contents = [item["content"] for item in popped if item]
    assert sorted(contents) == [str(number) for number in range(10)]
    assert popped.count(None) == 1


async def test_an_id_that_is_no_session_id_is_kept_apart(committed_db: CommittedDatabase) -> None:
    long = session_of(committed_db, "project/" + "x" * 300)
    await long.add_items([user("a")])
    assert await contents(session_of(committed_db, "project/" + "x" * 300)) == ["a"]
    assert await session_of(committed_db, "project/" + "x" * 301).get_items() == []


async def test_the_session_is_one_of_the_store(
    session: DjangoSession, committed_db: CommittedDatabase
) -> None:
    await session.add_items([user("a")])
    store = DatabaseStateStore(committed_db.alias, tenant=committed_db.tenant)
    state = await store.aload_state("chat")
    assert state is not None
    assert state.agent_type == "openai_agents"
    await store.adelete_session("chat")
    assert await session.get_items() == []


async def test_clearing_keeps_the_session(session: DjangoSession, committed_db: CommittedDatabase) -> None:
    await session.add_items([user("a")])
    await session.create_branch_from_turn(1, "other")
    await session.add_items([user("b")])
    await session.clear_session()
    assert session.branch_id == "main"
    assert await session.list_branches() == []
    assert await DatabaseStateStore(committed_db.alias, tenant=committed_db.tenant).aload_state("chat")


async def test_a_superseded_writer_is_refused(committed_db: CommittedDatabase) -> None:
    locks = DatabaseLockManager(committed_db.alias, tenant=committed_db.tenant)
    old = await locks.aacquire("chat", owner="old")
    assert old is not None
    session = session_of(committed_db, fencing_token=old.fencing_token)
    await session.add_items([user("a")])
    await locks.atake_over("chat", owner="new")
    with pytest.raises(FencedOutError):
        await session.add_items([user("b")])
    with pytest.raises(FencedOutError):
        await session._atomic_replace_items([user("b")])
    with pytest.raises(FencedOutError):
        await session.pop_item()
    assert await contents(session) == ["a"]


async def test_a_wrong_key_deletes_nothing_if_the_session_checks_before_a_pop(session: DjangoSession) -> None:
    fernet = pytest.importorskip("cryptography.fernet")
    from agents.extensions.memory import EncryptedSession

    def encrypted(key: str, **options: Any) -> Any:
        theirs = EncryptedSession("chat", cast("Any", session), encryption_key=key, **options)
        session.check_before_pop = lambda item: theirs.cipher.extract_timestamp(
            cast("Any", item)["payload"].encode()
        )
        return theirs

    right, wrong = (fernet.Fernet.generate_key().decode() for _ in range(2))
    await encrypted(right).add_items([user("a"), user("b")])
    with pytest.raises(fernet.InvalidToken):
        await encrypted(wrong).pop_item()
    assert await encrypted(right).pop_item() == user("b")
    assert await encrypted(right).get_items() == [user("a")]


# --- Compaction ------------------------------------------------------------------------------------

with_snapshots = pytest.mark.skipif(
    not hasattr(sdk_session, "_CompactionSnapshot"), reason="this version of the SDK has no snapshots"
)


@with_snapshots
async def test_the_newest_items_are_replaced_only_if_they_are_as_they_were(session: DjangoSession) -> None:
    await session.add_items([user("a"), user("b"), user("c")])
    snapshot = await session._get_compaction_snapshot(2)
    assert (snapshot.items, snapshot.complete) == ([user("b"), user("c")], False)
    await session.add_items([user("d")])
    assert not await snapshot.replace_suffix(0, [user("summary")])
    await session.pop_item()
    assert await snapshot.replace_suffix(1, [user("summary")])
    assert await contents(session) == ["a", "b", "summary"]
    assert (await session._get_compaction_snapshot(3)).complete


@with_snapshots
async def test_a_replacement_prunes_the_oldest_items(session: DjangoSession) -> None:
    await session.add_items([user("old"), user("kept"), user("c")])
    snapshot = await session._get_compaction_snapshot(1, prune_prefix=lambda item: item == user("old"))
    assert await snapshot.replace_suffix(0, [user("summary")])
    assert await contents(session) == ["kept", "summary"]


async def test_a_session_that_stores_items_in_another_form_is_not_replaced(session: DjangoSession) -> None:
    class Shouting(DjangoSession):
        async def add_items(self, items: list[Any], **options: Any) -> None:
            await super().add_items([user(item["content"].upper()) for item in items])

    assert not await Shouting("chat")._atomic_replace_items([user("summary")])


async def test_the_compaction_session_of_the_sdk_takes_it(session: DjangoSession) -> None:
    compacting = OpenAIResponsesCompactionSession("chat", session)
    await compacting.add_items([user("a")])
    assert await compacting.get_items() == [user("a")]


class Compacting:
    """What `OpenAIResponsesCompactionSession` needs of the OpenAI client: it compacts to one message."""

    responses: Any

    def __init__(self) -> None:
        self.responses = self

    async def compact(self, **kwargs: Any) -> Any:
        return SimpleNamespace(output=[user("summary")], usage=None)


with_replacement = pytest.mark.skipif(
    "_atomic_replace_items" not in getsource(OpenAIResponsesCompactionSession),
    reason="this version of the SDK clears a session before it adds the compacted items",
)


@with_replacement
async def test_a_compaction_by_hand_replaces_the_current_branch_alone(
    session: DjangoSession,
) -> None:
    await session.add_items([user("a"), user("b")])
    await session.create_branch_from_turn(2, "other")
    await session.add_items([user("c")])

    client: Any = Compacting()
    compacting = OpenAIResponsesCompactionSession("chat", session, client=client, compaction_mode="input")
    await compacting.run_compaction({"force": True})
    assert await contents(session) == ["summary"]
    assert session.branch_id == "other"
    await session.switch_to_branch("main")
    assert await contents(session) == ["a", "b"]


# --- Branches --------------------------------------------------------------------------------------


async def with_three_turns(session: DjangoSession) -> None:
    for words in ("one", "two", "three"):
        await session.add_items([user(words), {"role": "assistant", "content": f"answer {words}"}])


async def test_a_branch_has_what_stands_before_its_turn(session: DjangoSession) -> None:
    await with_three_turns(session)
    assert await session.create_branch_from_turn(2, "plan b") == "plan b"
    await session.add_items([user("other")])
    assert await contents(session) == ["one", "answer one", "other"]
    assert len(await contents(session, branch_id="main")) == 6
    await session.switch_to_branch("main")
    assert len(await contents(session)) == 6
    assert await session.list_branches() == [
        {"branch_id": "main", "message_count": 6, "is_current": True},
        {"branch_id": "plan b", "message_count": 3, "is_current": False},
    ]


async def test_a_branch_can_begin_where_a_text_is(session: DjangoSession) -> None:
    await with_three_turns(session)
    name = await session.create_branch_from_content("thr")
    assert session.branch_id == name
    assert len(await contents(session)) == 4
    with pytest.raises(ValueError, match="No turn"):
        await session.create_branch_from_content("nowhere")


@pytest.mark.parametrize(("turn", "name"), [(0, "x"), (4, "x"), (1, " "), (1, "main"), (2, "taken")])
async def test_a_branch_that_cannot_be_made_changes_nothing(
    session: DjangoSession, turn: int, name: str
) -> None:
    await with_three_turns(session)
    await session.create_branch_from_turn(2, "taken")
    await session.switch_to_branch("main")
    with pytest.raises(ValueError, match=r"."):
        await session.create_branch_from_turn(turn, name)
    assert session.branch_id == "main"
    assert {each["branch_id"] for each in await session.list_branches()} == {"main", "taken"}


async def test_a_branch_is_deleted_but_never_main(session: DjangoSession) -> None:
    await with_three_turns(session)
    await session.create_branch_from_turn(2, "other")
    for branch, match in (("main", "main"), ("other", "current"), ("unknown", "not exist")):
        with pytest.raises(ValueError, match=match):
            await session.delete_branch(branch)
    await session.delete_branch("other", force=True)
    assert session.branch_id == "main"
    with pytest.raises(ValueError, match="not exist"):
        await session.switch_to_branch("other")


async def test_turns_are_listed_with_their_texts(session: DjangoSession) -> None:
    await session.add_items([user("x" * 150), {"role": "assistant", "content": "y"}, user("two")])
    turns = await session.get_conversation_turns()
    assert [turn["turn"] for turn in turns] == [1, 2]
    assert turns[0]["content"] == "x" * 100 + "..."
    assert turns[0]["full_content"] == "x" * 150


def test_it_has_every_public_name_of_the_advanced_session_of_the_sdk(session: DjangoSession) -> None:
    theirs = {name for name in dir(AdvancedSQLiteSession) if not name.startswith("_")}
    # There is no connection to close.
    assert theirs - set(dir(session)) == {"close"}


async def test_turns_and_tools_are_those_of_the_advanced_session(
    session: DjangoSession, tmp_path: Path
) -> None:
    def call(kind: str, **fields: Any) -> Any:
        return {"type": kind, "call_id": "c", **fields}

    items: list[Any] = [
        {"role": "system", "content": "Be brief."},
        user("one"),
        call("function_call", name="weather"),
        call("function_call", name="weather"),
        call("function_call_output", output="sunny"),
        call("function_call", name="find", namespace="crm"),
        {"role": "assistant", "content": "Sunny.", "type": "message"},
        user("two"),
        call("mcp_call", name="read", server_label="files"),
        call("mcp_approval_request", server_label="files"),
        call("shell_call"),
        call("web_search_call"),
        call("tool_search_output"),
        {"content": "?"},
        user("three"),
        call("tool_search_call"),
        call("tool_search_output"),
        call("custom_tool_call", name="lookup"),
    ]
    theirs = AdvancedSQLiteSession(session_id="s", db_path=tmp_path / "s.db", create_tables=True)
    await theirs.add_items(items)
    await session.add_items(items)
    assert await session.get_conversation_by_turns() == await theirs.get_conversation_by_turns()
    assert sorted(await session.get_tool_usage()) == sorted(await theirs.get_tool_usage())
    theirs.close()
    assert await session.get_tool_usage("none") == []


# --- Usage -----------------------------------------------------------------------------------------


async def test_the_usage_of_turns_is_in_the_ledger(
    session: DjangoSession, committed_db: CommittedDatabase
) -> None:
    agent = talking_agent("a", "b")
    assert await session.get_session_usage() is None
    for question in ("one", "two"):
        result = await Runner.run(agent, question, session=session)
        await session.store_run_usage(result)
    await session.store_run_usage(result)
    once = {"requests": 1, "input_tokens": 100, "output_tokens": 20, "total_tokens": 120}
    assert await session.get_turn_usage(2) == once
    assert await session.get_turn_usage() == [{"user_turn_number": n, **once} for n in (1, 2)]
    assert await session.get_turn_usage(3) == {}
    assert await session.get_session_usage() == {
        "requests": 2,
        "input_tokens": 200,
        "output_tokens": 40,
        "total_tokens": 240,
        "total_turns": 2,
    }
    entries = await DatabaseUsageStore(committed_db.alias, tenant=committed_db.tenant).aget_entries("chat")
    assert [(entry.model, entry.source.name, entry.step_count) for entry in entries] == [
        ("scripted-1", "talker", 1),
        ("scripted-1", "talker", 2),
    ]


async def test_tokens_of_a_run_that_belong_to_no_request_are_recorded_once(session: DjangoSession) -> None:
    result = await Runner.run(talking_agent("a"), "one", session=session)
    usage = result.context_wrapper.usage
    (request,) = usage.request_usage_entries
    # As in a run that waited in an older version of the SDK, and went on.
    usage.request_usage_entries.clear()
    for number in (1, 2):
        usage.add(Usage(requests=1, input_tokens=3, output_tokens=4, total_tokens=7))
        await session.store_run_usage(result)
        assert await session.get_turn_usage(1) == {
            "requests": 1 + number,
            "input_tokens": request.input_tokens + 3 * number,
            "output_tokens": request.output_tokens + 4 * number,
            "total_tokens": request.total_tokens + 7 * number,
        }


async def test_tokens_written_to_a_cache_are_counted_apart(
    session: DjangoSession, committed_db: CommittedDatabase
) -> None:
    result = await Runner.run(talking_agent("a"), "one", session=session)
    details = result.context_wrapper.usage.request_usage_entries[0].input_tokens_details
    # Releases of the SDK before 0.21 do not report them.
    cast("Any", details).cache_write_tokens = 30
    await session.store_run_usage(result)
    (entry,) = await DatabaseUsageStore(committed_db.alias, tenant=committed_db.tenant).aget_entries("chat")
    assert entry.tokens == TokenCounts(prompt=100, completion=20, cache_write=30, total=120)


async def test_the_usage_of_branches_is_apart(session: DjangoSession) -> None:
    agent = talking_agent("a", "b")
    await session.store_run_usage(await Runner.run(agent, "one", session=session))
    await session.create_branch_from_turn(1, "other")
    await session.store_run_usage(await Runner.run(agent, "uno", session=session))
    for branch in ("main", "other"):
        sums = await session.get_session_usage(branch)
        assert sums is not None
        assert sums["requests"] == 1
    assert (await session.get_session_usage() or {})["total_turns"] == 2


async def test_items_of_the_session_are_in_the_log(
    session: DjangoSession, committed_db: CommittedDatabase
) -> None:
    await session.add_items([user("a")])
    log = ItemLog("chat", using=committed_db.alias, tenant=committed_db.tenant)
    assert await log.alanes() == {"main": 1}
