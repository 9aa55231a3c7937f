"""Conversations, and how they are written as Markdown.

A whole conversation as Markdown, for reviews and tickets.

What a message says stands in code blocks, whose fences are longer than any run of backticks in it, and names
are escaped. So no message can look like another message, and nothing in it becomes HTML or a link.
Invisible characters are shown as escapes, as they are on the pages of the admin.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from functools import cache
from operator import or_
from typing import Any, Final, NamedTuple

from django.db.models import Model, Q, QuerySet

from helix_store.catalogue import Conversation, ConversationPage, Outline, conversations, tables
from helix_store.catalogue.table import WholeConversation, children_of_sessions, children_with_rows
from helix_store.conf import table_name
from helix_store.core.moments import as_utc
from helix_store.core.transcript import (
    KEPT_IN_PROSE,
    ConversationMessage,
    Part,
    is_unread,
    parts_of,
    visible,
    visible_json,
)
from helix_store.core.types import SessionHead
from helix_store.engine.database import Database, rows_without_model
from helix_store.engine.expressions import distinct_values, list_parameter, paced_pages
from helix_store.engine.statement import Statement, table
from helix_store.exceptions import IntegrityFault, SessionNotFound
from helix_store.models import Item, Message, Session
from helix_store.reports.payloads import (
    PREVIEW_SOURCE,
    PayloadText,
    message_in,
    moment,
    payload_start,
    read_start,
    start_text,
    whole_payloads,
)
from helix_store.sessions.locking import session_with_id
from helix_store.stores import DatabaseStateStore

MESSAGE_COLUMNS: Final = ("sequence", "role", "created_at")
_KEY: Final = ("tenant", "session_id", "pk")


def conversations_of(
    db: Database, keys: Collection[int], may_view: Callable[[type[Model]], bool] = lambda _model: True
) -> list[Conversation]:
    """Return the conversations that the sessions with these keys may have. This is always one statement.

    Adapters without rows for these sessions, or whose rows the user may not view, are left out.
    """
    permitted = [each for each in conversations() if all(map(may_view, each.needs))]
    if not (keys and permitted):
        return []
    filled = {child.related_model for child in db.query(lambda: children_with_rows(db, keys))}
    empty = {child.related_model for child in children_of_sessions()} - filled
    return [each for each in permitted if empty.isdisjoint(each.needs)]


def outlines(
    db: Database, keys: Collection[int], may_view: Callable[[type[Model]], bool] = lambda _model: True
) -> dict[int, tuple[str, Outline]]:
    """Return the outline of each session that has a conversation, with the name of its framework."""
    found: dict[int, tuple[str, Outline]] = {}
    for conversation in conversations_of(db, keys, may_view):
        missing = [key for key in keys if key not in found]
        if missing:
            outlined = conversation.outlines(db, missing)
            found.update((key, (conversation.name, outline)) for key, outline in outlined.items())
    return found


def outlined(
    sessions: Collection[Session], alias: str, may_view: Callable[[type[Model]], bool]
) -> dict[int, Outline]:
    """Return the outlines of all these sessions: of the store's own messages, or otherwise of an adapter's.

    The number of statements does not depend on the number of sessions.
    """
    db = Database(alias, "")
    counts = {session.pk: session.message_count for session in sessions}
    own = {key: count for key, count in counts.items() if count}
    last = _last_messages(db, own) if own and may_view(Message) else {}
    found = {key: Outline(count=count, last=last.get(key)) for key, count in counts.items()}
    of_adapters = outlines(db, [key for key, count in counts.items() if not count], may_view)
    return found | {key: outline for key, (_, outline) in of_adapters.items()}


def outlines_of_heads(
    db: Database, listed: Collection[tuple[str, SessionHead]]
) -> list[tuple[str, Outline] | None]:
    """Return an adapter's outline of each session, with the name of its framework, or `None` if the session
    has messages of the store or no conversation. The number of statements does not depend on the number of
    sessions.
    """
    names = [(tenant, head.session_id) for tenant, head in listed if not head.message_count]
    if not names:
        return [None] * len(listed)
    tenants, session_ids = map(set, zip(*names, strict=True))
    rows = Session.objects.using(db.alias).filter(tenant__in=tenants, session_id__in=session_ids)
    keys = {(tenant, name): key for tenant, name, key in db.query(lambda: list(rows.values_list(*_KEY)))}
    found = outlines(db, [keys[name] for name in names if name in keys])
    by_session = {name: found.get(keys[name]) for name in names if name in keys}
    return [by_session.get((tenant, head.session_id)) for tenant, head in listed]


_AT_ONCE: Final = 50

SHOWN_RECORDS: Final = frozenset(
    {
        *("checkpoint", "interrupt_request", "message", "operation", "post", "run"),
        *("staged_change", "sub_session_ref"),
    }
)
"""The records that parts of a session's page show, and operations, which are never shown."""


