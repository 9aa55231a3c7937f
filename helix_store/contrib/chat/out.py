"""What an agent says while it works: chunks in the stream of its thread, a few writes a second."""

from __future__ import annotations

import heapq
import json
import logging
import os
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from itertools import takewhile
from typing import TYPE_CHECKING, Any, Final

from django.conf import settings
from django.db import connections

from helix_store import (
    InvalidPayload,
    LimitExceeded,
    LockLostError,
    SessionNotFound,
    Store,
    StreamNotFound,
    TurnInterrupted,
    new_id,
)
from helix_store.contrib.chat.matching import Matching, Said
from helix_store.contrib.chat.stored import as_text, is_of_agent
from helix_store.contrib.chat.threads import messages_of_thread
from helix_store.core.payloads import copy_json, encode
from helix_store.engine.async_twins import async_twin
from helix_store.stores.step import may_wait_here
from helix_store.streams.manager import open_without_writer

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

__all__ = ["Out", "Writer", "open_stream", "told_error"]

_SECONDS_BETWEEN_LOOKS: Final = 1.0
"""How often a writer checks its fence and looks for a request to stop, beside what the stream shows."""
_LARGEST_DELTA: Final = 60_000
"""The most bytes of a chunk of text, which is split so that others can be written in between."""
_ROOM: Final = 100
"""The most bytes of what each chunk gets when it is written."""
_LONGEST_ERROR: Final = 2_000
_SHARE: Final = 5
_LONGEST_INTERVAL: Final = 0.15
"""A write of w seconds is followed by at least 5 w without one, but no more than this many seconds."""
_LOOK_BACK: Final = 20
_BOUNDARIES: Final = frozenset({"run", "commit", "reset", "end"})
"""The chunks after which nothing is open."""
_PATIENCE_SECONDS: Final = 0.5
"""How long a writer in a transaction waits for another thread that writes."""

_logger = logging.getLogger(__name__)


def told_error(error: BaseException) -> str:
    """Return what clients are told about an exception: nothing of it, unless ``DEBUG`` is set."""
    if not settings.DEBUG:
        return "The agent failed."
    return f"{type(error).__name__}: {error}"[:_LONGEST_ERROR]


def open_stream(store: Store, session_id: str, agent_type: str) -> None:
    """Create the stream of a thread. It stays open between turns, without a writer that has to be alive."""
    open_without_writer(store.streams, session_id, session_id, agent_type)


