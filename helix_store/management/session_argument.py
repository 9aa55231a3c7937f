"""Arguments of commands: the session that an id means, and times."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from django.core.management.base import CommandError
from django.utils import timezone

from helix_store.exceptions import InvalidPayload, SessionNotFound
from helix_store.management.base import USAGE
from helix_store.management.text import visible
from helix_store.sessions.directory import SessionDirectory
from helix_store.stores import DatabaseStateStore

__all__ = ["directory_of", "only_tenant", "store_of", "time_argument"]

_TENANTS_NAMED = 5


def directory_of(options: Mapping[str, Any]) -> SessionDirectory:
    """The sessions that ``--database`` and ``--tenant`` choose."""
    try:
        return SessionDirectory(options["database"], tenant=options["tenant"])
    except InvalidPayload as exc:
        raise CommandError(f"--tenant: {exc.reason}.", returncode=USAGE) from exc


def store_of(session_id: str, options: Mapping[str, Any]) -> DatabaseStateStore:
    """The store of the one tenant that has a session with this id.

    Without ``--tenant`` an id that several tenants have is wrong usage. Raises `SessionNotFound`.
    """
    directory = directory_of(options)
    try:
        tenants = directory.tenants_of(session_id)
    except InvalidPayload as exc:
        raise CommandError(
            f"{visible(session_id)!r} is no session id: {exc.reason}.", returncode=USAGE
        ) from exc
    if not tenants:
        raise SessionNotFound(session_id)
    return directory.store(only_tenant(tenants, f"session {visible(session_id)}"))


def only_tenant(tenants: Sequence[str], what: str) -> str:
    """The tenant, if there is one; with several the command cannot know which is meant."""
    if len(tenants) > 1:
        named = ", ".join(f"'{visible(tenant)}'" for tenant in tenants[:_TENANTS_NAMED])
        more = "" if len(tenants) <= _TENANTS_NAMED else f" and {len(tenants) - _TENANTS_NAMED} more"
        raise CommandError(
            f"{len(tenants)} tenants have a {what}: {named}{more}. Give --tenant.", returncode=USAGE
        )
    return tenants[0]


def time_argument(text: str) -> datetime:
    """An argparse type: an ISO 8601 date or time, in the project's time zone unless it has one."""
    try:
        value = datetime.fromisoformat(text)
    except ValueError as exc:
        raise argparse.ArgumentTypeError(
            f"expected a date or time such as 2026-11-22T12:00, got {text!r}"
        ) from exc
    return value if value.tzinfo else timezone.make_aware(value)
