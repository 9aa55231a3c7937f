"""The calls that open LangGraph's own savers and stores; here there is nothing to open."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any, NoReturn, Self

from django.core.exceptions import ImproperlyConfigured


class _Nothing:
    """The result of `setup`, which async code awaits and sync code ignores."""

    def __await__(self) -> Generator[Any, None, None]:
        yield from ()


class AcceptsLifecycle:
    """A saver or store that works without ``setup()``, ``with`` and ``async with``, but also accepts them."""

    @classmethod
    def from_conn_string(cls, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise `ImproperlyConfigured`: the database is one of the project's ``DATABASES``."""
        raise ImproperlyConfigured(
            f"{cls.__name__} uses the connections of Django, so that its writes can join your transactions: "
            f'add the database to DATABASES, and pass its alias, as in {cls.__name__}(using="default").'
        )

    def setup(self) -> _Nothing:
        """Do nothing: ``python manage.py migrate`` creates the tables. Async code may await the result."""
        return _Nothing()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        """Do nothing: each call has released its connection."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        """Do nothing: each call has released its connection."""