class Writer:
    """The only writer of a thread's stream during a turn. Its fencing token is in each chunk.

    A chunk has ``s``, the position at which its step began, so that a reader finds the beginning of what is
    open, and ``r``, the token: readers leave out what a worker writes after another one has taken over. So a
    chunk is written without a fence, in one statement. The writer checks its fence once a second, and as soon
    as a gap in the sequences shows that somebody else has written.
    """

    def __init__(
        self, store: Store, session_id: str, agent_type: str, *, token: int, run_id: str, seconds: float
    ) -> None:
        self._store = store
        self._session_id = session_id
        self._agent_type = agent_type
        self.token: Final = token
        self._run_id = run_id
        self._interval = self._shortest = seconds
        self._buffer: list[dict[str, Any]] = []
        self._lock = threading.RLock()
        self._writing = threading.RLock()
        self._connection = connections[store.alias]
        """The connection of the agent's thread, in which it may have a transaction open."""
        self._last: int | None = None
        self._base = 0
        self._flushed_at = 0.0
        self._looks_at = 0.0
        self._error: BaseException | None = None
        self._must_show = False
        self._open: dict[str | None, Said] = {}
        self._said: list[Said] = []
        self._step_is_open = False
        self._received: list[str] = []
        self.step_number = 1
        self._is_over = False
        self._may_be_rolled_back = False

    # Parts

    def add(self, chunk: dict[str, Any]) -> None:
        """Add a chunk to the buffer, and text to the last chunk if that continues it."""
        with self._lock:
            self._settle()
            if not self._step_is_open:
                self._step_is_open = True
                self._buffer.append({"type": "step", "n": self.step_number})
            last = self._buffer[-1] if self._buffer else {}
            if "d" in chunk and {**last, "d": ""} == {**chunk, "d": ""}:
                last["d"] += chunk["d"]
            else:
                self._buffer.append(chunk)

    def _settle(self) -> None:
        """If the caller has rolled back the transaction of a step, tell readers to load what is stored."""
        if self._may_be_rolled_back and not connections[self._alias].in_atomic_block:
            self._may_be_rolled_back = False
            self._buffer.append({"type": "reset"})

    def message(self, agent: Mapping[str, Any] | None) -> Said:
        """Return the message that the agent is saying; begin one if it says none."""
        key = None if agent is None else agent["id"]
        with self._lock:
            said = self._open.get(key)
            if said is None:
                said = self._open[key] = Said(new_id(), agent=agent)
                if agent is None:
                    self._said.append(said)
                else:
                    self.message(None).parts.append({"type": "agent", "said": said, "agent": agent})
            return said

    def result(self, call_id: str, content: str, agent: Mapping[str, Any] | None) -> Said:
        """Begin the message of a tool's result; the agent's next part begins another message."""
        said = Said(new_id(), role="tool", agent=agent, call_id=call_id, content=content)
        with self._lock:
            if agent is None:
                self._said.append(said)
            else:
                self.message(None).parts.append({"type": "agent", "said": said, "agent": agent})
            self._open.pop(None if agent is None else agent["id"], None)
        return said

    def end_agent(self, agent: Mapping[str, Any]) -> None:
        with self._lock:
            self._open.pop(agent["id"], None)

    # Writing

    @property
    def due_at(self) -> float:
        """The time of the next write."""
        return self._flushed_at + self._interval

    @property
    def is_due(self) -> bool:
        return time.monotonic() >= self.due_at

    def raise_error(self) -> None:
        """Raise the error of a write that another thread has made."""
        if self._error is not None:
            raise self._error

    def pump(self) -> None:
        """Write what is in the buffer, at once or after the rest of the interval.

        In an event loop, which must not query a database, another thread writes it.
        """
        self.raise_error()
        if may_wait_here() and (self.is_due or connections[self._alias].in_atomic_block):
            self._flush_if_due()
        else:
            _flusher.add(self, self.due_at)

    async def apump(self) -> None:
        self.raise_error()
        if self.is_due:
            await self._aflush_if_due()
        else:
            _flusher.add(self, self.due_at)

    @property
    def _alias(self) -> str:
        return self._store.alias

    def flush(self) -> None:
        """Write what is in the buffer. Raises `TurnInterrupted`, `FencedOutError` and errors of streams."""
        self.raise_error()
        with self._only_writer():
            with self._lock:
                chunks, self._buffer = self._buffer, []
            if not chunks or self._is_over:
                return
            parts = self._fitting(chunks)
            # A chunk that was kept may be before the next step, which begins after it.
            begins = 1 + max((at for at, part in enumerate(parts) if part["type"] in _BOUNDARIES), default=-1)
            before, following = parts[:begins], parts[begins:]
            if before:
                try:
                    self._write(before)
                except BaseException:
                    self._must_show |= bool(following)
                    raise
            if following:
                self._write(following)

    aflush = async_twin(flush)

    def _fitting(self, chunks: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
        """Split the chunks that are too large for the stream.

        A chunk without text cannot be split. It is left out, and readers load the step. The end of a turn,
        for which readers wait, is written without its usage.
        """
        limit = self._store.limits.max_chunk_bytes - _ROOM
        fitting: list[dict[str, Any]] = []
        for chunk in chunks:
            parts = list(_split(chunk, limit))
            if not parts and chunk["type"] == "commit":
                parts = [_without_details(chunk, limit), {"type": "run", "run": self._run_id}]
            elif not parts and chunk["type"] == "end":
                parts = [{key: value for key, value in chunk.items() if key != "usage"}]
            elif not parts:
                self._must_show = self._must_show or not chunk.get("transient")
                if chunk["type"] == "data":
                    message = "Data of a chat are larger than max_chunk_bytes, and were not streamed: %s."
                    _logger.warning(message, chunk["name"])
            fitting += parts
        return fitting

    @contextmanager
    def _only_writer(self) -> Iterator[None]:
        """Keep the other thread from writing. In a transaction, do not wait for it for long.

        It may be waiting for that transaction: on SQLite for any, on PostgreSQL for one with a chunk in it.
        """
        is_only = self._writing.acquire(timeout=_PATIENCE_SECONDS if self._connection.in_atomic_block else -1)
        if not is_only:
            # Its words come too late, so readers load the step.
            self._must_show = True
        try:
            yield
        finally:
            if is_only:
                self._writing.release()

    def _flush_if_due(self) -> None:
        """Write what is in the buffer, unless another thread has just written."""
        with self._only_writer():
            if self.is_due:
                self.flush()
                return
        _flusher.add(self, self.due_at)

    _aflush_if_due = async_twin(_flush_if_due)

    def flush_in_background(self) -> None:
        """Write what is in the buffer, in the thread of all writers that have fallen silent."""
        if self._connection.in_atomic_block:
            # The write might wait for the agent's transaction, and the agent for the write.
            if self._buffer:
                _flusher.add(self, time.monotonic() + _LONGEST_INTERVAL)
            return
        with self._only_writer():
            try:
                self._flush_if_due()
            except Exception as exc:  # noqa: BLE001  the next call of the agent raises it
                self._error = exc

    def _write(self, chunks: Sequence[dict[str, Any]]) -> None:
        begun = time.monotonic()
        is_look = begun >= self._looks_at
        stamped = [{**chunk, "s": self._base, "r": self.token} for chunk in chunks]
        token = self.token if is_look else None
        try:
            last = self._write_or_create(stamped, token)
        except BaseException:
            self._must_show = True
            raise
        if any(chunk["type"] in _BOUNDARIES for chunk in chunks):
            self._base = last
        has_gap = self._last is not None and last != self._last + len(chunks)
        self._last, self._flushed_at = last, time.monotonic()
        if self._shortest:
            # A busy process or database gets fewer writes.
            taken = self._flushed_at - begun
            self._interval = max(self._shortest, min(_LONGEST_INTERVAL, _SHARE * taken))
        if is_look:
            self._looks_at = time.monotonic() + _SECONDS_BETWEEN_LOOKS
        if has_gap and not is_look:
            # Somebody else has written: another worker, or a request to stop.
            self._looks_at = 0.0
        if is_look or has_gap:
            self._look()
        if has_gap and not self._is_of_this_run():
            raise LockLostError("The thread was deleted, or has another run.")

    def _write_or_create(self, chunks: list[dict[str, Any]], token: int | None) -> int:
        write = self._store.streams.write_sync
        try:
            return write(self._session_id, chunks, fencing_token=token)
        except StreamNotFound:
            if not self._store.sessions.session_exists(self._session_id):
                # It was deleted with its stream: what is said from now on is stored nowhere.
                raise SessionNotFound(self._session_id) from None
            open_stream(self._store, self._session_id, self._agent_type)
            return write(self._session_id, chunks, fencing_token=token)

    def _look(self) -> None:
        request = self._store.sessions.check_interrupt(self._session_id, run_id=self._run_id)
        if request is not None:
            raise TurnInterrupted(request.kind.value, request.reason)

    def _is_of_this_run(self) -> bool:
        """Return whether the newest run is this one: a thread may be deleted and begun anew meanwhile."""
        runs = self._store.sessions.list_runs(self._session_id, limit=1)
        return bool(runs) and runs[0].run_id == self._run_id

    # What the driver writes

    def begin(self) -> None:
        """Tell readers that a turn has begun."""
        self._put({"type": "run", "run": self._run_id})
        self.flush()

    def end(self, **outcome: Any) -> None:
        """Tell readers how the turn has ended, after everything else is stored."""
        self._error = None
        self._settle()
        if self._step_is_open or self._said or self._must_show:
            self.reset()
        self._put({"type": "end", "run": self._run_id, **outcome})
        self.flush()
        self._is_over = True

    def reset(self) -> None:
        """Take back what the step has said: it is not stored."""
        with self._lock:
            was_open = self._step_is_open or bool(self._said) or self._must_show
            # The beginnings and ends of sub-agents are in no message, and the next step may go on with them.
            kept = [chunk for chunk in self._buffer if chunk["type"] in ("agent", "agent_end")]
            self._buffer.clear()
            self._open.clear()
            self._said.clear()
            self._step_is_open = self._must_show = False
            if was_open:
                self._put({"type": "reset"})
            self._buffer += kept

    def committed(self, chunk: Mapping[str, Any], *, is_shown: bool) -> None:
        """Tell readers that the step is stored; unless ``is_shown``, they load it.

        No error of the stream leaves the step, which is stored: the next write and the next step find a
        request to stop, and a chunk that could not be written is written with the next one.
        """
        with self._lock:
            must_show = self._must_show or not is_shown
            self._open.clear()
            self._said.clear()
            self._step_is_open = self._must_show = False
            self.step_number += 1
        commit = {"type": "commit", "snapshot": must_show, **chunk}
        with self._only_writer():
            last, self._error = self._last, None
            self._put(commit)
            try:
                self.flush()
            except Exception:
                if self._last != last:
                    # It is written. What was found after that is found again by the next write.
                    self._looks_at = 0.0
                    return
                if self._connection.in_atomic_block:
                    # The error may have broken the caller's transaction, and with it the step.
                    raise
                _logger.warning("A commit was not written to the stream yet.", exc_info=True)
                with self._lock:
                    self._buffer.insert(0, {**commit, "snapshot": True})
                    self._must_show = False

    def received(self, ids: Sequence[str]) -> None:
        """Tell readers that messages were received before the step, which has said nothing yet.

        If it has, what it says comes after these messages: readers learn of both with the step.
        """
        if not ids:
            return
        with self._lock:
            if self._step_is_open or self._said:
                self._received += ids
                self._must_show = True
                return
        self._put({"type": "commit", "snapshot": False, "said": [], "received": list(ids), "asked": []})
        self.flush()

    def taken_received(self, ids: Sequence[str]) -> list[str]:
        """Return the ids of messages that the step has received, after those of which readers do not know."""
        taken, self._received = self._received, []
        return [*taken, *ids]

    def forget(self) -> None:
        """Expect that the caller's transaction may be rolled back, and with it the step that it holds."""
        self._may_be_rolled_back = True

    def remember(self) -> None:
        """Take note of the commit of the caller's transaction."""
        self._may_be_rolled_back = False

    def _put(self, chunk: dict[str, Any]) -> None:
        with self._lock:
            self._buffer.append(chunk)

    def matched(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        asked: Mapping[str, Mapping[str, Any]],
        results: Mapping[str, Mapping[str, Any]],
        usage: Sequence[Mapping[str, Any]],
    ) -> tuple[list[dict[str, Any]], bool]:
        """Return a step's messages as they are to be stored, and whether the stream shows them as they are:
        see `Matching.matched`.
        """
        self.raise_error()
        with self._lock:
            matching = Matching(
                self._said,
                step_number=self.step_number,
                stream=self.add,
                earlier=self._earlier,
                results=results,
            )
            return matching.matched(messages, asked=asked, usage=usage)

    def _earlier(self) -> Sequence[Mapping[str, Any]]:
        """Return the messages of the earlier steps of the answer, oldest first."""
        last = _LOOK_BACK
        while True:
            history = messages_of_thread(self._store, self._session_id, last)
            answer = list(takewhile(is_of_agent, reversed(history)))
            if len(answer) < len(history) or len(history) < last:
                return answer[::-1]
            last *= 10


# --- What is too large for the stream --------------------------------------------------------------------


def _split(chunk: dict[str, Any], limit: int) -> Iterator[dict[str, Any]]:
    """Yield a chunk in parts that are small enough for the stream: none, if it has no text to split."""
    delta = chunk.get("d")
    if not isinstance(delta, str):
        if _fits(chunk, limit):
            yield chunk
        return
    limit = min(limit, _LARGEST_DELTA)
    if _fits(chunk, limit):
        yield chunk
    elif len(delta) > 1 and _fits({**chunk, "d": ""}, limit // 2):
        middle = len(delta) // 2
        for half in (delta[:middle], delta[middle:]):
            yield from _split({**chunk, "d": half}, limit)


def _fits(chunk: dict[str, Any], limit: int) -> bool:
    try:
        encode(chunk, limit=limit, name=_LIMIT)
    except LimitExceeded as exc:
        return exc.name != _LIMIT
    except InvalidPayload:
        # The write refuses it, with its path.
        return True
    return True


_LIMIT: Final = "max_chunk_bytes"


def _without_details(commit: Mapping[str, Any], limit: int) -> dict[str, Any]:
    """Return the note of a commit for readers that load everything: it must be followed by that of a run."""
    # A snapshot that a reader has does not hold a message without an id, so the reader loads another one.
    said = [{"id": "", "role": ""}]
    short = {"type": "commit", "snapshot": True, "said": said, "received": [], "asked": []}
    with_usage = {**short, "usage": commit.get("usage", [])}
    return with_usage if _fits(with_usage, limit) else short


class Out:
    """What the agent says now. Everything is in the stream at once, and in the history with the step.

    Each call has an async version with the prefix ``a``. After a request to stop, a call raises
    `TurnInterrupted`; when another worker has taken over, `FencedOutError`.
    """

    def __init__(self, writer: Writer, agent: Mapping[str, Any] | None = None) -> None:
        self._writer = writer
        self._agent = agent

    def text(self, delta: str) -> None:
        """Say a part of the answer's text."""
        self._add_text(delta)
        self._writer.pump()

    async def atext(self, delta: str) -> None:
        """Async version of `text`."""
        self._add_text(delta)
        await self._writer.apump()

    def reasoning(self, delta: str) -> None:
        """Say a part of the reasoning, which is stored with the step's message."""
        self._add_reasoning(delta)
        self._writer.pump()

    async def areasoning(self, delta: str) -> None:
        """Async version of `reasoning`."""
        self._add_reasoning(delta)
        await self._writer.apump()

    def tool_input(self, call_id: str, name: str, delta: str) -> None:
        """Say a part of the JSON text of a tool call's input. `tool_call` ends it, or the step does."""
        self._add_input(call_id, name, delta)
        self._writer.pump()

    async def atool_input(self, call_id: str, name: str, delta: str) -> None:
        """Async version of `tool_input`."""
        self._add_input(call_id, name, delta)
        await self._writer.apump()

    def tool_call(self, call_id: str, name: str, input: Any) -> None:
        """Say a tool call with its whole input, a JSON value."""
        self._add_call(call_id, name, input)
        self._writer.pump()

    async def atool_call(self, call_id: str, name: str, input: Any) -> None:
        """Async version of `tool_call`."""
        self._add_call(call_id, name, input)
        await self._writer.apump()

    def tool_result(self, call_id: str, result: Any) -> None:
        """Say the result of a tool call: the text of its message, or a JSON value."""
        self._add_result(call_id, result)
        self._writer.pump()

    async def atool_result(self, call_id: str, result: Any) -> None:
        """Async version of `tool_result`."""
        self._add_result(call_id, result)
        await self._writer.apump()

    def file(self, url: str, media_type: str) -> None:
        """Say a file, which is stored with the step's message."""
        self._add_part({"type": "file", "url": url, "media_type": media_type})
        self._writer.pump()

    async def afile(self, url: str, media_type: str) -> None:
        """Async version of `file`."""
        self._add_part({"type": "file", "url": url, "media_type": media_type})
        await self._writer.apump()

    def data(self, name: str, value: Any, transient: bool = False) -> None:
        """Say data of your own, a JSON value. Unless it is transient, it is stored with the message."""
        self._add_part({"type": "data", "name": name, "value": copy_json(value)}, is_transient=transient)
        self._writer.pump()

    async def adata(self, name: str, value: Any, transient: bool = False) -> None:
        """Async version of `data`."""
        self._add_part({"type": "data", "name": name, "value": copy_json(value)}, is_transient=transient)
        await self._writer.apump()

    @contextmanager
    def agent(self, name: str) -> Iterator[Out]:
        """Yield what a sub-agent says, for ``with``."""
        about = self._begin_agent(name)
        try:
            yield Out(self._writer, about)
        except BaseException as exc:
            self._end_agent(about, exc)
            raise
        self._end_agent(about)
        self._writer.pump()

    @asynccontextmanager
    async def aagent(self, name: str) -> AsyncIterator[Out]:
        """Yield what a sub-agent says, for ``async with``."""
        about = self._begin_agent(name)
        try:
            yield Out(self._writer, about)
        except BaseException as exc:
            self._end_agent(about, exc)
            raise
        self._end_agent(about)
        await self._writer.apump()

    # Adding

    @property
    def _of_agent(self) -> dict[str, Any]:
        return {} if self._agent is None else {"a": self._agent["id"]}

    def _add_text(self, delta: str) -> None:
        if not delta:
            return
        with self._writer._lock:
            said = self._writer.message(self._agent)
            number = said.add("text", delta)
            self._writer.add({"type": "text", "m": said.id, "i": number, "d": delta, **self._of_agent})

    def _add_reasoning(self, delta: str) -> None:
        if not delta:
            return
        with self._writer._lock:
            said = self._writer.message(self._agent)
            number = said.add("reasoning", delta)
            self._writer.add({"type": "reasoning", "m": said.id, "i": number, "d": delta, **self._of_agent})

    def _add_input(self, call_id: str, name: str, delta: str) -> None:
        with self._writer._lock:
            said = self._writer.message(self._agent)
            part = said.call(call_id)
            if part is None:
                said.parts.append({"type": "call", "id": call_id, "name": name, "text": delta})
            else:
                part["text"] += delta
            self._writer.add(
                {"type": "input", "m": said.id, "c": call_id, "name": name, "d": delta, **self._of_agent}
            )

    def _add_call(self, call_id: str, name: str, value: Any) -> None:
        with self._writer._lock:
            said = self._writer.message(self._agent)
            if said.call(call_id) is None:
                self._add_input(call_id, name, json.dumps(copy_json(value), ensure_ascii=False))
            self._writer.add({"type": "call", "m": said.id, "c": call_id, **self._of_agent})

    def _add_result(self, call_id: str, result: Any) -> None:
        content = as_text(copy_json(result))
        with self._writer._lock:
            said = self._writer.result(call_id, content, self._agent)
            chunk = {"type": "result", "m": said.id, "c": call_id, "content": content, **self._of_agent}
            self._writer.add(chunk)

    def _add_part(self, part: dict[str, Any], *, is_transient: bool = False) -> None:
        with self._writer._lock:
            said = self._writer.message(self._agent)
            if not is_transient:
                said.parts.append(part)
            chunk = {**part, "m": said.id, **self._of_agent}
            self._writer.add({**chunk, "transient": True} if is_transient else chunk)

    def _begin_agent(self, name: str) -> dict[str, Any]:
        about: dict[str, Any] = {"id": new_id(), "name": name}
        if self._agent is not None:
            about["parent"] = self._agent["id"]
        with self._writer._lock:
            self._writer.message(None)
            self._writer.add({"type": "agent", "agent": about})
        return about

    def _end_agent(self, about: Mapping[str, Any], error: BaseException | None = None) -> None:
        with self._writer._lock:
            self._writer.end_agent(about)
            chunk: dict[str, Any] = {"type": "agent_end", "a": about["id"]}
            if error is not None:
                chunk["error"] = told_error(error)
            self._writer.add(chunk)


class _Flusher:
    """One thread of the process, which writes the last words of those who have fallen silent."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._due: list[tuple[float, int, Writer]] = []
        self._waiting: set[int] = set()
        self._thread: threading.Thread | None = None
        self._process = os.getpid()

    def add(self, writer: Writer, at: float) -> None:
        if self._process != os.getpid():
            self.__init__()  # type: ignore[misc]  # a fork has no threads of its parent
        with self._condition:
            if id(writer) in self._waiting:
                return
            self._waiting.add(id(writer))
            heapq.heappush(self._due, (at, id(writer), writer))
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(
                    target=self._run, name="helix_store chat flusher", daemon=True
                )
                self._thread.start()
            self._condition.notify()

    def _run(self) -> None:
        while True:
            with self._condition:
                if not self._due and not self._condition.wait_for(lambda: self._due, timeout=1.0):
                    self._thread = None
                    break
                at, key, writer = self._due[0]
                pause = at - time.monotonic()
                if pause > 0:
                    self._condition.wait(pause)
                    continue
                heapq.heappop(self._due)
                if writer.is_due:
                    self._waiting.discard(key)
                else:
                    # The agent's thread has flushed the writer itself, so the next flush is later.
                    heapq.heappush(self._due, (writer.due_at, key, writer))
                    continue
            writer.flush_in_background()
            del writer
        connections.close_all()


_flusher: Final = _Flusher()
