"""Responses that follow a thread: what is stored first, then the chunks of its stream until it is idle.

A process reads the newest chunks of a thread once for all its responses.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import time
from collections import deque
from collections.abc import (
    AsyncGenerator,
    Awaitable,
    Callable,
    Collection,
    Hashable,
    Iterator,
    Mapping,
    Sequence,
)
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import aclosing, suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from itertools import takewhile
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol, TypeVar

from django.conf import settings
from django.db import close_old_connections

from helix_store import (
    HelixStoreError,
    Post,
    RunStatus,
    SessionNotFound,
    SessionState,
    SessionStatus,
    Store,
    StoredChunk,
    StreamNotFound,
    StreamTruncated,
)
from helix_store.contrib.chat import agui, aisdk
from helix_store.contrib.chat.agui import Outcome
from helix_store.contrib.chat.stored import Entry, entries, reasoning_id
from helix_store.contrib.chat.threads import Activity, Thread, has_ended, is_due, load_thread, newest_chunk
from helix_store.contrib.chat.turns import digest_of
from helix_store.core.payloads import decode
from helix_store.engine.threads import keep_open
from helix_store.sessions.runs import BUDGET_REASON, EFFECT_REASON
from helix_store.streams.manager import ResumableReader

if TYPE_CHECKING:
    from helix_store.contrib.chat.driver import Driver

__all__ = [
    "AgUi",
    "AiSdk",
    "BrokenOff",
    "Feed",
    "Joined",
    "Seen",
    "calls_of",
    "follow",
    "in_reading_thread",
    "join",
    "new_thread",
    "next_of",
    "open_feed",
    "outcome_of",
    "waiting_of",
]

R = TypeVar("R")

_LONGEST: Final = 256
"""How many chunks a feed keeps. A response that is slower reads its own pages from the database."""
_PAGE: Final = 200
_MOST_PAGES: Final = 5
_SECONDS_BETWEEN_TRIES: Final = 0.05
_LONGEST_SECONDS_BETWEEN_TRIES: Final = 1.0
_PAUSE_SECONDS_PER_FOLLOWER: Final = 0.0004
"""An event costs about a tenth of a millisecond for each response, and the process has other work to do."""
_LONGEST_PAUSE_SECONDS: Final = 0.12
_THREADS: Final = 2
"""How many threads of a process read for its responses, and how many call runners."""


class Seen(NamedTuple):
    sequence: int
    chunk: dict[str, Any]


class Feed:
    """One reader of a stream, and the chunks that it has read last."""

    def __init__(self, key: tuple[str, str, str], store: Store, position: int) -> None:
        self.key = key
        self.loop = asyncio.get_running_loop()
        self.followers = 0
        self._store = store
        self._floor = position
        """The buffer has every chunk after this one, up to the newest that was read."""
        self._buffer: deque[Seen] = deque()
        self._arrived = asyncio.Event()
        self._error: BaseException | None = None
        self._task = asyncio.create_task(self._read(position), name="helix_store chat feed")

    @property
    def is_alive(self) -> bool:
        return self._error is None and self.loop is asyncio.get_running_loop()

    async def _read(self, position: int) -> None:
        session_id, streams = self.key[2], self._store.streams
        try:
            reader = await streams.create_resumable_reader(session_id, from_sequence=position)
            pause = _SECONDS_BETWEEN_TRIES
            while reader is None:
                # The first turn creates the stream. It begins at once, unless the runner of the chat is a
                # queue that is busy.
                await asyncio.sleep(pause)
                pause = min(pause * 1.2, _LONGEST_SECONDS_BETWEEN_TRIES)
                reader = await streams.create_resumable_reader(session_id, from_sequence=position)
            async with aclosing(reader.texts()) as texts:
                async for stored in texts:
                    if stored is None:
                        continue
                    self._buffer.append(Seen(stored.sequence, decode(stored.text)))
                    if len(self._buffer) > _LONGEST:
                        self._floor = self._buffer.popleft().sequence
                    self._arrived.set()
                    if _is_all(reader, stored.sequence):
                        await asyncio.sleep(_pause())
        except Exception as exc:  # noqa: BLE001  each response raises it
            self._error = exc
        else:
            self._error = ConnectionError("The stream of the thread has ended.")
        finally:
            self._arrived.set()

    async def after(self, position: int, seconds: float) -> Sequence[Seen]:
        """Return the chunks after a position; none if none arrives in time. Raises the errors of readers."""
        has_newer = position < self._floor or self._newer(position)
        if not has_newer and self._error is None:
            self._arrived.clear()
            await _in_time(self._arrived.wait(), seconds)
        if position < self._floor:
            # Of a long write, the first chunks have left the buffer again.
            page = await in_reading_thread(
                lambda: self._store.streams.read_after(self.key[2], position, limit=_PAGE)
            )
            return [Seen(each.sequence, each.chunk) for each in page]
        found = self._newer(position)
        if not found and self._error is not None:
            raise self._error
        return found

    def _newer(self, position: int) -> list[Seen]:
        newer = list(takewhile(lambda seen: seen.sequence > position, reversed(self._buffer)))
        newer.reverse()
        return newer

    async def close(self) -> None:
        """Leave the feed. The last one to leave stops its reader."""
        self.followers -= 1
        if self.followers == 0:
            if _feeds.get(self.key) is self:
                del _feeds[self.key]
            self._task.cancel()
            await asyncio.wait([self._task])


def _is_all(reader: ResumableReader, sequence: int) -> bool:
    """Return whether this was the newest chunk when the reader's page was read."""
    head = getattr(reader, "_head", None)
    return head is not None and sequence >= head.last_sequence


