"""Transcript entries as items, and the usage that they report."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Any

from helix_store.adapters import LockedSession
from helix_store.contrib.usage import count_of, record_usage, response_entry
from helix_store.core import validation
from helix_store.core.limits import MAX_LANE_BYTES
from helix_store.core.usage import UsageEntry
from helix_store.counters.counting import delete_usage
from helix_store.engine.expressions import tenant_parameter
from helix_store.exceptions import HelixStoreError, InvalidPayload
from helix_store.models import UsageEntry as UsageRow


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

    A response is written as several entries with one message id and the same usage, and a fork copies them,
    so the ledger's entry has the id of the message. The totals of a `ResultMessage` are not in a transcript,
    and cover a whole connection.
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
    """Record the responses in the ledger, each once, with the largest usage that its entries have.

    The entries of one response may arrive in several batches. Entries of another session in the ledger stay.
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
