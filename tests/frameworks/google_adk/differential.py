"""One random sequence of calls on two session services at once, whose results and errors are compared."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable
from typing import Any

from google.adk.errors.already_exists_error import AlreadyExistsError
from google.adk.events.event import Event
from google.adk.events.event_actions import EventActions
from google.adk.sessions import BaseSessionService, Session
from google.adk.sessions.base_session_service import GetSessionConfig
from google.genai import types

__all__ = ["Differential"]

_VALUES = (1, 1.5, -0.0, True, None, "", "naïve 🦊", "a\x00b", "~tilde", ["a", {"b": []}], {"~json": "1"})
_NAMES = ("plain", "city", "app:theme", "app:plain", "user:name", "user:plain", "temp:scratch", "odd:key")
_FIRST_SECOND = 1_700_000_000


class Differential:
    """Sessions are created, read, listed, written and deleted, as ``seed`` chooses them."""

    def __init__(self, first: BaseSessionService, second: BaseSessionService, seed: int) -> None:
        self.services = (first, second)
        self.choose = random.Random(seed)  # noqa: S311  a sequence to repeat
        self.calls = 0
        self.events = 0

    async def run(self, calls: int) -> None:
        actions = [self._append] * 6 + [self._create, self._create, self._get, self._get, self._list]
        actions += [self._user_state, self._delete]
        while self.calls < calls:
            await self.choose.choice(actions)()

    async def _both(self, call: Callable[[BaseSessionService], Awaitable[Any]]) -> list[Any]:
        """Make a call on both services, and return what each of them gave."""
        self.calls += 1
        results = [await _result(call(service)) for service in self.services]
        shown = [_shown(result) for result in results]
        assert shown[0] == shown[1], f"{shown[0]} is not {shown[1]}"
        return results

    def _session(self) -> dict[str, str]:
        number = self.choose.randrange(4)
        return {**self._owner(), "session_id": f"s{number}" if number else "a long\nid" * 60}

    def _owner(self) -> dict[str, str]:
        return {
            "app_name": self.choose.choice(["weather", "travel agent/é"]),
            "user_id": self.choose.choice(["ada", "grace"]),
        }

    def _state(self) -> dict[str, Any]:
        names = self.choose.sample(_NAMES, self.choose.randrange(4))
        return {name: self.choose.choice(_VALUES) for name in names}

    async def _create(self) -> None:
        named, state = self._session(), self._state()
        if self.choose.random() < 0.1:
            named["session_id"] = f" {named['session_id']} "
        await self._both(lambda service: service.create_session(**named, state=dict(state)))

    async def _get(self) -> None:
        named = self._session()
        config = self.choose.choice([None, GetSessionConfig(), self._config(), self._config()])
        await self._both(lambda service: service.get_session(**named, config=config))

    def _config(self) -> GetSessionConfig:
        after = _FIRST_SECOND + self.choose.randrange(self.events + 2)
        return GetSessionConfig(
            num_recent_events=self.choose.choice([None, 0, 1, 3]),
            after_timestamp=self.choose.choice([None, float(after)]),
        )

    async def _list(self) -> None:
        owner = self._owner()
        if self.choose.random() < 0.5:
            del owner["user_id"]
        await self._both(lambda service: service.list_sessions(**owner))

    async def _user_state(self) -> None:
        owner = self._owner()
        await self._both(lambda service: service.get_user_state(**owner))

    async def _delete(self) -> None:
        named = self._session()
        await self._both(lambda service: service.delete_session(**named))

    async def _append(self) -> None:
        named = self._session()
        sessions = await self._both(lambda service: service.get_session(**named))
        if sessions[0] is None:
            unknown = {"id": named["session_id"], **named}
            del unknown["session_id"]
            sessions = [Session(**unknown) for _ in range(2)]
        events = [self._event() for _ in range(self.choose.randrange(1, 4))]
        # In memory, an event with state for one invocation is not recognised when it is repeated.
        if self.choose.random() < 0.1 and "temp:scratch" not in events[-1].actions.state_delta:
            events.append(events[-1])
        for event in events:
            given = dict(zip(self.services, sessions, strict=True))
            await self._both(
                lambda service, given=given, event=event: service.append_event(  # type: ignore[misc]
                    given[service], event.model_copy(deep=True)
                )
            )
            assert _shown(sessions[0]) == _shown(sessions[1])

    def _event(self) -> Event:
        self.events += 1
        call = types.FunctionCall(id="call", name="look", args={"value": self.choose.choice(_VALUES)})
        parts = [
            types.Part(text=self.choose.choice(["hello", "", "naïve 🦊", "a\x00b", "x" * 3_000])),
            types.Part(function_call=call, thought_signature=b"\x00\xff"),
            types.Part(inline_data=types.Blob(data=b"\xff\xfe", mime_type="image/png")),
        ]
        return Event(
            author=self.choose.choice(["user", "guide"]),
            invocation_id=f"run-{self.choose.randrange(5)}",
            timestamp=float(_FIRST_SECOND + self.events),
            partial=self.choose.choice([None, None, None, True]),
            content=types.Content(role="model", parts=self.choose.sample(parts, 2)),
            actions=EventActions(state_delta=self._state()),
            long_running_tool_ids=self.choose.choice([None, {"call"}]),
        )


async def _result(call: Awaitable[Any]) -> Any:
    try:
        return await call
    except (AlreadyExistsError, ValueError) as exc:
        return type(exc)


def _shown(result: Any) -> Any:
    """Return what must be equal; the clock says another time to the second service."""
    if isinstance(result, Session):
        shown = result.model_dump(mode="json")
        return shown if result.last_update_time >= _FIRST_SECOND else {**shown, "last_update_time": 0}
    if hasattr(result, "sessions"):
        return [_shown(session) for session in result.sessions]
    return result.model_dump(mode="json") if isinstance(result, Event) else result
