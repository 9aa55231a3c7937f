"""Recorded conversations in OpenAI chat format, replayed through a store: every assistant turn is one step.

A conversation is a list of messages, or an object that has them under ``traj`` or ``messages``; its other
short values become metadata of the session. A file holds one conversation, a JSON array of them, or JSON
Lines; it may be compressed with xz.
"""

from __future__ import annotations

import json
import lzma
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TextIO, cast

from example_project.spending import recorded_entries
from helix_store.core.types import (
    Message,
    SessionState,
    SessionStatus,
    StepInfo,
)
from helix_store.stores import DatabaseStateStore, DatabaseUsageStore

__all__ = ["Replayed", "Transcript", "TranscriptError", "difference", "read_transcripts", "replay"]

_CHUNK: Final = 1_048_576
_DECODER: Final = json.JSONDecoder()
_SPACE: Final = re.compile(r"\s*")
_SEPARATOR: Final = re.compile(r"[\s,]*")
_LONGEST_LITERAL: Final = len("-Infinity")
_TITLE_LENGTH: Final = 80


class TranscriptError(ValueError):
    """The file does not hold conversations."""


@dataclass(frozen=True)
class Transcript:
    session_id: str
    messages: list[Message]
    metadata: dict[str, str] = field(default_factory=dict)

    @property
    def title(self) -> str:
        """The start of the first user message."""
        wishes = (message.get("content") for message in self.messages if message["role"] == "user")
        first = next((wish for wish in wishes if isinstance(wish, str)), "")
        return _column_text(first[:_TITLE_LENGTH])


@dataclass(frozen=True)
class Replayed:
    """The counts of what a replay wrote; 0 for a conversation that was stored before."""

    messages: int = 0
    steps: int = 0


def read_transcripts(path: Path) -> Iterator[Transcript]:
    """Iterate over the conversations of a file, in constant memory. Raises `TranscriptError`."""
    name = re.sub(r"(\.jsonl?)?(\.xz)?$", "", path.name)
    try:
        with _opened(path) as stream:
            for number, (place, entry) in enumerate(_entries(stream)):
                yield _transcript(f"{name}-{number:04d}", place, entry)
    except (ValueError, EOFError, RecursionError, lzma.LZMAError) as exc:
        raise TranscriptError(f"{path.name} cannot be read: {exc}") from exc


def replay(store: DatabaseStateStore, transcript: Transcript) -> Replayed:
    """Write a conversation as a session, or continue an earlier replay. Safe to repeat.

    A step holds the messages since the previous step, up to and including the assistant's message.
    """
    session_id, messages = transcript.session_id, transcript.messages
    state = store.load_state(session_id) or store.create_session(
        session_id,
        agent_type="recorded",
        title=transcript.title,
        tags=["transcript"],
        metadata=transcript.metadata,
    )
    stored = state.message_count
    ends = [index + 1 for index, message in enumerate(messages) if message["role"] == "assistant"]
    steps = 0
    for turn, end in enumerate(ends, start=1):
        if end > stored:
            _commit_turn(store, state, StepInfo(f"turn-{turn}", turn), messages[stored:end])
            stored = end
            steps += 1
    if stored < len(messages):
        stored = store.append_messages(session_id, messages[stored:], expected_version=state.version)
    usage = DatabaseUsageStore(store.alias, tenant=store.tenant)
    usage.record_entries(recorded_entries(session_id, messages))
    if state.status is not SessionStatus.COMPLETED:
        store.update_status(session_id, SessionStatus.COMPLETED)
    return Replayed(messages=stored - state.message_count, steps=steps)


def _commit_turn(store: DatabaseStateStore, state: SessionState, step: StepInfo, said: list[Message]) -> None:
    state.step_count = step.step_count
    calls = state.custom_state.get("tool_calls", 0) + len(said[-1].get("tool_calls") or [])
    state.custom_state = {"turn": step.step_count, "tool_calls": calls}
    commit = store.save_state_and_promote_staging(
        state.session_id, state, said, step, expected_version=state.version
    )
    state.version = commit.new_version


def difference(store: DatabaseStateStore, transcript: Transcript) -> str | None:
    """Return the first difference of a session from its conversation: count, order, role, content or type."""
    stored_count = store.get_message_count(transcript.session_id)
    if stored_count != len(transcript.messages):
        return f"{transcript.session_id}: {stored_count} messages instead of {len(transcript.messages)}"
    for number, (stored, recorded) in enumerate(
        zip(store.iter_messages(transcript.session_id), transcript.messages, strict=True), start=1
    ):
        # As text: in Python 1, 1.0 and True are equal, and so are dicts with another order of keys.
        if json.dumps(stored) != json.dumps(recorded):
            return f"{transcript.session_id}: message {number} is not the recorded one"
    return None


