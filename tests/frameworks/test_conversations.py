"""The conversations that the adapters keep: in the admin, and in ``helix_sessions show``."""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from io import StringIO
from typing import Any

import pytest
from django.contrib.auth.models import Permission
from django.core.management import call_command
from django.db import connections
from django.test.utils import CaptureQueriesContext
from langgraph.checkpoint.base import empty_checkpoint

from example_project.frameworks import pydantic_ai
from example_project.frameworks.__main__ import run_claude_agent, run_langgraph, run_strands
from helix_store.adapters import session_id_for
from helix_store.catalogue import ConversationPage, Outline, conversations
from helix_store.contrib.langgraph import DjangoSaver
from helix_store.contrib.langgraph.models import LangGraphCheckpoint, LangGraphValue
from helix_store.contrib.openai_agents import DjangoSession
from helix_store.contrib.pydantic_ai.models import Conversation, ConversationEntry
from helix_store.core.payloads import encode
from helix_store.core.transcript import Part
from helix_store.core.types import StepInfo
from helix_store.engine.database import Database
from helix_store.items import ItemLog
from helix_store.models import Item, Session
from helix_store.stores import DatabaseStateStore
from tests.admin.conftest import Browser, Page, browser_on
from tests.admin.rows import write_session
from tests.asgi_server import database_url
from tests.cells import for_each
from tests.databases import CommittedDatabase

SAID = {
    "langgraph-example": ["To Lisbon, please.", "A flight to Lisbon for 120 euros.", "Yes.", "It is booked."],
    "openai-agents-example": ["What is the capital of France?", "Paris.", "And its river?", "The Seine."],
    session_id_for("-srv-app", "claude-example"): ["What is in this folder?", "An app."],
    "pydantic-ai-example": ["How is Lisbon?", "Book it.", "book", "a room in Lisbon is booked", "Done:"],
    "strands-example": ["How is Lisbon?", "weather", '{"city": "Lisbon"}', "Sunny in Lisbon"],
}


@pytest.fixture
def visitor(empty_db: CommittedDatabase) -> Iterator[Browser]:
    with browser_on(empty_db) as browser:
        yield browser


@pytest.fixture
def browser(visitor: Browser) -> Browser:
    visitor.sign_in(superuser=True)
    return visitor


def _session(browser: Browser, session_id: str) -> Session:
    return Session.objects.using(browser.database.alias).get(session_id=session_id)


def _show(session_id: str, *options: str) -> str:
    output = StringIO()
    # The id of a Claude session may begin with a dash.
    call_command("helix_sessions", "show", *options, "--", session_id, stdout=output)
    return output.getvalue()


def _name(name: str) -> Any:
    return next(each for each in conversations() if each.name == name)


def _page(browser: Browser, name: str, session_id: str, **query: Any) -> ConversationPage:
    key = _session(browser, session_id).pk
    db = Database(browser.database.alias, "")
    found: ConversationPage = _name(name).page(db, key, **{"first": None, "limit": 40, **query})
    return found


def _outline(browser: Browser, name: str, session_id: str) -> Outline:
    key = _session(browser, session_id).pk
    found: Outline = _name(name).outlines(Database(browser.database.alias, ""), [key])[key]
    return found


def _in_order(text: str, words: list[str]) -> bool:
    for word in words:
        _, found, text = text.partition(word)
        if not found:
            return False
    return True


# --- The example's sessions --------------------------------------------------------------------------


@pytest.mark.thorough
def test_the_agents_of_all_frameworks_are_readable_in_the_admin_and_in_show(browser: Browser) -> None:
    environment = {
        **os.environ,
        "DATABASE_URL": database_url(browser.database, "frameworks"),
        "DJANGO_SETTINGS_MODULE": "example_project.settings",
    }
    subprocess.run([sys.executable, "-m", "example_project.frameworks"], env=environment, check=True)
    for session_id, words in SAID.items():
        page = browser.page_of(_session(browser, session_id))
        assert page.status == 200
        assert _in_order(page.text, words), session_id
        assert "Nobody has said anything yet" not in page.text
        assert _in_order(_show(session_id, "--messages", "20"), words), session_id
        assert len(page.statements) <= 30, session_id
    text = browser.list_of(Session).text
    assert "strands-example Sunny in Lisbon. strands active ada 4 messages 0 steps" in text
    assert "langgraph-example It is booked. langgraph active ada 4 messages 0 steps" in text
    assert "openai-agents-example The Seine. openai_agents active ada 4 messages 0 steps" in text
    assert "An app. claude-agent active ada 2 messages 0 steps" in text
    booked = "pydantic-ai-example Done: a room in Lisbon is booked"
    assert f"{booked} pydantic_ai active ada 6 messages 0 steps" in text