def _pause() -> float:
    """Return how long a feed lets chunks come together, which depends on the responses of this process."""
    followers = sum(feed.followers for feed in _feeds.values())
    return min(_LONGEST_PAUSE_SECONDS, followers * _PAUSE_SECONDS_PER_FOLLOWER)


_feeds: Final[dict[tuple[str, str, str], Feed]] = {}


def open_feed(store: Store, session_id: str, position: int) -> Feed:
    """Return the feed of a thread in this event loop. Call `close` at the end."""
    key = (store.alias, store.tenant, session_id)
    feed = _feeds.get(key)
    if feed is None or not feed.is_alive:
        feed = _feeds[key] = Feed(key, store, position)
    feed.followers += 1
    return feed


async def _in_time(waiting: Awaitable[object], seconds: float) -> None:
    # `asyncio.wait_for` makes a task for each wait before Python 3.12.
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await waiting


_pools: Final[dict[tuple[int, str], ThreadPoolExecutor]] = {}


async def in_reading_thread(call: Callable[[], R]) -> R:
    """Make a call in one of the two threads in which the responses of this process read threads.

    A response lasts longer than the thread that Django has for a request, and must not keep it.
    """

    def made() -> R:
        # Otherwise, each of its statements would open a connection.
        with keep_open():
            return call()

    return await asyncio.wrap_future(_in_thread_of("reader", made))


_called: Final[dict[tuple[Hashable, ...], object]] = {}
"""The calls of runners that are under way, by process and by the thread of a chat that they are made for."""


def call_soon(call: Callable[[], object], *what: Hashable) -> None:
    """Call a runner in the background, unless a call for the same chat and thread (``what``) is under way.

    Nobody awaits the call, so responses go on while a runner waits for its queue. It is finished even if the
    response that made it ends.
    """
    key, own = (os.getpid(), *what), object()
    if _called.setdefault(key, own) is not own:
        return

    def forget(future: Future[object]) -> None:
        del _called[key]
        if (error := future.exception()) is not None:
            _logger.error("The runner of a chat was not called.", exc_info=error)

    _in_thread_of("caller", call).add_done_callback(forget)


def _in_thread_of(kind: str, call: Callable[[], R]) -> Future[R]:
    key = (os.getpid(), kind)
    if key not in _pools:
        _pools[key] = ThreadPoolExecutor(_THREADS, thread_name_prefix=f"helix_store chat {kind}")

    def made() -> R:
        try:
            return call()
        finally:
            close_old_connections()

    return _pools[key].submit(made)


_queued: Final[dict[tuple[Hashable, ...], asyncio.Task[Any]]] = {}
"""Readings that have not begun, by what they read."""


