"""What drives a chat: a thread of the server takes one turn for each message and each decision.

The thread may die with its server. Nothing but the stored session is needed to go on, in any process.
"""

from __future__ import annotations

import logging
import threading
from concurrent.futures import Future
from datetime import timedelta
from typing import Final

from example_project.agent import Agent
from example_project.answers import Answer
from example_project.chat.guide import GUIDE, guide
from example_project.chat.transcript import entries, is_answered, question
from example_project.events import Event
from helix_store import DatabaseStateStore, Turn
from helix_store.core.ids import new_id

__all__ = ["TERM", "NotNow", "drive", "new_chat", "stream_of"]

TERM: Final = timedelta(seconds=10)
"""So long after the death of its server a chat is locked."""
_TITLE_LENGTH: Final = 80

_logger = logging.getLogger(__name__)


class NotNow(Exception):
    """The chat takes no message now; the text says what has to happen first."""


def new_chat(text: str) -> str:
    """Create a chat and return its id. `drive` begins it."""
    session = DatabaseStateStore().new_session(
        f"chat-{new_id()}", agent_type=GUIDE, title=text[:_TITLE_LENGTH], tags=["chat"]
    )
    return session.id


def stream_of(session_id: str, run_id: str) -> str:
    """The id of the stream with the answer of a turn."""
    return f"{session_id}/{run_id}"


def drive(session_id: str, text: str | None = None) -> None:
    """Start a thread that drives the chat, and return when the message is stored and can be answered.

    Raises `SessionBusy` while another thread or process drives it, `NotNow`, and `SessionNotFound`; the
    message is not stored then.
    """
    begun: Future[None] = Future()
    threading.Thread(target=_drive, args=[session_id, text, begun], daemon=True).start()
    begun.result()


def _drive(session_id: str, text: str | None, begun: Future[None]) -> None:
    store = DatabaseStateStore()
    answer = None
    try:
        with store.session(session_id).turn(ttl=TERM) as turn:
            if text is not None:
                _say(store, turn, text)
            if turn.run is not None:
                answer = Answer(stream_of(session_id, turn.run.run_id), agent_name=GUIDE)
            begun.set_result(None)
            if answer is not None and not is_answered(turn.messages()):
                shown = _Shown(turn, answer)
                Agent(store, guide(shown.speak), report=shown.report).drive(turn)
        if answer is not None:
            answer.end({"question": question(turn.state)})
    except Exception as exc:
        if not begun.done():
            begun.set_exception(exc)
            return
        _logger.exception("The turn of chat %r failed.", session_id)
        if answer is not None:
            answer.fail({"type": type(exc).__name__})


def _say(store: DatabaseStateStore, turn: Turn, text: str) -> None:
    if question(turn.state):
        raise NotNow("The agent waits for your decision. Your message was not sent: decide first.")
    if not turn.is_active:
        raise NotNow("This chat has ended. Your message was not sent: start a new chat.")
    if not is_answered(turn.messages()):
        raise NotNow("The last answer is not complete. Your message was not sent: press Go on first.")
    message = {"role": "user", "content": text}
    store.append_messages(turn.session.id, [message], fencing_token=turn.fencing_token)


class _Shown:
    """Shows a turn in its stream: words while the model speaks, and messages as they were committed."""

    def __init__(self, turn: Turn, answer: Answer) -> None:
        self._turn = turn
        self._answer = answer
        self._count = len(turn.messages())

    def speak(self, text: str, number: int) -> None:
        self._answer.speak(text, number=number)

    def report(self, event: Event) -> None:
        if event.kind == "step":
            messages = self._turn.messages()
            new = entries(messages[self._count :])
            self._answer.write("messages", number=self._count, entries=new)
            self._count = len(messages)
