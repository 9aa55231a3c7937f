"""One random sequence of calls on two stores at once, whose results, errors and rests are compared."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any, Generic, TypeVar

from pydantic_ai import DeferredToolRequests
from pydantic_ai.conversation import Conversation
from pydantic_ai.conversation_store import (
    ConversationConflict,
    ConversationEntry,
    ConversationRecord,
    ConversationStore,
)
from pydantic_ai.exceptions import UserError
from pydantic_ai.messages import (
    ModelMessage,
    ModelRequest,
    ModelResponse,
    TextPart,
    ToolCallPart,
    ToolReturnPart,
    UserPromptPart,
)
from pydantic_ai.usage import RequestUsage, RunUsage

__all__ = ["Difference", "Differential", "message"]

R = TypeVar("R")

_TEXTS = (
    "hello",
    "",
    "naïve 🦊",
    "a\x00b",
    "lone \udc00",
    "pair \ud83e\udd8a",
    "~tilde",
    '{"json": [1, 1.0]}',
    "x" * 5_000,
)
_VALUES = (1, 1.0, -0.0, 10**30, True, None, "text", ["a", {"b": []}], {"z": 1, "a": {"__proto__": 2}})
_SCOPES = (None, "ada", "grace", "", "a scope\nof two lines", "s" * 300)


class Difference(AssertionError):
    """The stores disagree."""


def message(choose: random.Random) -> ModelMessage:
    """A request or a response with texts and values that are hard to keep."""
    at = datetime(2026, 1, 1, tzinfo=UTC) + timedelta(microseconds=choose.randrange(10**12))
    text, value = choose.choice(_TEXTS), choose.choice(_VALUES)
    kind = choose.randrange(3)
    if kind == 0:
        return ModelRequest(
            parts=[UserPromptPart(content=text, timestamp=at)], instructions=choose.choice([None, text])
        )
    if kind == 1:
        returned = ToolReturnPart(tool_name="look", content=value, tool_call_id="call", timestamp=at)
        return ModelRequest(parts=[returned], metadata={"kept": value})
    return ModelResponse(
        parts=[
            TextPart(content=text),
            ToolCallPart(tool_name="look", args={"value": value}, tool_call_id="call"),
        ],
        usage=RequestUsage(input_tokens=choose.randrange(9), output_tokens=2, details={"seen": 1}),
        model_name=choose.choice(["fast", "slow"]),
        timestamp=at,
    )


class _Compared(ConversationStore):
    """Each primitive on both stores: the answer of the first one, once the second has given the same."""

    def __init__(self, first: ConversationStore, second: ConversationStore) -> None:
        self.first, self.second, self.calls = first, second, 0

    async def _both(self, name: str, call: Callable[[ConversationStore], Awaitable[R]]) -> R:
        self.calls += 1
        answers = [await _answer(call(store)) for store in (self.first, self.second)]
        if answers[0] != answers[1]:
            raise Difference(f"{name}: {answers[0]!r} is not {answers[1]!r}")
        return answers[0].value()

    async def read_record(self, conversation_id: str) -> ConversationRecord | None:
        return await self._both("read_record", lambda store: store.read_record(conversation_id))

    async def read_records(
        self, *, scope: str | None = None, limit: int | None = None
    ) -> Sequence[ConversationRecord]:
        return await self._both("read_records", lambda store: store.read_records(scope=scope, limit=limit))

    async def write_record(
        self,
        record: ConversationRecord,
        *,
        new_entries: Sequence[ConversationEntry] = (),
        expected_revision: str | None,
    ) -> None:
        await self._both(
            "write_record",
            lambda store: store.write_record(
                record, new_entries=new_entries, expected_revision=expected_revision
            ),
        )

    async def delete_record(self, conversation_id: str, *, expected_revision: str) -> None:
        await self._both(
            "delete_record",
            lambda store: store.delete_record(conversation_id, expected_revision=expected_revision),
        )

    async def read_entry(self, entry_id: str) -> ConversationEntry:
        return await self._both("read_entry", lambda store: store.read_entry(entry_id))

    async def read_history(self, head_id: str | None, *, limit: int | None = None) -> list[ConversationEntry]:
        return await self._both("read_history", lambda store: store.read_history(head_id, limit=limit))


@dataclasses.dataclass(frozen=True)
class _Answer(Generic[R]):
    result: tuple[R, ...] = ()
    error: tuple[type[Exception], tuple[Any, ...]] | None = None

    def value(self) -> R:
        if self.error is not None:
            raise self.error[0](*self.error[1])
        return self.result[0]


async def _answer(call: Awaitable[R]) -> _Answer[R]:
    try:
        return _Answer(result=(await call,))
    except ConversationConflict as exc:
        return _Answer(error=(ConversationConflict, (exc.conversation_id,)))
    except (KeyError, UserError) as exc:
        return _Answer(error=(type(exc), exc.args))


class Differential:
    """Saves, branches, forks, deletions, loads and lists, as ``seed`` chooses them."""

    def __init__(self, first: ConversationStore, second: ConversationStore, seed: int) -> None:
        self.store = _Compared(first, second)
        self.choose = random.Random(seed)  # noqa: S311  a sequence to repeat
        self.loaded: list[Conversation] = []
        self.names = [f"talk-{number}" for number in range(6)] + ["a talk\nof two lines", "t" * 300]

    async def run(self, primitives: int) -> None:
        actions = [self._save, self._save, self._save, self._rewrite, self._branch, self._fork, self._fork]
        actions += [self._delete, self._load, self._list, self._raw]
        while self.store.calls < primitives:
            # What both stores refuse is one of the answers.
            with suppress(ConversationConflict, KeyError, UserError):
                await self.choose.choice(actions)()

    def _name(self) -> str:
        return self.choose.choice(self.names)

    async def _loaded(self) -> Conversation:
        """A conversation of the store, of the past, or a new one."""
        if self.loaded and self.choose.random() < 0.15:
            return self.choose.choice(self.loaded)
        name = self._name()
        limit = self.choose.choice([None, None, 0, 1, 3])
        found = await self.store.load(name, limit=limit) or Conversation(conversation_id=name)
        self.loaded = [*self.loaded[-20:], dataclasses.replace(found)]
        return found

    async def _save(self) -> None:
        conversation = await self._loaded()
        for _ in range(self.choose.randrange(4)):
            new = message(self.choose)
            conversation.messages.append(new)
            if isinstance(new, ModelResponse):
                conversation.usage += new.usage
        conversation.usage += RunUsage(
            requests=1, tool_calls=self.choose.randrange(3), cost=Decimal("0.0001")
        )
        paused = DeferredToolRequests(
            approvals=[ToolCallPart("look", {"a": 1}, "call")], metadata={"call": {"why": "\udc00"}}
        )
        conversation.deferred_tool_requests = self.choose.choice([None, None, paused])
        await self.store.save(conversation, scope=self.choose.choice([None, None, *_SCOPES]))

    async def _rewrite(self) -> None:
        conversation = await self._loaded()
        if conversation.messages:
            place = self.choose.randrange(len(conversation.messages))
            conversation.messages[place:] = [message(self.choose)]
        await self.store.save(conversation)

    async def _entry_of(self, name: str) -> str:
        record = await self.store.read_record(name)
        if record is None:
            return "no entry"
        tips = [record.head_id, *record.branches]
        history = await self.store.read_history(self.choose.choice(tips))
        return self.choose.choice(history).id if history else "no entry"

    async def _point(self, name: str) -> dict[str, Any]:
        if self.choose.random() < 0.5:
            return {"from_entry": await self._entry_of(name)}
        return {"at": self.choose.randrange(6)}

    async def _branch(self) -> None:
        name = self._name()
        record = await self.store.read_record(name)
        revision = self.choose.choice([None, "stale", *([record.revision] * 4 if record else [])])
        await self.store.branch(name, **await self._point(name), expected_revision=revision)

    async def _fork(self) -> None:
        name = self._name()
        point = {} if self.choose.random() < 0.3 else await self._point(name)
        await self.store.fork(
            name, **point, new_conversation_id=self._name(), scope=self.choose.choice(_SCOPES)
        )

    async def _delete(self) -> None:
        if self.choose.random() < 0.2:
            await self.store.delete_record(self._name(), expected_revision="stale")
        await self.store.delete(self._name(), scope=self.choose.choice([None, None, *_SCOPES]))

    async def _load(self) -> None:
        await self.store.load_entries(self._name(), limit=self.choose.choice([None, 0, 1, 2, 50]))

    async def _list(self) -> None:
        await self.store.list_conversations(
            scope=self.choose.choice(_SCOPES), limit=self.choose.choice([None, 0, 1, 4])
        )

    async def _raw(self) -> None:
        """A record that names an entry which no store has, or one that was deleted."""
        gone = ConversationRecord(conversation_id=self._name(), head_id=f"entry-{self.choose.randrange(9)}")
        await self.store.write_record(gone, expected_revision=self.choose.choice([None, "stale"]))
