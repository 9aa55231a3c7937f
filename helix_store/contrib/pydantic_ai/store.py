"""`DjangoConversationStore`: conversations of Pydantic AI as sessions in a Django database."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Sequence
from datetime import datetime
from decimal import Decimal
from functools import partial
from itertools import islice
from typing import Any, Final, NamedTuple

from django.db import IntegrityError
from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic_ai.conversation_store import (
    ConversationConflict,
    ConversationEntry,
    ConversationRecord,
    ConversationStore,
)
from pydantic_ai.messages import ModelMessage, ModelResponse
from pydantic_ai.usage import RunUsage

from helix_store.adapters import LockedSession, SessionAdapter, session_id_for
from helix_store.contrib.item_storage import hour_long_cost, record_usage
from helix_store.contrib.pydantic_ai import models
from helix_store.contrib.pydantic_ai.models import Conversation, ConversationFamily
from helix_store.contrib.pydantic_ai.models import ConversationEntry as StoredEntry
from helix_store.core import moments, validation
from helix_store.core.ids import new_id
from helix_store.core.limits import MAX_BIGINT, Limits
from helix_store.core.payloads import decode_all, encode, encode_all, size_of
from helix_store.core.types import BRANCHED_FROM, UsageKind, UserId
from helix_store.core.usage import TokenCounts, UsageEntry, UsageSource
from helix_store.engine.async_twins import in_thread, in_thread_to_the_end
from helix_store.engine.database import Database
from helix_store.engine.errors import is_unique_violation
from helix_store.engine.expressions import (
    insert_row,
    insert_rows,
    is_in_list,
    list_parameter,
    looked_up,
    update_row,
)
from helix_store.engine.statement import Statement, table
from helix_store.exceptions import IntegrityFault, InvalidPayload, SessionNotFound, shown_id
from helix_store.models import Session
from helix_store.sessions.statements import SESSION_BY_ID

_FAMILY: Final = table(ConversationFamily)
_CONVERSATION: Final = table(Conversation)
_ENTRY: Final = table(StoredEntry)

_OF_TENANT: Final = "tenant = (SELECT %(tenant)s)"

# --- Reads -------------------------------------------------------------------------------------------

CONVERSATION_OF_SESSION: Final = Statement(
    f"""
    SELECT document FROM {_CONVERSATION}
    WHERE session_id = (SELECT id FROM {table(Session)} WHERE {SESSION_BY_ID})"""
)

_LISTED: Final = f"SELECT document, session_id FROM {_CONVERSATION} WHERE {_OF_TENANT}"
_NEWEST: Final = "ORDER BY updated_at DESC, id LIMIT %(limit)s"
CONVERSATIONS: Final = Statement(f"{_LISTED} {_NEWEST}")
SCOPED_CONVERSATIONS: Final = Statement(f"{_LISTED} AND scope = %(scope)s {_NEWEST}")

_COLUMNS: Final = "entry_id, parent_id, kind, payload"

ENTRY: Final = Statement(f"SELECT {_COLUMNS} FROM {_ENTRY} WHERE {_OF_TENANT} AND entry_id = %(entry_id)s")


# A history is not longer than its family, unless an entry is its own ancestor: then it would have no end.
_LONGEST: Final = f"""(
                SELECT count(*) FROM {_ENTRY} AS f WHERE f.{_OF_TENANT} AND f.family = (
                    SELECT family FROM {_ENTRY} WHERE {_OF_TENANT} AND entry_id = %(head_id)s
                )
            )"""


def _history(before: str) -> str:
    return f"""
        WITH RECURSIVE history AS (
            SELECT {_COLUMNS}, CAST(1 AS bigint) AS depth FROM {_ENTRY}
            WHERE {_OF_TENANT} AND entry_id = %(head_id)s
            UNION ALL
            SELECT e.entry_id, e.parent_id, e.kind, e.payload, history.depth + 1 FROM history {before}
            WHERE history.depth < %(limit)s AND history.depth < {_LONGEST}
        )
        SELECT {_COLUMNS} FROM history ORDER BY depth DESC"""


HISTORY: Final = Statement(
    *map(
        _history,
        looked_up(StoredEntry, "e", f"e.{_OF_TENANT} AND e.entry_id = history.parent_id"),
    )
)
"""The entries up to ``head_id``, oldest first, at most ``limit``."""

# --- Writes ------------------------------------------------------------------------------------------

CONVERSATION_TO_WRITE: Final = Statement(
    f"""
    SELECT id, family, revision, head_id, branches, document FROM {_CONVERSATION}
    WHERE session_id = %(session)s"""
)

_ONE_FAMILY: Final = f"SELECT id FROM {_FAMILY} WHERE tenant = %(tenant)s AND family = %(family)s"
HOLD_FAMILY: Final = Statement(postgresql=f"{_ONE_FAMILY} FOR SHARE", sqlite=_ONE_FAMILY)
"""Nobody can delete entries of the family until the commit. Its holders do not block each other."""

FAMILIES_OF_ENTRIES: Final = Statement(
    *(
        f"SELECT entry_id, family FROM {_ENTRY} WHERE tenant = %(tenant)s AND {of_ids}"
        for of_ids in is_in_list("entry_id", "entry_ids", "varchar")
    )
)


_ROWS_PER_STATEMENT: Final = 500
# Dump a list, because a dataclass takes the encoding of bytes from its container.
# NaN and infinity are not written as null, so that `encode` refuses them.
_CONFIG: Final = ConfigDict(
    defer_build=True, ser_json_bytes="base64", val_json_bytes="base64", ser_json_inf_nan="constants"
)
_RECORDS: Final = TypeAdapter(list[ConversationRecord], config=_CONFIG)
_MESSAGES: Final = TypeAdapter(list[ModelMessage], config=_CONFIG)


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
    messages = _dumped(_MESSAGES, [entry.message for entry in entries], "new_entries")
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
    messages = _validated(_MESSAGES, [row.payload for row in rows])
    return [
        ConversationEntry(id=row.entry_id, parent_id=row.parent_id, kind=row.kind, message=message)  # type: ignore[arg-type]  # a newer version may have stored another kind
        for row, message in zip(rows, messages, strict=True)
    ]


def _dumped(adapter: TypeAdapter[Any], values: list[Any], path: str) -> list[Any]:
    """Dump values. Raises `InvalidPayload` if Pydantic cannot write one, such as a deeply nested one, or if
    it could not read one again.
    """
    try:
        dumped: list[Any] = adapter.dump_python(values, mode="json")
        adapter.validate_python(dumped)
        return dumped
    except ValidationError as exc:
        first = exc.errors(include_url=False, include_context=False, include_input=False)[0]
        path_in_value = "/".join(map(str, first["loc"]))
        reason = f"Pydantic could not read it again: {path_in_value}: {first['msg']}"
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
    rows = session.db.execute(CONVERSATION_TO_WRITE, {"session": session.key})
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
    return bool(db.execute(HOLD_FAMILY, {"tenant": db.tenant, "family": family}))


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
    rows = db.execute(FAMILIES_OF_ENTRIES, {"tenant": db.tenant, "entry_ids": names})
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


_logger = logging.getLogger(__name__)

_UNKNOWN_MODEL: Final = "unknown"
_COUNTED: Final = ("requests", "tool_calls")
"""Counts of a run other than tokens; they become custom entries of the usage ledger."""


class DjangoConversationStore(ConversationStore):
    """A store of conversations in the database ``using`` and one tenant. Each conversation is a session.

    If a conversation id is not a valid session id, `session_id_for` converts it. The user of its session is
    ``user_id``, or else the scope with which the conversation is created, so that usage and erasure by user
    include it. A save sets ``user_id`` as the user of a session without one, and raises `ConflictError` if
    the session belongs to another user. A fork is a branch of its source, and is erased with the source. A
    save is one transaction: it stores the record, its new entries and the usage that it adds to the ledger.
    If saves of one revision run concurrently, one succeeds; the others raise ``ConversationConflict``. If a
    save or deletion is cancelled, the caller is told after its transaction has ended. A deletion also deletes
    the entries that no other conversation of the tenant reaches, even if the session is deleted in another
    way, such as by a cleanup, the admin or an erasure. With a ``fencing_token``, a save or deletion of a
    conversation whose lock has a larger one raises `FencedOutError` and stores nothing. The session of an
    erased conversation is not created again, which raises `SessionErased`, unless ``recreate`` is True.

    Example::

        conversations = DjangoConversationStore()
        result = await agent.run("How is Lisbon?", conversation=Conversation(conversation_id="lisbon"))
        await conversations.save(result, scope="ada")
    """

    def __init__(
        self,
        using: str | None = None,
        *,
        tenant: str = "",
        agent_type: str = "pydantic_ai",
        user_id: UserId | None = None,
        fencing_token: int | None = None,
        recreate: bool = False,
    ) -> None:
        self._sessions = SessionAdapter(
            agent_type,
            using,
            tenant=tenant,
            user_id=user_id,
            fencing_token=fencing_token,
            recreate=recreate,
        )

    @property
    def tenant(self) -> str:
        return self._sessions.tenant

    async def read_record(self, conversation_id: str) -> ConversationRecord | None:
        """Return the record of a conversation, or ``None``. One statement."""
        session_id = session_id_for(conversation_id)
        rows = await self._rows(CONVERSATION_OF_SESSION, {"session_id": session_id})
        return record_from(rows[0][0]) if rows else None

    async def read_records(
        self, *, scope: str | None = None, limit: int | None = None
    ) -> Sequence[ConversationRecord]:
        """Return the records of the tenant, or of a scope, newest first. One statement, without the messages.

        A record that cannot be read is left out and logged, but counts towards ``limit``; `read_record`
        raises `IntegrityFault` for it.
        """
        limit = MAX_BIGINT if limit is None else validation.query_number(limit, "limit")
        if scope is None:
            return await self._records(CONVERSATIONS, limit=limit)
        return await self._records(SCOPED_CONVERSATIONS, scope=scope_name(scope), limit=limit)

    async def write_record(
        self,
        record: ConversationRecord,
        *,
        new_entries: Sequence[ConversationEntry] = (),
        expected_revision: str | None,
    ) -> None:
        """Store a record, its new entries and the usage that it adds, either all of them or nothing.

        It locks the session, and takes a share lock on the conversation's family. Raises
        ``ConversationConflict`` if the stored revision differs or an entry that the record needs no longer
        exists, `InvalidPayload` if an entry id is taken, `LimitExceeded`, and `FencedOutError` before it
        checks the revision.
        """
        validation.instance(record, ConversationRecord, "record")
        if expected_revision is not None:
            validation.identifier(expected_revision, "expected_revision")
        session_id = session_id_for(record.conversation_id)
        row = record_row(record, self._sessions.db.limits)
        entries = entry_rows(new_entries, self._sessions.db.limits)

        def write(session: LockedSession) -> None:
            stored = stored_record(session)
            if (stored.revision if stored is not None else None) != expected_revision:
                raise Changed
            write_record(session, row, entries, stored)
            before = record_from(stored.document) if stored is not None else None
            source = self._sessions.agent_type
            record_usage(session, _usage_of_save(session_id, record, before, new_entries, source=source))

        save = partial(self._sessions.write, session_id, write, create=False)

        def create() -> None:
            owner = self._sessions.user_id or row.scope or None
            self._sessions.ensure(session_id, user_id=owner, metadata=_origin(record))
            save()

        is_new = expected_revision is None
        try:
            await in_thread_to_the_end(partial(self._sessions.db.transaction, create) if is_new else save)
        except (Changed, SessionNotFound):
            raise ConversationConflict(record.conversation_id) from None

    async def delete_record(self, conversation_id: str, *, expected_revision: str) -> None:
        """Delete a conversation with its session, and the entries that no other conversation reaches.

        If the application created the session, only the conversation is deleted. One transaction. Raises
        ``ConversationConflict`` if the stored revision differs, and `FencedOutError`.
        """
        session_id = session_id_for(conversation_id)
        validation.identifier(expected_revision, "expected_revision")

        def check(session: LockedSession) -> None:
            stored = stored_record(session)
            if stored is None or stored.revision != expected_revision:
                raise Changed

        def delete() -> None:
            self._sessions.write(session_id, check, create=False)
            self._sessions.delete(session_id, Conversation)

        try:
            await in_thread_to_the_end(lambda: self._sessions.db.transaction(delete))
        except (Changed, SessionNotFound):
            raise ConversationConflict(conversation_id) from None

    async def read_entry(self, entry_id: str) -> ConversationEntry:
        """Return the entry with this id. Raises ``KeyError`` for an unknown one."""
        validation.identifier(entry_id, "entry_id")
        for entry in await self._entries(ENTRY, entry_id=entry_id):
            return entry
        raise KeyError(entry_id)

    async def read_history(self, head_id: str | None, *, limit: int | None = None) -> list[ConversationEntry]:
        """Return the entries from the first to ``head_id``, or only the last ``limit`` entries. One
        statement.

        Raises ``KeyError`` if one of them is not stored, and `IntegrityFault` if one is its own ancestor.
        """
        limit = MAX_BIGINT if limit is None else validation.query_number(limit, "limit")
        if head_id is None:
            return []
        validation.identifier(head_id, "head_id")
        if not limit:
            return []
        history = await self._entries(HISTORY, head_id=head_id, limit=limit)
        if not history:
            raise KeyError(head_id)
        before = history[0].parent_id
        if len(history) < limit and before is not None:
            if any(entry.id == before for entry in history):
                raise IntegrityFault(f"The entry {shown_id(before)} of a conversation is its own ancestor.")
            raise KeyError(before)
        return history

    async def _records(self, statement: Statement, **parameters: object) -> list[ConversationRecord]:
        records = []
        for document, key in await self._rows(statement, parameters):
            try:
                records.append(record_from(document))
            except IntegrityFault as exc:
                _logger.error("A list leaves out the conversation of the session row %s. %s", key, exc)
        return records

    async def _entries(self, statement: Statement, **parameters: object) -> list[ConversationEntry]:
        return entries_from([EntryRow(*row) for row in await self._rows(statement, parameters)])

    async def _rows(self, statement: Statement, parameters: dict[str, object]) -> list[tuple[Any, ...]]:
        db = self._sessions.db
        return await in_thread(lambda: db.read(statement, {"tenant": db.tenant, **parameters}))


def _origin(record: ConversationRecord) -> dict[str, str]:
    """Return the metadata of a fork's session, through which an erasure of the source includes the fork."""
    if record.forked_from is None or record.head_id is None:
        return {}
    return {BRANCHED_FROM: session_id_for(record.forked_from)}


