"""A database or memory in which tenants live: their stores, what they store, and how a call is tried."""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import fields, is_dataclass
from functools import cached_property
from typing import Any, Final

from asgiref.sync import async_to_sync
from django.apps import apps
from django.db import transaction

import helix_store.checkpointers
import helix_store.stores
from helix_store.core.types import StepInfo
from helix_store.engine.memory import MemoryWorld
from tests.databases import fresh_tenant
from tests.security.tenant_arguments import MESSAGE, Names, arguments_of, choices_of, cursor_of

__all__ = ["DatabaseTenants", "MemoryTenants", "Tenants", "called", "public_stores", "takes"]

WITHOUT_TENANT: Final = {
    "Claim": "is made by a checkpointer for its own tenant",
    "Lock": "is made by a lock manager for its own tenant",
    "MemoryWorld": "is the memory of all tenants",
    "OpenEffect": "is opened by a handle or a turn for its own tenant",
    "SessionHandle": "is opened by a store for its own tenant",
    "Step": "is opened by a handle for its own tenant",
    "StreamWriter": "is made by a stream manager for its own tenant",
    "Turn": "is opened by a handle for its own tenant",
}
"""Public classes that no caller makes for a tenant, and why; beside the values that stores return."""

OF_PARTS: Final = ("InMemoryStore", "Store")
"""Classes that only pass their tenant to other stores of this list, as `tests.handles.test_stores` shows."""

PATHS_TO_TENANT: Final = ("tenant", "session__tenant", "stream__tenant")


def public_stores() -> dict[str, type[Any]]:
    """Every public class that is made for a tenant."""
    found = {}
    for module in (helix_store.stores, helix_store.checkpointers):
        for name in [each for each in module.__all__ if each not in OF_PARTS]:
            cls = getattr(module, name)
            if "tenant" in inspect.signature(cls).parameters:
                found[name] = cls
            elif not is_dataclass(cls):
                assert name in WITHOUT_TENANT, (
                    f"{module.__name__}.{name} is new and takes no tenant. Say why in WITHOUT_TENANT."
                )
    return found


class Tenants:
    """Tenants that share a database or memory."""

    stores: list[type[Any]]

    def store(self, store: type[Any], tenant: str) -> Any:
        raise NotImplementedError

    def dump(self, tenant: str) -> Any:
        """Everything that is stored for a tenant."""
        raise NotImplementedError

    def trial(self) -> AbstractContextManager[tuple[str, Names]]:
        """A tenant with something of everything, for one call; every trial finds the same."""
        raise NotImplementedError

    @contextmanager
    def empty(self) -> Iterator[str]:
        """A tenant that has stored nothing, for one call."""
        yield fresh_tenant()

    def names_of_nothing(self, prefix: str) -> Names:
        """Names like those of `fill`, of what exists nowhere."""
        raise NotImplementedError

    def fill(self, tenant: str, prefix: str) -> Names:
        """Store something of everything for a tenant, under names with a prefix."""
        names = Names(prefix)
        faces = [self.store(store, tenant) for store in self.stores]
        made: dict[str, Any] = {}
        for face in faces:
            _fill(face, names, made)
        for face in faces:
            made.update(_cursors(face, Names(prefix, made)))
        return Names(prefix, made)

    @cached_property
    def own(self) -> tuple[str, Names]:
        """The tenant of the trials, and what it has stored."""
        tenant = fresh_tenant()
        return tenant, self.fill(tenant, "own")

    def refer(self, tenant: str, own: Names, other: Names) -> None:
        """Store the ids of others in the own session, wherever a tenant can."""
        (store,) = [self.store(each, tenant) for each in self.stores if hasattr(each, "save_state")]
        refs = [{"sub_session_id": name, "agent_type": own.agent} for name in (other.session, other.child)]
        store.add_sub_session_refs(own.session, refs)
        state = store.load_state(own.session)
        state.parent_session_id = state.root_session_id = state.stream_id = other.session
        state.client_tool_call_ownership = dict.fromkeys((own.call, other.call), other.session)
        state.suspended_awaiting_children = [other.child]
        store.save_state(own.session, state)


