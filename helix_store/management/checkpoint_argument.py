"""The argument of a command that selects a checkpoint."""

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
from helix_store.management.base import WrongUsage
from helix_store.management.session_argument import chosen_session
from helix_store.management.text import visible
from helix_store.stores import DatabaseStateStore

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
    """The state of a checkpoint, or the current state, which has no checkpoint id."""

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


def chosen_checkpoint(
    text: str, options: Mapping[str, Any], *, is_whole: bool = False
) -> tuple[DatabaseStateStore, Checkpoint]:
    """Return the store and the checkpoint. Raise `SessionNotFound`, `CheckpointNotFound` or `CommandError`.

    `chosen_session` explains ``is_whole``.
    """
    match = _RELATIVE.fullmatch(text)
    if match and match["current"]:
        raise WrongUsage("The current state is not a checkpoint. " + CHECKPOINT_FORMS)
    session_id = None if match else _session_of(text)
    if session_id is None:
        start, before = (match["session_id"], int(match["before"] or 0)) if match else (text, 0)
        store, session_id = chosen_session(start, options, is_whole=is_whole)
        return store, _before_the_newest(store, session_id, before)
    store, _ = chosen_session(session_id, options, is_whole=True)
    found = store.get_checkpoint(session_id, text)
    if found is None:
        raise CheckpointNotFound(text)
    return store, found


def chosen_state(text: str, options: Mapping[str, Any]) -> ChosenState:
    """Return the state of `chosen_checkpoint`, or the current state for ``SESSION@current``."""
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
    store, session_id = chosen_session(match["session_id"], options)
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
    cursor, left = None, count
    while True:
        page = store.list_checkpoints(session_id, limit=min(left + 1, _LARGEST_PAGE), cursor=cursor)
        if left < len(page.items):
            found = store.get_checkpoint(session_id, page.items[left].checkpoint_id)
            if found is not None:
                return found
        left -= len(page.items)
        cursor = page.next_cursor
        if cursor is None or left < 0:
            name = f"{session_id}@latest~{count}" if count else f"{session_id}@latest"
            raise CommandError(
                f"There is no checkpoint {visible(name)}. Checkpoints of the session: {page.total:,}."
            )
