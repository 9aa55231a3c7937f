"""The tables and the conversations that the catalogue registers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from datetime import datetime
from functools import partial
from typing import Any, Final

from django.core.exceptions import EmptyResultSet
from django.db.models import Model, QuerySet
from django.db.models.expressions import RawSQL

from helix_store.catalogue import AppTable, Branch, ConversationPage, Outline
from helix_store.contrib.pydantic_ai.models import Conversation, ConversationEntry, ConversationFamily
from helix_store.core import moments
from helix_store.core.ids import new_id
from helix_store.core.moments import as_utc
from helix_store.core.payloads import decode_object, encode
from helix_store.core.transcript import ConversationMessage, Fields, parts_of, with_rest
from helix_store.engine.database import Database
from helix_store.engine.expressions import Pace, for_keys, is_in_list, list_parameter, looked_up
from helix_store.engine.statement import Statement, table
from helix_store.reports.payloads import (
    PREVIEW_SOURCE,
    PayloadText,
    message_in,
    read_start,
    start_text,
    whole_payloads,
)

_FAMILY: Final = table(ConversationFamily)
_CONVERSATION: Final = table(Conversation)
_ENTRY: Final = table(ConversationEntry)


# --- Deletion ------------------------------------------------------------------------------------------


def release_entries(db: Database, sessions: Collection[int]) -> Mapping[type[Model], int]:
    """Delete the entries that only conversations of these sessions reach, before the sessions are deleted.
    Call this in a transaction. It locks the families of the conversations: a fork that begins now waits for
    the commit, and an earlier fork keeps the entries that it reaches.
    """
    keys = list_parameter(db, list(sessions))
    families: dict[str, list[str]] = defaultdict(list)
    for tenant, family in db.execute(_FAMILIES_OF_SESSIONS, {"keys": keys}):
        families[tenant].append(family)
    entries = emptied = 0
    for tenant, names in sorted(families.items()):
        chosen = {"tenant": tenant, "families": list_parameter(db, names)}
        db.execute(_LOCK_FAMILIES, chosen)
        # These are separate statements, so that they see the commits for which the lock was awaited.
        entries += len(db.execute(_DELETE_UNREACHED, {**chosen, "keys": keys}))
        emptied += len(db.execute(_DELETE_FAMILIES, {**chosen, "keys": keys}))
    return {ConversationEntry: entries, ConversationFamily: emptied}


# --- Exports -------------------------------------------------------------------------------------------


def entries_of_sessions(rows: QuerySet[Any], sessions: QuerySet[Any]) -> QuerySet[Any]:
    """Select the rows of `ConversationEntry` in the histories of these sessions' conversations."""
    try:
        chosen, params = sessions.values("pk").query.get_compiler(using=rows.db).as_sql()
    except EmptyResultSet:
        # Django knows that no row matches, and has no SQL for it.
        return rows.none()
    condition = f"c.session_id IN ({chosen})"
    postgresql, sqlite = _reached((condition, condition))
    reached = postgresql if Database(rows.db, "").is_postgresql else sqlite
    return rows.filter(pk__in=RawSQL(f"{reached} SELECT id FROM reached", params * 2))  # noqa: S611  our own


def families_of_sessions(rows: QuerySet[Any], sessions: QuerySet[Any]) -> QuerySet[Any]:
    """Select the rows of `ConversationFamily` with a conversation of these sessions."""
    conversations = Conversation._base_manager.using(rows.db).filter(session__in=sessions.values("pk"))
    return rows.filter(family__in=conversations.values("family"))


# --- The doctor ----------------------------------------------------------------------------------------


def faults_of_conversations(db: Database, sessions: Collection[int]) -> Iterator[tuple[int, str]]:
    """Yield sessions whose conversation has a head or a branch that is not stored."""
    for session, entry_id in db.execute(_MISSING_TIPS, {"keys": list_parameter(db, list(sessions))}):
        yield session, f"the conversation ends with the entry {entry_id}, which is not stored"