class DatabaseTenants(Tenants):
    def __init__(self, alias: str) -> None:
        self._alias = alias
        self.stores = [each for each in public_stores().values() if takes(each, "using")]

    def store(self, store: type[Any], tenant: str) -> Any:
        return store(self._alias, tenant=tenant)

    def dump(self, tenant: str) -> Any:
        rows = {}
        for model in apps.get_app_config("helix_store").get_models(include_auto_created=True):
            names = {each.name for each in model._meta.get_fields()}
            path = next(
                path
                for path in ("tenant", "session__tenant", "stream__tenant")
                if path.split("__")[0] in names
            )
            found = model._default_manager.using(self._alias).filter(**{path: tenant})
            rows[model.__name__] = list(found.order_by("pk").values())
        return rows

    @contextmanager
    def trial(self) -> Iterator[tuple[str, Names]]:
        own = self.own
        with self._undone():
            yield own

    def names_of_nothing(self, prefix: str) -> Names:
        with self._undone():
            return self.fill(fresh_tenant(), prefix)

    @contextmanager
    def _undone(self) -> Iterator[None]:
        with transaction.atomic(using=self._alias):
            yield
            transaction.set_rollback(True, using=self._alias)


class MemoryTenants(Tenants):
    def __init__(self) -> None:
        self._world = MemoryWorld()
        self.stores = [each for each in public_stores().values() if not takes(each, "using")]

    def store(self, store: type[Any], tenant: str) -> Any:
        return store(tenant=tenant, **({"world": self._world} if takes(store, "world") else {}))

    def dump(self, tenant: str) -> Any:
        return _written_out(self._world._tenants.get(tenant, {}))

    @contextmanager
    def trial(self) -> Iterator[tuple[str, Names]]:
        tenant, names = self.own
        tables = dict(self._world._tenants[tenant])
        undo = [table.saved() for table in tables.values()]
        yield tenant, names
        for put_back in undo:
            put_back()
        self._world._tenants[tenant] = tables

    @contextmanager
    def empty(self) -> Iterator[str]:
        with super().empty() as tenant:
            yield tenant
        # Every transaction in memory copies the tables of all tenants.
        self._world._tenants.pop(tenant, None)

    def names_of_nothing(self, prefix: str) -> Names:
        return MemoryTenants().fill(fresh_tenant(), prefix)


def takes(store: type[Any], parameter: str) -> bool:
    return parameter in inspect.signature(store).parameters


def _written_out(value: Any) -> Any:
    """A copy as plain values that no later write changes."""
    if isinstance(value, type):
        return value.__name__
    if isinstance(value, dict):
        inner = [(_written_out(key), _written_out(each)) for key, each in value.items()]
        return [type(value).__name__, inner, _written_out(getattr(value, "__dict__", None))]
    if isinstance(value, (list, tuple, set)):
        return [_written_out(each) for each in value]
    if is_dataclass(value):
        return [type(value).__name__, [_written_out(getattr(value, each.name)) for each in fields(value)]]
    if type(value).__module__.startswith("helix_store") and hasattr(value, "__dict__"):
        return [type(value).__name__, _written_out(vars(value))]
    return (
        repr(value)
        if type(value).__module__ == "builtins" or hasattr(value, "isoformat")
        else type(value).__name__
    )


def called(store: Any, method: str, arguments: dict[str, Any]) -> Any:
    """The result of a method or property, sync or async; an iterator as a list."""
    found = getattr(store, method)
    if not callable(found):
        return found
    result = found(**arguments)
    if inspect.iscoroutine(result):
        result = async_to_sync(_awaited)(result)
    if isinstance(result, AsyncIterator):
        return async_to_sync(_first)(result)
    return list(result) if inspect.isgenerator(result) else result


