"""Nothing that a message contains is lost on the page, in the Markdown and in the JSON."""

from __future__ import annotations

import html
import json
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from io import StringIO
from typing import Any

import pytest
from django.core.management import call_command
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
from langgraph.checkpoint.base import empty_checkpoint

from helix_store.contrib.agent_framework.catalogue import MESSAGES
from helix_store.contrib.claude_agent.models import ClaudeSession
from helix_store.contrib.google_adk.catalogue import EVENTS
from helix_store.contrib.langgraph import DjangoSaver
from helix_store.contrib.pydantic_ai.models import Conversation, ConversationEntry
from helix_store.core.payloads import encode
from helix_store.items import ItemLog
from helix_store.models import Session
from helix_store.stores import DatabaseStateStore
from tests.admin.conftest import Browser, browser_on
from tests.databases import CommittedDatabase
from tests.frameworks.message_shapes import BYTES, PNG, SHAPES, Shapes

_FORMAT = frozenset({"type", "part_kind", "kind", "role"})
"""The fields whose values are words of a format, which decide how the others are shown."""

_AT = datetime(2026, 11, 20, tzinfo=UTC)
_CLASSES = {"human": HumanMessage, "ai": AIMessage, "tool": ToolMessage, "system": SystemMessage}


def strings(value: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """Yield each string of a message, and of JSON in a string, with its place."""
    if isinstance(value, dict):
        for name, each in value.items():
            if not (name in _FORMAT and isinstance(each, str)):
                yield from strings(each, f"{path}/{name}")
    elif isinstance(value, list):
        for index, each in enumerate(value):
            yield from strings(each, f"{path}/{index}")
    elif isinstance(value, str):
        if value.startswith("{") and value != "{}":
            yield from strings(json.loads(value), path)
        else:
            yield path, value


def _is_told(text: str, interface: str) -> bool:
    """Return whether an interface shows a string, or says how long the content of a file is."""
    if text in (BYTES, PNG):
        return "8 bytes" in interface or text in interface
    if text in ("error", "success"):
        # The status of a result, which is shown as an error or not.
        return "Error" in interface or "result" in interface.lower()
    return text in interface


def _lane(lane: str) -> Callable[[str, Shapes], None]:
    def write(alias: str, shapes: Shapes) -> None:
        ItemLog("shapes", lane, using=alias).append(list(shapes.values()))

    return write


def _own(alias: str, shapes: Shapes) -> None:
    store = DatabaseStateStore(alias)
    store.create_session("shapes", agent_type="a")
    store.append_messages("shapes", list(shapes.values()))


def _claude(alias: str, shapes: Shapes) -> None:
    _lane("")(alias, shapes)
    session = Session.objects.using(alias).get(session_id="shapes")
    ClaudeSession.objects.using(alias).create(
        session=session, tenant="", project_key="p", claude_session_id="s"
    )


def _pydantic(alias: str, shapes: Shapes) -> None:
    DatabaseStateStore(alias).create_session("shapes", agent_type="a")
    entry = {"tenant": "", "family": "f", "kind": "message", "size_bytes": 1, "created_at": _AT}
    for number, shape in enumerate(shapes.values(), 1):
        parent = f"e{number - 1}" if number > 1 else None
        payload = encode(shape, limit=100_000, path="")
        ConversationEntry.objects.using(alias).create(
            entry_id=f"e{number}", parent_id=parent, payload=payload, **entry
        )
    Conversation.objects.using(alias).create(
        session=Session.objects.using(alias).get(session_id="shapes"),
        family="f",
        head_id=f"e{len(shapes)}",
        revision="r",
        updated_at=_AT,
        document="{}",
    )


def _langgraph(alias: str, shapes: Shapes) -> None:
    saver = DjangoSaver(alias)
    checkpoint = empty_checkpoint()
    version = saver.get_next_version(None, None)
    checkpoint["channel_values"] = {
        "messages": [_CLASSES[shape["type"]](**shape) for shape in shapes.values()]
    }
    checkpoint["channel_versions"] = {"messages": version}
    config: Any = {"configurable": {"thread_id": "shapes", "checkpoint_ns": ""}}
    saver.put(config, checkpoint, {"source": "loop", "step": 1, "parents": {}}, {"messages": version})


WRITERS: dict[str, Callable[[str, Shapes], None]] = {
    "": _own,
    "OpenAI Agents SDK": _lane("main"),
    "Claude Agent SDK": _claude,
    "Pydantic AI": _pydantic,
    "Strands Agents": _lane("messages/agent"),
    "Google ADK": _lane(f"{EVENTS}app"),
    "Microsoft Agent Framework": _lane(f"{MESSAGES}source"),
    "LangGraph": _langgraph,
}


def _show(alias: str, *options: str) -> str:
    output = StringIO()
    call_command("helix_sessions", "show", "shapes", *options, "--database", alias, stdout=output)
    return output.getvalue()


@pytest.fixture
def browser(empty_db: CommittedDatabase) -> Iterator[Browser]:
    with browser_on(empty_db) as visitor:
        visitor.sign_in(superuser=True)
        yield visitor


@pytest.mark.thorough
def test_every_string_of_every_shape_is_on_the_page_in_the_markdown_and_in_the_json(browser: Browser) -> None:
    alias = browser.database.alias
    assert sum(map(len, SHAPES.values())) >= 40
    lost = []
    for framework, shapes in SHAPES.items():
        Session.objects.using(alias).all().delete()
        WRITERS[framework](alias, shapes)
        session = Session.objects.using(alias).get(session_id="shapes")
        page = browser.page_of(session, section="conversation", of=framework)
        found = {
            "page": html.unescape(page.html),
            "markdown": _show(alias, "--markdown"),
            "json": _show(alias, "--messages", "1000", "--format", "json"),
        }
        assert page.status == 200
        lost += [
            f"{framework or 'own'}: {name} {path} {text!r} is not in the {interface}"
            for name, shape in shapes.items()
            for path, text in strings(shape)
            for interface, shown in found.items()
            if not _is_told(text, shown)
        ]
        lost += [
            f"{framework or 'own'}: {name} {path} {text!r} is in the parts of no message"
            for name, shape in shapes.items()
            for path, text in strings(shape)
            if not _is_told(text, _parts(found["json"]))
        ]
    if lost:
        pytest.fail("\n".join(lost))


def _parts(document: str) -> str:
    """Return the JSON of a report without the messages as they are stored."""
    report = json.loads(document)
    for conversation in report["conversations"].values():
        for message in conversation["messages"]:
            message.pop("stored", None)
    return json.dumps(report, ensure_ascii=False).replace('\\"', '"')
