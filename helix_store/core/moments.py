"""Moments: aware datetimes in UTC, in projects with any ``USE_TZ`` and ``TIME_ZONE``."""

from __future__ import annotations

from datetime import UTC, datetime

__all__ = ["now"]


def now() -> datetime:
    """The time on this machine's clock. Django's ``timezone.now()`` is naive with ``USE_TZ = False``."""
    return datetime.now(UTC)
