"""Recorded conversations in OpenAI chat format, replayed through a store: every assistant turn is one step.

A file is a JSON array, optionally compressed with xz. Each entry is a list of messages, or an object that has
them under ``traj`` or ``messages``; its other short values become metadata of the session.
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
_SEPARATOR: Final = re.compile(r"[\s,]*")
_TITLE_LENGTH: Final = 80


class TranscriptError(ValueError):
    """The file is not an array of conversations."""


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
    name = path.name.removesuffix(".xz").removesuffix(".json")
    try:
        with _opened(path) as stream:
            for number, entry in enumerate(_entries(stream)):
                yield _transcript(f"{name}-{number:04d}", entry)
    except (ValueError, EOFError, lzma.LZMAError) as exc:
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


def _entries(stream: TextIO) -> Iterator[Any]:
    """Yield the entries of a JSON array, with little more than one entry in memory."""
    read = json.JSONDecoder().raw_decode
    buffer = stream.read(_CHUNK).lstrip()
    if buffer[:1] != "[":
        raise ValueError("expected a JSON array")
    position = 1
    while True:
        position = _after_separator(buffer, position)
        if buffer[position : position + 1] == "]":
            return
        try:
            entry, position = read(buffer, position)
        except json.JSONDecodeError:
            # Doubled each time, so that a long entry is parsed only a few times.
            more = stream.read(max(_CHUNK, len(buffer) - position))
            if not more:
                raise
            buffer, position = buffer[position:] + more, 0
        else:
            yield entry


def _after_separator(text: str, position: int) -> int:
    match = _SEPARATOR.match(text, position)
    return position if match is None else match.end()


def _transcript(session_id: str, entry: Any) -> Transcript:
    messages, metadata = entry, {}
    if isinstance(entry, dict):
        messages = entry.get("traj", entry.get("messages"))
        metadata = {
            _column_text(key): _column_text(str(value))
            for key, value in entry.items()
            if isinstance(value, str | int | float)
        }
    if not isinstance(messages, list) or not all(_is_message(message) for message in messages):
        raise ValueError(f"entry {session_id} is not a conversation")
    return Transcript(session_id, messages, metadata)


def _column_text(text: str) -> str:
    """Return a text without NUL and lone surrogates, which columns do not accept."""
    return "".join(character for character in text if character.isprintable())


def _is_message(message: Any) -> bool:
    return isinstance(message, dict) and isinstance(message.get("role"), str)
