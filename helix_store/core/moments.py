"""Moments: aware datetimes in UTC, in projects with any ``USE_TZ`` and ``TIME_ZONE``."""

from __future__ import annotations

from datetime import UTC, datetime
from functools import partial
from typing import Final

now: Final = partial(datetime.now, UTC)
"""Return this machine's time; Django's ``timezone.now()`` is naive with ``USE_TZ = False``."""


def as_utc(value: datetime | str) -> datetime:
    """Return an aware datetime from a database's time, which SQLite stores in UTC, as naive or text."""
    if isinstance(value, str):
        value = datetime.fromisoformat(value)
    return value if value.tzinfo is not None else value.replace(tzinfo=UTC)


def as_sqlite_text(moment: datetime) -> str:
    """Return a datetime as Django's fields store it on SQLite: as naive text in UTC. A naive one comes from a
    row of SQLite, and is in UTC already.
    """
    if moment.tzinfo not in (None, UTC):
        moment = moment.astimezone(UTC)
    return str(moment.replace(tzinfo=None))
