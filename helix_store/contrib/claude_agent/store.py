"""The session store of Claude Agent SDK in the project's database.

Stand-ins for entries of a transcript that cannot be stored.

The SDK drops a batch that is refused, and continues. A later resume would then miss a part of the chain, so
an entry that is too large is stored without its large values.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from typing import Any, Final, Self, cast

from claude_agent_sdk import SessionKey, SessionStore, fold_session_summary
from claude_agent_sdk.types import (
    SessionListSubkeysKey,
    SessionStoreEntry,
    SessionStoreListEntry,
    SessionSummaryEntry,
)

from helix_store import conf
from helix_store.adapters import LockedSession, session_id_for
from helix_store.contrib.claude_agent.models import ClaudeSession
from helix_store.contrib.item_storage import (
    ItemStorage,
    as_payload,
    count_of,
    from_payload,
    record_usage,
    response_entry,
    store_exactly,
)
from helix_store.core import validation
from helix_store.core.limits import MAX_CALL_BYTES, MAX_LANE_BYTES
from helix_store.core.payloads import decode_object, encode, size_of
from helix_store.core.types import UserId
from helix_store.core.usage import UsageEntry
from helix_store.core.validation import datetime_to_milliseconds
from helix_store.counters import delete_usage
from helix_store.engine.async_twins import in_thread, in_thread_to_the_end
from helix_store.engine.database import Database
from helix_store.engine.expressions import tenant_parameter
from helix_store.exceptions import HelixStoreError, IntegrityFault, InvalidPayload, LimitExceeded, shown_id
from helix_store.items import item_key
from helix_store.models import Item
from helix_store.models import UsageEntry as UsageRow

_LARGEST_TEXT: Final = 16 * 1024
"""Longer strings are left out, in bytes of UTF-8."""
_LARGEST_FIELD: Final = 1_024
_BLOCKS_KEPT: Final = 1_000
_UNREADABLE: Final = frozenset({"image", "document", "thinking", "redacted_thinking"})
"""Blocks that a model refuses if a part of them is replaced."""
_KEY: Final = "helix_store"
"""The field of a stand-in that says what was left out."""


def storable_parts(entries: Sequence[Any]) -> list[tuple[list[Any], list[Any]]]:
    """Return entries with their payloads, in parts that one call can store each.

    The payload of an entry that is too large or too deep is that of its stand-in. Raises `InvalidPayload` for
    an entry that is not JSON.
    """
    parts: list[tuple[list[Any], list[Any]]] = [([], [])]
    size = 0
    for index, entry in enumerate(entries):
        payload, its_size = _storable(entry, f"/entries/{index}")
        if size + its_size > MAX_CALL_BYTES:
            parts.append(([], []))
            size = 0
        size += its_size
        parts[-1][0].append(entry)
        parts[-1][1].append(payload)
    return parts


def _storable(entry: dict[str, Any], path: str) -> tuple[Any, int]:
    """Return a payload that can be stored, and its size in bytes. Raises `InvalidPayload`."""
    payload = as_payload(entry)
    size, reason = _measured(payload, path)
    if not reason:
        return payload, size
    note = f"[left out by helix_store: {reason}]"
    left_out = {_KEY: {"left_out": reason}}
    if _is_shallow(entry):
        shorter = as_payload({**_without_large(entry, note), **left_out})
        size, problem = _measured(shorter, path)
        if not problem:
            return shorter, size
    outline = as_payload({**_outline(entry, note), **left_out})
    return outline, size_of(_encoded(outline, path))


def _measured(payload: Any, path: str) -> tuple[int, str]:
    """Return the size of a payload, and why it exceeds a limit, or ``""``. Raises `InvalidPayload`."""
    try:
        return size_of(_encoded(payload, path)), ""
    except LimitExceeded as exc:
        return 0, f"the entry has at least {exc.actual} bytes, and {exc.name} is {exc.limit}"


def _encoded(payload: Any, path: str) -> str:
    return encode(payload, limit=conf.limits().max_state_bytes, path=path)


def _is_shallow(value: Any, levels: int = 150) -> bool:
    """Return whether a value can be walked by recursion."""
    if not levels:
        return False
    children = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return all(_is_shallow(child, levels - 1) for child in children if isinstance(child, dict | list))


def _without_large(value: Any, note: str) -> Any:
    """Return a copy with a note in place of each long string and of each block that would be incomplete."""
    if isinstance(value, str):
        return note if len(value) > _LARGEST_TEXT else value
    if isinstance(value, list):
        return [_without_large(each, note) for each in value]
    if not isinstance(value, dict):
        return value
    shorter = {key: _without_large(each, note) for key, each in value.items()}
    if value.get("type") in _UNREADABLE and shorter != value:
        return _text(note)
    return shorter


def _outline(entry: Mapping[str, Any], note: str) -> dict[str, Any]:
    """Return the small fields of an entry, and a message with its role, its ids and a note."""
    found = _small_fields(entry)
    message = entry.get("message")
    if isinstance(message, dict):
        content = message.get("content")
        blocks = content[:_BLOCKS_KEPT] if isinstance(content, list) else []
        usage = message.get("usage")
        found["message"] = {
            **_small_fields(message),
            **({"usage": _small_fields(usage)} if isinstance(usage, dict) else {}),
            # A model refuses a call without its result, and a result without its call.
            "content": [_block(each, note) for each in blocks if _pairs(each)] or [_text(note)],
        }
    return found


def _small_fields(value: Mapping[str, Any]) -> dict[str, Any]:
    kinds = str | int | float | bool | None
    return {
        key: each
        for key, each in value.items()
        if len(key) <= _LARGEST_FIELD and isinstance(each, kinds) and _fits(each)
    }


def _fits(value: Any) -> bool:
    if isinstance(value, str):
        return len(value) <= _LARGEST_FIELD
    try:
        return size_of(encode(value, limit=_LARGEST_FIELD, name="field", path="/field")) <= _LARGEST_FIELD
    except (InvalidPayload, LimitExceeded):
        return False


def _pairs(block: Any) -> bool:
    return isinstance(block, dict) and block.get("type") in ("tool_use", "tool_result")


def _block(block: dict[str, Any], note: str) -> dict[str, Any]:
    fields = _small_fields(block)
    if block.get("type") == "tool_use":
        return {**fields, "input": {}}
    return {**fields, "content": note}


def _text(note: str) -> dict[str, str]:
    return {"type": "text", "text": note}


MAIN: Final = ""
"""The lane of the main transcript. The lane of a sub-agent is its ``subpath``."""


@dataclass(frozen=True, slots=True)
class TranscriptKey:
    """A key of the SDK, checked. Each part can have up to 1,000 bytes."""

    project_key: str
    session_id: str
    lane: str

    @classmethod
    def of(cls, key: Mapping[str, Any]) -> Self:
        """Check a session key of the SDK. Raises `InvalidPayload` and `LimitExceeded`."""
        if not isinstance(key, Mapping):
            raise InvalidPayload(path="key", reason=f"expected a session key, got {type(key).__name__}")
        subpath = key.get("subpath")
        return cls(
            item_key(key.get("project_key"), "project_key"),
            item_key(key.get("session_id"), "session_id"),
            MAIN if subpath is None or subpath == "" else item_key(subpath, "subpath"),
        )

    @property
    def stored_id(self) -> str:
        """The id of the session in this store."""
        return session_id_for(self.project_key, self.session_id)


def key_of(entry: Mapping[str, Any]) -> str | None:
    """Return the key that makes an entry unique, or ``None`` for an entry that is always added."""
    uuid = entry.get("uuid")
    try:
        return validation.text(uuid, "uuid", limit=MAX_LANE_BYTES) or None
    except HelixStoreError:
        return None


# --- Usage -----------------------------------------------------------------------------------------


def usage_of(
    entries: Iterable[Mapping[str, Any]], *, session_id: str, agent_type: str, now_ms: int
) -> list[UsageEntry]:
    """Return a ledger entry for each response of a model.

    A response is written as several entries with the same message id and the same usage, and a fork copies
    them; the ledger's entry therefore uses the id of the message. The totals of a `ResultMessage` are not in
    a transcript, and they cover a whole connection.
    """
    responses: dict[str, UsageEntry] = {}
    for entry in entries:
        if (found := _usage(entry, session_id, agent_type, now_ms)) is None:
            continue
        known = responses.get(str(found.id))
        if known is None or _total(known) < _total(found):
            responses[str(found.id)] = found
    return list(responses.values())


def record_largest(session: LockedSession, usage: list[UsageEntry]) -> None:
    """Record the responses in the ledger, each once, with the largest usage among its entries.

    The entries of a response may arrive in several batches. Entries of other sessions do not change.
    """
    if not usage:
        return
    rows = UsageRow.objects.using(session.alias).filter(tenant=tenant_parameter(session.tenant))
    recorded = rows.filter(entry_id__in=[entry.id for entry in usage])
    totals = {str(entry.id): _total(entry) for entry in usage}
    known = recorded.values_list("pk", "entry_id", "session_id", "total_tokens")
    outdated = [
        key
        for key, name, recorded_in, total in known
        if recorded_in == session.key and (total or 0) < totals[name]
    ]
    if outdated:
        delete_usage(session.db, rows.filter(pk__in=outdated))
    record_usage(session, usage)


def _usage(entry: Mapping[str, Any], session_id: str, agent_type: str, now_ms: int) -> UsageEntry | None:
    match entry:
        case {"type": "assistant", "message": {"id": str(name), "model": str(model), "usage": dict(usage)}}:
            pass
        case _:
            return None
    cached = count_of(usage.get("cache_read_input_tokens"))
    written = count_of(usage.get("cache_creation_input_tokens"))
    lifetimes = usage.get("cache_creation")
    for_an_hour = lifetimes.get("ephemeral_1h_input_tokens") if isinstance(lifetimes, dict) else None
    try:
        return response_entry(
            session_id,
            validation.identifier(f"claude:{name}", "id"),
            source=agent_type,
            model=validation.identifier(model, "model"),
            prompt=count_of(usage.get("input_tokens")) + written + cached,
            completion=count_of(usage.get("output_tokens")),
            cached=cached,
            cache_write=written,
            cache_write_1h=min(count_of(for_an_hour), written),
            timestamp=_moment(entry.get("timestamp"), now_ms),
        )
    except InvalidPayload:
        return None


def _total(entry: UsageEntry) -> int:
    return 0 if entry.tokens is None else entry.tokens.total


def _moment(value: Any, now_ms: int) -> int:
    try:
        return validation.epoch_milliseconds(datetime.fromisoformat(value), "timestamp")
    except (HelixStoreError, TypeError, ValueError):
        return now_ms


_logger = logging.getLogger(__name__)


class DjangoClaudeSessions(SessionStore):
    """Transcripts of the SDK as items of sessions, in the database ``using`` and one tenant.

    A session of the SDK is one session here, and each transcript is one of its lanes. An entry with a
    ``uuid`` is stored once. The summary is updated under the session's lock, so appends may overlap. A
    cancelled write raises only after its transaction has ended. The usage of the models' responses is
    recorded in the usage ledger in the same transaction, unless ``record_usage`` is False. An append sets
    ``user_id`` as the user of a session without one, and raises `ConflictError` if the session belongs to
    another user. With a ``fencing_token``, a write raises `FencedOutError` if the session's lock has a larger
    one. An erased session is not created again, which raises `SessionErased`, unless ``recreate`` is True.
    Needs asyncio. Calls raise the errors of helix_store.

    Example::

        sessions = DjangoClaudeSessions(user_id="ada")
        options = ClaudeAgentOptions(session_store=sessions, cwd="/srv/app")
        print(await list_sessions_from_store(sessions, directory="/srv/app"))
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
        recreate: bool = False,
    ) -> None:
        self._storage = ItemStorage(
            agent_type,
            using,
            tenant=tenant,
            user_id=user_id,
            fencing_token=fencing_token,
            recreate=recreate,
        )
        self._records_usage = record_usage
        self._failure: Exception | None = None
        self._failed: object = None

    @staticmethod
    def session_id_of(key: SessionKey) -> str:
        """Return the id of the session in this store: for the admin, usage, locks and cleanup."""
        return TranscriptKey.of(key).stored_id

    # --- The protocol of the SDK -------------------------------------------------------------------

    async def append(self, key: SessionKey, entries: list[SessionStoreEntry]) -> None:
        """Add entries to a transcript, all or none, in one transaction. Each ``uuid`` is added only once.

        An entry that is too large is stored without its large values. `failure` keeps an error, because the
        SDK does not raise it.
        """
        try:
            transcript = TranscriptKey.of(key)
            given = validation.items(entries, "entries")
            if given:
                await in_thread_to_the_end(partial(self._append, transcript, given))
        except Exception as exc:
            self._failure = exc
            self._failed = entries
            raise
        if self._failed is entries:
            # This was another attempt of the SDK.
            self._failure = self._failed = None

    @property
    def failure(self) -> Exception | None:
        """The newest error of an append, whose entries are not stored; ``None`` if there was none."""
        return self._failure

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

        store = partial(self._store, transcript)
        try:
            store_exactly(partial(store, entries), entries)
        except (InvalidPayload, LimitExceeded) as exc:
            # The SDK would drop the whole batch, and continue.
            parts = storable_parts(entries)
            _logger.warning("Parts of entries of %s are left out. %s", transcript.stored_id, exc)
            for some_entries, payloads in parts:
                store(some_entries, payloads)

    def _store(self, transcript: TranscriptKey, entries: Sequence[Any], payloads: list[Any]) -> None:
        append = partial(self._append_locked, transcript, entries, payloads)
        self._storage.write(transcript.stored_id, append)

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


DjangoSessionStore = DjangoClaudeSessions
"""The name before `DjangoClaudeSessions`; code that imports it goes on working."""


def _summary(session_id: str, text: str) -> dict[str, Any] | None:
    """Return a stored summary, or `None` if it cannot be read. It can be rebuilt from the transcript."""
    try:
        return decode_object(text)
    except IntegrityFault:
        _logger.error("The summary of the Claude session %s cannot be read.", shown_id(session_id))
        return None
