"""The checkpoint that an argument of a command means."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from django.core.management.base import CommandError

from helix_store.core.ids import parse_checkpoint_id
from helix_store.core.types import Checkpoint, SessionState
from helix_store.exceptions import CheckpointNotFound, InvalidPayload, SessionNotFound
from helix_store.management.base import USAGE
from helix_store.management.session_argument import store_of
from helix_store.stores import DatabaseStateStore

__all__ = ["CHECKPOINT_FORMS", "ChosenState", "chosen_checkpoint", "chosen_state"]

CHECKPOINT_FORMS: Final = (
    "A checkpoint id; or SESSION@latest, the newest one, SESSION@latest~2, the second before it; "
    "SESSION alone means SESSION@latest."
)

_RELATIVE: Final = re.compile(
    r"(?P<session_id>.+)@(?:latest(?:~(?P<before>[0-9]{1,6}))?|(?P<current>current))", re.DOTALL
)
_LARGEST_PAGE: Final = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class ChosenState:
    """A state to look at: that of a checkpoint, or the current one, which has no checkpoint id."""

    tenant: str
    session_id: str
    checkpoint_id: str | None
    state: SessionState
    message_count: int
    created_at: datetime | None

    def to_dict(self) -> dict[str, Any]:
        return {
            "tenant": self.tenant,
            "session_id": self.session_id,
            "checkpoint_id": self.checkpoint_id,
            "step_count": self.state.step_count,
            "message_count": self.message_count,
            "created_at": None if self.created_at is None else self.created_at.isoformat(),
        }


def chosen_checkpoint(text: str, options: Mapping[str, Any]) -> tuple[DatabaseStateStore, Checkpoint]:
    """The store and the checkpoint. Raises `SessionNotFound`, `CheckpointNotFound` and for wrong usage."""
    if match := _RELATIVE.fullmatch(text):
        if match["current"]:
            raise CommandError("The current state is no checkpoint. " + CHECKPOINT_FORMS, returncode=USAGE)
        store = store_of(match["session_id"], options)
        return store, _before_the_newest(store, match["session_id"], int(match["before"] or 0))
    session_id = _session_of(text)
    if session_id is None:
        store = store_of(text, options)
        return store, _before_the_newest(store, text, 0)
    store = store_of(session_id, options)
    found = store.get_checkpoint(session_id, text)
    if found is None:
        raise CheckpointNotFound(text)
    return store, found


def chosen_state(text: str, options: Mapping[str, Any]) -> ChosenState:
    """`chosen_checkpoint`, or with ``SESSION@current`` the current state."""
    match = _RELATIVE.fullmatch(text)
    if match is None or not match["current"]:
        store, found = chosen_checkpoint(text, options)
        return ChosenState(
            tenant=store.tenant,
            session_id=found.session_id,
            checkpoint_id=found.checkpoint_id,
            state=found.state,
            message_count=found.message_count,
            created_at=found.created_at,
        )
    session_id = match["session_id"]
    store = store_of(session_id, options)
    state = store.load_state(session_id)
    if state is None:
        raise SessionNotFound(session_id)
    return ChosenState(
        tenant=store.tenant,
        session_id=session_id,
        checkpoint_id=None,
        state=state,
        message_count=state.message_count,
        created_at=state.updated_at,
    )


def _session_of(text: str) -> str | None:
    try:
        return parse_checkpoint_id(text).session_id
    except InvalidPayload:
        return None


def _before_the_newest(store: DatabaseStateStore, session_id: str, count: int) -> Checkpoint:
    cursor = None
    while True:
        page = store.list_checkpoints(session_id, limit=min(count + 1, _LARGEST_PAGE), cursor=cursor)
        if count < len(page.items):
            found = store.get_checkpoint(session_id, page.items[count].checkpoint_id)
            if found is not None:
                return found
        count -= len(page.items)
        cursor = page.next_cursor
        if cursor is None or count < 0:
            raise CheckpointNotFound(f"{session_id}@latest")
