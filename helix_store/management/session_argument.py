"""Command arguments that select a session, a call or a checkpoint, by an id or by the start of one."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, Final, NamedTuple

from django.core.management.base import CommandError

from helix_store.core.ids import parse_checkpoint_id
from helix_store.core.types import Checkpoint, SessionState
from helix_store.exceptions import CheckpointNotFound, InvalidPayload, SessionNotFound
from helix_store.management.base import WrongUsage
from helix_store.management.text import visible
from helix_store.sessions.tool_calls import ToolCalls
from helix_store.stores import DatabaseStateStore
from helix_store.stores.directory import SessionDirectory

_TENANTS_NAMED = 5
_SHORTEST_START = 4
"""The minimum number of characters that may select a session, as in git."""
_MATCHES_NAMED = 8
CHECKPOINT_FORMS: Final = (
    "A checkpoint id; or SESSION@latest, the newest one, SESSION@latest~2, the second before it; "
    "SESSION alone means SESSION@latest."
)

_RELATIVE: Final = re.compile(
    r"(?P<session_id>.+)@(?:latest(?:~(?P<before>[0-9]{1,6}))?|(?P<current>current))", re.DOTALL
)
_LARGEST_PAGE: Final = 200


def directory_of(options: Mapping[str, Any]) -> SessionDirectory:
    """Return the directory of sessions that ``--database`` and ``--tenant`` select."""
    return SessionDirectory(options["database"], tenant=options["tenant"])


def chosen_session(
    text: str, options: Mapping[str, Any], *, is_whole: bool = False
) -> tuple[DatabaseStateStore, str]:
    """Return the store and the id of the session that ``text`` selects by its id or by the start of its id.

    The start of an id needs at least four characters and must match one session, not counting that session's
    sub-sessions. ``is_whole`` requires a whole id, because a command that deletes without asking must not
    find another session when it is repeated. Without ``--tenant``, an id that exists in several tenants is a
    usage error. Raise `SessionNotFound`.
    """
    directory = directory_of(options)
    session_id, tenants = text, directory.tenants_of(text)
    if not tenants and not is_whole and len(text) >= _SHORTEST_START:
        session_id, tenants = _started(text, directory)
    if not tenants:
        raise SessionNotFound(text)
    return directory.store(only_tenant(tenants, f"session {visible(session_id)}")), session_id


def whole_id(text: str, options: Mapping[str, Any]) -> str:
    """Return the session id that a filter selects. The session need not exist."""
    if directory_of(options).tenants_of(text):
        return text
    try:
        return chosen_session(text, options)[1]
    except SessionNotFound:
        return text


def _started(start: str, directory: SessionDirectory) -> tuple[str, list[str]]:
    """Return the only id that begins with ``start`` and its tenants, or no tenants if no id matches."""
    found = directory.starting_with(start, limit=_MATCHES_NAMED + 1)
    ids = list(dict.fromkeys(session_id for _, session_id in found))
    if len(ids) > 1:
        named = ", ".join(visible(session_id) for session_id in ids[:_MATCHES_NAMED])
        more = "" if len(found) <= _MATCHES_NAMED else " and others"
        raise WrongUsage(
            f"{visible(start)!r} is ambiguous: {named}{more} begin with it. Use more characters of the id."
        )
    return (ids[0] if ids else start), [tenant for tenant, _ in found]


def only_tenant(tenants: Sequence[str], what: str) -> str:
    """Return the only tenant. If there are several, raise `CommandError`, because the choice is ambiguous."""
    if len(tenants) > 1:
        named = ", ".join(f"'{visible(tenant)}'" for tenant in tenants[:_TENANTS_NAMED])
        more = "" if len(tenants) <= _TENANTS_NAMED else f" and {len(tenants) - _TENANTS_NAMED} more"
        raise WrongUsage(f"{len(tenants)} tenants have a {what}: {named}{more}. Give --tenant.")
    return tenants[0]


def chosen_call(store: DatabaseStateStore, session_id: str, text: str | None) -> tuple[str, str | None]:
    """Return the id and approval id of the call that ``text`` selects by its id or by the start of its id.

    ``None`` selects the only open call. If another session owns the call, only its id is known.
    """
    state = store.load_state(session_id)
    if state is None:
        raise SessionNotFound(session_id)
    calls = ToolCalls(state.pending_client_tool_calls, state.completed_client_tool_calls)
    open_calls = calls.unanswered
    if text is not None and (text in calls.pending or text in calls.completed):
        return text, _approval_id(calls.pending.get(text))
    matches = [call_id for call_id in open_calls if call_id.startswith(text or "")]
    if len(matches) == 1:
        return matches[0], _approval_id(open_calls[matches[0]])
    if matches:
        named = ", ".join(
            f"{visible(call_id)} ({visible(str(open_calls[call_id].get('tool_name')))})"
            for call_id in matches
        )
        raise WrongUsage(f"The session waits for {len(matches)} answers: {named}. Name one with --call.")
    if text is None:
        raise CommandError(f"The session {visible(session_id)} is not waiting for an answer.")
    return text, None


def _approval_id(call: Any) -> str | None:
    found = call.get("approval_id") if isinstance(call, Mapping) else None
    return found if isinstance(found, str) else None


# --- Checkpoints


class ChosenState(NamedTuple):
    """The state of a checkpoint, or the current state, which has no checkpoint id."""

    tenant: str
    checkpoint_id: str | None
    state: SessionState

    def to_dict(self) -> dict[str, Any]:
        state = self.state
        return {
            "tenant": self.tenant,
            "session_id": state.session_id,
            "checkpoint_id": self.checkpoint_id,
            "step_count": state.step_count,
            "message_count": state.message_count,
            "created_at": None if state.updated_at is None else state.updated_at.isoformat(),
        }


def chosen_checkpoint(
    text: str, options: Mapping[str, Any], *, is_whole: bool = False
) -> tuple[DatabaseStateStore, Checkpoint]:
    """Return the store and the checkpoint. Raise `SessionNotFound`, `CheckpointNotFound` or `CommandError`.

    See `chosen_session` for ``is_whole``.
    """
    match = _RELATIVE.fullmatch(text)
    if match and match["current"]:
        raise WrongUsage("The current state is not a checkpoint. " + CHECKPOINT_FORMS)
    session_id = None
    if not match:
        with suppress(InvalidPayload):
            session_id = parse_checkpoint_id(text).session_id
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
        return ChosenState(store.tenant, found.checkpoint_id, found.state)
    store, session_id = chosen_session(match["session_id"], options)
    state = store.load_state(session_id)
    if state is None:
        raise SessionNotFound(session_id)
    return ChosenState(store.tenant, None, state)


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
