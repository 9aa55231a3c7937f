"""The threads of a chat, and who drives them: by default, a few threads of this process.

A thread of a chat is a session of one agent type and one owner.
"""

from __future__ import annotations

import atexit
import hashlib
import json
import logging
import os
import re
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any, Final, TypeAlias
from uuid import UUID

from asgiref.sync import async_to_sync
from django.db import close_old_connections, connections
from django.http import HttpRequest
from django.urls import get_resolver

from helix_store import (
    EffectUnknown,
    FencedOutError,
    LockLostError,
    SessionBusy,
    SessionNotFound,
    Store,
    TurnInterrupted,
    conf,
)
from helix_store.contrib.chat.out import Out, told_error
from helix_store.contrib.chat.threads import Activity, activity_of, ask_again, look_at
from helix_store.contrib.chat.turns import ChatTurn
from helix_store.core import validation
from helix_store.core.limits import MAX_TITLE_BYTES
from helix_store.engine.async_twins import async_twin, is_async

__all__ = ["Answer", "Driver", "Pool", "run_thread", "wait_for_turns"]

Answer: TypeAlias = Callable[[Any, Out], Any]
"""One turn of the agent, ``answer(turn, out)``, or a coroutine function."""

Runner: TypeAlias = Callable[[str, str | None, str], object]
Asked: TypeAlias = Callable[[HttpRequest], Any | Awaitable[Any]]

_IDLE_SECONDS: Final = 60.0
_LAST_SECONDS: Final = 10.0
"""How long a process that ends waits for its turns. What is left is continued by the next process."""

_THREAD: Final = re.compile(r"chat-[0-9a-f]{10}-[0-9a-f]{40}")
"""The id of a thread: the beginning of its chat's ids, and a digest of its owner and its own id."""

_logger = logging.getLogger(__name__)


