"""Processes that post to sessions, and workers that drive these sessions until they are killed."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, Final, NamedTuple, TypeAlias

from helix_store.core.types import TERMINAL_STATUSES, Message
from helix_store.exceptions import (
    FencedOutError,
    LockLostError,
    SessionBusy,
    SessionEnded,
    SessionExists,
    SessionNotFound,
    StoreBusy,
)
from helix_store.stores import DatabaseStateStore, SessionHandle

__all__ = ["Accepted", "Broke", "Committed", "Ending", "Refused", "Told", "drive", "finish", "post"]

_SESSIONS_AT_A_TIME: Final = 3
_TERM_MS: Final = 250
_ENDINGS: Final = ("finish", "finish", "finish", "fail")
_ACTIONS: Final = ("go on", "go on", "end turn", "end turn", "crash", "ask", "call")
_EARLIER: Final = timedelta(seconds=1)
_LONGEST_STEP_SECONDS: Final = 0.005
_LONGEST_PAUSE_SECONDS: Final = 0.2


class Accepted(NamedTuple):
    """A call to `post_message` that began at ``begun`` and returned a post."""

    session: str
    text: str
    post_id: str
    begun: float


class Refused(NamedTuple):
    """A call that raised `SessionEnded` at ``at``, with the status of the error and the stored one."""

    session: str
    status: str
    stored: str
    at: float


class Ending(NamedTuple):
    """A worker is about to commit a step that may end the session."""

    session: str
    at: float


class Committed(NamedTuple):
    """A worker has committed a step with this text, which has or has not ended the session."""

    session: str
    text: str
    has_ended: bool
    at: float


class Broke(NamedTuple):
    """A turn raised an error that nothing in this campaign may cause."""

    session: str
    error: str


Told: TypeAlias = Accepted | Refused | Ending | Committed | Broke
Tell = Callable[[Told], None]


class Crashed(Exception):
    """The turn fails in a step."""


def _name(place: int, generation: int) -> str:
    return f"{place}-{generation}"


class _Poster:
    """Posts to the present session of each place. Once that session has ended, it creates the next one."""

    def __init__(self, store: DatabaseStateStore, chance: random.Random) -> None:
        self.told: list[Told] = []
        self._store = store
        self._chance = chance
        self._generations = [-1] * _SESSIONS_AT_A_TIME
        for place in range(_SESSIONS_AT_A_TIME):
            self._create_next(place)

    def post(self, text: str, **options: Any) -> None:
        """Post until a session accepts the message, and sometimes repeat the accepted call."""
        while True:
            place = self._chance.randrange(_SESSIONS_AT_A_TIME)
            post = partial(
                self._store.post_message,
                _name(place, self._generations[place]),
                {"role": "user", "content": text},
                key=text,
                **options,
            )
            begun = time.monotonic()
            try:
                accepted = post()
            except SessionEnded as error:
                at = time.monotonic()
                state = self._store.session(error.session_id).load()
                self.told.append(Refused(state.session_id, error.status, state.status.value, at))
                self._create_next(place)
            except StoreBusy:
                continue
            else:
                self.told.append(Accepted(accepted.session_id, text, accepted.post_id, begun))
                if self._chance.random() < 0.1:
                    assert post().post_id == accepted.post_id
                return

    def _create_next(self, place: int) -> None:
        self._generations[place] += 1
        with suppress(SessionExists):
            self._store.create_session(_name(place, self._generations[place]), agent_type="agent")


def post(alias: str, tenant: str, poster: int, seed: int, count: int) -> list[Told]:
    """Post until ``count`` messages are accepted. One in ten is due before those that wait already."""
    chance = random.Random(seed)  # noqa: S311  the same draws for the same seed
    posting = _Poster(DatabaseStateStore(alias, tenant=tenant), chance)
    for number in range(count):
        not_before = datetime.now(UTC) - _EARLIER if chance.random() < 0.1 else None
        posting.post(f"{poster}-{number}", author=f"poster-{poster}", not_before=not_before)
        time.sleep(chance.uniform(0, _LONGEST_PAUSE_SECONDS))
    return posting.told


def drive(alias: str, tenant: str, seed: int, tell: Connection) -> None:
    """Take turns in the present session of each place, and answer what they ask, until somebody kills us."""
    store = DatabaseStateStore(alias, tenant=tenant)
    chance = random.Random(seed)  # noqa: S311  the same draws for the same seed
    generations = [0] * _SESSIONS_AT_A_TIME
    while True:
        place = chance.randrange(_SESSIONS_AT_A_TIME)
        session = store.session(_name(place, generations[place]))
        try:
            if session.load().status in TERMINAL_STATUSES:
                generations[place] += 1
                continue
            if chance.random() < 0.3:
                _answer(session)
            _take_a_turn(session, chance, tell.send)
        except (SessionBusy, SessionNotFound, StoreBusy, FencedOutError, LockLostError, Crashed):
            time.sleep(0.005)
        except Exception as error:  # noqa: BLE001  whatever it is, the campaign must not cause it
            tell.send(Broke(session.id, f"{type(error).__name__}: {error}"))


def finish(session: SessionHandle, chance: random.Random, tell: Tell) -> None:
    """Drive a session without disturbance until it has ended. On a busy machine, a term may be over early."""
    while session.load().status not in TERMINAL_STATUSES:
        _answer(session)
        with suppress(LockLostError):
            _take_a_turn(session, chance, tell, actions=("finish",))


def _answer(session: SessionHandle) -> None:
    for call_id in session.load().pending_client_tool_calls:
        session.store.submit_tool_result(session.id, call_id, result="yes")


def _take_a_turn(
    session: SessionHandle, chance: random.Random, tell: Tell, *, actions: Sequence[str] = ()
) -> None:
    receives = bool(actions) or chance.random() < 0.8
    # Without reception, the end would leave posts that are due.
    possible = actions or ((*_ACTIONS, *_ENDINGS) if receives else _ACTIONS)
    # To end a session, a turn goes on where nothing has arrived.
    with session.turn(ttl=_TERM_MS, receive=receives, rest=not actions) as turn:
        while turn.is_active:
            if not receives:
                turn.receive()
            open_calls = _open_calls(turn.messages(last=1))
            text = f"answer {chance.getrandbits(64):x}"
            with turn.step() as step:
                step.say(*({"role": "tool", "tool_call_id": each, "content": "done"} for each in open_calls))
                time.sleep(chance.uniform(0, _LONGEST_STEP_SECONDS))
                action = chance.choice(possible)
                answer: dict[str, Any] = {"role": "assistant", "content": text}
                if action in ("ask", "call"):
                    answer["tool_calls"] = [{"id": text}]
                step.say(answer)
                if action == "crash":
                    raise Crashed
                if action == "ask":
                    step.wait_for({text: {"tool_name": "ask", "input": {}}})
                if action == "end turn":
                    step.end_turn()
                if action in ("finish", "fail"):
                    tell(Ending(session.id, time.monotonic()))
                    step.finish("done") if action == "finish" else step.fail("broken")
            has_ended = turn.state.status in TERMINAL_STATUSES
            tell(Committed(session.id, text, has_ended, time.monotonic()))


def _open_calls(last: Sequence[Message]) -> list[str]:
    return [call["id"] for message in last for call in message.get("tool_calls", ())]
