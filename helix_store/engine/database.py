"""Where a database back end works, and how one write becomes one transaction."""

from __future__ import annotations

import functools
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Concatenate, ParamSpec, TypeVar

from django.db import connections, router, transaction
from django.db.backends.base.base import BaseDatabaseWrapper

from helix_store import conf
from helix_store.core.limits import Limits
from helix_store.engine.connections import given_back
from helix_store.engine.errors import is_retryable_transaction, mapped_errors
from helix_store.exceptions import HelixStoreError, StoreBusy
from helix_store.models import Session

__all__ = ["DatabaseVerbs", "Scope", "reads", "writes"]

P = ParamSpec("P")
R = TypeVar("R")

_ATTEMPTS = 5
_FIRST_PAUSE_SECONDS = 0.01


@dataclass(frozen=True, slots=True)
class Scope:
    """An alias, a tenant and the limits; what is not given is looked up live."""

    using: str | None
    tenant: str
    given_limits: Limits | None

    @property
    def alias(self) -> str:
        # Reads go where writes go: a decision taken on a replica would be a stale one.
        return self.using or router.db_for_write(Session)

    @property
    def connection(self) -> BaseDatabaseWrapper:
        return connections[self.alias]

    @property
    def limits(self) -> Limits:
        return self.given_limits or conf.limits()

    def read(self, body: Callable[[], R]) -> R:
        """Run queries with the driver's errors mapped to ours."""
        connection = self.connection
        with given_back(connection), mapped_errors(connection):
            return body()

    def write(self, body: Callable[[], R]) -> R:
        """Run ``body`` in one transaction.

        Inside the caller's atomic block it is a savepoint of that: the caller owns the commit and any
        retry. Otherwise a transaction that the database gave up for another one's sake is run again.
        """
        connection = self.connection
        with given_back(connection):
            attempts = 1 if connection.in_atomic_block else _ATTEMPTS
            for attempt in range(attempts - 1):
                try:
                    return _attempt(connection, body)
                except StoreBusy as exc:
                    if not is_retryable_transaction(exc):
                        raise
                pause = random.uniform(0, _FIRST_PAUSE_SECONDS * 2**attempt)  # noqa: S311  jitter, no secret
                time.sleep(pause)
            return _attempt(connection, body)


def _attempt(connection: BaseDatabaseWrapper, body: Callable[[], R]) -> R:
    committing = committed = False

    def mark_committed() -> None:
        nonlocal committed
        committed = True

    try:
        with mapped_errors(connection, committing=lambda: committing):
            with transaction.atomic(using=connection.alias):
                transaction.on_commit(mark_committed, using=connection.alias)
                result = body()
                committing = not connection.savepoint_ids
            return result
    except HelixStoreError as exc:
        # An error of somebody's on_commit hook says nothing about this write: it must not be run again.
        if committed and exc.__cause__ is not None:
            raise exc.__cause__ from None
        raise


class DatabaseVerbs:
    """A group of verbs on one scope."""

    def __init__(self, scope: Scope) -> None:
        self.scope = scope


S = TypeVar("S", bound=DatabaseVerbs)


def writes(method: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
    """Make the whole method one transaction."""

    @functools.wraps(method)
    def in_transaction(self: S, /, *args: P.args, **kwargs: P.kwargs) -> R:
        return self.scope.write(functools.partial(method, self, *args, **kwargs))

    return in_transaction


def reads(method: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
    """Map the errors of a method that only reads."""

    @functools.wraps(method)
    def mapped(self: S, /, *args: P.args, **kwargs: P.kwargs) -> R:
        return self.scope.read(functools.partial(method, self, *args, **kwargs))

    return mapped
