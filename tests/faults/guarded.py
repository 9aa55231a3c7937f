"""Every public call that takes a fencing token, by the room of the package that it is in."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

from asgiref.sync import async_to_sync
from django.apps import apps

import helix_store
from helix_store.adapters import SessionAdapter
from helix_store.checkpointers import GraphCheckpointStore, SnapshotCheckpointer
from helix_store.items import ItemLog
from helix_store.models import Item, Lock
from helix_store.stores import DatabaseStateStore, DatabaseStreamManager
from helix_store.testing.state_store.samples import full_session
from helix_store.testing.state_store.versions import GUARDED, PREPARED

__all__ = ["CALLS", "Place", "calls_with_a_token", "everything_in", "prepare"]

SESSION: Final = "session"
"""The session, the thread, the stream, and the lock that guards them."""

_ROOMS: Final = ("adapters", "checkpointers", "items", "sessions", "streams")
# It makes no statement: the handle gives the token to each of its calls.
_HANDLES: Final = {"sessions: session"}


@dataclass(frozen=True)
class Place:
    """A tenant in a database, which one trial has for itself."""

    alias: str
    tenant: str

    @property
    def state(self) -> DatabaseStateStore:
        return DatabaseStateStore(self.alias, tenant=self.tenant)

    @property
    def streams(self) -> DatabaseStreamManager:
        return DatabaseStreamManager(self.alias, tenant=self.tenant)

    @property
    def graph(self) -> GraphCheckpointStore:
        return GraphCheckpointStore(self.alias, tenant=self.tenant)

    @property
    def snapshots(self) -> SnapshotCheckpointer:
        return SnapshotCheckpointer(self.alias, tenant=self.tenant)

    @property
    def adapter(self) -> SessionAdapter:
        # Of another type than the session, which `delete` would delete too.
        return SessionAdapter("framework", self.alias, tenant=self.tenant)

    def items(self, lane: str = "") -> ItemLog:
        return ItemLog(SESSION, lane, using=self.alias, tenant=self.tenant)


GuardedCall = Callable[[Place, int | None], object]


def _of_state(name: str) -> GuardedCall:
    return lambda place, token: GUARDED[name](place.state, token)  # type: ignore[arg-type]  # None: no fence


def _of_items(name: str, *arguments: Any, lane: str = "") -> GuardedCall:
    return lambda place, token: getattr(place.items(lane), name)(*arguments, fencing_token=token)


def _of_streams(name: str, *arguments: Any) -> GuardedCall:
    def call(place: Place, token: int | None) -> object:
        method = getattr(place.streams, name)
        if inspect.iscoroutinefunction(method):
            method = async_to_sync(method)
        return method(SESSION, *arguments, fencing_token=token)

    return call


CALLS: Final[dict[str, GuardedCall]] = {
    **{f"sessions: {name}": _of_state(name) for name in GUARDED},
    "sessions: receive_posts": lambda place, token: place.state.receive_posts(SESSION, fencing_token=token),
    "streams: create_writer": _of_streams("create_writer", "run", "agent"),
    "streams: write_sync": _of_streams("write_sync", [{"type": "text"}]),
    "streams: end_stream": _of_streams("end_stream"),
    "streams: fail_stream": _of_streams("fail_stream", "error"),
    "streams: pause_stream": _of_streams("pause_stream"),
    "streams: reactivate_stream": _of_streams("reactivate_stream"),
    "streams: reset_stream": _of_streams("reset_stream"),
    "items: append": _of_items("append", [3]),
    "items: put": _of_items("put", "key", 4),
    "items: pop": _of_items("pop"),
    "items: replace_suffix": _of_items("replace_suffix", [2], [5]),
    "items: copy_to": _of_items("copy_to", "copy"),
    "items: clear": _of_items("clear"),
    "items: delete_lane": _of_items("delete_lane", "other"),
    "items: clear_all": _of_items("clear_all"),
    "checkpointers: add_message": lambda place, token: place.graph.add_message(
        SESSION, role="user", fencing_token=token
    ),
    "checkpointers: add_messages": lambda place, token: place.graph.add_messages(
        SESSION, [{"role": "user"}], fencing_token=token
    ),
    "checkpointers: save_checkpoint": lambda place, token: place.graph.save_checkpoint(
        SESSION, step=1, fencing_token=token
    ),
    "checkpointers: put": lambda place, token: place.snapshots.put(
        SESSION, {"version": 1}, fencing_token=token
    ),
    "adapters: write": lambda place, token: place.adapter.write(
        SESSION, lambda session: None, fencing_token=token
    ),
    "adapters: delete": lambda place, token: place.adapter.delete(SESSION, Item, fencing_token=token),
}


def prepare(place: Place, name: str) -> None:
    """Store what a guarded call changes."""
    full_session(place.state, SESSION)
    room, method = name.split(": ")
    if room == "sessions" and method in PREPARED:
        PREPARED[method](place.state)
    if method == "receive_posts":
        place.state.post_message(SESSION, {"role": "user", "content": "hello"})
    if room in ("adapters", "items"):
        place.items().append([1, 2])
        place.items("other").append([1])
    if room == "streams":
        async_to_sync(place.streams.create_writer)(SESSION, "run", "agent")
        place.streams.write_sync(SESSION, [{"type": "text"}])
        if method == "reactivate_stream":
            async_to_sync(place.streams.pause_stream)(SESSION)


def everything_in(place: Place) -> dict[str, list[Any]]:
    """All rows of the tenant by table, but not its locks."""
    found = {}
    for model in apps.get_app_config("helix_store").get_models():
        fields = {field.name for field in model._meta.fields}
        paths = {"tenant": "tenant", "session": "session__tenant", "stream": "stream__tenant"}
        path = next((path for name, path in paths.items() if name in fields), None)
        if model is not Lock and path is not None:
            rows = model._default_manager.using(place.alias).filter(**{path: place.tenant})
            found[model.__name__] = sorted(map(repr, rows.values_list()))
    return found


def calls_with_a_token() -> set[str]:
    """The public methods of the package that take a fencing token, without their async versions."""
    return {
        f"{room}: {name}"
        for room, owner in _classes()
        for name, function in vars(owner).items()
        if inspect.isfunction(function) and "fencing_token" in inspect.signature(function).parameters
        if not name.startswith("_") and not hasattr(owner, name[1:])
    } - _HANDLES


def _classes() -> Iterator[tuple[str, type]]:
    for room in _ROOMS:
        package = importlib.import_module(f"helix_store.{room}")
        path = getattr(package, "__path__", ())
        modules = [each.name for each in pkgutil.walk_packages(path, f"{package.__name__}.")]
        for module in modules or [package.__name__]:
            for value in vars(importlib.import_module(module)).values():
                if inspect.isclass(value) and value.__module__.startswith(helix_store.__name__):
                    yield room, value
