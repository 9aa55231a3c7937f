"""Faults of the viewer of conversations: what was cut, mixed up or hidden without a word."""

from __future__ import annotations

import argparse
import html
import json
import pkgutil
import re
from collections.abc import Iterator
from datetime import UTC, datetime
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from django import VERSION
from django.core.management import CommandError, call_command, load_command_class
from django.db import connections
from django.urls import reverse

from helix_store.conf import table_name
from helix_store.contrib.pydantic_ai.models import Conversation, ConversationEntry
from helix_store.core.payloads import encode
from helix_store.core.transcript import turns
from helix_store.exceptions import NotPermitted
from helix_store.items import ItemLog
from helix_store.management import commands
from helix_store.models import Item, Message, Session
from helix_store.stores import DatabaseLockManager, DatabaseStateStore
from tests.admin.conftest import Browser, browser_on
from tests.commands.running import run
from tests.databases import CommittedDatabase

LONG = "x" * 30_000 + "THE END"


@pytest.fixture
def browser(empty_db: CommittedDatabase) -> Iterator[Browser]:
    with browser_on(empty_db) as visitor:
        visitor.sign_in(superuser=True)
        yield visitor


def _session(browser: Browser, session_id: str) -> Session:
    return Session.objects.using(browser.database.alias).get(session_id=session_id)


def _say(browser: Browser, session_id: str, *messages: dict[str, Any]) -> Session:
    store = DatabaseStateStore(browser.database.alias)
    store.create_session(session_id, agent_type="a")
    store.append_messages(session_id, list(messages))
    return _session(browser, session_id)


def _show(browser: Browser, *arguments: str) -> str:
    ended = run(browser.database.alias, "helix_sessions", "show", *arguments)
    assert (ended.code, ended.err) == (0, "")
    return ended.out


def _download(browser: Browser, session: Session, **query: Any) -> str:
    response: Any = browser.client.get(
        reverse("admin:helix_store_session_conversation", args=[session.pk]), query
    )
    assert response.status_code == 200
    return b"".join(response.streaming_content).decode()


# --- V1: no cap hides what was asked for


@pytest.mark.thorough
def test_a_branch_that_sorts_before_main_hides_neither_main_nor_itself(browser: Browser) -> None:
    for number in range(70):
        ItemLog("many", f"a-{number:02}", using=browser.database.alias).append(
            [{"role": "user", "content": f"branch {number}"}]
        )
    ItemLog("many", "main", using=browser.database.alias).append([{"role": "user", "content": "of main"}])
    session = _session(browser, "many")
    page = browser.page_of(session)
    assert "of main" in page.text
    assert "More of 71 threads" in page.text
    assert "branch 69" in browser.page_of(session, section="conversation", thread="a-69").text
    following = re.search(r'href="([^"]*threads=[^"]*)#section"', page.html)
    assert following is not None
    assert "a-69" in browser.open(html.unescape(following[1])).text
    printed = _show(browser, "many", "--messages", "5")
    assert "of main" in printed
    assert "and 20 more; --markdown prints all of them" in printed
    assert all(f"branch {number}\n" in _show(browser, "many", "--markdown") for number in (0, 50, 69))
    downloaded = json.loads(_download(browser, session, format="json"))
    assert len(downloaded["conversations"]) == 72  # with the store's own, which is empty


# --- V2: exports are whole