async def read_together(call: Callable[[], R], *what: Hashable) -> R:
    """Make a call `in_reading_thread`. Responses that ask for the same before it begins share its result.

    The function ``call`` reads nothing but ``what``.
    """
    loop = asyncio.get_running_loop()
    key = (loop, call.__qualname__, *what)

    def begin() -> R:
        # Who asks from now on needs what is stored from now on.
        _queued.pop(key, None)
        return call()

    def forget(task: asyncio.Task[R]) -> None:
        if _queued.get(key) is task:
            del _queued[key]
        if not task.cancelled():
            task.exception()  # all its responses may have ended

    task = _queued.get(key)
    if task is None:
        task = _queued[key] = loop.create_task(in_reading_thread(begin))
        task.add_done_callback(forget)
    result: R = await asyncio.shield(task)
    return result


_SECONDS_BETWEEN_LOOKS: Final = 3.0
"""How often a response looks whether its thread has become idle, or is left by its worker."""
_LONGEST_SECONDS_BETWEEN_CALLS: Final = 60.0
_BEGINNING: Final = b": chat\n\n"
_HEARTBEAT: Final = b": heartbeat\n\n"

_logger = logging.getLogger(__name__)


class BrokenOff(Exception):
    """A response must end before its run does: its connection is closed, so that the client comes back."""


# --- What is stored ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Joined:
    """A thread, and where to read its stream from so that nothing is missing.

    ``start`` is the position at which the open step began, ``position`` that of the newest chunk. Both were
    read before the thread: what is stored in between is in the thread, and is not shown twice. If a turn
    ``is_under_way``, its end is not in the stream yet.
    """

    thread: Thread
    start: int
    position: int
    token: int
    is_under_way: bool


def join(
    store: Store,
    session_id: str,
    *,
    activity: Activity | None = None,
    newest: tuple[int, dict[str, Any]] | None = None,
) -> Joined:
    """Read the end of the stream, then the thread. Raises `SessionNotFound`.

    Pass the `newest_chunk` of an earlier moment to follow everything that was said since.
    """
    position, chunk = newest_chunk(store, session_id) if newest is None else newest
    thread = load_thread(store, session_id, activity=activity)
    return Joined(
        thread=thread,
        start=_start_after(position, chunk),
        position=position,
        token=chunk.get("r", 0),
        is_under_way=chunk.get("type", "end") != "end",
    )


def new_thread(state: SessionState, post: Post) -> Joined:
    """Return a thread that this message has begun. Nothing else can be stored yet."""
    thread = Thread(state=state, messages=[], posts=[post], run=None, activity=Activity.DUE, open_calls={})
    return Joined(thread=thread, start=0, position=0, token=0, is_under_way=False)


def _start_after(position: int, chunk: Mapping[str, Any]) -> int:
    """Return the position from which on chunks belong to what is open after a chunk."""
    if not chunk or chunk["type"] in ("run", "commit", "reset", "end"):
        return position
    start = chunk.get("s", position)
    return start if start <= position else position


def open_reasoning(store: Store, session_id: str, joined: Joined) -> list[str]:
    """Return the ids of the reasoning of the running answer up to now."""
    found: dict[str, None] = {}
    stored = {message.get("id") for message in joined.thread.messages}
    at = joined.start
    while at < joined.position:
        page = _kept_after(store, session_id, at)
        for each in page:
            chunk = each.chunk
            is_current = chunk.get("r", 0) >= joined.token and each.sequence <= joined.position
            if is_current and chunk["type"] == "reasoning" and chunk["m"] not in stored:
                found[reasoning_id(chunk["m"], chunk["i"])] = None
        if not page:
            break
        at = page[-1].sequence
    return list(found)


def abandoned_reasoning(store: Store, session_id: str, joined: Joined) -> list[str]:
    """Return the ids of newer reasoning that is not stored, and that a client may hold from failed steps."""
    stored = {message.get("id") for message in joined.thread.messages}
    page = _kept_after(store, session_id, max(0, joined.position - _PAGE))
    said = [each.chunk for each in page if each.chunk["type"] == "reasoning"]
    return list(dict.fromkeys(reasoning_id(each["m"], each["i"]) for each in said if each["m"] not in stored))


def next_of(thread: Thread) -> str | None:
    """Return the id of the message whose answer the next turn begins, or ``None`` if no message is due.

    That is the last one that is due, whoever has posted it.
    """
    now = datetime.now(UTC)
    due = [post.message for post in thread.posts if post.message is not None and is_due(post, now)]
    said = [entry.id for entry in entries(due) if entry.role not in ("assistant", "tool")]
    return said[-1] if said else None