def test_show_counts_the_messages_of_an_adapter_and_writes_them_as_json(browser: Browser) -> None:
    run_langgraph()
    assert "LangGraph   4 messages" in _show("langgraph-example")
    report = json.loads(_show("langgraph-example", "--messages", "2", "--format", "json"))
    found = report["conversations"]["LangGraph"]
    assert found["total"] == 4
    assert [(each["number"], each["role"], each["step"]) for each in found["messages"]] == [
        (3, "user", 2),
        (4, "assistant", 3),
    ]
    assert found["messages"][1]["parts"][0]["text"] == "It is booked."
    assert [(each["step"], each["message_count"]) for each in found["path"]] == [
        (3, 4),
        (2, 3),
        (1, 2),
        (0, 1),
        (-1, 0),
    ]


@pytest.mark.thorough
def test_a_list_of_many_sessions_takes_as_many_statements_as_a_list_of_few(browser: Browser) -> None:
    run_langgraph()
    run_strands()
    asyncio.run(run_claude_agent())
    asyncio.run(pydantic_ai.main())
    ItemLog("chat", "main", using=browser.database.alias).append([{"role": "user", "content": "Hi"}])
    few = browser.list_of(Session)
    for number in range(20):
        log = ItemLog(f"chat-{number}", "main", using=browser.database.alias)
        log.append([{"role": "user", "content": f"Question {number}"}])
    many = browser.list_of(Session)
    assert "chat-7 Question 7 items active - 1 message 0 steps" in many.text
    assert len(many.statements) == len(few.statements)


def test_the_list_of_the_command_counts_the_messages_of_adapters(browser: Browser) -> None:
    alias = browser.database.alias
    write_session(browser.database, "Hello", session_id="own")
    DatabaseStateStore(alias).create_session("empty", agent_type="agent")

    def add(number: int, messages: int) -> None:
        log = ItemLog(f"chat-{number}", "main", using=alias)
        log.append([{"role": "user", "content": "Hi"}] * messages)

    def listed(*options: str) -> tuple[str, int]:
        output = StringIO()
        with CaptureQueriesContext(connections[alias]) as captured:
            call_command("helix_sessions", "list", "--database", alias, *options, stdout=output)
        return output.getvalue(), len(captured)

    add(0, 3)
    few, statements = listed("--wide")
    assert re.search(r"chat-0 .* 0 +3 +20", few)
    assert re.search(r"own .* 1 +1 +20", few)
    for number in range(1, 20):
        add(number, 1)
    assert listed("--wide")[1] == statements
    found = {each["session_id"]: each for each in json.loads(listed("--format", "json")[0])["sessions"]}
    conversation = {"framework": "OpenAI Agents SDK", "message_count": 3, "is_partial": False}
    assert (found["chat-0"]["message_count"], found["chat-0"]["conversation"]) == (0, conversation)
    assert (found["own"]["conversation"], found["empty"]["conversation"]) == (None, None)


def test_a_list_of_the_stores_own_sessions_asks_no_adapter(browser: Browser) -> None:
    write_session(browser.database, "Hello", session_id="own")
    page = browser.list_of(Session)
    row = f"Hello own tenant {browser.database.tenant} Hello Hello crashed Hello Hello 1 message 1 step"
    assert row in page.text
    assert not [each for each in page.statements if LangGraphCheckpoint._meta.db_table in each]


