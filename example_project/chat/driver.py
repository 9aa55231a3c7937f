"""The driver of a chat: when something arrives, a thread of the server takes a turn, unless one is under way.

The thread may die with its server. The stored session is enough to continue in any process.
"""

from __future__ import annotations

import logging
import threading
import time
from contextlib import suppress
from datetime import timedelta
from typing import Any, Final

from asgiref.sync import async_to_sync
from django.db import connections

from example_project.agent import Agent
from example_project.answers import SECONDS_PER_WORD
from example_project.chat.allowance import require_budget
from example_project.chat.guide import GUIDE, guide
from example_project.chat.transcript import is_answered
from helix_store import SessionBusy, SessionExists, SessionHandle, SessionNotFound, Store, Turn

__all__ = ["POSITION", "TERM", "drive", "say", "show"]

TERM: Final = timedelta(seconds=10)
"""The time for which a chat stays locked after its server has died."""
POSITION: Final = "stream_position"
"""The key of the custom state with the position in the stream after the words of all stored messages."""
_PATIENCE_SECONDS: Final = 2
"""The time that a request waits for its turn to begin, so that the next page shows it."""
_TITLE_LENGTH: Final = 80

_logger = logging.getLogger(__name__)


def say(store: Store, session_id: str, text: str, *, key: str) -> None:
    """Post a message, whatever the agent is doing. The first one creates the chat. Safe to repeat."""
    session, message = store.session(session_id), {"role": "user", "content": text}
    try:
        session.post(message, key=key)
    except SessionNotFound:
        require_budget(store)
        async_to_sync(_create_stream)(store, session_id)
        with suppress(SessionExists):
            store.new_session(session_id, agent_type=GUIDE, title=text[:_TITLE_LENGTH], tags=["chat"])
        session.post(message, key=key)


async def _create_stream(store: Store, session_id: str) -> None:
    writer = await store.streams.create_writer(session_id, session_id, GUIDE)
    # The stream stays open between turns, without a writer that has to be alive.
    await writer.close()


def show(store: Store, session_id: str) -> None:
    """Let the open pages of a chat load what is stored."""
    store.streams.write_sync(session_id, [{"type": "changed"}])


def drive(*, session_id: str, using: str | None, tenant: str, **kwargs: Any) -> None:
    """Answer what has arrived in a chat, in a thread.

    A receiver of `session_posted` and `session_answered`. Returns when somebody drives the chat.
    """
    store = Store(using, tenant=tenant)
    if store.session(session_id).load().agent_type == GUIDE:
        show(store, session_id)
        begun = threading.Event()
        threading.Thread(target=_drive, args=[store, session_id, begun], name=session_id, daemon=True).start()
        begun.wait(_PATIENCE_SECONDS)


def _drive(store: Store, session_id: str, begun: threading.Event) -> None:
    try:
        while _take_turn(store, store.session(session_id), begun):
            pass
    except SessionBusy:
        _logger.info("Another thread drives the chat %r, and looks for more after its turn.", session_id)
    except Exception:
        _logger.exception("The turn of chat %r failed.", session_id)
    finally:
        begun.set()
        show(store, session_id)
        connections.close_all()


def _take_turn(store: Store, session: SessionHandle, begun: threading.Event) -> bool:
    """Answer what is open, and return whether more arrived between the last commit and the release."""
    is_over = False
    with session.turn(ttl=TERM) as turn:
        begun.set()
        if not is_answered(turn.messages(last=1)):
            _answer(store, turn)
        # Not after a stop, which leaves the block: then posts wait for the next turn.
        is_over = turn.run is not None
    return is_over and _has_arrived(session)


def _has_arrived(session: SessionHandle) -> bool:
    """Return whether a message waits, or all decisions have been made."""
    calls = session.load().pending_client_tool_calls.values()
    is_decided = bool(calls) and all("submitted_at" in call for call in calls)
    return is_decided or any(post.not_before is None for post in session.posts().items)


def _answer(store: Store, turn: Turn) -> None:
    voice = _Voice(store, turn)
    agent = Agent(store.sessions, guide(voice.speak), report=lambda event: None)
    while turn.is_active:
        show(store, turn.session.id)
        try:
            with turn.step() as step:
                agent.advance(turn, step)
                step.state.custom_state[POSITION] = voice.position
        except _Stopped as stop:
            # Keep what was said. The next step finds the request to stop, and ends the turn.
            if stop.said:
                message = {"role": "assistant", "content": f"{stop.said} …"}
                store.sessions.append_messages(turn.session.id, [message], fencing_token=turn.fencing_token)


class _Stopped(Exception):
    """Somebody stopped the agent while it spoke, after these words."""

    def __init__(self, said: str) -> None:
        super().__init__(said)
        self.said = said


class _Voice:
    """The words of the agent in the stream of a chat."""

    def __init__(self, store: Store, turn: Turn) -> None:
        self._store = store
        self._turn = turn
        self.position: int = turn.state.custom_state.get(POSITION, 0)

    def speak(self, text: str, number: int) -> None:
        """Write the text of a message, until somebody stops the agent."""
        session_id, said = self._turn.session.id, ""
        for word in text.split(" "):
            if self._store.sessions.check_interrupt(session_id):
                raise _Stopped(said.rstrip())
            chunk = {"type": "text_delta", "number": number, "is_first": not said, "delta": f"{word} "}
            self.position = self._store.streams.write_sync(
                session_id, [chunk], fencing_token=self._turn.fencing_token
            )
            said += f"{word} "
            time.sleep(SECONDS_PER_WORD)