def _pydantic(browser: Browser, *texts: str) -> None:
    alias = browser.database.alias
    DatabaseStateStore(alias).create_session("long", agent_type="a")
    at = datetime(2026, 11, 20, tzinfo=UTC)
    for number, text in enumerate(texts):
        message = {"kind": "response", "parts": [{"part_kind": "text", "content": text}]}
        ConversationEntry.objects.using(alias).create(
            tenant="",
            family="f",
            kind="message",
            size_bytes=1,
            created_at=at,
            entry_id=f"e{number}",
            parent_id=f"e{number - 1}" if number else None,
            payload=encode(message, limit=10**6, path=""),
        )
    Conversation.objects.using(alias).create(
        session=_session(browser, "long"),
        family="f",
        head_id=f"e{len(texts) - 1}",
        revision="r",
        updated_at=at,
        document="{}",
    )


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["items", "entries", "own"])
def test_commands_and_downloads_print_whole_messages(browser: Browser, kind: str) -> None:
    if kind == "items":
        log = ItemLog("long", "main", using=browser.database.alias)
        log.append([{"role": "user", "content": text} for text in (LONG, "short")])
    elif kind == "entries":
        _pydantic(browser, LONG, "short")
    else:
        _say(browser, "long", {"role": "user", "content": LONG}, {"role": "user", "content": "short"})
    session = _session(browser, "long")
    for text in (
        _show(browser, "long", "--markdown"),
        _show(browser, "long", "--messages", "5", "--wide"),
        _show(browser, "long", "--messages", "5", "--format", "json"),
        _download(browser, session, format="markdown"),
        _download(browser, session, format="json"),
    ):
        assert LONG in text
        assert "short" in text
    newest = json.loads(_show(browser, "long", "--messages", "1", "--format", "json"))
    listed = [each["messages"] for each in newest["conversations"].values()] or [newest["messages"]]
    assert LONG not in json.dumps(listed[0])
    assert len(listed[0]) == 1
    page = browser.page_of(session, section="conversation")
    assert "THE END" not in page.text
    links = re.findall(r'href="([^"]*)">It is longer: see the whole message', page.html)
    assert len(links) == 1
    response: Any = browser.client.get(html.unescape(links[0]))
    assert LONG in b"".join(response.streaming_content).decode()


def test_the_page_of_a_message_links_to_all_of_it(browser: Browser) -> None:
    alias = browser.database.alias
    _say(browser, "own", {"role": "user", "content": LONG})
    ItemLog("items", "main", using=alias).append([{"role": "user", "content": LONG}])
    _pydantic(browser, LONG)
    for row in (
        Message.objects.using(alias).get(),
        Item.objects.using(alias).get(),
        ConversationEntry.objects.using(alias).get(),
    ):
        page = browser.page_of(row)
        assert "THE END" not in page.text
        (address,) = re.findall(r'href="([^"]*payload.json)"', page.html)
        assert LONG in browser.open(address).html


def test_a_download_of_a_damaged_conversation_contains_the_rest(browser: Browser) -> None:
    session = _say(
        browser, "damaged", *({"role": "user", "content": text} for text in ("one", "two", "three"))
    )
    Message.objects.using(browser.database.alias).filter(sequence=2).update(payload="{")
    for kind in ("markdown", "json"):
        text = _download(browser, session, format=kind)
        assert "one" in text
        assert "three" in text
    ended = run(browser.database.alias, "helix_sessions", "show", "damaged", "--markdown")
    assert (ended.code, "three" in ended.out) == (1, True)
    ended = run(
        browser.database.alias, "helix_sessions", "show", "damaged", "--messages", "3", "--format", "json"
    )
    assert ended.code == 1
    assert [each["message"] is None for each in ended.data["messages"]] == [False, True, False]
    assert ended.data["problems"]


def test_a_long_conversation_is_read_a_few_messages_at_a_time(browser: Browser) -> None:
    log = ItemLog("long", "main", using=browser.database.alias)
    log.append({"role": "user", "content": f"message {number} {'y' * 1_000}"} for number in range(450))
    for options in (["--markdown"], ["--messages", "450", "--wide"]):
        text = _show(browser, "long", *options)
        assert [int(each) for each in re.findall(r"message (\d+) y", text)] == list(range(450))


# --- V4: results stand at their calls


def _call(call_id: str, *cities: str) -> dict[str, Any]:
    calls = [{"id": call_id, "function": {"name": "f", "arguments": city}} for city in cities]
    return {"role": "assistant", "tool_calls": calls}


def _result(call_id: str, text: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call_id, "content": text}