def test_a_conversation_needs_the_permission_to_view_its_rows(visitor: Browser) -> None:
    asyncio.run(pydantic_ai.main())
    permissions = Permission.objects.filter(content_type__app_label__startswith="helix_store")
    of_message = permissions.filter(codename__in=("view_session", "view_message"))
    visitor.sign_in(*of_message)
    session = _session(visitor, "pydantic-ai-example")
    assert "How is Lisbon?" not in visitor.page_of(session).text
    assert "a room in Lisbon is booked" not in visitor.list_of(Session).text
    visitor.sign_in(*of_message, permissions.get(codename="view_conversation"))
    assert "How is Lisbon?" not in visitor.page_of(session).text
    of_rows = permissions.filter(codename__in=("view_conversation", "view_conversationentry"))
    visitor.sign_in(permissions.get(codename="view_session"), *of_rows)
    assert "How is Lisbon?" in visitor.page_of(session).text
    assert "a room in Lisbon is booked" in visitor.list_of(Session).text


def test_messages_of_the_store_and_of_an_adapter_are_two_conversations(browser: Browser) -> None:
    run_strands()
    store = DatabaseStateStore(browser.database.alias)
    said = [{"role": "user", "content": "From the application"}]
    state = store.load_state("strands-example")
    assert state is not None
    store.save_state_and_promote_staging("strands-example", state, said, StepInfo("step-1", 1))
    session = _session(browser, "strands-example")
    own = browser.page_of(session)
    assert "From the application" in own.text
    assert "How is Lisbon?" not in own.text
    other = browser.page_of(session, section="conversation", of="Strands Agents")
    assert "How is Lisbon?" in other.text
    assert "From the application" not in other.text
    assert "of=Strands+Agents" in own.html


# --- Pages -------------------------------------------------------------------------------------------


def test_a_long_conversation_of_items_is_paged(browser: Browser) -> None:
    log = ItemLog("long", "main", using=browser.database.alias)
    log.append({"role": "user", "content": f"Word {number}"} for number in range(1, 101))
    session = _session(browser, "long")
    newest = browser.page_of(session)
    assert "Messages 61 to 100 of 100" in newest.text
    assert "Word 100" in newest.text
    assert "Word 60 " not in newest.text
    middle = browser.page_of(session, section="conversation", start=21)
    assert "Messages 21 to 60 of 100" in middle.text
    assert len(middle.statements) == len(newest.statements)
    beyond = browser.page_of(session, section="conversation", start=1_000)
    assert beyond.status == 200


def test_a_list_counts_at_most_a_thousand_items(browser: Browser) -> None:
    log = ItemLog("long", "main", using=browser.database.alias)
    log.append({"role": "user", "content": "Hi"} for _ in range(1_001))
    outline = _outline(browser, "OpenAI Agents SDK", "long")
    assert (outline.count, outline.is_partial) == (1_000, True)
    assert "long Hi items active - > 1,000" in browser.list_of(Session).text


async def _branch(alias: str) -> None:
    session = DjangoSession("branched", using=alias)
    await session.add_items([{"role": "user", "content": "One"}, {"role": "user", "content": "Two"}])
    await session.create_branch_from_turn(2, "other")
    await session.add_items([{"role": "user", "content": "Three"}])


async def test_branches_are_threads_of_a_conversation(browser: Browser) -> None:
    from helix_store.engine.async_twins import in_thread

    await _branch(browser.database.alias)

    def look() -> tuple[Page, Page]:
        session = _session(browser, "branched")
        return browser.page_of(session), browser.page_of(session, section="conversation", thread="other")

    main_page, other = await in_thread(look)
    assert _in_order(main_page.text, ["One", "Two"])
    assert "Three" not in main_page.text
    assert _in_order(other.text, ["One", "Three"])
    assert "thread=other" in main_page.html


def test_an_item_that_cannot_be_read_hides_no_other(browser: Browser) -> None:
    alias = browser.database.alias
    ItemLog("damaged", "main", using=alias).append([{"role": "user", "content": text} for text in "abc"])
    second = Item.objects.using(alias).order_by("pk")[1]
    Item.objects.using(alias).filter(pk=second.pk).update(payload='{"role": ')
    page = browser.page_of(_session(browser, "damaged"))
    assert "This message cannot be read." in page.text
    assert "Messages 1 to 3 of 3" in page.text
    assert "This message cannot be read." in _show("damaged", "--messages", "5")


