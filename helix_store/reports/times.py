"""The project's time zone, and times as text in that zone and back."""

from __future__ import annotations

import argparse
from datetime import UTC, datetime, timedelta
from typing import Final
from zoneinfo import ZoneInfo

from django.utils import timezone

NOTHING: Final = "-"

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


def project_zone() -> ZoneInfo:
    """Return the time zone of the project, ``TIME_ZONE``."""
    return ZoneInfo(timezone.get_default_timezone_name())


def time_argument(text: str) -> datetime:
    """Parse an ISO 8601 date or time for argparse, in the project's time zone unless it specifies one."""
    try:
        value = datetime.fromisoformat(text)
    except ValueError as exc:
        raise argparse.ArgumentTypeError(
            f"expected a date or time such as 2026-11-22T12:00, got {text!r}"
        ) from exc
    return value if value.tzinfo else timezone.make_aware(value)


def moment(value: datetime | None, *, seconds: bool = False) -> str:
    """Return a time with its offset, in the project's time zone: ``2026-11-22 11:22 UTC``."""
    if value is None:
        return NOTHING
    local = timezone.localtime(value)
    text = local.strftime("%Y-%m-%d %H:%M:%S" if seconds else "%Y-%m-%d %H:%M")
    offset = local.utcoffset()
    # "CST" has four meanings, but an offset has only one.
    return f"{text} {local.strftime('%z')[:3]}:{local.strftime('%z')[3:5]}" if offset else f"{text} UTC"


def epoch_moment(milliseconds: int | None, *, seconds: bool = False) -> str:
    """Return the `moment` of epoch milliseconds, or the number itself if it is outside the calendar."""
    if milliseconds is None:
        return NOTHING
    try:
        return moment(_EPOCH + timedelta(milliseconds=milliseconds), seconds=seconds)
    except OverflowError:
        return str(milliseconds)