def _item(city: str) -> dict[str, Any]:
    return {"role": "assistant", "type": "function_call", "call_id": "", "name": "f", "arguments": city}


USER = {"role": "user", "content": "And now?"}


def test_results_with_repeated_ids_stand_at_the_nearest_open_call() -> None:
    table: dict[str, tuple[list[dict[str, Any]], dict[str, str | None]]] = {
        "an interrupted call": (
            [_call("call_0", "Oslo"), USER, _call("call_0", "Cairo"), _result("call_0", "hot")],
            {"Oslo": None, "Cairo": "hot"},
        ),
        "an interrupted call, no message between": (
            [_call("", "Oslo"), _call("", "Cairo"), _result("", "hot")],
            {"Oslo": None, "Cairo": "hot"},
        ),
        "calls of one message": (
            [_call("", "Oslo", "Cairo"), _result("", "cold"), _result("", "hot")],
            {"Oslo": "cold", "Cairo": "hot"},
        ),
        "the first of two calls": (
            [_call("", "Oslo", "Cairo"), _result("", "cold")],
            {"Oslo": "cold", "Cairo": None},
        ),
        "calls that are items": (
            [_item("Oslo"), _item("Cairo"), _result("", "cold"), _result("", "hot")],
            {"Oslo": "cold", "Cairo": "hot"},
        ),
        "one after another": (
            [_call("c", "Oslo"), _result("c", "cold"), _call("c", "Cairo"), _result("c", "hot")],
            {"Oslo": "cold", "Cairo": "hot"},
        ),
        "an interrupted call before two others": (
            [
                _call("c", "Rome"),
                USER,
                _call("c", "Oslo", "Cairo"),
                _result("c", "cold"),
                _result("c", "hot"),
            ],
            {"Rome": None, "Oslo": "cold", "Cairo": "hot"},
        ),
        "a function without ids": (
            [
                {"role": "assistant", "function_call": {"name": "f", "arguments": "Oslo"}},
                {"role": "function", "name": "f", "content": "cold"},
            ],
            {"Oslo": "cold"},
        ),
    }
    wrong = []
    for name, (messages, expected) in table.items():
        found = {
            own.part.text: None if own.result is None else own.result.text
            for turn in turns(enumerate(messages, 1))
            for own in turn.parts
            if own.part.kind == "call"
        }
        if found != expected:
            wrong.append(f"{name}: {found}")
    assert wrong == []


# --- V5 and V16: a long result hides no other, and its id may follow its content


def test_a_long_result_hides_neither_another_nor_its_own_call(browser: Browser) -> None:
    calls: list[dict[str, Any]] = [
        {"type": "tool_use", "id": name, "name": name, "input": {}} for name in ("one", "two")
    ]
    results = [
        {"type": "tool_result", "content": "z" * 300_000, "tool_use_id": "one"},
        {"type": "tool_result", "content": "the second", "tool_use_id": "two"},
    ]
    session = _say(
        browser,
        "two",
        {"role": "assistant", "content": calls},
        {"role": "user", "content": results},
    )
    page = browser.page_of(session, section="conversation")
    first, second = page.html.split('class="helix-call"')[1:]
    assert "zzz" in first
    assert "It is longer: see the whole message." in first
    assert "the second" in second
    assert 'id="message-2"' not in page.html


