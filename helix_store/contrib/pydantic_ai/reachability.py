"""The entries that conversations reach from their heads and branches, and the deletion of the rest."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from typing import Any, Final

from django.db.models import Model, QuerySet
from django.db.models.expressions import RawSQL

from helix_store.contrib.pydantic_ai.models import Conversation, ConversationEntry, ConversationFamily
from helix_store.engine.database import Database
from helix_store.engine.expressions import for_keys, is_in_list, list_parameter, looked_up
from helix_store.engine.statement import Statement, table

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
    chosen, params = sessions.values("pk").query.get_compiler(using=rows.db).as_sql()
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
_BEFORE: Final = looked_up(
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
            SELECT e.id, e.tenant, e.parent_id FROM reached {_BEFORE[vendor]}
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
