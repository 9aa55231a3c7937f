"""Every public method of every store with its arguments, found by reflection, and how to call it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, Final

from asgiref.sync import async_to_sync
from django.db import connections
from django.test.utils import CaptureQueriesContext

from helix_store.adapters import SessionAdapter
from helix_store.checkpointers import (
    Claim,
    GraphCheckpointStore,
    InMemorySnapshotCheckpointer,
    SnapshotCheckpointer,
)
from helix_store.cleanup import expired_session_cleanup
from helix_store.core.types import SessionState, StagedChanges, StepInfo, SubSessionRef
from helix_store.core.usage import TokenCounts, UsageEntry, UsageSource
from helix_store.items import ItemLog
from helix_store.retention import prune_streams
from helix_store.stores import (
    DatabaseBudgetStore,
    DatabaseLockManager,
    DatabaseStateStore,
    DatabaseStreamManager,
    DatabaseUsageStore,
    InMemoryBudgetStore,
    InMemoryLockManager,
    InMemoryStateStore,
    InMemoryStore,
    InMemoryStreamManager,
    InMemoryUsageStore,
    Lock,
    MemoryWorld,
    NoOpLockManager,
    OpenEffect,
    SessionHandle,
    Step,
    Store,
    Turn,
)
from helix_store.streams.manager import StreamWriter
from helix_store.testing.state_store.samples import contents
from tests.databases import ALIASES, fresh_tenant
from tests.security.bounds import COLLECTIONS, Bound, Growing, bound_of

BACKENDS: Final = ("memory", *ALIASES)


# --- What there is ---------------------------------------------------------------------------------


class World:
    """The stores of one new tenant, and a session with something to refer to."""

    def __init__(self, backend: str) -> None:
        self.backend = backend
        self.tenant = fresh_tenant()
        self.alias = ALIASES.get(backend)
        shared = {"world": MemoryWorld()} if self.alias is None else {"using": self.alias}
        self._shared: dict[str, Any] = {"tenant": self.tenant, **shared}
        memory = self.alias is None
        self.store = (InMemoryStateStore if memory else DatabaseStateStore)(**self._shared)
        self.store.create_session("session", agent_type="agent")

    @cached_property
    def locks(self) -> Any:
        return (InMemoryLockManager if self.alias is None else DatabaseLockManager)(**self._shared)

    @cached_property
    def usage(self) -> Any:
        return (InMemoryUsageStore if self.alias is None else DatabaseUsageStore)(**self._shared)

    @cached_property
    def streams(self) -> Any:
        manager = (InMemoryStreamManager if self.alias is None else DatabaseStreamManager)(**self._shared)
        async_to_sync(manager.create_writer)("stream", "run", "agent")
        return manager

    @cached_property
    def graph(self) -> Any:
        store = GraphCheckpointStore(self.alias, tenant=self.tenant)
        store.create_session("", session_id="graph")
        return store

    @cached_property
    def items(self) -> Any:
        log = ItemLog("session", using=self.alias, tenant=self.tenant)
        log.append(["first", "second"], keys=["key", None])
        return log

    @cached_property
    def adapter(self) -> Any:
        return SessionAdapter("agent", self.alias, tenant=self.tenant)

    @cached_property
    def snapshots(self) -> Any:
        checkpointer = InMemorySnapshotCheckpointer if self.alias is None else SnapshotCheckpointer
        return checkpointer(**self._shared)

    @cached_property
    def lock(self) -> Any:
        return self.locks.acquire("lock")

    @cached_property
    def writer(self) -> Any:
        return async_to_sync(self.streams.create_writer)("stream", "run", "agent")

    @cached_property
    def claim(self) -> Any:
        self.snapshots.put("thread", {"version": 1})
        return self.snapshots.claim("thread", owner="owner")

    @contextmanager
    def untouched(self) -> Iterator[None]:
        """No statement, and in memory nothing changed."""
        if self.alias is None:
            before = contents(self.store, "session"), self.store.list_sessions().total
            yield
            assert (contents(self.store, "session"), self.store.list_sessions().total) == before
        else:
            with CaptureQueriesContext(connections[self.alias]) as captured:
                yield
            assert captured.captured_queries == []


ROOMS: Final[dict[str, tuple[type, ...]]] = {
    "store": (InMemoryStateStore, DatabaseStateStore),
    "locks": (InMemoryLockManager, DatabaseLockManager),
    "usage": (InMemoryUsageStore, DatabaseUsageStore),
    "streams": (InMemoryStreamManager, DatabaseStreamManager),
    "graph": (GraphCheckpointStore,),
    "items": (ItemLog,),
    "adapter": (SessionAdapter,),
    "snapshots": (InMemorySnapshotCheckpointer, SnapshotCheckpointer),
    "lock": (Lock,),
    "writer": (StreamWriter,),
    "claim": (Claim,),
}
WITHOUT_BOUNDS: Final = {
    MemoryWorld: "it takes no arguments",
    NoOpLockManager: "it has the methods of the other managers and stores nothing",
    **dict.fromkeys(
        (InMemoryStore, SessionHandle, Step, Store, Turn),
        "its arguments are those of the stores",
    ),
    OpenEffect: "the contract tests of effects try its arguments",
    **dict.fromkeys(
        (DatabaseBudgetStore, InMemoryBudgetStore), "the contract tests of budgets try its arguments"
    ),
}


def methods_of(classes: tuple[type, ...]) -> dict[str, Any]:
    """The public methods of classes by name, without the async twin of another one."""
    found = {
        name: member
        for cls in classes
        for name, member in inspect.getmembers(cls, callable)
        if not name.startswith("_")
    }
    return {name: member for name, member in found.items() if not (name[0] == "a" and name[1:] in found)}


METHODS: Final = {
    f"{room}.{name}": method
    for room, classes in ROOMS.items()
    for name, method in methods_of(classes).items()
}
CONSTRUCTORS: Final = {
    f"new.{cls.__name__}": cls
    for room in ("store", "locks", "usage", "streams", "graph", "items", "adapter", "snapshots")
    for cls in ROOMS[room]
}
FUNCTIONS: Final = {f"run.{run.__name__}": run for run in (expired_session_cleanup, prune_streams)}
CALLABLES: Final[dict[str, Any]] = {**METHODS, **CONSTRUCTORS, **FUNCTIONS}
CONFIGURATION: Final = frozenset(
    {
        *("using", "limits", "world", "id_factory", "state_store", "workspace_providers", "progress"),
        *("call", "models", "prune", "validate"),
    }
)
"""Arguments that a project's code gives, not its users: aliases, objects and functions."""


