"""The conversion of records and entries to rows and back, and storing them under the locks of the session and
of the family.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime
from itertools import islice
from typing import Any, Final, NamedTuple

from django.db import IntegrityError
from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic_ai.conversation_store import ConversationEntry, ConversationRecord
from pydantic_ai.messages import ModelMessagesTypeAdapter

from helix_store.adapters import LockedSession, session_id_for
from helix_store.contrib.pydantic_ai import models, sql
from helix_store.core import moments, validation
from helix_store.core.ids import new_id
from helix_store.core.limits import Limits
from helix_store.core.payloads import decode_all, encode, encode_all, size_of
from helix_store.engine.database import Database
from helix_store.engine.errors import is_unique_violation
from helix_store.engine.expressions import list_parameter
from helix_store.engine.rows import insert_row, insert_rows, update_row
from helix_store.exceptions import IntegrityFault, InvalidPayload

_ROWS_PER_STATEMENT: Final = 500
# Dump a list, because a dataclass takes the encoding of bytes from its container.
_RECORDS: Final = TypeAdapter(
    list[ConversationRecord], config=ConfigDict(ser_json_bytes="base64", val_json_bytes="base64")
)


class Changed(Exception):
    """The stored conversation is not the expected one, or an entry that it refers to no longer exists."""


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


# --- Conversion ------------------------------------------------------------------------------------


def scope_name(scope: str | None) -> str | None:
    """Return the string of a scope for its indexed column, which is an identifier."""
    return scope if scope in (None, "") else session_id_for(scope)


def record_row(record: ConversationRecord, limits: Limits) -> RecordRow:
    """Raises `InvalidPayload` and `LimitExceeded`."""
    if record.updated_at.utcoffset() is None:
        raise InvalidPayload(path="record/updated_at", reason="a time needs a time zone")
    return RecordRow(
        head_id=validation.optional_identifier(record.head_id, "record/head_id"),
        branches=[
            validation.identifier(tip, f"record/branches/{index}")
            for index, tip in enumerate(validation.items(record.branches, "record/branches"))
        ],
        revision=validation.identifier(record.revision, "record/revision"),
        scope=scope_name(record.scope),
        updated_at=record.updated_at,
        document=encode(
            _dumped(_RECORDS, [record], "record")[0], limit=limits.max_state_bytes, path="record"
        ),
    )


def record_from(text: str) -> ConversationRecord:
    """Return the record of stored text. Raises `IntegrityFault`."""
    records: list[ConversationRecord] = _validated(_RECORDS, [text])
    return records[0]


def entry_rows(entries: Sequence[ConversationEntry], limits: Limits) -> list[EntryRow]:
    """Raises `InvalidPayload` and `LimitExceeded`."""
    entries = validation.items(entries, "new_entries")
    messages = _dumped(ModelMessagesTypeAdapter, [entry.message for entry in entries], "new_entries")
    payloads = encode_all(messages, limit=limits.max_state_bytes, name="max_state_bytes", path="new_entries")
    return [
        EntryRow(
            entry_id=validation.identifier(entry.id, f"new_entries/{index}/id"),
            parent_id=validation.optional_identifier(entry.parent_id, f"new_entries/{index}/parent_id"),
            kind=validation.identifier(entry.kind, f"new_entries/{index}/kind"),
            payload=payload,
        )
        for index, (entry, payload) in enumerate(zip(entries, payloads, strict=True))
    ]


def entries_from(rows: Sequence[EntryRow]) -> list[ConversationEntry]:
    """Return the entries of stored rows. Raises `IntegrityFault`."""
    messages = _validated(ModelMessagesTypeAdapter, [row.payload for row in rows])
    return [
        ConversationEntry(id=row.entry_id, parent_id=row.parent_id, kind=row.kind, message=message)  # type: ignore[arg-type]  # a newer version may have stored another kind
        for row, message in zip(rows, messages, strict=True)
    ]


def _dumped(adapter: TypeAdapter[Any], values: list[Any], path: str) -> list[Any]:
    """Dump a value. Raises `InvalidPayload` if Pydantic cannot write it, such as a deeply nested one."""
    try:
        dumped: list[Any] = adapter.dump_python(values, mode="json")
        return dumped
    except (ValueError, TypeError, RecursionError) as exc:
        reason = f"Pydantic cannot write it as JSON ({type(exc).__name__})"
    raise InvalidPayload(path=path, reason=reason)


def _validated(adapter: TypeAdapter[Any], texts: Sequence[str]) -> Any:
    # Validate values instead of JSON, because Pydantic's JSON reader refuses lone surrogates.
    values = decode_all(texts)
    try:
        return adapter.validate_python(values)
    except ValidationError as exc:
        reason = f"{exc.error_count()} invalid fields"
    # This is raised outside the handler because Pydantic's error contains the values.
    raise IntegrityFault(
        f"The installed pydantic-ai cannot read a stored conversation ({reason}); was it stored by another "
        "version?"
    )


# --- Storing ---------------------------------------------------------------------------------------


def stored_record(session: LockedSession) -> StoredRecord | None:
    """Return the record of a locked session, if it has one. ``known`` are the entries that it refers to."""
    rows = session.db.execute(sql.CONVERSATION_TO_WRITE, {"session": session.key})
    for key, family, revision, head_id, branches, document in rows:
        tips = json.loads(branches) if isinstance(branches, str) else branches
        known = frozenset(tips if head_id is None else (*tips, head_id))
        return StoredRecord(key, family, revision, known, document)
    return None


def write_record(
    session: LockedSession, new: RecordRow, entries: Sequence[EntryRow], stored: StoredRecord | None
) -> None:
    """Insert the entries, and replace the record ``stored``. Raises `Changed` if an entry that they refer to
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
        insert_row(db, models.ConversationFamily, {"tenant": db.tenant, "family": family})
    _insert_entries(db, family, entries)
    if stored is not None:
        update_row(db, models.Conversation, stored.key, new._asdict())
    else:
        owner = {"session_id": session.key, "tenant": db.tenant, "family": family}
        insert_row(db, models.Conversation, owner | new._asdict())


def _pointed_at(new: RecordRow, entries: Sequence[EntryRow]) -> frozenset[str]:
    """Return those of the named entries that are not new. Raises `InvalidPayload` for the wrong order."""
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
    """Return the family of stored entries, locked. Raises `Changed` if one of them no longer exists."""
    for family in sorted(set(_families(db, entries).values())):
        if _hold(db, family):
            # Read the entries again, because the previous holder of the lock may have deleted one.
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
        reason = "it refers to entries of conversations that are not forks of each other"
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
            insert_rows(db, models.ConversationEntry, columns, batch)
    except IntegrityError as exc:
        if is_unique_violation(exc):
            reason = "an entry with one of these ids is stored already, and entries do not change"
            raise InvalidPayload(path="new_entries", reason=reason) from exc
        raise
