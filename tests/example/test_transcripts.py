"""Recorded conversations: read in pieces, stored turn by turn, and compared to the last key."""

from __future__ import annotations

import io
import json
import lzma
from pathlib import Path
from typing import Any, Final

import pytest

from example_project import transcripts
from example_project.management.commands.demo import SAMPLE
from example_project.transcripts import Transcript, TranscriptError, difference, read_transcripts, replay
from helix_store.core.types import SessionStatus
from helix_store.stores import DatabaseStateStore
from tests.cells import for_each
from tests.databases import CommittedDatabase

CHAT: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "One?"},
    {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}, {"id": "2"}]},
    {"role": "tool", "tool_call_id": "1", "content": "1"},
    {"role": "tool", "tool_call_id": "2", "content": "2"},
    {"role": "assistant", "content": "Two."},
    {"role": "user", "content": "Thanks \ud800"},
]


def _store_of(database: CommittedDatabase) -> DatabaseStateStore:
    return DatabaseStateStore(database.alias, tenant=database.tenant)


def _written(path: Path, text: str) -> Path:
    if path.suffix == ".xz":
        path.write_bytes(lzma.compress(text.encode()))
    else:
        path.write_text(text, encoding="utf-8")
    return path


@for_each("name", ["chats.json", "chats.json.xz"])
@for_each("indent", [None, 2])
@for_each("chunk", [1, 7, 100_000])
def test_a_file_is_read_entry_by_entry(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, indent: int | None, chunk: int
) -> None:
    monkeypatch.setattr(transcripts, "_CHUNK", chunk)
    entries = [{"task_id": 7, "reward": 0.5, "info": {}, "traj": CHAT}, {"messages": CHAT[:3]}, CHAT[:1], []]
    path = _written(tmp_path / name, json.dumps(entries, indent=indent) + "\n")
    read = list(read_transcripts(path))
    assert [transcript.session_id for transcript in read] == [f"chats-{number:04d}" for number in range(4)]
    assert [transcript.messages for transcript in read] == [CHAT, CHAT[:3], CHAT[:1], []]
    assert read[0].metadata == {"task_id": "7", "reward": "0.5"}
    assert read[0].title == "One?"


_OF_AN_OBJECT: Final = {"task_id": 7, "messages": CHAT}
FILES: Final[dict[str, tuple[str, list[list[dict[str, Any]]]]]] = {
    "no conversations": ("[]", []),
    "a list of conversations": (json.dumps([CHAT, _OF_AN_OBJECT, [], CHAT[:1]]), [CHAT, CHAT, [], CHAT[:1]]),
    "a list of messages": (json.dumps(CHAT), [CHAT]),
    "a list of messages on several lines": (json.dumps(CHAT, indent=2), [CHAT]),
    "one message": (json.dumps(CHAT[:1]), [CHAT[:1]]),
    "an object": (json.dumps(_OF_AN_OBJECT), [CHAT]),
    "an object on several lines": (json.dumps(_OF_AN_OBJECT, indent=2) + "\n", [CHAT]),
    "an object with a role": (json.dumps([{"role": "pilot", "messages": CHAT}]), [CHAT]),
    "lines of lists": (f"{json.dumps(CHAT)}\n{json.dumps(CHAT[:3])}\n", [CHAT, CHAT[:3]]),
    "lines of objects": (
        f"{json.dumps(_OF_AN_OBJECT)}\n\n{json.dumps({'traj': CHAT[:1]})}",
        [CHAT, CHAT[:1]],
    ),
    "lines of both": (f"{json.dumps(CHAT)}\r\n{json.dumps(_OF_AN_OBJECT)}\r\n", [CHAT, CHAT]),
    "lines of lists of conversations": (f"{json.dumps([CHAT])}\n{json.dumps([_OF_AN_OBJECT])}", [CHAT, CHAT]),
}


@for_each("chunk", [1, 7, 100_000])
@for_each("kind", FILES)
def test_a_file_holds_one_conversation_or_several(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, chunk: int
) -> None:
    monkeypatch.setattr(transcripts, "_CHUNK", chunk)
    text, expected = FILES[kind]
    for name in ("chats.json", "chats.jsonl", "chats.jsonl.xz", "chats"):
        read = list(read_transcripts(_written(tmp_path / name, text)))
        assert [each.messages for each in read] == expected
        assert [each.session_id for each in read] == [f"chats-{number:04d}" for number in range(len(read))]
        assert all(each.metadata.get("task_id", "7") == "7" for each in read)


_MESSAGE: Final = '{"role": "user"}'
REFUSED: Final = {
    "": "empty",
    " \n": "empty",
    "{}": "line 1 column 1: expected a list of messages",
    "3": "line 1 column 1: expected a list of messages",
    _MESSAGE: "line 1 column 1: expected a list of messages",
    "[": "line 1 column 1: the list has no end",
    "[[]": "line 1 column 1: the list has no end",
    f"[{_MESSAGE}": "line 1 column 1: the list has no end",
    '[{"a": 1}]': "line 1 column 2: expected a list of messages",
    "[3]": "line 1 column 2: expected a list of messages",
    "[[3]]": "conversation at line 1 column 2: message 1 is not",
    '[[{"role": 1}]]': "conversation at line 1 column 2: message 1 is not",
    '[{"role": 1}]': "conversation at line 1 column 1: message 1 is not",
    "[[{}]]": "conversation at line 1 column 2: message 1 is not",
    "[[[]]": "conversation at line 1 column 2: message 1 is not",
    f"[{_MESSAGE},\n[]]": "conversation at line 1 column 1: message 2 is not",
    f"[[{_MESSAGE}],\n {_MESSAGE}]": "line 2 column 2: expected a list of messages",
    f'[{_MESSAGE}]\n\n{{"messages": [{_MESSAGE}, 7]}}\n': "conversation at line 3 column 1: message 2 is not",
    f"[{_MESSAGE}]\n{{messages}}\n": "line 2 column 2: Expecting property name",
    f'{{"messages": [{_MESSAGE}\n{{"messages": []}}\n': "line 2 column 1: Expecting ',' delimiter",
    f"[{_MESSAGE}] x": f"line 1 column {len(_MESSAGE) + 4}: Expecting value",
    '{"messages": "': "line 1 column 14: Unterminated string",
    "[" * 100_000: "recursion",
}


