"""Storing a record and its new entries, under the locks of the session and of the family."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime
from itertools import islice
from typing import Final, NamedTuple

from django.db import IntegrityError

from helix_store.adapters import LockedSession
from helix_store.contrib.pydantic_ai import sql
from helix_store.contrib.pydantic_ai.models import Conversation, ConversationEntry, ConversationFamily
from helix_store.core import moments
from helix_store.core.ids import new_id
from helix_store.core.payloads import size_of
from helix_store.engine.database import Database
from helix_store.engine.errors import is_unique_violation
from helix_store.engine.expressions import list_parameter
from helix_store.engine.rows import insert_row, insert_rows, update_row
from helix_store.exceptions import IntegrityFault, InvalidPayload

_ROWS_PER_STATEMENT: Final = 500


class Changed(Exception):
    """The stored conversation is not the expected one, or an entry that it points at is gone."""


class RecordRow(NamedTuple):
    """The columns of a record. ``document`` is its complete text."""

    head_id: str | None
    branches: list[str]
    revision: str
    scope: str | None
    updated_at: datetime
    document: str


class EntryRow(NamedTuple):
    """The columns of a new entry. ``payload`` is the text of its message."""

    entry_id: str
    parent_id: str | None
    kind: str
    payload: str


class StoredRecord(NamedTuple):
    key: int
    family: str
    revision: str
    known: frozenset[str]
    document: str


def stored_record(session: LockedSession) -> StoredRecord | None:
    """Return the record of a locked session, if it has one. ``known`` are the entries that it points at."""
    rows = session.db.execute(sql.CONVERSATION_TO_WRITE, {"session": session.key})
    for key, family, revision, head_id, branches, document in rows:
        tips = json.loads(branches) if isinstance(branches, str) else branches
        known = frozenset(tips if head_id is None else (*tips, head_id))
        return StoredRecord(key, family, revision, known, document)
    return None


def write_record(
    session: LockedSession, new: RecordRow, entries: Sequence[EntryRow], stored: StoredRecord | None
) -> None:
    """Insert the entries, and replace the record ``stored``. Raises `Changed` if an entry that they point at
    is not stored, and `InvalidPayload` if an id is taken.
    """
    db = session.db
    pointed_at = _pointed_at(new, entries)
    if stored is not None:
        family = stored.family
        if not _hold(db, family):
            raise IntegrityFault(
                "The family of a stored conversation is missing; was its import interrupted?"
            )
        _check_entries(db, pointed_at - stored.known, family)
    elif pointed_at:
        family = _family_of(db, pointed_at)
    else:
        family = new_id()
        insert_row(db, ConversationFamily, {"tenant": db.tenant, "family": family})
    _insert_entries(db, family, entries)
    if stored is not None:
        update_row(db, Conversation, stored.key, new._asdict())
    else:
        owner = {"session_id": session.key, "tenant": db.tenant, "family": family}
        insert_row(db, Conversation, owner | new._asdict())


def _pointed_at(new: RecordRow, entries: Sequence[EntryRow]) -> frozenset[str]:
    """Return the named entries that are not new. Raises `InvalidPayload` for a wrong order."""
    brought: set[str] = set()
    outside = set()
    ids = {entry.entry_id for entry in entries}
    for index, entry in enumerate(entries):
        path = f"new_entries/{index}"
        if entry.entry_id in brought:
            raise InvalidPayload(path=f"{path}/id", reason="an entry before it has the same id")
        if entry.parent_id is not None and entry.parent_id not in brought:
            if entry.parent_id in ids:
                raise InvalidPayload(path=f"{path}/parent_id", reason="its parent must come before it")
            outside.add(entry.parent_id)
        brought.add(entry.entry_id)
    tips = {*new.branches} if new.head_id is None else {*new.branches, new.head_id}
    return frozenset(outside | (tips - brought))


def _hold(db: Database, family: str) -> bool:
    """Protect a family from deletion until the commit, and return whether it still exists."""
    return bool(db.execute(sql.HOLD_FAMILY, {"tenant": db.tenant, "family": family}))


def _family_of(db: Database, entries: frozenset[str]) -> str:
    """Return the family of stored entries, locked. Raises `Changed` if one of them is gone."""
    for family in sorted(set(_families(db, entries).values())):
        if _hold(db, family):
            # Read again, because the previous holder of the lock may have deleted an entry.
            _check_entries(db, entries, family)
            return family
    raise Changed


def _check_entries(db: Database, entries: frozenset[str], family: str) -> None:
    if not entries:
        return
    families = _families(db, entries)
    if families.keys() != entries:
        raise Changed
    if set(families.values()) != {family}:
        reason = "it points at entries of conversations that are not forks of each other"
        raise InvalidPayload(path="record", reason=reason)


def _families(db: Database, entries: frozenset[str]) -> dict[str, str]:
    names = list_parameter(db, sorted(entries))
    rows = db.execute(sql.FAMILIES_OF_ENTRIES, {"tenant": db.tenant, "entry_ids": names})
    return dict(rows)


def _insert_entries(db: Database, family: str, entries: Sequence[EntryRow]) -> None:
    at = moments.now()
    columns = ("tenant", "family", "size_bytes", "created_at", *EntryRow._fields)
    rows = ((db.tenant, family, size_of(entry.payload), at, *entry) for entry in entries)
    try:
        while batch := list(islice(rows, _ROWS_PER_STATEMENT)):
            insert_rows(db, ConversationEntry, columns, batch)
    except IntegrityError as exc:
        if is_unique_violation(exc):
            reason = "an entry with one of these ids is stored already, and entries do not change"
            raise InvalidPayload(path="new_entries", reason=reason) from exc
        raise