def messages_of(
    db: Database, key: int, conversation: Conversation, thread: str | None, *, first: int = 1
) -> Iterator[ConversationMessage]:
    """Yield an adapter's messages from a number, as whole as the adapter can read them.

    A negative number counts from the end.
    """
    if isinstance(conversation, WholeConversation):
        yield from conversation.messages(db, key, thread=thread, first=first)
        return
    number = first
    if first < 0:
        newest = conversation.page(db, key, first=None, limit=1, thread=thread)
        number = 1 if newest is None else max(1, newest.total + first + 1)
    while page := conversation.page(db, key, first=number, limit=_AT_ONCE, thread=thread):
        yield from page.messages
        if not page.messages or page.messages[-1].number >= page.total:
            return
        number = page.messages[-1].number + 1


def threads_of(db: Database, key: int, conversation: Conversation) -> Iterator[str]:
    """Yield the names of all threads of a session's conversation, or nothing if there is no conversation."""
    page = conversation.page(db, key, first=None, limit=1)
    if page is None:
        return
    if isinstance(conversation, WholeConversation):
        yield from conversation.threads(db, key)
    else:
        yield from page.threads or (page.thread,)


def own_messages(db: Database, key: int, *, first: int = 1) -> Iterator[ConversationMessage]:
    """Yield the store's own messages of a session from a sequence number, whole and in constant memory."""
    rows = Message.objects.using(db.alias).filter(session=key, sequence__gte=first)
    rows = rows.annotate(text=PayloadText("payload"))
    for page in paced_pages(db, rows, ("sequence",), "pk", "role", "created_at", "text"):
        for pk, role, at, text, sequence in page:
            message = message_in(text)
            yield ConversationMessage(
                number=sequence,
                role=role,
                parts=None if message is None else parts_of(message),
                at=at,
                row=(Message, pk),
                stored=message,
            )


def unread_rows(
    db: Database, key: int, may_view: Callable[[type[Model]], bool] = lambda _model: True
) -> dict[str, int]:
    """Return the number of rows of a session in each table that no part of its page shows, by name.

    Where a session has no conversation, these are the rows of other apps, or of adapters whose app is not
    installed or has registered no conversation. Tables of apps that are not installed are found by name.
    """
    records = {table.model: table.record for table in tables("session") if not table.names_tenant}
    children = db.query(lambda: children_with_rows(db, [key]))
    found = {}
    for model, column in ((child.related_model, child.field.name) for child in children):
        is_counted = model in records and records[model] not in SHOWN_RECORDS and may_view(model)
        if is_counted:
            rows = model._base_manager.using(db.alias).filter(**{column: key})
            found[str(model._meta.verbose_name_plural)] = db.query(rows.count)
    found.update(db.query(lambda: rows_without_model(db, table_name(""), "session_id", key)))
    return found


def _last_messages(db: Database, counts: Mapping[int, int]) -> dict[int, ConversationMessage]:
    """Return the newest message of sessions with these numbers of messages. One statement."""
    newest = (Q(session=key, sequence=count) for key, count in counts.items())
    # With a join, PostgreSQL would read all messages of these sessions.
    rows = Message.objects.using(db.alias).filter(functools.reduce(or_, newest))
    columns = ("session_id", *MESSAGE_COLUMNS, payload_start())
    return {key: stored_message(*row) for key, *row in db.query(lambda: list(rows.values_list(*columns)))}


def stored_message(
    sequence: int,
    role: str,
    at: datetime,
    start: str,
    *,
    limit: int | None = PREVIEW_SOURCE,
    row: tuple[type[Model], int] | None = None,
) -> ConversationMessage:
    """Return a message of the store from its `MESSAGE_COLUMNS` and its `payload_start` of this limit.

    Without a limit, ``start`` is the whole payload.
    """
    message, is_cut = read_start(start, len(start) if limit is None else limit)
    parts = None if message is None else parts_of(message)
    return ConversationMessage(number=sequence, role=role, parts=parts, at=at, is_cut=is_cut, row=row)