def _kept_after(store: Store, session_id: str, position: int) -> Sequence[StoredChunk]:
    """Return a page of the chunks after a position that were not pruned."""
    try:
        return store.streams.read_after(session_id, position, limit=_PAGE)
    except StreamTruncated as exc:
        return store.streams.read_after(session_id, exc.oldest - 1, limit=_PAGE)


def waiting_of(thread: Thread) -> list[Entry]:
    """Return the messages that wait to be received, under the ids that they will have."""
    stored = {message.get("id") for message in thread.messages}
    posts = [post.message for post in thread.posts if post.message is not None]
    return [entry for entry in entries(posts) if entry.id not in stored]


def calls_of(thread: Thread) -> dict[str, aisdk.Call]:
    """Return the calls that the thread waits for, and those whose answer was not used yet."""
    pending = thread.state.pending_client_tool_calls
    return {
        call_id: _call(call_id, thread.open_calls.get(call_id, call), is_open=call_id in thread.open_calls)
        for call_id, call in pending.items()
        if isinstance(call, dict) and ("submitted_at" in call or not has_ended(thread.state))
    }


def _call(call_id: str, call: Mapping[str, Any], *, is_open: bool) -> aisdk.Call:
    return aisdk.Call(
        id=call_id,
        name=call.get("tool_name", ""),
        input=call.get("input"),
        digest=call.get("digest", ""),
        approval=call.get("approval_id"),
        approved=None if is_open else call.get("approved"),
        reason=None if is_open else call.get("reason"),
    )


def cost_of(store: Store, session_id: str, steps: Sequence[int], run_ids: Collection[str]) -> str | None:
    """Return the dollars that runs have cost from the first of these steps on, or ``None`` if the price of a
    model is unknown.

    After a rewind, another run has steps with the same numbers.
    """
    spent = store.usage.get_entries(session_id, kinds=["tokens"], step_range=(min(steps), None))
    costs = [each.cost_usd for each in spent if each.run_id in run_ids]
    known = [cost for cost in costs if cost is not None]
    return None if not costs or len(known) < len(costs) else str(sum(known))


def outcome_of(thread: Thread, *, usage: Sequence[Mapping[str, Any]] = ()) -> Outcome:
    """Return how a thread stands that nobody drives."""
    state, run = thread.state, thread.run
    if state.status == SessionStatus.FAILED:
        return Outcome(
            kind="error", message=state.failure_reason or "The agent failed.", code="failed", usage=usage
        )
    calls = thread.open_calls
    approvals = [_interrupt(id, call) for id, call in calls.items() if call.get("approval_id") is not None]
    if approvals:
        return Outcome(kind="interrupt", interrupts=approvals, usage=usage)
    if calls:
        return Outcome(pending=list(calls), usage=usage)
    if run is not None and run.status == RunStatus.FAILED:
        return Outcome(kind="error", message=_told(run.error), code="agent_failed", usage=usage)
    if run is not None and run.status == RunStatus.INTERRUPTED:
        reason = run.completion_reason or ""
        if reason.startswith(BUDGET_REASON):
            message = "A budget does not allow another step at the moment."
            return Outcome(kind="error", message=message, code="budget_exceeded", usage=usage)
        if reason.startswith(EFFECT_REASON):
            message = "Nobody knows whether a call has happened. Somebody must settle it."
            return Outcome(kind="error", message=message, code="effect_unknown", usage=usage)
        return Outcome(kind="cancelled", usage=usage)
    return Outcome(result=state.output, usage=usage)


def _told(error: Any) -> str:
    if settings.DEBUG and isinstance(error, Mapping):
        return f"{error.get('type')}: {error.get('message')}"
    return "The agent failed."