# --- Their arguments -------------------------------------------------------------------------------

_CALL_FIELDS: Final = (
    "tool_name",
    "input",
    "run_id",
    "requested_at",
    "deadline",
    "approval_id",
    "on_expiry",
    "requester",
)
_ENTRY: Final = {
    "session_id": "session",
    "timestamp": 1,
    "step_count": 0,
    "source": {"type": "t", "name": "n"},
}
ENTRIES: Final[dict[str, dict[str, Any]]] = {
    "tokens": {**_ENTRY, "kind": "tokens", "model": "m", "tokens": {}},
    "tool": {**_ENTRY, "kind": "tool", "tool_name": "t", "success": True, "duration_ms": 1},
    "subagent": {
        **_ENTRY,
        "kind": "subagent",
        "agent_type": "agent",
        "sub_session_id": "sub",
        "success": True,
        "duration_ms": 1,
    },
    "custom": {**_ENTRY, "kind": "custom", "type": "t", "name": "n", "amount": 1},
}


def _state_with(world: World, name: str, value: Any) -> Any:
    state = world.store.load_state("session")
    assert state is not None
    setattr(state, name, value)
    return state


def _call_with(name: str, value: Any) -> dict[str, Any]:
    call: dict[str, Any] = {"tool_name": "tool"}
    if name == "on_expiry":
        call = {**call, "deadline": 4_000_000_000_000}
    return {"call": {**call, name: value}}


