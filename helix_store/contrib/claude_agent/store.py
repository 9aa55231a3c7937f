"""The session store of Claude Agent SDK in the project's database."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial
from typing import Any, cast

from claude_agent_sdk import SessionKey, SessionStore, fold_session_summary
from claude_agent_sdk.types import (
    SessionListSubkeysKey,
    SessionStoreEntry,
    SessionStoreListEntry,
    SessionSummaryEntry,
)

from helix_store.adapters import LockedSession
from helix_store.contrib.claude_agent.entries import MAIN, TranscriptKey, key_of, record_largest, usage_of
from helix_store.contrib.claude_agent.models import ClaudeSession
from helix_store.contrib.item_storage import ItemStorage, from_payload, store_exactly
from helix_store.core import validation
from helix_store.core.payloads import decode_object, encode
from helix_store.core.types import UserId
from helix_store.core.validation import datetime_to_milliseconds
from helix_store.engine.async_twins import in_thread, in_thread_to_the_end
from helix_store.engine.database import Database
from helix_store.exceptions import IntegrityFault, InvalidPayload, shown_id
from helix_store.items.rules import item_key
from helix_store.models import Item

_logger = logging.getLogger(__name__)


class DjangoSessionStore(SessionStore):
    """Transcripts of the SDK as items of sessions, in the database ``using`` and one tenant.

    A session of the SDK is one session here, and each transcript is one of its lanes. An entry with a
    ``uuid`` is stored once. The summary is updated under the session's lock, so appends may overlap. A
    cancelled write raises only after its transaction has ended. The usage of the models' responses is
    recorded in the usage ledger in the same transaction, unless ``record_usage`` is False. An append sets
    ``user_id`` as the user of a session without one, and raises `ConflictError` if the session belongs to
    another user. With a ``fencing_token``, a write raises `FencedOutError` if the session's lock has a larger
    one. Needs asyncio. Calls raise the errors of helix_store.
    """

    def __init__(
        self,
        using: str | None = None,
        *,
        tenant: str = "",
        agent_type: str = "claude-agent",
        user_id: UserId | None = None,
        record_usage: bool = True,
        fencing_token: int | None = None,
    ) -> None:
        self._storage = ItemStorage(
            agent_type, using, tenant=tenant, user_id=user_id, fencing_token=fencing_token
        )
        self._records_usage = record_usage

    @staticmethod
    def session_id_of(key: SessionKey) -> str:
        """Return the id of the session in this store: for the admin, usage, locks and cleanup."""
        return TranscriptKey.of(key).stored_id

    # --- The protocol of the SDK -------------------------------------------------------------------

    async def append(self, key: SessionKey, entries: list[SessionStoreEntry]) -> None:
        """Add entries to a transcript, all or none, in one transaction. Each ``uuid`` is added only once."""
        transcript = TranscriptKey.of(key)
        given = validation.items(entries, "entries")
        if given:
            await in_thread_to_the_end(partial(self._append, transcript, given))

    async def load(self, key: SessionKey) -> list[SessionStoreEntry] | None:
        """Return all entries of a transcript, read at one moment, or ``None`` if it has no entries."""
        entries = await in_thread(partial(self._entries, TranscriptKey.of(key)))
        return cast("list[SessionStoreEntry]", entries) or None

    async def list_sessions(self, project_key: str) -> list[SessionStoreListEntry]:
        """Return a project's sessions that have a main transcript, with its last write time. One query."""
        rows = await self._listed(project_key, "claude_session_id", "mtime_ms")
        return [{"session_id": session_id, "mtime": mtime} for session_id, mtime in rows]

    async def list_session_summaries(self, project_key: str) -> list[SessionSummaryEntry]:
        """Return the sessions of `list_sessions` with their summaries. One query, which reads no transcript.

        A summary that cannot be read is left out and logged; the SDK then reads the transcript itself. The
        next append rebuilds the summary.
        """
        rows = await self._listed(project_key, "claude_session_id", "mtime_ms", "summary")
        found: list[SessionSummaryEntry] = []
        for session_id, mtime, summary in rows:
            if (data := _summary(session_id, summary)) is not None:
                found.append({"session_id": session_id, "mtime": mtime, "data": data})
        return found

    async def delete(self, key: SessionKey) -> None:
        """Delete a session with its transcripts and usage, or only the transcript of a ``subpath``.

        If the application created the session, only its items are deleted. Safe to repeat.
        """
        transcript = TranscriptKey.of(key)
        if transcript.lane != MAIN:
            log = self._storage.log(transcript.stored_id, transcript.lane)
            await log.aclear(fencing_token=self._storage.fencing_token)
        else:
            await self._storage.adelete(transcript.stored_id, Item, ClaudeSession)

    async def list_subkeys(self, key: SessionListSubkeysKey) -> list[str]:
        """Return the subpaths of the transcripts of sub-agents, in order."""
        lanes = await self._storage.log(TranscriptKey.of(key).stored_id, MAIN).alanes()
        return [lane for lane in lanes if lane != MAIN]

    # --- Writing -----------------------------------------------------------------------------------

    def _append(self, transcript: TranscriptKey, entries: list[Any]) -> None:
        for index, entry in enumerate(entries):
            if type(entry) is not dict:
                reason = f"expected a dict, got {type(entry).__name__}"
                raise InvalidPayload(path=f"/entries/{index}", reason=reason)

        def store(payloads: list[Any]) -> None:
            append = partial(self._append_locked, transcript, entries, payloads)
            self._storage.write(transcript.stored_id, append)

        store_exactly(store, entries)

    def _append_locked(
        self,
        transcript: TranscriptKey,
        entries: Sequence[Any],
        payloads: Sequence[Any],
        session: LockedSession,
    ) -> None:
        log = self._storage.log(transcript.stored_id, transcript.lane)
        added = log.append(payloads, keys=map(key_of, entries))
        if not added:
            return
        if added < len(entries):
            # The lane is locked, so its newest items are the new ones.
            entries = [from_payload(item.payload) for item in log.tail(added)]
        now_ms = datetime_to_milliseconds(session.db.now())
        self._fold_locked(transcript, entries, session, now_ms)
        if self._records_usage:
            agent_type = self._storage.agent_type
            usage = usage_of(entries, session_id=session.session_id, agent_type=agent_type, now_ms=now_ms)
            record_largest(session, usage)

    def _fold_locked(
        self, transcript: TranscriptKey, entries: Sequence[Any], session: LockedSession, now_ms: int
    ) -> None:
        rows = ClaudeSession.objects.using(session.alias)
        row = rows.filter(session_id=session.key).first()
        if row is None:
            row = ClaudeSession(
                session_id=session.key,
                tenant=session.tenant,
                project_key=transcript.project_key,
                claude_session_id=transcript.session_id,
            )
        elif transcript.lane != MAIN:
            return
        if transcript.lane == MAIN:
            before: SessionSummaryEntry | None = None
            if row.summary is not None and row.mtime_ms is not None:
                data = _summary(transcript.session_id, row.summary)
                if data is None:
                    entries = self._entries(transcript)
                else:
                    before = {"session_id": transcript.session_id, "mtime": row.mtime_ms, "data": data}
            key: SessionKey = {"project_key": transcript.project_key, "session_id": transcript.session_id}
            folded = fold_session_summary(before, key, cast("list[SessionStoreEntry]", entries))
            row.summary = encode(folded["data"])
            # The new time is later even if the clock was set back, so that no write looks older than it is.
            row.mtime_ms = max(now_ms, (row.mtime_ms or 0) + 1)
        row.save(using=session.alias)

    # --- Reading -----------------------------------------------------------------------------------

    def _entries(self, transcript: TranscriptKey) -> list[Any]:
        items = self._storage.log(transcript.stored_id, transcript.lane).tail()
        return [from_payload(item.payload) for item in items]

    async def _listed(self, project_key: str, *columns: str) -> list[Any]:
        project_key = item_key(project_key, "project_key")

        def read(db: Database) -> list[Any]:
            rows = ClaudeSession.objects.using(db.alias).filter(
                tenant=db.tenant, project_key=project_key, mtime_ms__isnull=False
            )
            return list(rows.order_by("-mtime_ms", "id").values_list(*columns))

        return await self._storage.aread(read)


def _summary(session_id: str, text: str) -> dict[str, Any] | None:
    """Return a stored summary, or `None` if it cannot be read. It can be rebuilt from the transcript."""
    try:
        return decode_object(text)
    except IntegrityFault:
        _logger.error("The summary of the Claude session %s cannot be read.", shown_id(session_id))
        return None
