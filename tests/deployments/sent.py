"""What the connections of an alias send, also those that the ORM makes, with the values in it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

from django.db import connections
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.backends.signals import connection_created
from psycopg.sql import Literal

__all__ = ["sent_through"]

_OF_THE_APP: Final = "helix_store_"
_WRITES_OR_READS: Final = ("INSERT", "UPDATE", "DELETE", "SELECT", "WITH")


def _bound(cursor: Any, text: str, params: Any) -> str:
    """The statement with its values; a prepared one has numbered placeholders."""
    if hasattr(cursor, "mogrify"):
        return str(cursor.mogrify(text, params))
    return re.sub(r"\$(\d+)", lambda number: Literal(params[int(number[1]) - 1]).as_string(None), text)


@contextmanager
def sent_through(alias: str) -> Iterator[dict[str, str]]:
    """The statements on the app's tables, each once, by their texts with placeholders.

    Connections that are open already are not watched.
    """
    sent: dict[str, str] = {}

    def keep(execute: Callable[..., Any], sql: Any, params: Any, many: bool, context: Any) -> Any:
        text = str(sql).lstrip(" \n(")
        if text.startswith(_WRITES_OR_READS) and _OF_THE_APP in text and text not in sent:
            sent[text] = _bound(context["cursor"].cursor, text, params)
        return execute(sql, params, many, context)

    def watch(connection: BaseDatabaseWrapper, **kwargs: Any) -> None:
        if connection.alias == alias and keep not in connection.execute_wrappers:
            connection.execute_wrappers.append(keep)

    connection_created.connect(watch)
    try:
        yield sent
    finally:
        connection_created.disconnect(watch)
        if keep in connections[alias].execute_wrappers:
            connections[alias].execute_wrappers.remove(keep)