def faults_of_entries(db: Database, keys: Collection[int]) -> Iterator[tuple[int, str]]:
    """Yield entries that no conversation reaches, and entries whose parent is not stored."""
    chosen = {"keys": list_parameter(db, list(keys))}
    for key, parent_id in db.execute(_ORPHANS, chosen):
        yield key, f"the entry before it, {parent_id}, is not stored"
    for (key,) in db.execute(_UNREACHED, chosen):
        yield key, "no conversation reaches the entry"


# --- Statements ----------------------------------------------------------------------------------------


_BRANCHES: Final = (
    "jsonb_array_elements_text(c.branches) AS left_at(value)",
    "json_each(c.branches) AS left_at",
)
_FROM_TIP: Final = looked_up(ConversationEntry, "e", "e.tenant = tip.tenant AND e.entry_id = tip.entry_id")
_REACHED_BEFORE: Final = looked_up(
    ConversationEntry, "e", "e.tenant = reached.tenant AND e.entry_id = reached.parent_id"
)


def _reached(conversations: tuple[str, str]) -> tuple[str, str]:
    """Return the entries in the histories of conversations ``c``, as ``reached(id, tenant, parent_id)``.

    The condition and the result have one variant for PostgreSQL and one for SQLite.
    """

    def form(vendor: int) -> str:
        condition = conversations[vendor]
        return f"""WITH RECURSIVE tip(tenant, entry_id) AS (
            SELECT c.tenant, c.head_id FROM {_CONVERSATION} AS c WHERE {condition}
            UNION
            SELECT c.tenant, left_at.value FROM {_CONVERSATION} AS c, {_BRANCHES[vendor]} WHERE {condition}
        ), reached(id, tenant, parent_id) AS (
            SELECT e.id, e.tenant, e.parent_id FROM tip {_FROM_TIP[vendor]}
            UNION
            SELECT e.id, e.tenant, e.parent_id FROM reached {_REACHED_BEFORE[vendor]}
        )"""

    return form(0), form(1)


def _statement(text: str, *conditions: tuple[str, str], postgresql_end: str = "") -> Statement:
    """Return a statement for keys with a place for each condition that the databases write differently."""
    return for_keys(
        Statement(
            postgresql=text.format(*(condition[0] for condition in conditions)) + postgresql_end,
            sqlite=text.format(*(condition[1] for condition in conditions)),
        )
    )


_FAMILIES_OF_SESSIONS: Final = for_keys(
    f"SELECT DISTINCT tenant, family FROM {_CONVERSATION} WHERE session_id IN %(keys)s"
)
_LOCK_FAMILIES: Final = _statement(
    f"SELECT id FROM {_FAMILY} WHERE tenant = %(tenant)s AND {{}} ORDER BY family",
    is_in_list("family", "families", "varchar"),
    postgresql_end=" FOR UPDATE",
)

_IN_FAMILIES: Final = is_in_list("c.family", "families", "varchar")
_REMAINING: Final = _reached(
    (
        f"c.tenant = %(tenant)s AND {_IN_FAMILIES[0]} AND NOT (c.session_id IN %(keys)s)",
        f"c.tenant = %(tenant)s AND {_IN_FAMILIES[1]} AND NOT (c.session_id IN %(keys)s)",
    )
)


_NOT_REACHED: Final = (
    "NOT EXISTS (SELECT FROM reached WHERE reached.id = e.id)",
    "e.id NOT IN (SELECT id FROM reached)",
)
_DELETE_UNREACHED: Final = _statement(
    f"{{}} DELETE FROM {_ENTRY} AS e WHERE e.tenant = %(tenant)s AND {{}} AND {{}} RETURNING id",
    _REMAINING,
    is_in_list("family", "families", "varchar"),
    _NOT_REACHED,
)
_DELETE_FAMILIES: Final = _statement(
    f"""DELETE FROM {_FAMILY} AS f WHERE f.tenant = %(tenant)s AND {{}} AND NOT EXISTS (
        SELECT 1 FROM {_CONVERSATION} AS c
        WHERE c.tenant = f.tenant AND c.family = f.family AND NOT (c.session_id IN %(keys)s)
    ) RETURNING id""",
    is_in_list("f.family", "families", "varchar"),
)

