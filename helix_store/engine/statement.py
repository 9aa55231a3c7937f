"""A single SQL statement, with one form for each database."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

from django.db.models import Model

_NAMED_PLACEHOLDER = re.compile(r"%\((\w+)\)s")


class Refusal(str):
    """The reason why a statement is not run on Citus: the call raises `NotSupportedOnBackend`, with a message
    that ends with this text, ``"<alias> is on Citus, …"``.
    """


class PreparedForm(NamedTuple):
    """A statement in the form in which PostgreSQL prepares it.

    ``text`` has the placeholders ``$1``, ``$2``…, and ``parameters`` lists their names in that order.
    ``name`` is a digest of the text: behind a pooler, where processes share a server connection, a name must
    refer to only one statement.
    """

    name: bytes
    text: str
    parameters: tuple[str, ...]


class Statement:
    """An SQL statement with placeholders ``%(name)s`` or ``%s``; ``%%`` is a percent sign. Pass ``sqlite`` if
    the text for PostgreSQL does not run on SQLite, and ``citus`` if it does not run on Citus; ``citus`` is a
    list of statements that run in order instead (see `engine.citus`).
    """

    def __init__(self, postgresql: str, sqlite: str | None = None, *, citus: Sequence[str] = ()) -> None:
        self.postgresql = postgresql
        self.sqlite = postgresql if sqlite is None else sqlite
        # A form with the same text is omitted, so that a write need not be a transaction.
        self.citus = () if list(citus) == [postgresql] else tuple(citus)

    def __repr__(self) -> str:
        return f"<Statement {self.postgresql.strip()[:60]!r}>"

    @cached_property
    def prepared(self) -> PreparedForm:
        """The form to prepare, for statements with named placeholders."""
        numbers: dict[str, int] = {}

        def number(match: re.Match[str]) -> str:
            return f"${numbers.setdefault(match[1], len(numbers) + 1)}"

        text = _NAMED_PLACEHOLDER.sub(number, self.postgresql).replace("%%", "%")
        digest = hashlib.sha256(text.encode()).hexdigest()[:32]
        return PreparedForm(f"helix_{digest}".encode(), text, tuple(numbers))


def table(model: type[Model]) -> str:
    """Return the quoted name of a model's table. Table prefixes are plain names."""
    return f'"{model._meta.db_table}"'