def said_at_start(start: str) -> str | None:
    """Return the content of a message on one line, from its `payload_start`, or ``None`` if unreadable.

    If no rule reads any of it, the line is its JSON without a name.
    """
    message, is_cut = read_start(start)
    if message is None:
        return None
    parts = parts_of(message)
    line = parts[0].text if is_unread(message, parts) else line_of(parts)
    return line + ("…" if is_cut else "")


def line_of(parts: Iterable[Part]) -> str:
    """Return the content of a message as one line of text, including calls, results and files."""
    return " ".join(" ".join(text_of(part).split()) for part in parts)


def text_of(part: Part) -> str:
    """Return a part of a message as plain text."""
    if part.kind == "call":
        return f"→ {part.name}({part.text})"
    if part.kind in ("file", "other"):
        return f"[{part.name}] {part.text}"
    return part.text


_MOST_COUNTED: Final = 1_000
_MOST_THREADS: Final = 50
_LAST_CHARACTER: Final = "\U0010ffff"
_SOURCE: Final = 12_000
"""The number of characters of a message above which a page reads the message with another statement."""

_ITEM: Final = table(Item)


class Said(NamedTuple):
    """The content of an item. ``at`` replaces the time at which the item was stored.

    Exports also contain the item itself, or ``stored`` instead of it.
    """

    role: str
    parts: list[Part]
    at: datetime | None = None
    step: int | None = None
    stored: Any = None


@dataclass(frozen=True, slots=True)
class ItemConversation:
    """The conversation of an adapter that keeps its messages as items.

    ``says`` reads the payload of an item, in which long text may have been cut off. It must not raise an
    error; it returns ``None`` for an item that it cannot read. ``lane`` is the lane of the main conversation,
    and all other lanes of the session are its other threads; if it ends with ``/``, all lanes that begin with
    it are threads, and the first of them is the main one. ``of`` is a table with one row for each session of
    the adapter: pass it if other adapters may use a lane of the same name.
    """

    name: str
    says: Callable[[dict[str, Any]], Said | None]
    lane: str
    of: type[Model] | None = None

    @property
    def needs(self) -> tuple[type[Model], ...]:
        return (Item,) if self.of is None else (self.of, Item)

    def outlines(self, db: Database, keys: Collection[int]) -> Mapping[int, Outline]:
        first, last = self._main
        parameters = {"keys": list_parameter(db, list(keys)), "first": first, "last": last}
        return {
            key: Outline(
                count=min(number, _MOST_COUNTED),
                is_partial=number > _MOST_COUNTED,
                last=self._message(number, pk, as_utc(at), start_text(start), PREVIEW_SOURCE),
            )
            for key, number, pk, at, start in db.read(_outlines(self.of), parameters)
        }

    def page(
        self, db: Database, key: int, *, first: int | None, limit: int, thread: str | None = None
    ) -> ConversationPage | None:
        if self.of is not None and not self.of._base_manager.using(db.alias).filter(session=key).exists():
            return None
        lanes = self._lanes(db, key)
        main = self._main_lane(db, lanes)
        if main is None:
            return None
        is_known = thread is not None and db.query(lanes.filter(lane=thread).exists)
        shown = thread if is_known and thread is not None else main
        threads, thread_count = self._some_threads(db, lanes, main, shown)
        items = lanes.filter(lane=shown)
        total = db.query(items.count)
        start = max(1, total - limit + 1) if first is None else first
        # Read from the end, where most requested pages are.
        skipped = max(0, total - (start + limit - 1))
        taken = max(0, min(limit, total - start + 1))
        columns = ("pk", "created_at", payload_start(_SOURCE))
        rows = list(items.order_by("-pk").values_list(*columns)[skipped : skipped + taken])[::-1]
        whole = whole_payloads(Item, db.alias, [(pk, text) for pk, _, text in rows], _SOURCE)
        return ConversationPage(
            messages=tuple(
                self._message(number, pk, at, whole[pk])
                if pk in whole
                else self._message(number, pk, at, text, _SOURCE)
                for number, (pk, at, text) in enumerate(rows, start)
            ),
            total=total,
            thread=shown,
            threads=tuple(threads) if len(threads) > 1 else (),
            thread_count=thread_count if thread_count > 1 else None,
        )

    def messages(
        self, db: Database, key: int, *, thread: str | None = None, first: int = 1
    ) -> Iterator[ConversationMessage]:
        """Yield the messages of a thread as a whole, in constant memory."""
        lanes = self._lanes(db, key)
        shown = self._main_lane(db, lanes) if thread is None else thread
        rows = lanes.filter(lane=shown).order_by("pk").annotate(text=PayloadText("payload"))
        if first < 0:
            first = max(1, db.query(rows.count) + first + 1)
        if first > 1:
            start = db.query(rows.values_list("pk", flat=True)[first - 1 : first].first)
            if start is None:
                return
            rows = rows.filter(pk__gte=start)
        number = first
        for page in paced_pages(db, rows, ("pk",), "created_at", "text"):
            for at, text, pk in page:
                yield self._message(number, pk, at, text)
                number += 1

    def threads(self, db: Database, key: int, *, after: str | None = None) -> Iterator[str]:
        """Yield the names of the threads in order, after one of them or from the first."""
        lanes = self._lanes(db, key)
        rows = lanes if after is None else lanes.filter(lane__gt=after)
        return (lane for (lane,) in distinct_values(db, rows, "lane"))

    def _lanes(self, db: Database, key: int) -> QuerySet[Item]:
        """Return the items in the lanes of this conversation."""
        items = Item.objects.using(db.alias).filter(session=key)
        return items.filter(lane__range=self._main) if self._has_prefix else items

    def _main_lane(self, db: Database, lanes: QuerySet[Item]) -> str | None:
        first = lanes.filter(lane__range=self._main).order_by("lane")
        return db.query(first.values_list("lane", flat=True).first)

    def _some_threads(
        self, db: Database, lanes: QuerySet[Item], main: str, shown: str
    ) -> tuple[list[str], int]:
        """Return the first threads with the main and the shown one, and the number of all threads."""
        rows = lanes.order_by("lane").values_list("lane", flat=True).distinct()
        found = db.query(lambda: list(rows[: _MOST_THREADS + 1]))
        if len(found) <= _MOST_THREADS:
            return found, len(found)
        threads = sorted({*found[:_MOST_THREADS], main, shown})
        return threads, db.query(lanes.values("lane").distinct().count)

    @property
    def _has_prefix(self) -> bool:
        return self.lane.endswith("/")

    @property
    def _main(self) -> tuple[str, str]:
        """The range of names, in sort order, that the main lane can have."""
        return self.lane, f"{self.lane}{_LAST_CHARACTER}" if self._has_prefix else self.lane

    def _message(
        self, number: int, pk: int, at: datetime, start: str, limit: int | None = None
    ) -> ConversationMessage:
        """Return the message of an item from the text of its payload, or from its start of this limit."""
        payload, is_cut = read_start(start, len(start) if limit is None else limit)
        said = None if payload is None else self.says(payload)
        return ConversationMessage(
            number=number,
            role="?" if said is None else said.role,
            parts=None if said is None else said.parts,
            at=at if said is None or said.at is None else said.at,
            step=None if said is None else said.step,
            is_cut=is_cut,
            row=(Item, pk),
            stored=None if limit is not None else payload if said is None else said.stored or payload,
        )