# --- Usage -----------------------------------------------------------------------------------------


def _usage_of_save(
    session_id: str,
    record: ConversationRecord,
    stored: ConversationRecord | None,
    entries: Sequence[ConversationEntry],
    *,
    source: str,
) -> list[UsageEntry]:
    """Return entries for the difference between ``record.usage`` and ``stored``: first by model, then the
    counts. A fork begins with the usage of its source conversation, which is already in the ledger. The ids
    are derived from the revision, so a save is recorded once.
    """
    if stored is None and record.forked_from is not None:
        return []
    spent = record.usage - (stored.usage if stored is not None else RunUsage())

    at = validation.datetime_to_milliseconds(record.updated_at)

    def entry(kind: UsageKind, counted: str, **fields: object) -> UsageEntry:
        return UsageEntry(
            id=session_id_for("usage", session_id, record.revision, kind.value, counted),
            kind=kind,
            session_id=session_id,
            step_count=0,
            timestamp=at,
            source=UsageSource(type="agent", name=source),
            **fields,  # type: ignore[arg-type]  # the fields of the kind
        )

    tokens = [
        entry(UsageKind.TOKENS, model, model=model, tokens=_tokens(usage), cost_usd=_cost(usage, model, at))
        for model, usage in _by_model(spent, entries)
    ]
    counts = [
        entry(UsageKind.CUSTOM, name, type=source, name=name, amount=getattr(spent, name))
        for name in _COUNTED
        if getattr(spent, name) > 0
    ]
    return tokens + counts


