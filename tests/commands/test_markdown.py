"""``helix_sessions show --markdown`` prints a whole conversation as Markdown."""

from __future__ import annotations

import pytest

from helix_store.contrib.openai_agents import DjangoSession
from helix_store.core.transcript import Part
from helix_store.engine import expressions as paging
from helix_store.items import ItemLog
from helix_store.models import Item, Message
from helix_store.reports import conversations as markdown
from helix_store.reports.payloads import moment
from helix_store.stores import DatabaseStateStore
from tests.commands.running import run
from tests.databases import CommittedDatabase


def shown(database: CommittedDatabase, session_id: str) -> str:
    ended = run(
        database.alias, "helix_sessions", "show", session_id, "--markdown", "--tenant", database.tenant
    )
    assert (ended.code, ended.err) == (0, "")
    return ended.out


def test_the_messages_of_the_store_with_calls_and_results(committed_db: CommittedDatabase) -> None:
    store = DatabaseStateStore(committed_db.alias, tenant=committed_db.tenant)
    store.create_session("trip", agent_type="planner", title="A trip\n# to Kyoto", user_id="ada")
    call = {"id": "c", "function": {"name": "find", "arguments": '{"to": "Kyoto"}'}}
    store.append_messages(
        "trip",
        [
            {"role": "user", "content": "To *Kyoto*,\nplease."},
            {"role": "assistant", "content": "", "thinking": "Hm.\nA train?", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c", "name": "find", "content": "10:03\n```\n11:00"},
        ],
    )
    stored = Message.objects.using(committed_db.alias).filter(session__tenant=committed_db.tenant)
    # One call stores all messages at one moment.
    (at,) = {moment(each) for each in stored.values_list("created_at", flat=True)}
    assert shown(committed_db, "trip") == (
        "# A trip \\# to Kyoto\n\n"
        "- Session: trip\n- Agent type: planner\n- User: ada\n\n"
        f"### 1. user · {at}\n\n```\nTo *Kyoto*,\nplease.\n```\n\n"
        f"### 2. assistant · {at}\n\n**Thinking**\n\n```\nHm.\nA train?\n```\n\n"
        '**Call of `find`** (`c`)\n\n```\n{"to": "Kyoto"}\n```\n\n'
        f"### 3. tool · {at}\n\n**Result of `find`** (`c`)\n\n````\n10:03\n```\n11:00\n````\n\n"
    )


async def test_each_thread_of_an_adapter_has_a_heading(committed_db: CommittedDatabase) -> None:
    from helix_store.engine.async_twins import in_thread

    session = DjangoSession("branched", using=committed_db.alias, tenant=committed_db.tenant)
    await session.add_items([{"role": "user", "content": "One"}, {"role": "user", "content": "Two"}])
    await session.create_branch_from_turn(2, "other")
    await session.add_items([{"role": "user", "content": "Three"}])
    text = await in_thread(lambda: shown(committed_db, "branched"))
    main, other = text.split("## OpenAI Agents SDK: ")[1:]
    assert [main.startswith("main"), "Two" in main, "Three" in main] == [True, True, False]
    assert [other.startswith("other"), "One" in other, "Three" in other] == [True, True, True]


def test_a_long_conversation_is_printed_once_and_whole(
    committed_db: CommittedDatabase, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(paging, "_CHARACTERS", 1)
    log = ItemLog("long", "main", using=committed_db.alias, tenant=committed_db.tenant)
    log.append([{"role": "user", "content": f"message {number}"} for number in range(5)])
    damaged = Item.objects.using(committed_db.alias).filter(session__tenant=committed_db.tenant)
    damaged.filter(pk=damaged.order_by("pk")[2].pk).update(payload="{")
    lines = shown(committed_db, "long").splitlines()
    assert sum(line.startswith("### ") for line in lines) == 5
    texts = [line for line in lines if line.startswith(("message", "*This"))]
    assert texts == [
        "message 0",
        "message 1",
        "*This message cannot be read.*",
        "message 3",
        "message 4",
    ]


@pytest.mark.parametrize(
    ("part", "block"),
    [
        (Part(kind="result", text="no", is_error=True), "**Error**\n\n```\nno\n```"),
        (Part(kind="file", text="a.png", name="image"), "**File `image`**: `a.png`"),
        (Part(kind="other", text="{}", name="a`b"), "**`` a`b ``**\n\n```\n{}\n```"),
    ],
)
def test_a_part_is_a_block(part: Part, block: str) -> None:
    assert markdown._block(part) == block


def test_an_unknown_session_is_a_problem(committed_db: CommittedDatabase) -> None:
    ended = run(committed_db.alias, "helix_sessions", "show", "nothing", "--markdown", "--tenant", "t")
    assert (ended.code, ended.out) == (1, "")


def test_characters_that_a_terminal_obeys_are_escaped(committed_db: CommittedDatabase) -> None:
    store = DatabaseStateStore(committed_db.alias, tenant=committed_db.tenant)
    store.create_session("s", agent_type="a")
    store.append_messages("s", [{"role": "user", "content": "a\tb\x1b[31m"}])
    assert "a\tb\\u001b[31m" in shown(committed_db, "s")