# --- What frameworks store ---------------------------------------------------------------------------


def _says(name: str, payload: dict[str, Any]) -> tuple[str, list[Part]]:
    said = _name(name).says(payload)
    return said.role, said.parts


@pytest.mark.parametrize(
    ("item", "role", "part"),
    [
        (
            {"type": "function_call", "call_id": "c", "name": "f", "arguments": '{"a": 1}'},
            "assistant",
            Part(kind="call", text='{"a": 1}', name="f", call_id="c"),
        ),
        (
            {"type": "function_call_output", "call_id": "c", "output": "done"},
            "tool",
            Part(kind="result", text="done", call_id="c"),
        ),
        (
            {"type": "reasoning", "id": "r", "summary": [{"type": "summary_text", "text": "Hm."}]},
            "assistant",
            Part(kind="thinking", text="Hm.", rest='{"id": "r"}'),
        ),
        (
            {"type": "web_search_call", "id": "w"},
            "assistant",
            Part(kind="other", text='{"type": "web_search_call", "id": "w"}', name="web_search_call"),
        ),
    ],
)
def test_an_item_of_the_responses_api_is_a_message(item: dict[str, Any], role: str, part: Part) -> None:
    assert _says("OpenAI Agents SDK", item) == (role, [part])


@pytest.mark.parametrize(
    ("entry", "role", "part"),
    [
        ({"type": "summary", "summary": "A trip"}, "summary", Part(kind="text", text="A trip")),
        (
            {"type": "system", "content": "Compacted", "timestamp": "never"},
            "system",
            Part(kind="text", text="Compacted", rest='{"timestamp": "never"}'),
        ),
        (
            {"type": "snapshot", "files": 2},
            "snapshot",
            Part(kind="other", text='{"type": "snapshot", "files": 2}', name="snapshot"),
        ),
    ],
)
def test_an_entry_of_a_transcript_without_a_message_is_shown(
    entry: dict[str, Any], role: str, part: Part
) -> None:
    assert _says("Claude Agent SDK", entry) == (role, [part])


@pytest.mark.parametrize(
    ("block", "part"),
    [
        (
            {"reasoningContent": {"reasoningText": {"text": "Hm.", "signature": "s"}}},
            Part(kind="thinking", text="Hm.", rest='{"signature": "s"}'),
        ),
        (
            {"toolResult": {"toolUseId": "c", "status": "error", "content": [{"json": {"a": 1}}]}},
            Part(kind="result", text='{"json": {"a": 1}}', call_id="c", is_error=True),
        ),
        (
            {
                "image": {
                    "format": "png",
                    "source": {"bytes": {"__bytes_encoded__": True, "data": "AAAA"}},
                }
            },
            Part(kind="file", text="3 bytes", name="png"),
        ),
        (
            {"cachePoint": {"type": "default"}},
            Part(kind="other", text='{"cachePoint": {"type": "default"}}', name="part"),
        ),
    ],
)
def test_a_block_of_strands_is_a_part(block: dict[str, Any], part: Part) -> None:
    message = {"role": "user", "content": [block]}
    assert _says("Strands Agents", {"message": message}) == ("user", [part])


def test_a_redacted_message_of_strands_is_shown_as_redacted(browser: Browser) -> None:
    stored = {
        "message": {"role": "user", "content": [{"text": "secret"}]},
        "redact_message": {"role": "user", "content": [{"text": "[removed]"}]},
    }
    assert _says("Strands Agents", stored) == ("user", [Part(kind="text", text="[removed]")])