@cache
def _outlines(of: type[Model] | None) -> Statement:
    owned = "" if of is None else f"AND EXISTS (SELECT 1 FROM {table(of)} AS o WHERE o.session_id = k.value)"

    def form(keys: str, start: str) -> str:
        return f"""
            WITH lanes AS (
                SELECT k.value AS session_id, (
                    SELECT lane FROM {_ITEM}
                    WHERE session_id = k.value AND lane >= %(first)s AND lane <= %(last)s
                    ORDER BY session_id, lane LIMIT 1
                ) AS lane
                FROM {keys} WHERE true {owned}
            ),
            counted AS (
                SELECT session_id, (
                    SELECT count(*) FROM (
                        SELECT 1 FROM {_ITEM} AS i
                        WHERE i.session_id = lanes.session_id AND i.lane = lanes.lane
                        LIMIT {_MOST_COUNTED + 1}
                    ) AS first_items
                ) AS number, (
                    SELECT id FROM {_ITEM} AS i
                    WHERE i.session_id = lanes.session_id AND i.lane = lanes.lane ORDER BY id DESC LIMIT 1
                ) AS newest
                FROM lanes WHERE lane IS NOT NULL
            )
            SELECT counted.session_id, number, i.id, i.created_at, {start}
            FROM counted JOIN {_ITEM} AS i ON i.id = newest"""

    start = f"substr(i.payload, 1, {PREVIEW_SOURCE + 1})"
    return Statement(
        form("unnest(%(keys)s::bigint[]) AS k(value)", start),
        form("json_each(%(keys)s) AS k", f"CAST({start} AS BLOB)"),
    )


_SPECIAL: Final = re.compile(r"([\\`*_\[\]<>&#~|!$])")