def _opened(path: Path) -> TextIO:
    if path.suffix == ".xz":
        return cast("TextIO", lzma.open(path, "rt", encoding="utf-8-sig"))
    return path.open(encoding="utf-8-sig")


class _Values:
    """The JSON values of a text, which is read in pieces; with the place of the next one."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._buffer = ""
        self._at = 0
        self._line, self._column = 1, 1
        """The place of the first character of the buffer."""

    def after(self, separator: re.Pattern[str]) -> str:
        """Go to the end of a separator. Return the character there, or nothing at the end of the text."""
        while True:
            self._at = cast("re.Match[str]", separator.match(self._buffer, self._at)).end()
            if self._at < len(self._buffer):
                return self._buffer[self._at]
            if not self._read():
                return ""

    def skip(self) -> None:
        """Go to the next character."""
        self._at += 1

    def value(self) -> Any:
        """Return the next value, and go to its end. Raise `ValueError`."""
        while True:
            try:
                value, self._at = _DECODER.raw_decode(self._buffer, self._at)
            except json.JSONDecodeError as exc:
                if not (self._may_be_cut(exc) and self._read()):
                    raise ValueError(f"{self._place(exc.pos)}: {exc.msg}") from exc
            else:
                return value

    @property
    def place(self) -> str:
        return self._place(self._at)

    def _place(self, at: int) -> str:
        line, column = self._position(at)
        return f"line {line} column {column}"

    def _position(self, at: int) -> tuple[int, int]:
        newlines = self._buffer.count("\n", 0, at)
        if not newlines:
            return self._line, self._column + at
        return self._line + newlines, at - self._buffer.rindex("\n", 0, at)

    def _may_be_cut(self, problem: json.JSONDecodeError) -> bool:
        """Return whether more text may solve a problem: that of a token at the end of the buffer."""
        is_at_end = problem.pos > len(self._buffer) - _LONGEST_LITERAL
        return is_at_end or problem.msg.startswith("Unterminated string")

    def _read(self) -> bool:
        """Read on, and forget what is before the position. Return whether there was more."""
        # Doubled each time, so that a long value is parsed only a few times.
        more = self._stream.read(max(_CHUNK, len(self._buffer) - self._at))
        if not more:
            return False
        self._line, self._column = self._position(self._at)
        self._buffer, self._at = self._buffer[self._at :] + more, 0
        return True


def _entries(stream: TextIO) -> Iterator[tuple[str, Any]]:
    """Yield the place and the value of each conversation, with little more than one of them in memory."""
    values = _Values(stream)
    if not values.after(_SPACE):
        raise ValueError("the file is empty")
    while start := values.after(_SPACE):
        if start == "[":
            yield from _entries_of_list(values)
        else:
            yield values.place, values.value()


def _entries_of_list(values: _Values) -> Iterator[tuple[str, Any]]:
    """Yield the conversations of a list, or the list itself if it begins with a message."""
    beginning, messages = values.place, list[Any]()
    is_conversation: bool | None = None
    values.skip()
    while (start := values.after(_SEPARATOR)) != "]":
        if not start:
            raise ValueError(f"{beginning}: the list has no end")
        place, entry = values.place, values.value()
        if is_conversation is None:
            is_conversation = _is_message(entry)
        if is_conversation:
            messages.append(entry)
        else:
            yield place, entry
    values.skip()
    if messages:
        yield beginning, messages


def _transcript(session_id: str, place: str, entry: Any) -> Transcript:
    messages, metadata = entry, {}
    if isinstance(entry, dict):
        messages = entry.get("traj", entry.get("messages"))
        metadata = {
            _column_text(key): _column_text(str(value))
            for key, value in entry.items()
            if isinstance(value, str | int | float)
        }
    if not isinstance(messages, list):
        raise ValueError(f'{place}: expected a list of messages, or an object with "messages"')
    for number, message in enumerate(messages, start=1):
        if not (isinstance(message, dict) and isinstance(message.get("role"), str)):
            raise ValueError(f"the conversation at {place}: message {number} is not an object with a role")
    return Transcript(session_id, messages, metadata)


def _column_text(text: str) -> str:
    """Return a text without NUL and lone surrogates, which columns do not accept."""
    return "".join(character for character in text if character.isprintable())


def _is_message(entry: Any) -> bool:
    """Return whether an entry of a list is a message, and not a conversation."""
    return isinstance(entry, dict) and "role" in entry and not entry.keys() & {"traj", "messages"}