class Driver:
    """A chat without its addresses: see `Chat`."""

    def __init__(
        self,
        agent_type: str,
        answer: Answer,
        *,
        name: str | None = None,
        using: str | None = None,
        tenant: str | Asked = "",
        owner: str | Asked | None = None,
        may_run: Asked | None = None,
        runner: Runner | None = None,
        title: Callable[[dict[str, Any]], str | None] | None = None,
        share_state: bool = True,
    ) -> None:
        self.agent_type: Final = agent_type
        self.name: Final = agent_type if name is None else name
        self.using: Final = using
        self.share_state: Final = share_state
        self._answer = answer
        self._tenant = tenant
        self._owner = owner
        self._may_run = may_run
        self._runner = runner
        self._title = title
        self._prefix = f"chat-{hashlib.sha256(agent_type.encode()).hexdigest()[:10]}"
        _chats[self._prefix] = self

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name!r}>"

    # Threads

    def session_id(self, owner: str | int | UUID, thread_id: str) -> str:
        """Return the id of the session of an owner's thread.

        It is derived from both, so that nobody can tell another owner's thread from an unknown one.
        """
        text = json.dumps([str(owner), thread_id])
        return f"{self._prefix}-{hashlib.sha256(text.encode('utf-8', 'surrogatepass')).hexdigest()[:40]}"

    def store(self, tenant: str = "") -> Store:
        return Store(self.using, tenant=tenant)

    def title_of(self, message: dict[str, Any]) -> str | None:
        """Return the title of a thread that begins with this message."""
        if self._title is not None:
            title = self._title(message)
            return None if title is None else _storable(title)
        content = message.get("content")
        parts: list[Any] = content if isinstance(content, list) else [{"text": content}]
        text = " ".join(part["text"] for part in parts if isinstance(part.get("text"), str))
        return _storable(text.strip().partition("\n")[0][:80]) or None

    # Driving

    def run(self, session_id: str, using: str | None = None, tenant: str = "") -> None:
        """Have a thread driven: by the runner of the chat, or in a thread of this process."""
        if self._runner is not None:
            self._runner(session_id, using, tenant)
            return
        drive = partial(self.drive, session_id, using=using, tenant=tenant)
        _pool.submit((self._prefix, session_id, using, tenant), drive)

    def call_driver(self, session_id: str, using: str | None, tenant: str) -> None:
        """Have a thread driven, if the runner can be reached. If not, the next wake-up has it driven."""
        try:
            self.run(session_id, using, tenant)
        except Exception:
            _logger.exception("The runner of %r failed. The thread stays due.", self)

    def activity(self, session_id: str, *, using: str | None = None, tenant: str = "") -> Activity:
        """Return whether somebody drives a thread, whether it is due, or whether it is idle."""
        return activity_of(self._store(using, tenant), session_id)

    def drive(self, session_id: str, *, using: str | None = None, tenant: str = "") -> bool:
        """Take turns until nothing is due. Return false at once if somebody else drives the thread.

        Also return false if the process ends: the next one goes on. Safe to repeat, and the body of a task of
        your queue. An exception of the agent ends the run as failed and is logged: clients are told, and the
        next message starts another turn.
        """
        store = self._store(using, tenant)
        try:
            look = look_at(store, session_id)
            while look.activity.is_due:
                if not threading.main_thread().is_alive():
                    # The process ends, and with it the turn would. The next process takes it.
                    return False
                has_stored = self._take_turn(store, session_id)
                before, look = look, look_at(store, session_id)
                # Another turn only makes sense after this one has changed something, or somebody else has.
                if not (has_stored or look.arrived - before.arrived):
                    return True
        except SessionBusy:
            return False
        except SessionNotFound:
            return True
        return not look.activity.is_running

    adrive = async_twin(drive)

    def _store(self, using: str | None, tenant: str) -> Store:
        return Store(self.using if using is None else using, tenant=tenant)

    def _take_turn(self, store: Store, session_id: str) -> bool:
        """Take one turn, and return whether it has stored anything and has not failed."""
        session = store.session(session_id)
        turn = ChatTurn(
            session,
            store,
            agent_type=self.agent_type,
            share_state=self.share_state,
            flush_seconds=conf.chat_flush_ms() / 1000,
        )
        error: BaseException | None = None
        is_stopped = False
        try:
            with turn:
                if turn.run is None:
                    return False
                is_stopped = True
                with _abandoned_at_the_end():
                    self._call(turn)
                is_stopped = turn.stopped_by is not None
        except _ProcessEnds:
            _logger.info(
                "The process ends, and the next one goes on with a thread of %r.", self, exc_info=True
            )
            return False
        except (FencedOutError, LockLostError) as exc:
            _logger.warning("Another worker has taken over a thread of %r (%s).", self, exc.code)
            return False
        except Exception as exc:
            if turn.run is None:
                raise  # No turn has begun: the thread is busy or gone, or the database cannot be reached.
            error = exc
            _logger.exception("The turn of a thread of %r failed.", self)
        self._end(turn, error, is_stopped=is_stopped)
        return error is None and turn.has_committed

    def _call(self, turn: ChatTurn) -> None:
        out = Out(turn.writer)
        try:
            turn.writer.begin()
            if is_async(self._answer):
                turn.load_client()
                async_to_sync(self._answer)(turn, out)
            else:
                self._answer(turn, out)
            if turn.is_active:
                turn.writer.raise_error()
        except EffectUnknown:
            raise  # The turn learns of an effect of its handle when it ends.
        except TurnInterrupted:
            # What `out` has found, the turn must find too: then it ends the run as interrupted.
            if turn.is_active:
                with turn.step():
                    # If it finds nothing, the step must not be stored: it would use up the answers to calls.
                    raise
            raise

    def _end(self, turn: ChatTurn, error: BaseException | None, *, is_stopped: bool) -> None:
        outcome: dict[str, Any] = {"status": "failed" if error else "interrupted" if is_stopped else "done"}
        if usage := turn.taken_tokens():
            outcome["usage"] = usage
        if error is not None:
            outcome["error"] = told_error(error)
        try:
            turn.writer.end(**outcome)
        except Exception:
            # Readers look at what is stored every few seconds.
            _logger.warning("The end of a turn was not written to the stream.", exc_info=True)


class _ProcessEnds(LockLostError):
    """The turn is abandoned, because its process ends. Its run stays running, as that of a killed worker."""


@contextmanager
def _abandoned_at_the_end() -> Iterator[None]:
    """Abandon a turn that raises an error while the process ends: it may be the end that causes the error."""
    try:
        yield
    except TurnInterrupted:
        raise
    except Exception as exc:
        if _process_ends():
            raise _ProcessEnds("The process ends.") from exc
        raise


def _process_ends() -> bool:
    """Return whether the interpreter of this process has begun to end."""
    if not threading.main_thread().is_alive():
        return True
    # Executors refuse work before the main thread has ended: until then, it waits for their threads.
    executor = ThreadPoolExecutor(max_workers=1)
    try:
        executor.submit(int)
    except RuntimeError:
        return True
    executor.shutdown(wait=False)
    return False


