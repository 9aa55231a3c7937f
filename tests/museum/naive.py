"""Naive variants: stores and loaders as they were written where the incidents happened."""

from __future__ import annotations

import base64
import json
import os
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Final
from uuid import uuid4

from django.db import IntegrityError
from django.db.backends.base.base import BaseDatabaseWrapper

from tests.database.separate import execute, fetch
from tests.databases import CommittedDatabase

__all__ = [
    "TABLE",
    "Detonation",
    "NaiveRows",
    "envelope",
    "ext_loaded",
    "loaded_with_fallback",
    "patched_by_attributes",
    "pickled_or_json",
    "revived",
    "without_nul",
]

TABLE: Final = "museum"


@dataclass
class NaiveRows:
    """Rows with a name and a position, in a table of the database under test. Every call is autocommitted.

    ``pause`` is called between what a call reads and what it writes: a test lets others in there.
    """

    database: CommittedDatabase
    pause: Callable[[], object] = lambda: None

    @property
    def connection(self) -> BaseDatabaseWrapper:
        return self.database.connection

    def create(self) -> None:
        execute(
            self.connection,
            f"CREATE TABLE {TABLE} (name text, position text, value text, at double precision DEFAULT 0,"
            " PRIMARY KEY (name, position))",
        )

    def drop(self) -> None:
        execute(self.connection, f"DROP TABLE {TABLE}")

    # --- One row for each name -----------------------------------------------------------------------

    def load(self, name: str) -> Any:
        """The value of the only row; ``None`` without one."""
        rows = fetch(self.connection, f"SELECT value FROM {TABLE} WHERE name = %s", name)
        return json.loads(rows[0][0]) if rows else None

    def save(self, name: str, value: Any) -> None:
        """The last writer wins."""
        self._insert(name, "", value, "ON CONFLICT (name, position) DO UPDATE SET value = excluded.value")

    def save_after_reloading(self, name: str, seen: Any, added: Any) -> None:
        """Append to the list that the caller has seen; if it is stale, to the newer one."""
        if self.load(name) != seen:
            seen = self.load(name)
        self.save(name, [*seen, added])

    def save_if_older(self, name: str, value: Any, at: float) -> bool:
        """Save unless the stored time says that somebody was faster; return whether it was saved."""
        with self.connection.cursor() as cursor:
            cursor.execute(
                f"UPDATE {TABLE} SET value = %s, at = %s WHERE name = %s AND at < %s",
                [json.dumps(value), at, name, at],
            )
            return bool(cursor.rowcount)

    # --- A list of rows ------------------------------------------------------------------------------

    def append(self, name: str, value: Any, at: float = 0) -> None:
        """The key is random, as where a store sorts by time."""
        self._insert(name, uuid4().hex, value, at=at)

    def values(self, name: str) -> list[Any]:
        rows = fetch(
            self.connection, f"SELECT value FROM {TABLE} WHERE name = %s ORDER BY at, position", name
        )
        return [json.loads(value) for (value,) in rows]

    def append_texts(self, name: str, texts: list[str]) -> None:
        """The texts as they are, as in a column of text or jsonb."""
        for text in texts:
            sql = f"INSERT INTO {TABLE} (name, position, value) VALUES (%s, %s, %s)"
            execute(self.connection, sql, name, uuid4().hex, text)

    def due(self, name: str, since: float, until: float) -> list[Any]:
        """The timers between two looks of a worker."""
        sql = f"SELECT value FROM {TABLE} WHERE name = %s AND at > %s AND at <= %s"
        return [json.loads(value) for (value,) in fetch(self.connection, sql, name, since, until)]

    def pop(self, name: str) -> Any:
        """Read the newest, then delete it."""
        position, value = fetch(
            self.connection,
            f"SELECT position, value FROM {TABLE} WHERE name = %s ORDER BY at DESC LIMIT 1",
            name,
        )[0]
        self.pause()
        execute(self.connection, f"DELETE FROM {TABLE} WHERE name = %s AND position = %s", name, position)
        return json.loads(value)

    def append_to_parent(self, name: str, value: Any) -> None:
        """Create the parent at the first access; a log line says when that fails."""
        is_new = self.load(f"parent of {name}") is None
        self.pause()
        try:
            if is_new:
                self._insert(f"parent of {name}", "", True)
            self.append(name, value)
        except IntegrityError:
            return

    def append_after_checking(self, name: str, value: Any) -> int:
        """Read all that there is under the lock, to see that nothing is wrong; return how much that was."""
        history = self.values(name)
        self.append(name, value, at=len(history))
        return len(history)

    # --- Search --------------------------------------------------------------------------------------

    def save_of_tenant(self, tenant: str, name: str, value: Any) -> None:
        self._insert(name, tenant, value)

    def search(self, tenant: str, field: str, value: str) -> list[Any]:
        """The value is a parameter, but the name of the field is not."""
        sql = f"SELECT value FROM {TABLE} WHERE position = %s AND {field} = %s ORDER BY value"
        return [json.loads(found) for (found,) in fetch(self.connection, sql, tenant, value)]

    def _insert(self, name: str, position: str, value: Any, conflict: str = "", at: float = 0) -> None:
        execute(
            self.connection,
            f"INSERT INTO {TABLE} (name, position, value, at) VALUES (%s, %s, %s, %s) {conflict}",
            name,
            position,
            json.dumps(value),
            at,
        )


def without_nul(text: str) -> str:
    """JSON that a database takes, by the look of it."""
    return json.dumps(text).replace("\\u0000", "")


# --- Loaders -----------------------------------------------------------------------------------------


class Detonation:
    """What a hostile payload calls. ``count`` says how often it did."""

    count = 0

    def __init__(self, *_: Any) -> None:
        type(self).count += 1

    def __reduce__(self) -> Any:
        return Detonation, ()


def envelope() -> dict[str, Any]:
    """A value that says which class to make of it, with a lone surrogate that sent it to the fallback."""
    return {
        "lc": 2,
        "type": "constructor",
        "id": [*Detonation.__module__.split("."), Detonation.__name__],
        "kwargs": {},
        "text": "\ud83d",
    }


def revived(value: Any) -> Any:
    """Make objects of the dicts that look like envelopes, wherever they came from."""
    if not isinstance(value, dict) or "lc" not in value:
        return value
    if value.get("type") == "secret":
        return os.environ[value["id"][0]]
    *module, name = value["id"]
    return getattr(import_module(".".join(module)), name)(**value["kwargs"])


def loaded_with_fallback(value: Any) -> Any:
    """What a strict format refuses is stored in a second one, which makes objects when it is loaded."""
    try:
        return json.loads(json.dumps(value, ensure_ascii=False).encode())
    except UnicodeEncodeError:
        return revived(value)


def ext_loaded(value: Any) -> Any:
    """An extension type says which function makes the value."""
    module, name, arguments = value["$ext"]
    return getattr(import_module(module), name)(*arguments)


def pickled_or_json(text: str) -> Any:
    """What is not JSON was pickled."""
    try:
        return json.loads(text)
    except ValueError:
        return pickle.loads(base64.b64decode(text))  # noqa: S301  the fault that is shown


def patched_by_attributes(document: Any, path: list[str], value: Any) -> None:
    """Walk a path over items and attributes alike, as JavaScript does, and set the last one."""
    for segment in path[:-1]:
        document = document[segment] if segment in document else getattr(document, segment)
    if isinstance(document, dict):
        document[path[-1]] = value
    else:
        setattr(document, path[-1], value)