def conversation_as_markdown(
    store: DatabaseStateStore,
    session_id: str,
    *,
    may_view: Callable[[type[Model]], bool] = lambda _model: True,
) -> Iterator[str]:
    """Yield a session's messages as blocks of Markdown: the store's own messages, then the messages of each
    adapter.

    An adapter's threads follow each other. Messages are read a few at a time, each as a whole; if a
    message is unreadable, the text says so. Rows that ``may_view`` does not permit are left out. Raises
    `SessionNotFound`, and at the end `IntegrityFault` if a message of the store was unreadable.
    """
    db = Database(store.alias, store.tenant)
    state = store.load_state(session_id)
    key = db.query(lambda: session_with_id(db, session_id).values_list("pk", flat=True).first())
    if state is None or key is None:
        raise SessionNotFound(session_id)
    yield f"# {_line(state.title or session_id)}"
    facts = {"Session": session_id, "Agent type": state.agent_type, "User": state.user_id}
    yield "\n".join(f"- {name}: {_line(value)}" for name, value in facts.items() if value)
    is_empty, damaged = True, list[int]()
    for block in _blocks(_noting_damage(own_messages(db, key), damaged)) if may_view(Message) else ():
        is_empty = False
        yield block
    for conversation in conversations_of(db, [key], may_view):
        for thread in threads_of(db, key, conversation):
            is_empty = False
            yield f"## {conversation.name}" + (f": {_line(thread)}" if thread else "")
            yield from _blocks(messages_of(db, key, conversation, thread))
    rows = unread_rows(db, key, may_view) if is_empty else {}
    if rows:
        yield "This session has rows that no conversation shows:"
        yield "\n".join(f"- {_line(name)}: {count:,}" for name, count in rows.items())
    if damaged:
        raise IntegrityFault(f"Messages of the session cannot be read: {', '.join(map(str, damaged))}.")


def _noting_damage(
    messages: Iterable[ConversationMessage], damaged: list[int]
) -> Iterator[ConversationMessage]:
    for message in messages:
        if message.parts is None:
            damaged.append(message.number)
        yield message


def _blocks(messages: Iterable[ConversationMessage]) -> Iterator[str]:
    for message in messages:
        at = "" if message.at is None else f" · {moment(message.at)}"
        yield f"### {message.number}. {_line(message.role)}{at}"
        if message.parts is None:
            yield "*This message cannot be read.*"
        else:
            for part in message.parts:
                yield _block(part)
                if part.rest:
                    yield f"**Other fields**\n\n{_json(part.rest)}"
        if message.is_cut:
            yield "*Only the start of this message is shown; an export of the session contains all of it.*"


def _block(part: Part) -> str:
    called = f" ({_code(part.call_id)})" if part.call_id else ""
    match part.kind:
        case "text":
            return _prose(part.text)
        case "thinking":
            return f"**Thinking**\n\n{_prose(part.text)}"
        case "call":
            kind = "Invalid call" if part.is_error else "Call"
            return f"**{kind} of {_code(part.name)}**{called}\n\n{_prose(part.text)}"
        case "result":
            kind = "Error" if part.is_error else "Result"
            of = f" of {_code(part.name)}" if part.name else ""
            return f"**{kind}{of}**{called}\n\n{_prose(part.text)}"
        case "file":
            return f"**File {_code(part.name)}**: {_code(part.text)}"
        case "other":
            return f"**{_code(part.name)}**\n\n{_json(part.text)}"


def _line(text: str) -> str:
    """Return a name on one line, so that it begins no other block, without any markup."""
    return _SPECIAL.sub(r"\\\1", visible(" ".join(text.split()), keep=KEPT_IN_PROSE))


def _code(text: str) -> str:
    line = visible(" ".join(text.split()), keep=KEPT_IN_PROSE) or "-"
    marks = "`" * _longer_than_any_run(line, least=1)
    return f"{marks} {line} {marks}" if "`" in line else f"{marks}{line}{marks}"


def _prose(text: str) -> str:
    return _fenced(visible(text, keep=f"{KEPT_IN_PROSE}\n\t"))


def _json(text: str) -> str:
    return _fenced(visible_json(text))


def _fenced(text: str) -> str:
    """Return visible text in a code block whose fence does not occur in the text."""
    fence = "`" * _longer_than_any_run(text, least=3)
    return f"{fence}\n{text}\n{fence}"


def _longer_than_any_run(text: str, *, least: int) -> int:
    """Return a run of backticks that is longer than any in the text."""
    return max([least, *(len(run) + 1 for run in re.findall("`+", text))])