def test_a_message_that_is_too_long_for_a_page_is_told(
    browser: Browser, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("helix_store.reports.payloads.PAGE_BYTES", 20_000)
    call = {"type": "tool_use", "id": "one", "name": "one", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "one", "content": "z" * 30_000}
    lost = {"type": "tool_result", "tool_use_id": "two", "content": "lost"}
    session = _say(
        browser, "two", {"role": "assistant", "content": [call]}, {"role": "user", "content": [result, lost]}
    )
    page = browser.page_of(session, section="conversation")
    assert "lost" not in page.text
    # The message is not left out, although its only part that was read stands at its call.
    _, _, block = page.html.partition('id="message-2"')
    assert "It is longer: see the whole message." in block


# --- V16: files


def test_the_data_of_a_file_is_shown_as_its_size(browser: Browser) -> None:
    data = "QUJDREVGR0hJSktMTU5PUFFSU1RVVldYWVo0" * 100
    url = f"data:image/png;base64,{data}"
    session = _say(
        browser,
        "files",
        {"role": "model", "parts": [{"inlineData": {"mimeType": "image/png", "data": data}}]},
        {"role": "assistant", "type": "image_generation_call", "result": data},
        {
            "role": "tool",
            "type": "computer_call_output",
            "call_id": "c",
            "output": {"image_url": url, "type": "computer_screenshot"},
        },
        {
            "role": "tool",
            "tool_call_id": "d",
            "content": [{"type": "image", "data": data, "mimeType": "image/png"}],
        },
    )
    page = browser.page_of(session, section="conversation")
    printed = _show(browser, "files", "--markdown")
    assert data[:50] not in page.html + printed
    assert page.text.count("2,700 bytes") == printed.count("2,700 bytes") == 4


# --- V17: rows that nothing reads


def test_a_session_with_rows_that_no_conversation_reads_names_them(browser: Browser) -> None:
    alias = browser.database.alias
    ItemLog("other", "unknown-lane", using=alias).append([{"a": 1}] * 3)
    gone = table_name("gone_app")
    with connections[alias].cursor() as cursor:
        cursor.execute(f"CREATE TABLE {gone} (session_id bigint)")
        cursor.execute(f"INSERT INTO {gone} VALUES (%s), (%s)", [_session(browser, "other").pk] * 2)
    try:
        page = browser.page_of(_session(browser, "other"), section="conversation")
        printed = _show(browser, "other", "--messages", "3")
        report = json.loads(_show(browser, "other", "--format", "json"))
        markdown = _show(browser, "other", "--markdown")
    finally:
        with connections[alias].cursor() as cursor:
            cursor.execute(f"DROP TABLE {gone}")
    assert "Nobody has said anything yet" not in page.text
    assert "items: 3" in page.text
    assert f"{gone}: 2" in page.text
    assert report["unread_rows"] == {"items": 3, gone: 2}
    assert re.search(r"items +3", printed)
    assert "gone\\_app: 2" in markdown
    DatabaseStateStore(alias).create_session("empty", agent_type="a")
    assert "Nobody has said anything yet" in browser.page_of(_session(browser, "empty")).text


# --- S7: no message can look like another one in Markdown


def test_a_message_cannot_forge_a_transcript(browser: Browser) -> None:
    forged = (
        "Hi\n\n### 2. assistant\n\nApproved.\n\n```\n</details><script>alert(1)</script>\n"
        "[click](javascript:alert(1))\n# Title\n"
    )
    ItemLog("forged", "messages/# lane\n# of", using=browser.database.alias).append(
        [
            {
                "message": {
                    "role": "user\n# x",
                    "content": [
                        {"text": forged},
                        {"toolUse": {"toolUseId": "`", "name": "a`b\n# c", "input": forged}},
                    ],
                }
            }
        ]
    )
    session = _session(browser, "forged")
    session.__class__.objects.using(browser.database.alias).filter(pk=session.pk).update(user_id="[u](x)<b>")
    text = _show(browser, "forged", "--markdown")
    outside, fence = [], ""
    for line in text.splitlines():
        marks = re.match("`{3,}", line)
        if fence:
            fence = "" if line == fence else fence
        elif marks is not None:
            fence = marks[0]
            assert line == fence
        else:
            outside.append(line)
    assert fence == ""
    headings = [line for line in outside if line.startswith("#")]
    assert headings[:2] == ["# forged", "## Strands Agents: messages/\\# lane \\# of"]
    assert [re.sub(" · .*", "", line) for line in headings[2:]] == ["### 1. user \\# x"]
    assert not re.search(r"(?<!\\)[\[<]", "".join(outside).replace("`<b>`", ""))
    assert "Approved." not in outside


def test_markdown_shows_invisible_characters(browser: Browser) -> None:
    hidden = "pay\u200b\u202e\x1b[2J"
    message = {
        "role": f"user{hidden}",
        "content": [
            {"text": f"\tline\n{hidden}"},
            {"toolUse": {"toolUseId": hidden, "name": hidden, "input": {"to": hidden}}},
            {"unknown": hidden},
        ],
    }
    ItemLog("hidden", f"messages/{hidden}", using=browser.database.alias).append([{"message": message}])
    text = _show(browser, "hidden", "--markdown")
    assert re.findall("[\u200b\u202e\x1b]", text) == []
    assert "\tline\npay\\u200b\\u202e\\u001b[2J" in text
    assert text.count("u202e") >= 6


# --- V11: ids that begin with a dash


def test_an_id_that_begins_with_a_dash_works_in_a_command(browser: Browser) -> None:
    for session_id in ("-home-me-app~0123", "-v-3", "-1"):
        _say(browser, session_id, {"role": "user", "content": "Hello"})
        assert "Hello" in _show(browser, session_id, "--messages", "1")
        output = StringIO()
        options = ["--database", browser.database.alias, "--messages", "1", "--", session_id]
        call_command("helix_sessions", "show", *options, stdout=output)
        assert "Hello" in output.getvalue()
    ended = run(browser.database.alias, "helix_checkpoints", "list", "-home-me-app~0123")
    assert (ended.code, ended.err) == (0, "")
    ended = run(browser.database.alias, "helix_sessions", "list", "--root", "-home-me-app~0123")
    assert ended.code == 0
    assert "-home-me-app~0123" in ended.out


def _free_arguments(parser: argparse.ArgumentParser, path: list[str]) -> Iterator[tuple[list[str], Any]]:
    """Yield each argument of a command that takes any text, with the sub-command and what it requires."""
    parts = [each for each in parser._actions if isinstance(each, argparse._SubParsersAction)]
    for part in parts:
        for name, inner in part.choices.items():
            yield from _free_arguments(inner, [*path, name])
    if parts:
        return
    for tested in parser._actions:
        if tested.type is not None or tested.choices is not None or tested.nargs not in (None, "?"):
            continue
        arguments = list(path)
        for each in parser._actions:
            value = DASHED if each is tested else next(iter(each.choices or ["5"]))
            if each.option_strings and (each is tested or each.required):
                arguments += [each.option_strings[0], value]
            elif not each.option_strings and (each is tested or each.nargs != "?"):
                arguments.append(value)
        yield arguments, tested


DASHED = "-home-me-app~0123"


@pytest.mark.thorough
def test_every_argument_of_every_command_takes_an_id_that_begins_with_a_dash() -> None:
    wrong, tested = [], 0
    for module in pkgutil.iter_modules(commands.__path__):
        command = load_command_class("helix_store", module.name)
        for arguments, action in _free_arguments(command.create_parser("manage.py", module.name), []):
            tested += 1
            try:
                parsed = vars(command.create_parser("manage.py", module.name).parse_args(arguments))
            except CommandError as exc:
                wrong.append(f"{module.name} {arguments}: {exc}")
                continue
            if parsed[action.dest] not in (DASHED, [DASHED]):
                wrong.append(f"{module.name} {arguments}: {parsed[action.dest]}")
    assert wrong == []
    assert tested > 60


# --- U7: the admin's own templates


def test_breadcrumbs_have_the_form_of_this_django(browser: Browser) -> None:
    session = _say(browser, "s", USER)
    of_django = browser.list_of(Session)
    links = re.findall(r'class="object-tools">.*?</ul>', of_django.html, re.DOTALL)
    side_lists = re.findall(r'href="([^"]*)"', "".join(links))
    pages = [browser.page_of(session), browser.open(reverse("admin:helix_store_usageentry_report"))]
    pages += [browser.open(url) for url in side_lists]
    assert len(pages) > 3
    for page in [of_django, *pages]:
        (found,) = re.findall(r'<(ol|div) class="breadcrumbs">(.*?)</\1>', page.html, re.DOTALL)
        tag, inner = found
        assert tag == ("ol" if VERSION >= (6, 1) else "div")
        crumbs = re.findall("<li[^>]*>.*?</li>", inner, re.DOTALL) if tag == "ol" else inner.split("&rsaquo;")
        assert len(crumbs) >= 3
        if tag == "ol":
            assert re.sub("<li[^>]*>.*?</li>", "", inner, flags=re.DOTALL).strip() == ""
            assert inner.count('aria-current="page"') == 1


# --- U13


def test_a_command_prints_objects_as_json(browser: Browser) -> None:
    DatabaseStateStore(browser.database.alias).create_session("s", agent_type="a")
    ended = run(browser.database.alias, "helix_sessions", "post", "s", "Hé")
    assert '{"role": "user", "content": "Hé"}' in ended.out


def test_an_interrupt_of_a_session_without_a_worker_says_so(browser: Browser) -> None:
    alias = browser.database.alias
    DatabaseStateStore(alias).create_session("s", agent_type="a")
    ended = run(alias, "helix_sessions", "interrupt", "s", "--format", "json")
    assert ended.data["has_worker"] is False
    lock = DatabaseLockManager(alias).acquire("s", owner="worker")
    assert lock is not None
    with lock:
        ended = run(alias, "helix_sessions", "interrupt", "s", "--format", "json")
    assert ended.data["has_worker"] is True


def test_an_export_of_nothing_leaves_no_file(browser: Browser, tmp_path: Path) -> None:
    alias = browser.database.alias
    for options in (["--session", "unknown"], ["--tenant", "unknown"]):
        ended = run(alias, "helix_export", *options, "--output", str(tmp_path / "file"))
        assert ended.code == 1
        assert "was not written" in ended.err
        assert list(tmp_path.iterdir()) == []
    DatabaseStateStore(alias).create_session("known", agent_type="a")
    assert run(alias, "helix_export", "--session", "known", "--output", str(tmp_path / "file")).code == 0
    assert [each.name for each in tmp_path.iterdir()] == ["file"]


def test_the_missing_permission_is_named() -> None:
    error = NotPermitted("c", "permission", "shop.refund")
    assert "shop.refund" in str(error)
    assert error.permission == "shop.refund"


# --- V16: dates and repeated keys


def test_a_period_at_the_end_of_the_calendar_is_refused(browser: Browser) -> None:
    address = reverse("admin:helix_store_usageentry_report")
    for since, until in (
        ("9999-12-01", "9999-12-31"),
        ("0001-01-01", "0001-01-02"),
        ("9999-12-31", "0001-01-01"),
    ):
        page = browser.open(address, since=since, until=until)
        assert page.status == 200
        assert "Cost" not in page.text or "outside the calendar" in page.text


def test_an_input_with_a_repeated_key_is_refused(browser: Browser) -> None:
    store = DatabaseStateStore(browser.database.alias)
    store.create_session("s", agent_type="a")
    store.add_pending_tool_calls("s", {"c": {"tool_name": "book", "approval_id": "x", "editable": True}})
    for arguments in (
        ["approve", "--input", '{"a": 1, "a": 2}'],
        ["result", '{"a": {"b": 1, "b": 2}}'],
    ):
        ended = run(browser.database.alias, "helix_sessions", "answer", "s", *arguments)
        assert ended.code != 0
        assert "is repeated" in ended.err
    assert store.take_tool_results("s") == {}


# --- S5: what is shown is bounded, also if it is deep


def test_the_download_of_a_deep_message_is_not_much_longer_than_the_message(browser: Browser) -> None:
    """Indented, it was two hundred times as long."""
    content: Any = list(range(100, 900)) * 60
    for _ in range(180):
        content = [content]
    session = _say(browser, "deep", {"role": "user", "content": content})
    text = _download(browser, session, number=1)
    assert json.loads(text)["content"] == content
    assert len(text) < 300_000
