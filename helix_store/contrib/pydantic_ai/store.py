"""`DjangoConversationStore`: conversations of Pydantic AI as sessions in a Django database."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, Final

from pydantic_ai.conversation_store import (
    ConversationConflict,
    ConversationEntry,
    ConversationRecord,
    ConversationStore,
)
from pydantic_ai.messages import ModelResponse
from pydantic_ai.usage import RunUsage

from helix_store.adapters import LockedSession, SessionAdapter, session_id_for
from helix_store.contrib.pydantic_ai import sql
from helix_store.contrib.pydantic_ai.models import Conversation
from helix_store.contrib.pydantic_ai.records import (
    Changed,
    EntryRow,
    entries_from,
    entry_rows,
    record_from,
    record_row,
    scope_name,
    stored_record,
    write_record,
)
from helix_store.contrib.usage import record_usage
from helix_store.core import validation
from helix_store.core.limits import MAX_BIGINT
from helix_store.core.types import BRANCHED_FROM, UsageKind, UserId
from helix_store.core.usage import TokenCounts, UsageEntry, UsageSource
from helix_store.engine.async_twins import in_thread, in_thread_to_the_end
from helix_store.engine.statement import Statement
from helix_store.exceptions import IntegrityFault, SessionNotFound

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
    conversation whose lock has a larger one raises `FencedOutError` and stores nothing.
    """

    def __init__(
        self,
        using: str | None = None,
        *,
        tenant: str = "",
        agent_type: str = "pydantic_ai",
        user_id: UserId | None = None,
        fencing_token: int | None = None,
    ) -> None:
        self._sessions = SessionAdapter(
            agent_type, using, tenant=tenant, user_id=user_id, fencing_token=fencing_token
        )

    @property
    def tenant(self) -> str:
        return self._sessions.tenant

    async def read_record(self, conversation_id: str) -> ConversationRecord | None:
        """Return the record of a conversation, or ``None``. One statement."""
        session_id = session_id_for(conversation_id)
        rows = await self._rows(sql.CONVERSATION_OF_SESSION, {"session_id": session_id})
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
            return await self._records(sql.CONVERSATIONS, limit=limit)
        return await self._records(sql.SCOPED_CONVERSATIONS, scope=scope_name(scope), limit=limit)

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
        for entry in await self._entries(sql.ENTRY, entry_id=entry_id):
            return entry
        raise KeyError(entry_id)

    async def read_history(self, head_id: str | None, *, limit: int | None = None) -> list[ConversationEntry]:
        """Return the entries from the first to ``head_id``, or only the last ``limit`` entries. One
        statement.

        Raises ``KeyError`` if one of them is not stored.
        """
        limit = MAX_BIGINT if limit is None else validation.query_number(limit, "limit")
        if head_id is None:
            return []
        validation.identifier(head_id, "head_id")
        if not limit:
            return []
        history = await self._entries(sql.HISTORY, head_id=head_id, limit=limit)
        if not history:
            raise KeyError(head_id)
        if len(history) < limit and history[0].parent_id is not None:
            raise KeyError(history[0].parent_id)
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

    def entry(kind: UsageKind, counted: str, **fields: object) -> UsageEntry:
        return UsageEntry(
            id=session_id_for("usage", session_id, record.revision, kind.value, counted),
            kind=kind,
            session_id=session_id,
            step_count=0,
            timestamp=validation.datetime_to_milliseconds(record.updated_at),
            source=UsageSource(type="agent", name=source),
            **fields,  # type: ignore[arg-type]  # the fields of the kind
        )

    tokens = [
        entry(UsageKind.TOKENS, model, model=model, tokens=_tokens(usage), cost_usd=usage.cost)
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
        total=usage.total_tokens,
    )


def _is_negative(usage: RunUsage) -> bool:
    return any(count < 0 for count in (*_tokens(usage).to_dict().values(), usage.cost or 0))
