"""A time may be epoch milliseconds or an aware datetime, a duration milliseconds or a timedelta."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import is_dataclass
from datetime import UTC, datetime, timedelta, timezone
from typing import Any, Final

import pytest

import helix_store
from helix_store.core import validation
from helix_store.core.types import StagedChanges
from helix_store.exceptions import HelixStoreError, InvalidPayload
from helix_store.stores import (
    DatabaseLockManager,
    DatabaseStateStore,
    DatabaseUsageStore,
    InMemoryLockManager,
    InMemoryStateStore,
    InMemoryUsageStore,
    MemoryWorld,
)
from helix_store.testing.state_store.samples import loaded
from helix_store.testing.usage.base import tool
from tests.cells import for_each
from tests.databases import ALIASES, CommittedDatabase

MOMENT: Final = datetime(2031, 5, 6, 7, 8, 9, 123_000, tzinfo=timezone(timedelta(hours=-5)))
SHORT: Final = timedelta(seconds=5)

TIMES: Final = {
    "expires_at",
    "now",
    "timestamp",
    "deadline",
    "not_before",
    "created_from",
    "created_to",
    "date_from",
    "date_to",
}


def _parameters() -> list[tuple[str, str]]:
    """The parameters of all public calls that are times or durations, with their annotations."""
    public = [getattr(helix_store, name) for name in helix_store.__all__]
    calls = {value.__name__: value for value in public if inspect.isfunction(value)}
    for cls in public:
        if isinstance(cls, type) and not is_dataclass(cls):
            calls |= {
                f"{cls.__name__}.{name}": call
                for name, call in inspect.getmembers(cls, inspect.isfunction)
                if not name.startswith("_") or (name == "__init__" and "Manager" in cls.__name__)
            }
    return [
        (f"{name}({parameter.name})", parameter.annotation)
        for name, call in calls.items()
        for parameter in inspect.signature(call).parameters.values()
        if parameter.name in TIMES or parameter.name.endswith("_ms")
    ]


def test_every_time_and_duration_of_a_public_call_takes_both_forms() -> None:
    parameters = _parameters()
    assert len(parameters) > 60
    for name, annotation in parameters:
        expected = "Duration" if name.endswith("_ms)") else "Timestamp"
        # Until when a call waits may also be given as the time from now.
        assert annotation.removesuffix(" | None").removeprefix("timedelta | ") == expected, name


# --- What is stored ---------------------------------------------------------------------------------


class World:
    """The stores of one tenant."""

    def __init__(self, database: CommittedDatabase | None) -> None:
        if database is None:
            world = MemoryWorld()
            self.store: DatabaseStateStore | InMemoryStateStore = InMemoryStateStore(world=world)
            self.usage: DatabaseUsageStore | InMemoryUsageStore = InMemoryUsageStore(world=world)
            self.locks: DatabaseLockManager | InMemoryLockManager = InMemoryLockManager(world=world)
        else:
            self.store = DatabaseStateStore(database.alias, tenant=database.tenant)
            self.usage = DatabaseUsageStore(database.alias, tenant=database.tenant)
            self.locks = DatabaseLockManager(database.alias, tenant=database.tenant)
        self.store.create_session("session", agent_type="agent")


@pytest.fixture(params=["memory", *ALIASES])
def world(request: pytest.FixtureRequest) -> World:
    name = request.param
    return World(None if name == "memory" else request.getfixturevalue(f"{name}_db"))


def _created(world: World) -> Any:
    return world.store.create_session(agent_type="agent", expires_at=MOMENT).expires_at


def _saved(world: World) -> Any:
    state = loaded(world.store, "session")
    state.expires_at = MOMENT  # type: ignore[assignment]  # what a load returns is a number
    world.store.save_state("session", state)
    return loaded(world.store, "session").expires_at


def _suspended(world: World) -> Any:
    world.store.suspend("session", kind="suspended_client_tool", context={}, expires_at=MOMENT)
    return loaded(world.store, "session").expires_at


def _asked(world: World) -> Any:
    call = {"tool_name": "ask", "requested_at": MOMENT, "deadline": MOMENT}
    world.store.add_pending_tool_calls("session", {"call": call})
    pending = loaded(world.store, "session").pending_client_tool_calls["call"]
    assert pending["requested_at"] == pending["deadline"]
    return pending["deadline"]


def _staged(world: World) -> Any:
    world.store.stage_changes("session", "step", {"tool_call_id": "call", "timestamp": MOMENT})
    (staged,) = world.store.get_staged_changes("session", "step")
    return staged.timestamp


def _recorded(world: World) -> Any:
    world.usage.record_entry(tool(timestamp=MOMENT))
    (entry,) = world.usage.get_entries("session")
    return entry.timestamp


@for_each("stored", [_created, _saved, _suspended, _asked, _staged, _recorded])
def test_an_aware_datetime_is_stored_as_its_milliseconds(
    world: World, stored: Callable[[World], Any]
) -> None:
    assert stored(world) == validation.datetime_to_milliseconds(MOMENT)


def test_a_deadline_of_a_suspension_is_stored_as_its_milliseconds(world: World) -> None:
    pending = {"call": {"tool_name": "ask", "deadline": MOMENT}}
    world.store.suspend("session", kind="suspended_client_tool", context={}, pending=pending)
    (overdue,) = world.store.find_expired_pending(now=MOMENT)
    assert overdue.deadline == validation.datetime_to_milliseconds(MOMENT)


def test_a_deadline_may_be_a_duration_from_now(world: World) -> None:
    before = validation.datetime_to_milliseconds(datetime.now(UTC))
    call = {"tool_name": "ask", "deadline": timedelta(days=7)}
    world.store.add_pending_tool_calls("session", {"call": call})
    pending = loaded(world.store, "session").pending_client_tool_calls["call"]
    week = 7 * 24 * 3_600_000
    assert pending["deadline"] == pending["requested_at"] + week
    assert before + week <= pending["deadline"] < before + week + 60_000


def test_a_term_may_be_a_timedelta(world: World) -> None:
    lock = world.locks.acquire("name", ttl_ms=SHORT)
    assert lock is not None
    assert lock.ttl_ms == 5_000
    lock.refresh(timedelta(seconds=7))
    assert lock.ttl_ms == 7_000
    with pytest.raises(helix_store.StoreBusy):
        world.locks.wait_acquire("name", timeout_ms=timedelta(0), ttl_ms=SHORT)
    lock.release()
    assert world.locks.wait_acquire("name", timeout_ms=timedelta(0), ttl_ms=SHORT).release()
    assert type(world.locks)(default_ttl_ms=timedelta(minutes=1)).default_ttl_ms == 60_000


def test_a_call_may_have_taken_a_timedelta(world: World) -> None:
    world.usage.record_entry(tool(duration_ms=timedelta(seconds=1.5)))
    assert world.usage.get_entries("session")[0].duration_ms == 1_500


@for_each(
    "time",
    [datetime(2031, 5, 6), datetime(1969, 1, 1, tzinfo=UTC), timedelta(1), "2031-05-06"],  # noqa: DTZ001
)
def test_another_time_is_refused(time: Any) -> None:
    store = InMemoryStateStore()
    store.create_session("session", agent_type="agent")
    calls: list[Callable[[], object]] = [
        lambda: store.create_session("other", agent_type="agent", expires_at=time),
        lambda: store.suspend("session", kind="suspended_client_tool", context={}, expires_at=time),
        lambda: store.stage_changes("session", "step", StagedChanges(tool_call_id="call", timestamp=time)),
        lambda: store.add_pending_tool_calls("session", {"a": {"tool_name": "ask", "requested_at": time}}),
    ]
    for call in calls:
        with pytest.raises(InvalidPayload):
            call()
    assert store.get_all_session_ids() == ["session"]
    assert loaded(store, "session").version == 1


@for_each("duration", [timedelta(seconds=-1), timedelta(0), timedelta(days=8)])
def test_a_term_out_of_bounds_is_refused(duration: timedelta) -> None:
    locks = InMemoryLockManager()
    with pytest.raises(HelixStoreError):
        locks.acquire("name", ttl_ms=duration)
    assert not locks.is_locked("name")
