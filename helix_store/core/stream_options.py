"""The options of streams, as ``HELIX_STORE["STREAMS"]`` gives them."""

from __future__ import annotations

from dataclasses import dataclass, fields
from datetime import timedelta
from typing import Any

from helix_store.exceptions import InvalidPayload

__all__ = ["StreamOptions", "duration_ms", "seconds"]

_LONGEST_SECONDS = 7 * 24 * 60 * 60


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamOptions:
    """Times are in seconds."""

    poll_interval: float = 0.2
    """How often streams with waiting readers are looked at; a lost notification costs at most this."""
    notify: bool = True
    """Whether PostgreSQL wakes readers with NOTIFY."""
    writer_lease: float = 60.0
    """How long a writer may be silent before it counts as dead."""
    heartbeat: float = 15.0
    """How often the stream view writes a comment, so that proxies and browsers see a living connection."""
    using: str | None = None
    """The database that the stream view reads."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name == "notify":
                if type(value) is not bool:
                    raise ValueError("notify must be True or False")
            elif field.name == "using":
                if value is not None and type(value) is not str:
                    raise ValueError("using must be the name of a database or None")
            elif type(value) not in (int, float) or not 0 < value <= _LONGEST_SECONDS:
                raise ValueError(f"{field.name} must be a number of seconds above 0, at most seven days")


def seconds(value: Any, name: str) -> float:
    """Seconds from a number or a timedelta, above 0 and at most seven days. Raises `InvalidPayload`."""
    number = value.total_seconds() if isinstance(value, timedelta) else value
    if type(number) not in (int, float) or not 0 < number <= _LONGEST_SECONDS:
        raise InvalidPayload(path=name, reason="expected seconds above 0, at most seven days")
    return float(number)


def duration_ms(value: Any, name: str) -> int:
    """Whole milliseconds of a timedelta that is not negative. Raises `InvalidPayload`."""
    if not isinstance(value, timedelta) or value < timedelta(0):
        raise InvalidPayload(path=name, reason="expected a timedelta that is not negative")
    return value // timedelta(milliseconds=1)
