"""The conversations that adapters keep with sessions, for lists and pages of sessions."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Mapping
from datetime import datetime
from operator import or_
from typing import Final

from django.db.models import Model, Q

from helix_store.catalogue import Conversation, Outline, conversations
from helix_store.catalogue.rows import children_of_sessions, children_with_rows
from helix_store.core.transcript import ConversationMessage, Part, parts_of
from helix_store.core.types import SessionHead
from helix_store.engine.database import Database
from helix_store.models import Message, Session
from helix_store.reports.payloads import PREVIEW_SOURCE, payload_start, read_start

MESSAGE_COLUMNS: Final = ("sequence", "role", "created_at")
_PLACE: Final = ("tenant", "session_id", "pk")


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
    places = [(tenant, head.session_id) for tenant, head in listed if not head.message_count]
    if not places:
        return [None] * len(listed)
    tenants, session_ids = map(set, zip(*places, strict=True))
    rows = Session.objects.using(db.alias).filter(tenant__in=tenants, session_id__in=session_ids)
    keys = {(tenant, name): key for tenant, name, key in db.query(lambda: list(rows.values_list(*_PLACE)))}
    found = outlines(db, [keys[place] for place in places if place in keys])
    by_place = {place: found.get(keys[place]) for place in places if place in keys}
    return [by_place.get((tenant, head.session_id)) for tenant, head in listed]


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
    limit: int = PREVIEW_SOURCE,
    row: tuple[type[Model], int] | None = None,
) -> ConversationMessage:
    """Return a message of the store from its `MESSAGE_COLUMNS` and its `payload_start` of this limit."""
    message, is_cut = read_start(start, limit)
    parts = None if message is None else parts_of(message)
    return ConversationMessage(number=sequence, role=role, parts=parts, at=at, is_cut=is_cut, row=row)


def said_at_start(start: str) -> str | None:
    """Return the content of a message on one line, from its `payload_start`, or ``None`` if unreadable."""
    message, is_cut = read_start(start)
    if message is None:
        return None
    return line_of(parts_of(message)) + ("…" if is_cut else "")


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
