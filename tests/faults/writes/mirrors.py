"""Mirrors: what a story leaves if nobody is killed."""

from __future__ import annotations

import io
import pickle
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol

from django.db import connections, transaction
from django.db.backends.base.base import BaseDatabaseWrapper

from helix_store.engine.memory import MemoryWorld, WorldLock
from tests.faults.writes.faces import Faces
from tests.faults.writes.rows import Rows
from tests.faults.writes.stories import KEY, Contents, Story, public_contents, write

__all__ = ["Mirror", "mirror_of"]

Choice = Callable[[Sequence[Contents]], int]


class Mirror(Protocol):
    """Follows the story of a database."""

    @property
    def contents(self) -> Contents: ...

    def follow(self, kind: str, choose: Choice) -> None:
        """Make a write, and go on from the state that ``choose`` picks.

        It gets the contents before the write and after each of its transactions, and returns an index.
        """


def mirror_of(story: Story, alias: str, twin: str) -> Mirror:
    """A store in memory, or for what has none the tenant ``twin`` of the database; the story has begun."""
    return MemoryMirror(story) if story.has_memory else DatabaseTwin(story, alias, twin)


class DatabaseTwin:
    """Another tenant of the same database. What is picked against is rolled back."""

    def __init__(self, story: Story, alias: str, tenant: str) -> None:
        self._story = story
        self._states: list[Contents] = []
        self._savepoints: list[str] = []
        self._faces = replace(Faces.of_database(alias, tenant), between=self._note)
        self._rows = Rows(alias, tenant, story.tables)
        story.begin(self._faces, KEY)

    @property
    def contents(self) -> Contents:
        return self._rows.contents(self._rows.read())

    def follow(self, kind: str, choose: Choice) -> None:
        self._states = [self.contents]
        with transaction.atomic(using=self._faces.alias):
            self._savepoints = [str(self._connection.savepoint())]
            write(self._story, self._faces, kind)
            self._note()
            index = choose(self._states)
            if index < len(self._states) - 1:
                self._connection.savepoint_rollback(self._savepoints[index])

    @property
    def _connection(self) -> BaseDatabaseWrapper:
        return connections[self._faces.alias]

    def _note(self) -> None:
        self._states.append(self.contents)
        self._savepoints.append(str(self._connection.savepoint()))


class MemoryMirror:
    """A store in memory, whose code is not that of the database's."""

    def __init__(self, story: Story) -> None:
        self._story = story
        self._states: list[bytes] = []
        self._world = self._world_of({})
        self._faces = Faces.in_memory(self._world)
        story.begin(self._faces, KEY)
        self.contents = public_contents(self._faces)

    def follow(self, kind: str, choose: Choice) -> None:
        old = self.contents
        self._states = [_copied(self._world)]
        write(self._story, self._faces, kind)
        states = list(dict.fromkeys((*self._states, _copied(self._world))))
        between = [public_contents(Faces.in_memory(self._world_from(each))) for each in states[1:-1]]
        new = old if len(states) == 1 else public_contents(self._faces)
        contents = [old, *between, new][-len(states) :]
        index = choose(contents)
        self.contents = contents[index]
        if index < len(states) - 1:
            self._world = self._world_from(states[index])
            self._faces = Faces.in_memory(self._world)

    def _world_from(self, copied: bytes) -> MemoryWorld:
        return self._world_of(pickle.loads(copied))  # noqa: S301  `_copied` wrote it

    def _world_of(self, tables: Any) -> MemoryWorld:
        world = MemoryWorld()
        world._tenants = tables
        world.lock = _ObservedLock(lambda: self._states.append(_copied(world)))
        return world


class _ObservedLock(WorldLock):
    """A lock that tells of its last release."""

    def __init__(self, released: Callable[[], None]) -> None:
        super().__init__()
        self._released = released

    def release(self) -> None:
        super().release()
        if not self._depth:
            self._released()


class _Pickler(pickle.Pickler):
    """Makes of each lock a new one."""

    dispatch_table = {type(threading.Lock()): lambda _: (threading.Lock, ())}


def _copied(world: MemoryWorld) -> bytes:
    file = io.BytesIO()
    _Pickler(file).dump(world._tenants)
    return file.getvalue()