def test_a_pydantic_request_with_files_and_a_retry_is_read(browser: Browser) -> None:
    alias = browser.database.alias
    log = DatabaseStateStore(alias)
    log.create_session("p", agent_type="pydantic_ai")
    parts = [
        {"part_kind": "user-prompt", "content": ["Look", {"kind": "image-url", "url": "https://a/b.png"}]},
        {"part_kind": "user-prompt", "content": [{"kind": "binary", "data": "AAAA", "media_type": "a/b"}]},
        {"part_kind": "retry-prompt", "content": "Again", "tool_name": "f", "tool_call_id": "c"},
    ]
    at = datetime(2026, 11, 20, tzinfo=UTC)
    entry = {"tenant": "", "family": "f", "kind": "message", "size_bytes": 1, "created_at": at}
    payload = encode({"kind": "request", "parts": parts}, limit=10_000, path="")
    ConversationEntry.objects.using(alias).create(entry_id="e", payload=payload, **entry)
    Conversation.objects.using(alias).create(
        session=_session(browser, "p"), family="f", head_id="e", revision="r", updated_at=at, document="{}"
    )
    (message,) = _page(browser, "Pydantic AI", "p").messages
    assert message.role == "user"
    assert message.parts == [
        Part(kind="text", text="Look"),
        Part(kind="file", text="https://a/b.png", name="image"),
        Part(kind="file", text="3 bytes", name="a/b"),
        Part(kind="result", text="Again", name="f", call_id="c", is_error=True),
    ]


def test_a_long_pydantic_history_is_paged_from_its_head(browser: Browser) -> None:
    alias = browser.database.alias
    DatabaseStateStore(alias).create_session("p", agent_type="pydantic_ai")
    at = datetime(2026, 11, 20, tzinfo=UTC)
    ConversationEntry.objects.using(alias).bulk_create(
        ConversationEntry(
            tenant="",
            family="f",
            kind="message",
            size_bytes=1,
            created_at=at,
            entry_id=f"e{number}",
            parent_id=f"e{number - 1}" if number > 1 else None,
            payload=encode(
                {"kind": "response", "parts": [{"part_kind": "text", "content": f"Word {number}"}]},
                limit=1_000,
                path="",
            ),
        )
        for number in range(1, 151)
    )
    Conversation.objects.using(alias).create(
        session=_session(browser, "p"),
        family="f",
        head_id="e150",
        branches=["e3"],
        revision="r",
        updated_at=at,
        document="{}",
    )
    page = _page(browser, "Pydantic AI", "p")
    assert [page.messages[0].number, page.messages[-1].number, page.total] == [111, 150, 150]
    early = _page(browser, "Pydantic AI", "p", first=1, limit=2)
    assert [each.parts for each in early.messages] == [
        [Part(kind="text", text="Word 1")],
        [Part(kind="text", text="Word 2")],
    ]
    left = _page(browser, "Pydantic AI", "p", thread="e3")
    assert (left.total, left.threads) == (3, ("current", "e3"))
    outline = _outline(browser, "Pydantic AI", "p")
    assert (outline.count, outline.is_partial) == (100, True)


# --- LangGraph ---------------------------------------------------------------------------------------


def _put(browser: Browser, channel: str, value: Any, saver: DjangoSaver | None = None) -> None:
    saver = saver or DjangoSaver(browser.database.alias)
    checkpoint = empty_checkpoint()
    version = saver.get_next_version(None, None)
    checkpoint["channel_values"] = {channel: value}
    checkpoint["channel_versions"] = {channel: version}
    config: Any = {"configurable": {"thread_id": "t", "checkpoint_ns": ""}}
    saver.put(config, checkpoint, {"source": "loop", "step": 1, "parents": {}}, {channel: version})


def test_calls_results_and_files_of_langchain_messages_are_read(browser: Browser) -> None:
    from langchain_core.messages import AIMessage, HumanMessage, ToolMessage

    picture = {"type": "image", "base64": "AAAA", "mime_type": "image/png"}
    call: Any = {"name": "f", "args": {"a": 1}, "id": "c"}
    _put(
        browser,
        "messages",
        [
            HumanMessage(content=["Look", picture]),
            AIMessage(
                content=[{"type": "tool_use", "id": "c", "name": "f", "input": {"a": 1}}], tool_calls=[call]
            ),
            ToolMessage("Broken", tool_call_id="c", name="f", status="error"),
            ("user", "And now?"),
            {"role": "assistant", "content": "Done."},
        ],
    )
    page = _page(browser, "LangGraph", "t")
    assert [(each.role, each.parts) for each in page.messages] == [
        ("user", [Part(kind="text", text="Look"), Part(kind="file", text="3 bytes", name="image/png")]),
        ("assistant", [Part(kind="call", text='{"a": 1}', name="f", call_id="c")]),
        ("tool", [Part(kind="result", text="Broken", name="f", call_id="c", is_error=True)]),
        ("user", [Part(kind="text", text="And now?")]),
        ("assistant", [Part(kind="text", text="Done.")]),
    ]
    assert {each.step for each in page.messages} == {1}
    assert _outline(browser, "LangGraph", "t").count == 5


