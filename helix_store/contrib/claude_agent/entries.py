"""Keys and entries of transcripts: where they are stored, and the usage that they report."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final, Self

from helix_store.adapters import LockedSession, session_id_for
from helix_store.contrib.usage import count_of, record_usage, response_entry
from helix_store.core import validation
from helix_store.core.limits import MAX_LANE_BYTES
from helix_store.core.usage import UsageEntry
from helix_store.counters.counting import delete_usage
from helix_store.engine.expressions import tenant_parameter
from helix_store.exceptions import HelixStoreError, InvalidPayload
from helix_store.items.rules import item_key
from helix_store.models import UsageEntry as UsageRow

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
    try:
        return response_entry(
            session_id,
            validation.identifier(f"claude:{name}", "id"),
            source=agent_type,
            model=validation.identifier(model, "model"),
            prompt=count_of(usage.get("input_tokens")) + written + cached,
            completion=count_of(usage.get("output_tokens")),
            cached=cached,
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
