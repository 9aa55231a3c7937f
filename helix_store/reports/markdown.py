"""A whole conversation as Markdown, for reviews and tickets."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Final

from helix_store.catalogue import Conversation
from helix_store.core.transcript import ConversationMessage, Part, parts_of, role_of
from helix_store.engine.database import Database
from helix_store.exceptions import SessionNotFound
from helix_store.reports.conversations import conversations_of
from helix_store.reports.times import moment
from helix_store.sessions.database.rows import session_with_id
from helix_store.stores import DatabaseStateStore

_AT_ONCE: Final = 100


def conversation_as_markdown(store: DatabaseStateStore, session_id: str) -> Iterator[str]:
    """Yield a session's messages as blocks of Markdown: the store's own messages, then the messages of each
    adapter.

    An adapter's threads follow each other. Messages are read in pages; if an adapter's message is unreadable,
    the text says so. Raises `SessionNotFound`, and `IntegrityFault` for an unreadable message of the store.
    """
    db = Database(store.alias, store.tenant)
    state = store.load_state(session_id)
    key = db.query(lambda: session_with_id(db, session_id).values_list("pk", flat=True).first())
    if state is None or key is None:
        raise SessionNotFound(session_id)
    yield f"# {_line(state.title or session_id)}"
    facts = {"Session": session_id, "Agent type": state.agent_type, "User": state.user_id}
    yield "\n".join(f"- {name}: {_line(value)}" for name, value in facts.items() if value)
    yield from _blocks(_own(store, session_id))
    for conversation in conversations_of(db, [key]):
        first = conversation.page(db, key, first=None, limit=1)
        if first is None:
            continue
        for thread in first.threads or (first.thread,):
            yield f"## {conversation.name}" + (f": {_line(thread)}" if thread else "")
            yield from _blocks(_of_adapter(db, key, conversation, thread))


def _own(store: DatabaseStateStore, session_id: str) -> Iterator[ConversationMessage]:
    for number, message in enumerate(store.iter_messages(session_id, chunk_size=_AT_ONCE), 1):
        yield ConversationMessage(number=number, role=role_of(message), parts=parts_of(message))


def _of_adapter(
    db: Database, key: int, conversation: Conversation, thread: str
) -> Iterator[ConversationMessage]:
    number = 1
    while page := conversation.page(db, key, first=number, limit=_AT_ONCE, thread=thread):
        yield from page.messages
        if not page.messages or page.messages[-1].number >= page.total:
            return
        number = page.messages[-1].number + 1


def _blocks(messages: Iterable[ConversationMessage]) -> Iterator[str]:
    for message in messages:
        at = "" if message.at is None else f" · {moment(message.at)}"
        yield f"### {message.number}. {_line(message.role)}{at}"
        if message.parts is None:
            yield "*This message cannot be read.*"
        else:
            yield from map(_block, message.parts)


def _block(part: Part) -> str:
    match part.kind:
        case "text":
            return part.text
        case "thinking":
            return "\n".join(f"> {line}".rstrip() for line in part.text.split("\n"))
        case "call":
            return f"**Call of {_code(part.name)}**\n\n{_fenced(part.text)}"
        case "result":
            kind = "Error" if part.is_error else "Result"
            of = f" of {_code(part.name)}" if part.name else ""
            return f"**{kind}{of}**\n\n{_fenced(part.text)}"
        case "file":
            return f"**File {_code(part.name)}**: {_code(part.text)}"
        case "other":
            return f"**{_code(part.name)}**\n\n{_fenced(part.text)}"


def _line(text: str) -> str:
    """Return a name on one line, so that it cannot begin another block."""
    return " ".join(text.split())


def _code(text: str) -> str:
    marks = "`" * _longer_than_any_run(text, least=1)
    return f"{marks} {_line(text)} {marks}" if "`" in text else f"{marks}{_line(text)}{marks}"


def _fenced(text: str) -> str:
    """Return text in a code block whose fence does not occur in the text."""
    fence = "`" * _longer_than_any_run(text, least=3)
    return f"{fence}\n{text}\n{fence}"


def _longer_than_any_run(text: str, *, least: int) -> int:
    """Return a run of backticks that is longer than any in the text."""
    return max([least, *(len(run) + 1 for run in re.findall("`+", text))])