def _entry_with(name: str, value: Any) -> dict[str, Any]:
    kind = next((kind for kind, entry in ENTRIES.items() if name in entry.keys() - _ENTRY.keys()), "custom")
    if name == "kind":
        kind = "custom"
    entry = dict(ENTRIES[kind])
    if name in _TOKENS:
        return {**ENTRIES["tokens"], "tokens": {name: value}}
    if name.startswith("source."):
        return {**entry, "source": {**entry["source"], name.removeprefix("source."): value}}
    return {**entry, name: value}


def _names(cls: type, *, but: tuple[str, ...] = ()) -> list[str]:
    return [field.name for field in fields(cls) if field.name not in but]


_TOKENS: Final = _names(TokenCounts)
_ENTRY_FIELDS: Final = [
    *_names(UsageEntry, but=("source", "tokens")),
    *_TOKENS,
    *(f"source.{name}" for name in _names(UsageSource)),
]

RECORDS: Final[dict[str, tuple[list[str], Callable[[World, str, Any], Any]]]] = {
    "state": (_names(SessionState), _state_with),
    "staged": (_names(StagedChanges), lambda _, name, value: {"tool_call_id": "call", name: value}),
    "save_state_and_promote_staging.step": (
        _names(StepInfo),
        lambda _, name, value: {"step_id": "step-1", "step_count": 1, name: value},
    ),
    "refs": (
        _names(SubSessionRef),
        lambda _, name, value: [{"sub_session_id": "sub", "agent_type": "agent", name: value}],
    ),
    "calls": (list(_CALL_FIELDS), lambda _, name, value: _call_with(name, value)),
    "pending": (list(_CALL_FIELDS), lambda _, name, value: _call_with(name, value)),
    "entry": (_ENTRY_FIELDS, lambda _, name, value: _entry_with(name, value)),
    "entries": (_ENTRY_FIELDS, lambda _, name, value: [_entry_with(name, value)]),
}
"""Arguments that are value objects or records, their fields, and one with a given field."""

VALID: Final[dict[str, Any]] = {
    "session_id": "session",
    "call": lambda _: lambda _: None,
    "payloads": [],
    "payload": None,
    "key": "key",
    "lane": "lane",
    "new": [],
    "replace_suffix.expected": [],
    "graph.session_id": "graph",
    "agent_type": "agent",
    "state": lambda world: world.store.load_state("session"),
    "status": "active",
    "update_run.status": "completed",
    "expected": ["active"],
    "changes": {},
    "message": {"role": "user"},
    "messages": [],
    "append_messages": [],
    "keep": 0,
    "step_id": "step-1",
    "staged": {"tool_call_id": "call"},
    "step": 1,
    "save_state_and_promote_staging.step": {"step_id": "step-1", "step_count": 1},
    "checkpoint_id": "checkpoint",
    "run_id": "run",
    "agent_name": "agent",
    "refs": [],
    "sub_session_id": "sub",
    "calls": {},
    "tool_call_id": "call",
    "post_id": "post",
    "effect_id": "effect",
    "done": True,
    "kind": "suspended_client_tool",
    "context": {},
    "name": "lock",
    "timeout_ms": 0,
    "entry": ENTRIES["custom"],
    "entries": [],
    "date_from": 0,
    "date_to": 1,
    "stream_id": "stream",
    "chunk": {"type": "t"},
    "chunks": [],
    "from_sequence": 0,
    "error": None,
    "older_than": None,
    "directory": "",
    "text": "text",
    "role": "user",
    "thread_id": "thread",
    "thread_ids": [],
    "snapshot": {"version": 1},
    "owner": "owner",
}
"""What an argument is while another one is tried."""

