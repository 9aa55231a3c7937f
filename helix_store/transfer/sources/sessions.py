"""The first records of a session that another store has made."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any, Final

from helix_store.core.payloads import size_of
from helix_store.core.types import CheckpointSource
from helix_store.core.validation import milliseconds_to_datetime
from helix_store.exceptions import InvalidPayload
from helix_store.models import Checkpoint, CheckpointKind, Session
from helix_store.sessions.requests import NewSession
from helix_store.transfer.layout import CHECKPOINTS, SESSIONS
from helix_store.transfer.records import Record

__all__ = ["TICK", "head_records", "moment"]

TICK: Final = timedelta(microseconds=1)

_FIRST_VERSION: Final = 1


def head_records(
    new: NewSession, tenant: str, *, message_count: int = 0, created_at: datetime, updated_at: datetime
) -> list[Record]:
    """The session and its state, as if it was created at that time and written last at the other one."""
    columns = {**new.encoded.columns, "root_session_id": new.session_id, "message_count": message_count}
    session = Session(
        tenant=tenant,
        session_id=new.session_id,
        version=_FIRST_VERSION,
        created_at=created_at,
        updated_at=updated_at,
        **columns,
    )
    state = Checkpoint(
        kind=CheckpointKind.STATE.value,
        version=_FIRST_VERSION,
        source=CheckpointSource.INPUT.value,
        payload=new.encoded.payload,
        envelope=new.encoded.envelope,
        size_bytes=size_of(new.encoded.payload, new.encoded.envelope),
        created_at=created_at,
    )
    current = (state.kind, state.namespace, state.version)
    return [SESSIONS.record_from(session, current), CHECKPOINTS.record_from(state)]


def moment(milliseconds: Any, path: str) -> datetime:
    """The time of epoch milliseconds. Raises `InvalidPayload`."""
    try:
        return milliseconds_to_datetime(milliseconds)
    except (OverflowError, TypeError):
        raise InvalidPayload(path=path, reason="it is no time between the years 1 and 9999") from None