def test_reading_a_thread_imports_and_builds_nothing_that_its_bytes_name(
    browser: Browser, monkeypatch: pytest.MonkeyPatch
) -> None:
    import ormsgpack

    # A call of os.system, and an object of a module that nobody has imported.
    evil = ormsgpack.Ext(0, ormsgpack.packb(["os", "system", "exit 1"]))
    unknown = ormsgpack.Ext(
        5, ormsgpack.packb(["antigravity", "Message", {"type": "human", "content": "Hi"}, "x"])
    )
    _put(browser, "messages", ["placeholder"])
    LangGraphValue.objects.using(browser.database.alias).update(blob=ormsgpack.packb([evil, unknown]))
    monkeypatch.setattr("os.system", lambda command: pytest.fail("it was called"))
    first, second = _page(browser, "LangGraph", "t").messages
    assert first.parts == [Part(kind="text", text="exit 1")]
    assert (second.role, second.parts) == ("user", [Part(kind="text", text="Hi")])
    assert "antigravity" not in sys.modules


@pytest.mark.thorough
@for_each(
    ("kind", "blob"),
    [("msgpack+aes", b"\x92\x01\x02"), ("msgpack", b"\x92\xc1"), ("json", b"[1]"), ("pickle", b"(lp0\n.")],
)
def test_bytes_that_cannot_be_decoded_are_shown_as_their_type_and_size(
    browser: Browser, kind: str, blob: bytes
) -> None:
    _put(browser, "messages", ["placeholder"])
    LangGraphValue.objects.using(browser.database.alias).update(type=kind, blob=blob)
    (message,) = _page(browser, "LangGraph", "t").messages
    assert message.parts == [Part(kind="other", text=f"{len(blob)} bytes", name=kind)]
    assert f"{kind} {len(blob)} bytes" in browser.page_of(_session(browser, "t")).text
    assert browser.list_of(Session).status == 200


def test_a_channel_whose_name_ends_with_messages_is_read(browser: Browser) -> None:
    _put(browser, "team_messages", [("user", "Hello")])
    assert "Hello" in browser.page_of(_session(browser, "t")).text


def test_a_thread_without_messages_shows_its_checkpoints(browser: Browser) -> None:
    _put(browser, "plan", ["a", "b"])
    page = browser.page_of(_session(browser, "t"))
    assert page.status == 200
    assert "The checkpoints that led to the newest message (1)" in page.text


def test_a_page_decodes_only_its_own_messages(browser: Browser) -> None:
    _put(browser, "messages", [("user", f"Word {number}") for number in range(1, 201)])
    page = _page(browser, "LangGraph", "t", first=50, limit=2)
    assert [each.number for each in page.messages] == [50, 51]
    assert page.messages[0].parts == [Part(kind="text", text="Word 50")]
    assert page.total == 200


def test_the_path_of_a_thread_is_bounded(browser: Browser) -> None:
    alias = browser.database.alias
    _put(browser, "messages", [("user", "Hello")])
    only = LangGraphCheckpoint.objects.using(alias).get()
    LangGraphCheckpoint.objects.using(alias).bulk_create(
        LangGraphCheckpoint(
            session_id=only.session_id,
            checkpoint_id=f"9-{number:04}",
            parent_id=f"9-{number - 1:04}" if number else only.checkpoint_id,
            versions=only.versions,
            type="msgpack",
            body=only.body,
            step=number + 2,
            created_at=only.created_at,
        )
        for number in range(150)
    )
    page = _page(browser, "LangGraph", "t")
    assert len(page.path) == 100
    assert page.path[0].step_id == "9-0149"
    # The step that added the message is not among them.
    assert page.messages[0].step is None