@for_each("chunk", [1, 7, 100_000])
@for_each("text", REFUSED, ids=lambda text: text[:60])
def test_a_file_that_holds_no_conversations_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, chunk: int
) -> None:
    monkeypatch.setattr(transcripts, "_CHUNK", chunk)
    with pytest.raises(TranscriptError, match=r"broken\.json") as caught:
        list(read_transcripts(_written(tmp_path / "broken.json", text)))
    assert REFUSED[text] in str(caught.value)


class _Counted(io.StringIO):
    """A text that counts what has been read."""

    def read(self, size: int | None = -1) -> str:
        self.count = getattr(self, "count", 0) + len(found := super().read(size))
        return found


@for_each("pattern", ["[{}]", "{}", '{"messages": {}}'], ids=repr)
def test_a_long_file_is_read_conversation_by_conversation(
    monkeypatch: pytest.MonkeyPatch, pattern: str
) -> None:
    monkeypatch.setattr(transcripts, "_CHUNK", 4_096)
    one = pattern.replace("{}", json.dumps(CHAT)) + "\n"
    stream = _Counted(one * 1_000)
    entries = transcripts._entries(stream)
    next(entries)
    assert stream.count <= 4_096
    assert sum(1 for _ in entries) == 999


def test_an_error_in_a_long_file_is_found_without_reading_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transcripts, "_CHUNK", 4_096)
    stream = _Counted("[{] " + " " * 1_000_000)
    with pytest.raises(ValueError, match="line 1 column 3"):
        list(transcripts._entries(stream))
    assert stream.count <= 4_096


def test_a_damaged_compressed_file_is_refused(tmp_path: Path) -> None:
    path = _written(tmp_path / "cut.json.xz", json.dumps([CHAT] * 50))
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(TranscriptError, match=r"cut\.json\.xz"):
        list(read_transcripts(path))
    path.write_bytes(b"not compressed at all")
    with pytest.raises(TranscriptError):
        list(read_transcripts(path))


def test_every_turn_of_the_assistant_is_one_step(committed_db: CommittedDatabase) -> None:
    store = _store_of(committed_db)
    written = replay(store, Transcript("chat", CHAT, {"task_id": "7"}))
    assert (written.messages, written.steps) == (7, 2)
    checkpoints = store.list_checkpoints("chat").items
    assert [(each.step_id, each.message_count) for each in checkpoints] == [("turn-2", 6), ("turn-1", 3)]
    state = store.load_state("chat")
    assert state is not None
    assert state.status is SessionStatus.COMPLETED
    assert (state.step_count, state.message_count) == (2, 7)
    assert state.custom_state == {"turn": 2, "tool_calls": 2}
    assert (state.title, state.metadata) == ("One?", {"task_id": "7"})


@for_each("stored", range(8))
def test_a_replay_goes_on_where_an_earlier_one_was_stopped(
    committed_db: CommittedDatabase, stored: int
) -> None:
    store = _store_of(committed_db)
    replay(store, Transcript("chat", CHAT[:stored]))
    written = replay(store, Transcript("chat", CHAT))
    assert written.messages == 7 - stored
    assert difference(store, Transcript("chat", CHAT)) is None
    again = replay(store, Transcript("chat", CHAT))
    assert (again.messages, again.steps) == (0, 0)


@for_each(
    ("changed", "problem"),
    [
        (CHAT[:-1], "7 messages instead of 6"),
        ([*CHAT, {"role": "user"}], "7 messages instead of 8"),
        ([CHAT[1], CHAT[0], *CHAT[2:]], "message 1"),
        ([*CHAT[:-1], {"role": "tool", "content": "Thanks \ud800"}], "message 7"),
        ([*CHAT[:-1], {"content": "Thanks \ud800", "role": "user"}], "message 7"),
    ],
)
def test_any_difference_is_found(committed_db: CommittedDatabase, changed: list[Any], problem: str) -> None:
    store = _store_of(committed_db)
    replay(store, Transcript("chat", CHAT))
    assert difference(store, Transcript("chat", CHAT)) is None
    assert problem in str(difference(store, Transcript("chat", changed)))


def test_numbers_that_are_only_equal_are_a_difference(committed_db: CommittedDatabase) -> None:
    store = _store_of(committed_db)
    replay(store, Transcript("chat", [{"role": "user", "content": 1}]))
    assert difference(store, Transcript("chat", [{"role": "user", "content": 1.0}])) is not None
    assert difference(store, Transcript("chat", [{"role": "user", "content": True}])) is not None


def test_the_sample_is_replayed_exactly(committed_db: CommittedDatabase) -> None:
    store = _store_of(committed_db)
    read = list(read_transcripts(SAMPLE))
    assert {message["role"] for each in read for message in each.messages} == {
        "system",
        "user",
        "assistant",
        "tool",
    }
    for transcript in read:
        replay(store, transcript)
        assert store.get_messages(transcript.session_id).messages == transcript.messages