def _by_model(spent: RunUsage, entries: Sequence[ConversationEntry]) -> Iterator[tuple[str, RunUsage]]:
    """Yield the tokens of each model from the new responses; the remainder is assigned to the last model."""
    if _is_negative(spent):
        return
    responses = [entry.message for entry in entries if isinstance(entry.message, ModelResponse)]
    by_model: dict[str, RunUsage] = {}
    for response in responses:
        by_model.setdefault(_model_of(response), RunUsage()).incr(response.usage)
    rest = spent - sum(by_model.values(), RunUsage())
    last = _model_of(responses[-1]) if responses else _UNKNOWN_MODEL
    if _is_negative(rest):
        # The responses do not account for all of the usage, so only the sum is known.
        by_model = {last: spent}
    else:
        by_model.setdefault(last, RunUsage()).incr(rest)
    for model, usage in by_model.items():
        if usage.total_tokens or usage.cost:
            yield model, usage


def _model_of(response: ModelResponse) -> str:
    return session_id_for(response.model_name) if response.model_name else _UNKNOWN_MODEL


def _tokens(usage: RunUsage) -> TokenCounts:
    return TokenCounts(
        prompt=usage.input_tokens,
        completion=usage.output_tokens,
        reasoning=usage.output_reasoning_tokens,
        cached=usage.cache_read_tokens,
        cache_write=usage.cache_write_tokens,
        audio_prompt=usage.input_audio_tokens,
        audio_completion=usage.output_audio_tokens,
        total=usage.total_tokens,
    )


def _cost(usage: RunUsage, model: str, at: int) -> Decimal | None:
    if usage.cost is not None:
        return usage.cost
    # Older releases of Pydantic AI do not count these tokens.
    for_an_hour = getattr(usage, "cache_write_1h_tokens", 0)
    return hour_long_cost(model, _tokens(usage), at, for_an_hour)


def _is_negative(usage: RunUsage) -> bool:
    return any(count < 0 for count in (*_tokens(usage).to_dict().values(), usage.cost or 0))