COMPANIONS: Final[dict[str, Callable[[Any], dict[str, Any]]]] = {
    "append.keys": lambda value: {"payloads": [None] * len(value) if isinstance(value, list) else []},
    "submit_tool_result.approved": lambda _: {"approval_id": "approval"},
    "submit_tool_result.input": lambda _: {"approval_id": "approval", "approved": True},
    "submit_tool_result.reason": lambda _: {"approval_id": "approval", "approved": False},
    "save_state.session_id": lambda value: {"state": SessionState(session_id=value, agent_type="agent")},
    "save_state_and_promote_staging.session_id": lambda value: {
        "state": SessionState(session_id=value, agent_type="agent")
    },
}
"""What the value of an argument asks of others."""


@dataclass(frozen=True)
class Argument:
    method: str
    path: str
    bound: Bound | Growing

    def __str__(self) -> str:
        return f"{self.method} {self.path}"

    def prepared(self, world: World, value: Any) -> Callable[[], Any]:
        """The call with this value; what it needs is loaded before."""
        room, _, name = self.method.partition(".")
        function = getattr(getattr(world, room), name) if self.method in METHODS else CALLABLES[self.method]
        values = {
            parameter.name: _valid(world, self.method, parameter.name)
            for parameter in inspect.signature(function).parameters.values()
            if parameter.default is parameter.empty and parameter.kind is not parameter.VAR_POSITIONAL
        }
        if "using" in inspect.signature(function).parameters:
            values["using"] = world.alias
        values.update(COMPANIONS.get(f"{name}.{self.path}", lambda _: {})(value))
        top, _, field = self.path.partition(".")
        record = _record(self.method, top)
        values[top] = record[1](world, field, value) if field and record is not None else value
        return lambda: _finished(function, values)

    def exists_in(self, backend: str) -> bool:
        room, _, name = self.method.partition(".")
        if room == "new":
            return ("InMemory" in name) == (backend == "memory")
        if room in ("graph", "items", "adapter", "run"):
            return backend != "memory"
        in_memory, in_database = ROOMS[room][0], ROOMS[room][-1]
        return hasattr(in_memory if backend == "memory" else in_database, name)


def _finished(function: Callable[..., Any], values: dict[str, Any]) -> Any:
    if not inspect.iscoroutinefunction(function):
        result = function(**values)
        return list(result) if inspect.isgenerator(result) else result

    async def run() -> Any:
        result = await function(**values)
        if hasattr(result, "aclose"):
            await result.aclose()
        return result

    return async_to_sync(run)()


def _keyed(table: dict[str, Any], method: str, name: str) -> Any:
    room, _, short = method.partition(".")
    return next((table[key] for key in (f"{short}.{name}", f"{room}.{name}", name) if key in table), None)


def _valid(world: World, method: str, name: str) -> Any:
    value = _keyed(VALID, method, name)
    return value(world) if callable(value) else value


def _record(method: str, name: str) -> Any:
    return None if method.startswith("graph.") else _keyed(RECORDS, method, name)


def paths(method: str, name: str) -> Iterator[str]:
    record = _record(method, name)
    if record is None:
        yield name
    else:
        yield from (f"{name}.{field}" for field in record[0])


def parameters() -> Iterator[tuple[str, str]]:
    for method, function in CALLABLES.items():
        for name in inspect.signature(function).parameters:
            if name != "self" and name not in CONFIGURATION:
                yield method, name


def _arguments() -> Iterator[Argument]:
    for method, name in parameters():
        if name in COLLECTIONS:
            yield Argument(method, name, COLLECTIONS[name])
        for path in paths(method, name):
            bound = bound_of(method, path)
            if bound is not None:
                yield Argument(method, path, bound)


ARGUMENTS: Final = list(_arguments())