def _storable(title: str) -> str:
    """Return a title without what a message can hold and a title cannot: NUL, lone surrogates, long text."""
    title = title.encode("utf-8", "ignore").decode().replace("\0", "")
    return validation.shortened(title, limit=MAX_TITLE_BYTES)


_chats: Final[dict[str, Driver]] = {}
"""The chats of the project by the beginning of their session ids."""


def run_thread(
    *, session_id: str, tenant: str, using: str | None, reason: str | None = None, **kwargs: Any
) -> None:
    """Have a thread driven by the runner of its chat.

    A receiver of `session_posted`, `session_answered` and `session_ready`, which has a ``reason``.
    Sessions that are no threads of a chat are left alone.
    """
    if not _THREAD.fullmatch(session_id):
        return
    prefix = session_id.rpartition("-")[0]
    if prefix not in _chats:
        # A process without requests, such as a command, has not imported the URLs, and with them the chats.
        len(get_resolver().url_patterns)
    chat = _chats.get(prefix)
    if chat is None:
        return
    if reason == "again":
        ask_again(Store(using, tenant=tenant), session_id)
    chat.run(session_id, using, tenant)


# --- The threads of this process that drive --------------------------------------------------------------


class Pool:
    """A bounded pool of threads, which start when there is work and end after a minute without it.

    The threads do not keep a process from ending: at its end, it waits some seconds for them, and abandons
    the turns that last longer, as if the process had been killed. A command that starts turns waits for all
    of them before that.
    """

    def __init__(self, *, idle_seconds: float = _IDLE_SECONDS) -> None:
        self._idle_seconds = idle_seconds
        self._reset()

    def _reset(self) -> None:
        self._process = os.getpid()
        lock = threading.RLock()
        self._condition, self._has_ended_work = threading.Condition(lock), threading.Condition(lock)
        self._queue: deque[tuple[tuple[object, ...], Callable[[], object]]] = deque()
        self._queued: set[tuple[object, ...]] = set()
        self._threads: set[threading.Thread] = set()
        self._idle = 0
        atexit.register(self._finish, os.getpid())

    @property
    def threads(self) -> int:
        """The number of threads that are alive in this process."""
        return 0 if self._process != os.getpid() else len(self._threads)

    def submit(self, key: tuple[object, ...], call: Callable[[], object]) -> None:
        """Make a call soon, once for all submissions of the key that have not begun."""
        if self._process != os.getpid():
            self._reset()  # the threads have stayed in the parent
        with self._condition:
            if key in self._queued:
                return
            self._queued.add(key)
            self._queue.append((key, call))
            if self._idle >= len(self._queue):
                self._condition.notify()
            elif len(self._threads) < conf.chat_threads():
                thread = threading.Thread(target=self._work, name="helix_store chat", daemon=True)
                self._threads.add(thread)
                thread.start()

    def _work(self) -> None:
        try:
            while (call := self._next()) is not None:
                try:
                    close_old_connections()
                    call()
                except Exception:
                    _logger.exception("A thread of a chat was not driven.")
                finally:
                    connections.close_all()
                del call
        except BaseException:
            with self._condition:
                self._threads.discard(threading.current_thread())
                self._has_ended_work.notify_all()
            raise

    def _next(self) -> Callable[[], object] | None:
        with self._condition:
            self._idle += 1
            self._has_ended_work.notify_all()
            has_work = self._condition.wait_for(lambda: self._queue, self._idle_seconds)
            self._idle -= 1
            if not has_work:
                self._threads.discard(threading.current_thread())
                self._condition.notify_all()
                return None
            key, call = self._queue.popleft()
            self._queued.discard(key)
            return call

    def wait(self, seconds: float) -> bool:
        """Wait until nothing is left to do, and return false if there still is after some seconds."""
        if self._process != os.getpid():
            return True
        with self._condition:
            return self._has_ended_work.wait_for(
                lambda: not self._queue and self._idle == len(self._threads), seconds
            )

    def _finish(self, process: int) -> None:
        if process == os.getpid():
            self.wait(_LAST_SECONDS)


_pool: Final = Pool()
"""The pool of this process, for all of its chats."""


def wait_for_turns(seconds: float) -> bool:
    """Wait for the turns that the pool of this process takes. Return false if one still runs after that.

    For a command that starts turns, because its process ends after it.
    """
    return _pool.wait(seconds)