def _interrupt(call_id: str, call: Mapping[str, Any]) -> dict[str, Any]:
    digest = call.get("digest", "")
    properties: dict[str, Any] = {
        "approved": {"type": "boolean"},
        "digest": {"const": digest},
        "reason": {"type": "string"},
    }
    if call.get("editable"):
        properties["input"] = {}
    interrupt: dict[str, Any] = {
        "id": call_id,
        "reason": "tool_call",
        "message": f"May the agent run {call.get('tool_name', '')}?",
        "toolCallId": call_id,
        "responseSchema": {
            "type": "object",
            "properties": properties,
            "required": ["approved", "digest"],
        },
        "metadata": {"digest": digest, "toolName": call.get("tool_name"), "input": call.get("input")},
    }
    deadline = call.get("deadline")
    if isinstance(deadline, int):
        moment = time.gmtime(deadline // 1000)
        interrupt["expiresAt"] = f"{time.strftime('%Y-%m-%dT%H:%M:%S', moment)}.{deadline % 1000:03d}Z"
    return interrupt


# --- The protocols -----------------------------------------------------------------------------------


class Spoken(Protocol):
    """One response in one of the protocols."""

    @property
    def is_over(self) -> bool: ...

    @property
    def may_hold_more(self) -> bool:
        """True if the client may hold messages that the request does not name."""
        ...

    @property
    def streams_each_message(self) -> bool:
        """True if a snapshot must not hold a message that chunks after it say."""
        ...

    def begin(
        self, joined: Joined, reasoning: Sequence[str], abandoned: Sequence[str] = ()
    ) -> Iterator[dict[str, Any]]: ...

    def needs_thread(self, chunk: Mapping[str, Any]) -> bool: ...

    def take(self, chunk: Mapping[str, Any], thread: Thread | None) -> Iterator[dict[str, Any]]: ...

    def resume(self, thread: Thread, later: Collection[str]) -> None: ...

    def absorb(self, chunk: Mapping[str, Any]) -> None: ...

    def reopened(self, thread: Thread) -> Iterator[dict[str, Any]]: ...

    @property
    def priced_steps(self) -> Sequence[int]:
        """The numbers of the steps whose cost the end of the response tells."""
        ...

    def end(self, thread: Thread, cost: str | None = None) -> Iterator[dict[str, Any]]: ...

    ending: bytes


class AgUi:
    """A response in AG-UI."""

    ending = b""
    is_over = False
    streams_each_message = True

    def __init__(
        self, thread_id: str, run_id: str, *, held: Sequence[tuple[str, str]] | None, shares_state: bool
    ) -> None:
        self.may_hold_more = held is None
        self._events = agui.Events(
            thread_id, run_id, held=held, shares_state=shares_state, now=_now, digest=digest_of
        )

    def begin(
        self, joined: Joined, reasoning: Sequence[str], abandoned: Sequence[str] = ()
    ) -> Iterator[dict[str, Any]]:
        thread = joined.thread
        yield self._events.started()
        self._events.expect(abandoned, entries(thread.messages), reasoning)
        yield from self._events.snapshot(
            entries(thread.messages), waiting_of(thread), thread.state.custom_state, reasoning
        )

    def needs_thread(self, chunk: Mapping[str, Any]) -> bool:
        return self._events.needs_thread(chunk)

    def take(self, chunk: Mapping[str, Any], thread: Thread | None) -> Iterator[dict[str, Any]]:
        if thread is None:
            return self._events.take(chunk)
        return self._events.take(
            chunk,
            entries(thread.messages),
            waiting_of(thread),
            thread.state.custom_state,
            has_thread=True,
        )

    def resume(self, thread: Thread, later: Collection[str]) -> None:
        self._events.resume([entry for entry in entries(thread.messages) if entry.id not in later])

    def absorb(self, chunk: Mapping[str, Any]) -> None:
        self._events.absorb(chunk)

    def reopened(self, thread: Thread) -> Iterator[dict[str, Any]]:
        yield self._events.started()
        yield from self._events.state_snapshot(thread.state.custom_state)
        yield from self._events.reopened()

    @property
    def priced_steps(self) -> Sequence[int]:
        return self._events.steps if self._events.usage() else ()

    def end(self, thread: Thread, cost: str | None = None) -> Iterator[dict[str, Any]]:
        outcome = outcome_of(thread, usage=self._events.usage())
        return self._events.finished(replace(outcome, cost_usd=cost))


class AiSdk:
    """A response in the UI message stream of the AI SDK."""

    ending = b"data: [DONE]\n\n"

    def __init__(self, *, after: str | None = None, held: aisdk.Held | None = None) -> None:
        self._parts = aisdk.Parts(after=after, held=held)

    @property
    def is_over(self) -> bool:
        return self._parts.is_over

    may_hold_more = False
    streams_each_message = False

    def begin(
        self, joined: Joined, reasoning: Sequence[str], abandoned: Sequence[str] = ()
    ) -> Iterator[dict[str, Any]]:
        thread = joined.thread
        return self._parts.begin(entries(thread.messages), calls_of(thread))

    def needs_thread(self, chunk: Mapping[str, Any]) -> bool:
        return self._parts.needs_thread(chunk)

    def take(self, chunk: Mapping[str, Any], thread: Thread | None) -> Iterator[dict[str, Any]]:
        if thread is None:
            return self._parts.take(chunk)
        return self._parts.take(chunk, entries(thread.messages), calls_of(thread), has_thread=True)

    def resume(self, thread: Thread, later: Collection[str]) -> None:
        self._parts.resume([entry for entry in entries(thread.messages) if entry.id not in later])

    def absorb(self, chunk: Mapping[str, Any]) -> None:
        for _ in self._parts.take(chunk):
            pass

    def reopened(self, thread: Thread) -> Iterator[dict[str, Any]]:
        return iter(())

    priced_steps: Sequence[int] = ()

    def end(self, thread: Thread, cost: str | None = None) -> Iterator[dict[str, Any]]:
        if self._parts.is_over:
            return self._parts.finished(Outcome())
        return self._parts.finished(outcome_of(thread))


def _now() -> int:
    return time.time_ns() // 1_000_000


# --- Following ---------------------------------------------------------------------------------------


async def follow(
    chat: Driver,
    store: Store,
    session_id: str,
    spoken: Spoken,
    joined: Joined,
    *,
    seen: int | None = None,
    is_called: bool = False,
    heartbeat: float,
) -> AsyncGenerator[bytes, None]:
    """Yield a response: what is stored, then what is said until the thread is idle.

    With ``seen``, the sequence of a chunk that the client has got, only what follows it. If ``is_called``,
    the request has called for a driver already. Raises `BrokenOff` if the stream cannot be read on.
    """
    yield _BEGINNING
    try:
        reader = _Reader(chat, store, session_id, spoken, heartbeat=heartbeat, is_called=is_called)
        async with aclosing(reader.events(joined, seen)) as events:
            async for part in events:
                yield part
    except SessionNotFound as exc:
        raise BrokenOff("The thread was deleted.") from exc
    except HelixStoreError as exc:
        _logger.warning("A response of a chat was broken off (%s); the client connects again.", exc.code)
        raise BrokenOff(exc.code) from exc
    yield spoken.ending


class _Reader:
    def __init__(
        self,
        chat: Driver,
        store: Store,
        session_id: str,
        spoken: Spoken,
        *,
        heartbeat: float,
        is_called: bool,
    ) -> None:
        self._is_called = is_called
        self._chat = chat
        self._store = store
        self._session_id = session_id
        self._key = (store.alias, store.tenant, session_id)
        self._spoken = spoken
        self._heartbeat = heartbeat
        self._position = 0
        self._safe = 0
        self._token = 0
        self._run_ids: set[str] = set()
        self._pause = _SECONDS_BETWEEN_LOOKS
        self._calls_at = time.monotonic() + (_SECONDS_BETWEEN_LOOKS if is_called else 0)

    async def events(self, joined: Joined, seen: int | None) -> AsyncGenerator[bytes, None]:
        thread = joined.thread
        if thread.activity is Activity.IDLE:
            # What a worker left behind in the stream is not going to be stored.
            joined = replace(joined, start=joined.position)
        if seen is not None and await self._absorbed(joined, seen):
            yield _parts(self._spoken.reopened(thread), None)
        else:
            self._position, self._token = joined.start, joined.token
            if joined.position:
                # A turn may have ended after the position was read and before the thread was.
                self._safe = await in_reading_thread(lambda: newest_chunk(self._store, self._session_id)[0])
            if not joined.position or self._safe > joined.start:
                joined = replace(joined, thread=await self._without_later(thread))
            reasoning: Sequence[str] = ()
            if joined.start < joined.position:
                reasoning = await in_reading_thread(
                    lambda: open_reasoning(self._store, self._session_id, joined)
                )
            abandoned: Sequence[str] = ()
            if self._spoken.may_hold_more and joined.position:
                abandoned = await in_reading_thread(
                    lambda: abandoned_reasoning(self._store, self._session_id, joined)
                )
            begun = self._spoken.begin(joined, reasoning, abandoned)
            yield _parts(begun, self._safe_id(joined.start), is_anew=True)
        if thread.activity is Activity.DUE and not self._is_called:
            self._call_a_driver()
        is_idle = thread.activity is Activity.IDLE and self._position >= joined.position
        while not is_idle and not self._spoken.is_over:
            try:
                async with aclosing(self._chunks()) as chunks:
                    async for part in chunks:
                        yield part
                break
            except StreamTruncated:
                # Chunks were pruned: go on with what is stored.
                joined = await in_reading_thread(lambda: join(self._store, self._session_id))
                self._position = joined.position
                yield _parts(self._spoken.take({"type": "reset"}, joined.thread), None, is_anew=True)
        thread = await self._load()
        own_id = self._safe_id(self._position)
        if not self._spoken.is_over:
            yield _parts(self._spoken.take({"type": "run"}, thread), own_id, is_anew=own_id is None)
        steps, cost = self._spoken.priced_steps, None
        if steps:
            run_ids = self._run_ids | ({thread.run.run_id} if thread.run is not None else set())
            cost = await in_reading_thread(lambda: cost_of(self._store, self._session_id, steps, run_ids))
        yield _parts(self._spoken.end(thread, cost), own_id)

    async def _absorbed(self, joined: Joined, seen: int) -> bool:
        """Take the chunks that the client has seen, from the beginning of their step.

        Return false if the response must begin anew: if they are not there any more or never were, and if
        another turn has begun since, which may have received messages that are in no chunk.
        """
        if not 0 < seen <= joined.position:
            return False
        try:
            found = await in_reading_thread(lambda: self._around(joined, seen))
        except (StreamTruncated, IndexError):
            return False
        if found is None:
            return False
        before, later = found
        self._spoken.resume(joined.thread, later)
        for chunk in before:
            if self._is_current(chunk):
                self._spoken.absorb(chunk)
        self._position = seen
        return True

    def _around(self, joined: Joined, seen: int) -> tuple[list[dict[str, Any]], set[str]] | None:
        """Return the chunks of the step up to one, and the ids of the messages in those that follow it."""
        read = self._store.streams.read_after
        start = _start_after(seen, read(self._session_id, seen - 1, limit=1)[0].chunk)
        before: list[dict[str, Any]] = []
        later: set[str] = set()
        while start < joined.position and (page := read(self._session_id, start, limit=_PAGE)):
            for each in page:
                if each.sequence <= seen:
                    before.append(each.chunk)
                elif each.sequence <= joined.position:
                    if each.chunk["type"] in ("run", "rewound"):
                        return None
                    later |= _ids_in(each.chunk)
            start = page[-1].sequence
        return before, later

    async def _chunks(self) -> AsyncGenerator[bytes, None]:
        """Yield the events of chunks until the thread is idle."""
        pause = min(_SECONDS_BETWEEN_LOOKS, self._heartbeat)
        feed = open_feed(self._store, self._session_id, self._position)
        try:
            while True:
                arrived = await feed.after(self._position, pause)
                if not arrived:
                    yield _HEARTBEAT
                    if await self._has_come_to_rest():
                        return
                for sequence, chunk in _together(arrived):
                    async for part in self._events_of(sequence, chunk):
                        yield part
                    if self._spoken.is_over:
                        return
                    if chunk["type"] == "end" and await self._has_come_to_rest():
                        return
        finally:
            await feed.close()

    async def _events_of(self, sequence: int, chunk: Mapping[str, Any]) -> AsyncGenerator[bytes, None]:
        self._position = sequence
        if self._is_current(chunk):
            if "run" in chunk:
                self._run_ids.add(chunk["run"])
            thread = await self._load() if self._spoken.needs_thread(chunk) else None
            own_id = self._safe_id(sequence)
            if thread is not None and own_id is None:
                thread = await self._without_later(thread)
            is_ahead = thread is not None and own_id is None
            if part := _parts(self._spoken.take(chunk, thread), own_id, is_anew=is_ahead):
                yield part

    def _is_current(self, chunk: Mapping[str, Any]) -> bool:
        """Return whether the worker that wrote a chunk is the newest one."""
        if "r" not in chunk or chunk["r"] < self._token:
            return False
        self._token = chunk["r"]
        return True

    async def _has_come_to_rest(self) -> bool:
        """Return whether nobody drives the thread or must, and everything in the stream was read."""

        def look() -> tuple[Activity, int]:
            activity = self._chat.activity(
                self._session_id, using=self._store.alias, tenant=self._store.tenant
            )
            return activity, newest_chunk(self._store, self._session_id)[0]

        activity, newest = await read_together(look, self._chat, *self._key)
        if activity is Activity.DUE and time.monotonic() >= self._calls_at:
            self._call_a_driver()
        return activity is Activity.IDLE and newest <= self._position

    def _call_a_driver(self) -> None:
        """Have the thread driven: the signal of its message may have been lost with its process."""
        self._calls_at = time.monotonic() + self._pause
        self._pause = min(2 * self._pause, _LONGEST_SECONDS_BETWEEN_CALLS)
        call = partial(self._chat.call_driver, self._session_id, self._store.alias, self._store.tenant)
        call_soon(call, self._chat, *self._key)

    async def _load(self) -> Thread:
        def read() -> tuple[Thread, int]:
            thread = load_thread(self._store, self._session_id)
            return thread, newest_chunk(self._store, self._session_id)[0]

        thread, newest = await read_together(read, *self._key)
        self._safe = max(self._safe, newest)
        return thread

    async def _without_later(self, thread: Thread) -> Thread:
        """Leave out messages that are stored already, but that the next chunks say."""
        if not self._spoken.streams_each_message or not thread.messages:
            return thread
        position, token = self._position, self._token
        later = await in_reading_thread(lambda: _said_after(self._store, self._session_id, position, token))
        return replace(thread, messages=[each for each in thread.messages if each["id"] not in later])

    def _safe_id(self, sequence: int) -> int | None:
        """Return a position after which a client can go on, or ``None`` if it has seen more than that.

        A thread that was loaded may be ahead of the chunk at which it was loaded.
        """
        return sequence if sequence >= self._safe else None


def _ids_in(chunk: Mapping[str, Any]) -> set[str]:
    """Return the ids of the messages that a chunk is about."""
    said = {each["id"] for each in chunk.get("said", ())}
    own = {chunk["m"]} if "m" in chunk else set()
    return {*said, *chunk.get("received", ()), *own}


def _said_after(store: Store, session_id: str, position: int, token: int) -> set[str]:
    """Return the ids of messages that the next chunks say, without those of workers that were replaced."""
    said: set[str] = set()
    # If there are more, a snapshot holds the messages of the rest.
    for _ in range(_MOST_PAGES):
        try:
            page = store.streams.read_after(session_id, position, limit=_PAGE)
        except (StreamNotFound, StreamTruncated):
            return set()
        for each in page:
            position, chunk = each.sequence, each.chunk
            if chunk.get("r", -1) >= token:
                token = chunk["r"]
                said |= _ids_in(chunk) - set(chunk.get("received", ()))
        if len(page) < _PAGE:
            break
    return said


def _together(arrived: Sequence[Seen]) -> Iterator[Seen]:
    """Yield chunks, with deltas that follow each other as one: a response that is late has fewer events."""
    last: Seen | None = None
    for seen in arrived:
        if last is not None:
            if _continues(last.chunk, seen.chunk):
                last = Seen(seen.sequence, {**seen.chunk, "d": last.chunk["d"] + seen.chunk["d"]})
                continue
            yield last
        last = seen
    if last is not None:
        yield last


def _continues(chunk: Mapping[str, Any], next_chunk: Mapping[str, Any]) -> bool:
    if "d" not in chunk or "d" not in next_chunk or chunk["type"] != next_chunk["type"]:
        return False
    return {**chunk, "d": ""} == {**next_chunk, "d": ""}


def _parts(events: Iterator[dict[str, Any]], sequence: int | None, *, is_anew: bool = False) -> bytes:
    """Return events as server-sent events; the last one has the position after which a client goes on.

    An empty id makes a client forget its position: until the next one, it must begin anew after a cut. This
    is so from the beginning of a response that begins anew, and while the client has no messages.
    """
    told = list(events)
    lines = [json.dumps(event, ensure_ascii=False, separators=(",", ":")) for event in told]
    if not lines:
        return b""
    found = [f"data: {line}\n\n" for line in lines]
    if is_anew:
        found[0] = f"id:\n{found[0]}"
    for index, event in enumerate(told[:-1]):
        if event["type"] == "MESSAGES_SNAPSHOT" and not event["messages"]:
            found[index] = f"id:\n{found[index]}"
    if sequence is not None:
        found[-1] = f"id: {sequence}\n{found[-1]}"
    return "".join(found).encode("utf-8", "backslashreplace")
