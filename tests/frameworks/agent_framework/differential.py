"""Random sequences of calls on the framework's storages in memory and on those of this package."""

from __future__ import annotations

import random
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from itertools import count
from typing import Any

from agent_framework import (
    AgentSession,
    CheckpointStorage,
    Content,
    HistoryProvider,
    InMemoryCheckpointStorage,
    InMemoryHistoryProvider,
    Message,
    SessionStore,
    WorkflowCheckpoint,
    WorkflowCheckpointException,
)

__all__ = ["Differential", "message"]

_TEXTS = ("hello", "", "naïve 🦊", "a\x00b", "~tilde", '{"json": [1, 1.0]}', "x" * 3_000)
_VALUES = (1, 1.5, -0.0, True, None, "text", ["a", {"b": []}], {"~json": "1"})
_START = datetime(2026, 1, 1, tzinfo=UTC)


def message(choose: random.Random) -> Message:
    """A message with contents that are hard to keep."""
    call = Content.from_function_call("call", "look", arguments={"value": choose.choice(_VALUES)})
    contents = [
        Content.from_text(choose.choice(_TEXTS)),
        call,
        Content.from_function_result("call", result=choose.choice(_TEXTS)),
        Content.from_data(b"\x00\xff", "image/png"),
        Content.from_text_reasoning(text="hm"),
    ]
    return Message(
        choose.choice(["user", "assistant", "tool"]),
        choose.sample(contents, choose.randrange(1, 3)),
        message_id=choose.choice([None, None, str(choose.random())]),
        author_name=choose.choice([None, "guide"]),
        additional_properties=choose.choice([{}, {"_excluded": True}, {"kept": choose.choice(_VALUES)}]),
    )


@dataclass(frozen=True)
class Stored:
    """A value that is stored, as the framework writes it."""

    number: int


class Differential:
    """Histories, sessions and checkpoints are written, read and deleted, as ``seed`` chooses them."""

    def __init__(
        self, history: HistoryProvider, sessions: SessionStore, checkpoints: CheckpointStorage, seed: int
    ) -> None:
        self.choose = random.Random(seed)  # noqa: S311  a sequence to repeat
        self.histories = (history, InMemoryHistoryProvider(skip_excluded=True))
        self.states: dict[str, dict[str, Any]] = {}
        self.sessions = (sessions, SessionStore())
        self.checkpoints: tuple[CheckpointStorage, ...] = (checkpoints, InMemoryCheckpointStorage())
        self.times: dict[str, datetime] = {}
        self.seconds = count()
        self.calls = 0

    async def run(self, calls: int) -> None:
        actions = [self._save, self._save, self._read, self._set, self._set, self._change, self._delete]
        actions += [self._checkpoint, self._checkpoint, self._load, self._list, self._latest, self._drop]
        while self.calls < calls:
            await self.choose.choice(actions)()

    async def _both(self, places: Any, call: Callable[[Any], Awaitable[Any]]) -> list[Any]:
        self.calls += 1
        results = [await _result(call(place)) for place in places]
        shown = [_shown(result) for result in results]
        assert shown[0] == shown[1], f"{shown[0]} is not {shown[1]}"
        return results

    # --- Histories ---------------------------------------------------------------------------------

    async def _save(self) -> None:
        name = self.choose.choice(["a", "b", "h" * 300])
        state = self.states.setdefault(name, {})
        stored = state.get("messages", [])
        given = [message(self.choose) for _ in range(self.choose.randrange(4))]
        if stored and self.choose.random() < 0.5:
            # A replay of what is stored, of all or of the end of it.
            given = stored[-self.choose.choice([1, 2, len(stored)]) :] + given
        await self._both(self.histories, lambda place: place.save_messages(name, given, state=state))

    async def _read(self) -> None:
        name = self.choose.choice(["a", "b", "h" * 300, "unknown"])
        state = self.states.get(name, {})
        await self._both(self.histories, lambda place: place.get_messages(name, state=state))

    # --- Sessions ----------------------------------------------------------------------------------

    def _name(self) -> str:
        return self.choose.choice(["one", "two", "a name\nof two lines", "n" * 300])

    async def _set(self) -> None:
        name = self._name()
        session = AgentSession(session_id=self.choose.choice([name, "another"]))
        session.service_session_id = self.choose.choice([None, "service", {"id": "service"}])
        session.state = {"value": self.choose.choice(_VALUES), "messages": [message(self.choose)]}
        await self._both(self.sessions, lambda store: store.set(name, session))

    async def _change(self) -> None:
        name = self._name()
        sessions = await self._both(self.sessions, lambda store: store.get(name))
        if sessions[0] is None:
            return
        value = self.choose.choice(_VALUES)
        for session in sessions:
            session.state["changed"] = value
        given = dict(zip(self.sessions, sessions, strict=True))
        await self._both(self.sessions, lambda store: store.set(name, given[store]))

    async def _delete(self) -> None:
        name = self._name()
        await self._both(self.sessions, lambda store: store.delete(name))

    # --- Checkpoints -------------------------------------------------------------------------------

    def _id(self) -> str:
        return str(uuid.UUID(int=self.choose.randrange(12)))

    async def _checkpoint(self) -> None:
        checkpoint_id = self._id()
        # In memory the latest checkpoint has the latest time; here it is the one that was stored last.
        at = self.times.setdefault(checkpoint_id, _START + timedelta(seconds=next(self.seconds)))
        checkpoint = WorkflowCheckpoint(
            workflow_name=self._workflow(),
            graph_signature_hash="hash",
            checkpoint_id=checkpoint_id,
            previous_checkpoint_id=self.choose.choice([None, self._id()]),
            timestamp=at.isoformat(),
            state={
                "value": self.choose.choice(_VALUES),
                "stored": Stored(self.choose.randrange(9)),
                "t": (1,),
            },
            iteration_count=self.choose.randrange(5),
        )
        await self._both(self.checkpoints, lambda storage: storage.save(replace(checkpoint)))

    def _workflow(self) -> str:
        return self.choose.choice(["trip", "a trip/é"])

    async def _load(self) -> None:
        checkpoint_id = self._id()
        await self._both(self.checkpoints, lambda storage: storage.load(checkpoint_id))

    async def _list(self) -> None:
        name = self._workflow()
        await self._both(self.checkpoints, lambda storage: storage.list_checkpoints(workflow_name=name))
        await self._both(self.checkpoints, lambda storage: storage.list_checkpoint_ids(workflow_name=name))

    async def _latest(self) -> None:
        name = self._workflow()
        await self._both(self.checkpoints, lambda storage: storage.get_latest(workflow_name=name))

    async def _drop(self) -> None:
        checkpoint_id = self._id()
        await self._both(self.checkpoints, lambda storage: storage.delete(checkpoint_id))
        self.times.pop(checkpoint_id, None)


async def _result(call: Awaitable[Any]) -> Any:
    try:
        return await call
    except WorkflowCheckpointException as exc:
        return type(exc)


def _shown(result: Any) -> Any:
    if isinstance(result, list):
        return [_shown(each) for each in result]
    if isinstance(result, Message | AgentSession):
        return result.to_dict()
    return result
