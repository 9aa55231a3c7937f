"""Conversations as messages: the chain of entries that ends at the head, or at the tip of a branch."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from datetime import datetime
from typing import Any, Final

from django.db.models import Model

from helix_store.catalogue import ConversationPage, Outline
from helix_store.contrib.pydantic_ai.models import Conversation, ConversationEntry
from helix_store.core.moments import as_utc
from helix_store.core.transcript import ConversationMessage, parts_of
from helix_store.engine.database import Database
from helix_store.engine.expressions import for_keys, list_parameter, looked_up
from helix_store.engine.statement import Statement, table
from helix_store.reports.payloads import PREVIEW_SOURCE, read_start, start_text

_MOST_COUNTED: Final = 100
"""The maximum number of entries of a conversation that a list of sessions reads."""

_MOST_NUMBERED: Final = 10_000
"""The maximum number of entries that a page walks to reach the oldest one."""

_MAIN: Final = "current"
_SOURCE: Final = 12_000
_RESULTS: Final = frozenset({"tool-return", "builtin-tool-return", "retry-prompt"})
_FILES: Final = {
    "image-url": "image",
    "audio-url": "audio",
    "video-url": "video",
    "document-url": "document",
    "binary": "file",
    "uploaded-file": "file",
}
_CONVERSATION: Final = table(Conversation)
_ENTRY: Final = table(ConversationEntry)

_OF_SESSIONS: Final = f"""
    SELECT c.session_id, c.tenant, e.id, e.parent_id, 1 AS depth FROM {_CONVERSATION} AS c
    JOIN {_ENTRY} AS e ON e.tenant = c.tenant AND e.entry_id = c.head_id WHERE c.session_id IN %(keys)s"""
_OF_HEAD: Final = f"""
    SELECT 0 AS session_id, tenant, id, parent_id, 1 AS depth FROM {_ENTRY}
    WHERE tenant = %(tenant)s AND entry_id = %(head)s"""
_BEFORE: Final = looked_up(ConversationEntry, "e", "e.tenant = h.tenant AND e.entry_id = h.parent_id")
_STARTS: Final = (
    "substr(e.payload, 1, %(characters)s)",
    "CAST(substr(e.payload, 1, %(characters)s) AS BLOB)",
)


def _statement(heads: str, found: Callable[[str], str]) -> Statement:
    """Return a statement that walks from each head to its oldest entry and numbers the entries by depth.
    ``found`` takes the SQL of the start of an entry.
    """

    def text(before: str, start: str) -> str:
        return f"""
        WITH RECURSIVE history AS (
            {heads}
            UNION ALL
            SELECT h.session_id, h.tenant, e.id, e.parent_id, h.depth + 1
            FROM history AS h {before} WHERE h.depth < %(most)s
        )
        {found(start)}"""

    return Statement(*map(text, _BEFORE, _STARTS))


def _newest(start: str) -> str:
    return f"""
        SELECT h.session_id, (SELECT max(depth) FROM history WHERE session_id = h.session_id), e.id,
            e.created_at, {start}
        FROM history AS h JOIN {_ENTRY} AS e ON e.id = h.id WHERE h.depth = 1"""


def _page(start: str) -> str:
    return f"""
        SELECT t.total, t.total - h.depth + 1 AS number, e.id, e.created_at, {start}
        FROM (SELECT max(depth) AS total FROM history) AS t
        LEFT JOIN history AS h ON t.total - h.depth + 1
            BETWEEN coalesce(CAST(%(first)s AS bigint), t.total - %(limit)s + 1)
            AND coalesce(CAST(%(first)s AS bigint), t.total - %(limit)s + 1) + %(limit)s - 1
        LEFT JOIN {_ENTRY} AS e ON e.id = h.id ORDER BY number"""


_OUTLINES: Final = for_keys(_statement(_OF_SESSIONS, _newest))
_PAGE: Final = _statement(_OF_HEAD, _page)


class _PydanticConversation:
    """The conversations of Pydantic AI. Histories that a conversation has abandoned are its other threads."""

    name = "Pydantic AI"
    needs: tuple[type[Model], ...] = (Conversation, ConversationEntry)

    def outlines(self, db: Database, keys: Collection[int]) -> Mapping[int, Outline]:
        parameters = {
            "keys": list_parameter(db, list(keys)),
            "most": _MOST_COUNTED + 1,
            "characters": PREVIEW_SOURCE + 1,
        }
        return {
            key: Outline(
                count=min(count, _MOST_COUNTED),
                is_partial=count > _MOST_COUNTED,
                last=entry_message(count, pk, at, start, PREVIEW_SOURCE),
            )
            for key, count, pk, at, start in db.read(_OUTLINES, parameters)
        }

    def page(
        self, db: Database, key: int, *, first: int | None, limit: int, thread: str | None = None
    ) -> ConversationPage | None:
        records = Conversation.objects.using(db.alias).filter(session=key)
        record = records.values_list("tenant", "head_id", "branches").first()
        if record is None:
            return None
        tenant, head, branches = record
        shown = thread if thread is not None and thread in branches else _MAIN
        parameters = {
            "tenant": tenant,
            "head": head if shown == _MAIN else shown,
            "most": _MOST_NUMBERED,
            "characters": _SOURCE + 1,
            "first": first,
            "limit": limit,
        }
        rows = db.read(_PAGE, parameters)
        return ConversationPage(
            messages=tuple(
                entry_message(number, pk, at, start, _SOURCE)
                for _, number, pk, at, start in rows
                if number is not None
            ),
            total=rows[0][0] or 0,
            is_partial=rows[0][0] == _MOST_NUMBERED,
            thread=shown,
            threads=(_MAIN, *branches) if branches else (),
        )


def entry_message(
    number: int, pk: int, at: datetime | str, start: str | bytes, limit: int
) -> ConversationMessage:
    """Return the message of an entry whose stored text begins with ``start``."""
    message, is_cut = read_start(start_text(start), limit)
    parts = None if message is None else message.get("parts")
    listed = parts if isinstance(parts, list) else [] if parts is None else [parts]
    return ConversationMessage(
        number=number,
        role="?" if message is None else _role(message, listed),
        parts=None
        if message is None
        else parts_of({"content": [each for part in listed for each in _flat(part)]}),
        at=as_utc(at),
        is_cut=is_cut,
        row=(ConversationEntry, pk),
    )


def _role(message: Mapping[str, Any], parts: list[Any]) -> str:
    if message.get("kind") == "response":
        return "assistant"
    kinds = {part.get("part_kind") for part in parts if isinstance(part, Mapping)}
    if kinds and kinds <= _RESULTS:
        return "tool"
    return "system" if kinds == {"system-prompt"} else "user"


def _flat(part: Any) -> Iterator[Any]:
    """Yield a part in forms that `parts_of` understands: a prompt may have several texts and files."""
    match part:
        case {"part_kind": "user-prompt", "content": list(contents)}:
            yield from map(_content, contents)
        case {"part_kind": "file", "content": Mapping() as content}:
            yield {**content, "type": "file"}
        case {"part_kind": "retry-prompt"}:
            yield {**part, "is_error": True}
        case {"part_kind": "tool-return", "outcome": "failed" | "denied"}:
            yield {**part, "is_error": True}
        case {"part_kind": "builtin-tool-call" | "builtin-tool-return" as kind}:
            yield {**part, "part_kind": kind.removeprefix("builtin-")}
        case _:
            yield part


def _content(content: Any) -> Any:
    match content:
        case {"kind": str(kind)} if kind in _FILES:
            return {**content, "type": _FILES[kind]}
    return content


CONVERSATION: Final = _PydanticConversation()
