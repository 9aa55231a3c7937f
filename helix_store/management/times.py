"""Times in command arguments: a date, a date with a time, or an age such as ``7d``."""

from __future__ import annotations

import argparse
import re
from datetime import datetime, timedelta, tzinfo
from typing import Final

from helix_store.core import moments, validation

_AGE: Final = re.compile(r"([0-9]{1,9})([smhdw])")
_UNITS: Final = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days", "w": "weeks"}
_EXPECTED: Final = "expected an age (90s, 30m, 12h, 7d, 2w) or a date (2026-11-20, 2026-11-20T09:00+09:00)"


def time_or_age(text: str) -> datetime | timedelta:
    """Parse a time or an age for argparse. A time without an offset is naive; `moment_of` adds the zone."""
    age = _AGE.fullmatch(text)
    try:
        value = timedelta(**{_UNITS[age[2]]: int(age[1])}) if age else datetime.fromisoformat(text)
    except (OverflowError, ValueError):
        raise argparse.ArgumentTypeError(f"{_EXPECTED}, got {text!r}") from None
    if isinstance(value, timedelta) and not validation.is_age(value):
        raise argparse.ArgumentTypeError(f"an age is at most a hundred years, got {text!r}")
    return value


def age_in_days(text: str) -> timedelta:
    """Parse a whole number of days for argparse."""
    try:
        age = timedelta(days=int(text))
    except (OverflowError, ValueError):
        age = timedelta(-1)
    if not validation.is_age(age):
        raise argparse.ArgumentTypeError(f"expected a number of days, at most a hundred years, got {text!r}")
    return age


def moment_of(value: datetime | timedelta, zone: tzinfo) -> datetime:
    """Return the moment that the argument names. An age counts back from now, and a time without an offset is
    in the given zone.
    """
    if isinstance(value, timedelta):
        return moments.now() - value
    return value.replace(tzinfo=zone) if value.tzinfo is None else value