async def _awaited(coroutine: Any) -> Any:
    return await coroutine


async def _first(items: Any) -> list[Any]:
    """The first item alone: the readers of a stream wait for more."""
    try:
        return [await anext(items)]
    except StopAsyncIteration:
        return []
    finally:
        await items.aclose()


def _fill(face: Any, names: Names, made: dict[str, Any]) -> None:
    """Store something of what the face stores, and add the ids that it made."""
    key = type(face).__name__
    if hasattr(face, "save_state_and_promote_staging"):
        made[f"{key}.checkpoint_id"] = _fill_sessions(face, names)
        for post_key in (names.key, None):
            post = face.post_message(names.session, MESSAGE, key=post_key, author=names.user)
            made[f"{key}.post_id"] = post.post_id
    elif hasattr(face, "record_entry"):
        face.record_entry(names.entry)
    elif hasattr(face, "set_budget"):
        face.set_budget(names.session, scope="user", value=names.user, limit_tokens=1)
    elif hasattr(face, "force_release"):
        assert face.acquire(names.session, owner=names.owner)
    elif hasattr(face, "write_sync"):
        async_to_sync(face.create_writer)(names.session, names.run, "writer")
        face.write_sync(names.session, [{"type": "text_delta", "delta": "x"}] * 2)
    elif hasattr(face, "save_checkpoint"):
        messages = [face.add_message(names.session, **MESSAGE) for _ in range(2)]
        made[f"{key}.before"] = messages[-1].id
        for step in (1, 2):
            checkpoint = face.save_checkpoint(names.session, namespace=names.namespace, step=step)
            made[f"{key}.checkpoint_id"] = checkpoint.checkpoint_id
    elif hasattr(face, "delete_threads"):
        made[f"{key}.before"] = face.put(names.thread, {"version": 1})
        made[f"{key}.checkpoint_id"] = face.put(names.thread, {"version": 1})
    else:
        raise AssertionError(f"{key} is new. Say in _fill of {__name__} what it stores.")


def _fill_sessions(store: Any, names: Names) -> str:
    for session_id, parent in ((names.session, None), (names.child, names.session)):
        state = store.create_session(
            session_id,
            agent_type=names.agent,
            parent_session_id=parent,
            user_id=names.user,
            workspace_id=names.workspace,
            tags=[names.tag],
            metadata={"of": names.metadata},
            title=names.title,
            directory=names.directory,
        )
        if parent is None:
            store.start_run(session_id, names.run)
            commits = [
                store.save_state_and_promote_staging(
                    session_id,
                    state,
                    [MESSAGE, MESSAGE],
                    StepInfo(f"done-{number}", number),
                    operation_id=operation_id,
                    run_id=names.run,
                )
                for number, operation_id in enumerate((None, names.operation), start=1)
            ]
    store.stage_changes(
        names.session, names.step, {"tool_call_id": names.call, "merge_changes": {"notes": [1]}}
    )
    store.add_sub_session_refs(names.session, [{"sub_session_id": names.child, "agent_type": names.agent}])
    store.request_interrupt(names.session, reason="because")
    store.add_pending_tool_calls(names.session, names.calls)
    if not store._stores.in_callers_transaction:
        # It cannot begin in the transaction that takes back the names of nothing.
        store.session(names.session).effect(names.operation).__enter__()
    return str(commits[-1].checkpoint_id)


def _cursors(face: Any, names: Names) -> dict[str, str]:
    """A cursor of every list that has one, from its first page of one row."""
    cursors = {}
    for method in dir(face):
        found = getattr(face, method)
        if method.startswith("_") or not callable(found) or inspect.iscoroutinefunction(found):
            continue
        if "cursor" in inspect.signature(found).parameters:
            required, _ = next(choices_of(found))
            arguments = arguments_of(type(face), method, required, frozenset(), own=names, other=names)
            page = found(**arguments, limit=1)
            cursors[cursor_of(type(face), method)] = page.next_cursor or "none"
    return cursors