_MISSING_TIPS: Final = _statement(
    f"""SELECT tip.session_id, tip.entry_id FROM (
        SELECT c.session_id, c.tenant, c.head_id AS entry_id FROM {_CONVERSATION} AS c
        WHERE c.session_id IN %(keys)s
        UNION ALL
        SELECT c.session_id, c.tenant, left_at.value FROM {_CONVERSATION} AS c, {{}}
        WHERE c.session_id IN %(keys)s
    ) AS tip
    WHERE tip.entry_id IS NOT NULL AND NOT EXISTS (
        SELECT 1 FROM {_ENTRY} AS e WHERE e.tenant = tip.tenant AND e.entry_id = tip.entry_id
    ) ORDER BY 1, 2""",
    _BRANCHES,
)

_ORPHANS: Final = for_keys(
    f"""SELECT e.id, e.parent_id FROM {_ENTRY} AS e
        WHERE e.id IN %(keys)s AND e.parent_id IS NOT NULL AND NOT EXISTS (
            SELECT 1 FROM {_ENTRY} AS before WHERE before.tenant = e.tenant AND before.entry_id = e.parent_id
        ) ORDER BY e.id"""
)
_THEIR_FAMILIES: Final = f"""EXISTS (
        SELECT 1 FROM {_ENTRY} AS e
        WHERE e.tenant = c.tenant AND e.family = c.family AND e.id IN %(keys)s
    )"""
_UNREACHED: Final = _statement(
    f"{{}} SELECT e.id FROM {_ENTRY} AS e WHERE e.id IN %(keys)s AND {{}} ORDER BY e.id",
    _reached((_THEIR_FAMILIES, _THEIR_FAMILIES)),
    _NOT_REACHED,
)


def _fork_to_branch(model: type[Model], branch: Branch) -> None:
    """Create a fork of the conversation for a branch of its session, with the same history but no branches.
    Until the commit, the lock on the source protects its entries, and thus those of the fork.
    """
    source = Conversation._base_manager.using(branch.db.alias).filter(session=branch.source).first()
    if source is None:
        return
    record = decode_object(source.document)
    at = moments.now()
    revision = new_id()
    record |= {
        "conversation_id": branch.target_id,
        "forked_from": record["conversation_id"],
        "forked_at": source.head_id,
        "branches": [],
        "revision": revision,
        "updated_at": at.isoformat(),
    }
    Conversation._base_manager.using(branch.db.alias).create(
        session_id=branch.target,
        tenant=source.tenant,
        family=source.family,
        head_id=source.head_id,
        revision=revision,
        scope=source.scope,
        updated_at=at,
        document=encode(record, limit=branch.db.limits.max_state_bytes, path="record"),
    )


# An entry is exported once, regardless of how many conversations share it.
TABLES: Final = (
    AppTable(
        ConversationFamily,
        record="pydantic_family",
        parent="tenant",
        order=("family",),
        of_sessions=families_of_sessions,
    ),
    AppTable(
        ConversationEntry,
        record="pydantic_entry",
        parent="tenant",
        order=("entry_id",),
        of_sessions=entries_of_sessions,
        check=faults_of_entries,
    ),
    AppTable(
        Conversation,
        record="pydantic_conversation",
        branch=_fork_to_branch,
        before_delete=release_entries,
        check=faults_of_conversations,
    ),
)


_MOST_COUNTED: Final = 100
"""The maximum number of entries of a conversation that a list of sessions reads."""

_MOST_NUMBERED: Final = 10_000
"""The maximum number of entries that a page walks to reach the oldest one."""

_AT_ONCE: Final = 200
_MAIN: Final = "current"
_SOURCE: Final = 12_000
_RESULTS: Final = frozenset({"tool-return", "builtin-tool-return", "retry-prompt"})

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


def _of_heads(heads: str, found: Callable[[str], str]) -> Statement:
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


def _keys(start: str) -> str:
    return "SELECT id FROM history ORDER BY depth DESC"


_KEYS: Final = _of_heads(_OF_HEAD, _keys)
_OUTLINES: Final = for_keys(_of_heads(_OF_SESSIONS, _newest))
_PAGE: Final = _of_heads(_OF_HEAD, _page)


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
        found = db.read(_PAGE, parameters)
        rows = [row for row in found if row[1] is not None]
        starts = [(pk, start_text(start)) for _, _, pk, _, start in rows]
        whole = whole_payloads(ConversationEntry, db.alias, starts, _SOURCE)
        total = found[0][0] or 0
        return ConversationPage(
            messages=tuple(
                entry_message(number, pk, at, start, _SOURCE)
                if pk not in whole
                else message_of(number, pk, at, message_in(whole[pk]))
                for _, number, pk, at, start in rows
            ),
            total=total,
            is_partial=total == _MOST_NUMBERED,
            thread=shown,
            threads=(_MAIN, *branches) if branches else (),
        )

    def messages(
        self, db: Database, key: int, *, thread: str | None = None, first: int = 1
    ) -> Iterator[ConversationMessage]:
        """Yield the messages of a thread. Only the keys of its entries are in memory at the same time."""
        records = Conversation.objects.using(db.alias).filter(session=key)
        record = db.query(records.values_list("tenant", "head_id", "family").first)
        if record is None:
            return
        tenant, head, family = record
        entries = ConversationEntry.objects.using(db.alias)
        parameters = {
            "tenant": tenant,
            "head": head if thread is None or thread == _MAIN else thread,
            # A damaged entry may be its own ancestor: the limit ends the walk, and each entry is shown once.
            "most": db.query(entries.filter(tenant=tenant, family=family).count),
        }
        keys = list(dict.fromkeys(pk for (pk,) in db.read(_KEYS, parameters)))
        first = max(1, len(keys) + first + 1) if first < 0 else first
        keys = keys[first - 1 :]
        pace = Pace(_AT_ONCE)
        number = first
        while keys:
            chosen, keys = keys[: pace.rows], keys[pace.rows :]
            columns = ("pk", "created_at", PayloadText("payload"))
            rows: list[tuple[Any, ...]] = db.query(
                partial(list, entries.filter(pk__in=chosen).values_list(*columns))
            )
            pace.measure(rows)
            found = {pk: (at, message_in(text)) for pk, at, text in rows}
            for pk in chosen:
                at, message = found[pk]
                yield replace(message_of(number, pk, at, message), stored=message)
                number += 1

    def threads(self, db: Database, key: int, *, after: str | None = None) -> Iterator[str]:
        records = Conversation.objects.using(db.alias).filter(session=key)
        branches = db.query(records.values_list("branches", flat=True).first)
        names = [] if branches is None else [_MAIN, *branches]
        return iter(names[names.index(after) + 1 :] if after in names else names)


def entry_message(
    number: int, pk: int, at: datetime | str, start: str | bytes, limit: int
) -> ConversationMessage:
    """Return the message of an entry whose stored text begins with ``start``."""
    message, is_cut = read_start(start_text(start), limit)
    return message_of(number, pk, at, message, is_cut=is_cut)


def message_of(
    number: int, pk: int, at: datetime | str, message: dict[str, Any] | None, *, is_cut: bool = False
) -> ConversationMessage:
    """Return the message of an entry, or one without parts if it is ``None``, because it is unreadable."""
    if message is None:
        role, parts = "?", None
    else:
        fields = Fields(message)
        fields.drop("kind", ("request", "response"))
        content = fields.take(("parts",), lambda parts: parts is not None)
        listed = content if isinstance(content, list) else [] if content is None else [content]
        role, parts = _role(message, listed), parts_of({"content": listed})
        parts = with_rest(parts, fields.rest, name="message")
    return ConversationMessage(
        number=number,
        role=role,
        parts=parts,
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


CONVERSATION: Final = _PydanticConversation()
