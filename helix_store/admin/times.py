"""Times on pages: exact to the second with their time zone, or relative to now, and durations."""

from __future__ import annotations

from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from django.utils import formats, timezone
from django.utils.html import format_html
from django.utils.safestring import SafeString
from django.utils.translation import gettext, ngettext_lazy

from helix_store.core import moments

_UNITS: Final[tuple[tuple[int, Any, Any], ...]] = (
    (
        365 * 86_400,
        ngettext_lazy("%(count)d year ago", "%(count)d years ago", "count"),
        ngettext_lazy("in %(count)d year", "in %(count)d years", "count"),
    ),
    (
        30 * 86_400,
        ngettext_lazy("%(count)d month ago", "%(count)d months ago", "count"),
        ngettext_lazy("in %(count)d month", "in %(count)d months", "count"),
    ),
    (
        86_400,
        ngettext_lazy("%(count)d day ago", "%(count)d days ago", "count"),
        ngettext_lazy("in %(count)d day", "in %(count)d days", "count"),
    ),
    (
        3_600,
        ngettext_lazy("%(count)d hour ago", "%(count)d hours ago", "count"),
        ngettext_lazy("in %(count)d hour", "in %(count)d hours", "count"),
    ),
    (
        60,
        ngettext_lazy("%(count)d minute ago", "%(count)d minutes ago", "count"),
        ngettext_lazy("in %(count)d minute", "in %(count)d minutes", "count"),
    ),
    (
        1,
        ngettext_lazy("%(count)d second ago", "%(count)d seconds ago", "count"),
        ngettext_lazy("in %(count)d second", "in %(count)d seconds", "count"),
    ),
)
"""A unit in seconds, and the phrases for a number of such units in the past and in the future."""


def format_time(value: datetime) -> str:
    """Return a local time to the second with the name of its time zone."""
    with suppress(OverflowError):  # Some times at the end of the year 9999 have no local time east of UTC.
        value = timezone.localtime(value)
    # Translators: a time with its zone, in the format of Django's filter "date".
    return str(formats.date_format(value, gettext("j M Y, H:i:s T")))


def distance(value: datetime | None) -> SafeString | str:
    """Return a time relative to now, with the exact time as a tooltip, or an empty string for no time."""
    return "" if value is None else _time(value, _distance(value), format_time(value))


def stamp(value: datetime | None) -> SafeString | str:
    """Return the exact time, with its distance from now as a tooltip, or an empty string for no time."""
    return "" if value is None else _time(value, format_time(value), _distance(value))


def clock(value: datetime) -> SafeString:
    """Return the time of day to the second, with the exact time as a tooltip, for rows of a single day."""
    local = value
    with suppress(OverflowError):
        local = timezone.localtime(value)
    return _time(value, f"{local:%H:%M:%S}", f"{format_time(value)}, {_distance(value)}")


def _time(value: datetime, text: str, title: str) -> SafeString:
    return format_html('<time datetime="{}" title="{}">{}</time>', value.isoformat(), title, text)


def _distance(value: datetime) -> str:
    seconds = int((value - moments.now()).total_seconds())
    size, past, future = next(
        (unit for unit in _UNITS if abs(seconds) >= unit[0]),
        _UNITS[-1],
    )
    words: str = (future if seconds > 0 else past) % {"count": abs(seconds) // size}
    return words


def moment_of_epoch(milliseconds: Any) -> datetime | None:
    """Return the time of epoch milliseconds, or ``None`` for any other value."""
    if type(milliseconds) is not int:
        return None
    try:
        return datetime.fromtimestamp(milliseconds / 1_000, UTC)
    except (OverflowError, OSError, ValueError):
        return None


def duration(length: timedelta) -> str:
    """Return a duration in at most two units, such as ``420 ms``, ``3.2 s`` or ``2 d 4 h``."""
    seconds = max(length.total_seconds(), 0.0)
    if seconds < 1:
        return gettext("%(count)d ms") % {"count": round(seconds * 1_000)}
    if seconds < 60:
        return gettext("%(count)s s") % {"count": formats.number_format(round(seconds, 1))}
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return gettext("%(minutes)d min %(seconds)d s") % {"minutes": minutes, "seconds": rest}
    hours, minutes = divmod(minutes, 60)
    if hours < 24:
        return gettext("%(hours)d h %(minutes)d min") % {"hours": hours, "minutes": minutes}
    days, hours = divmod(hours, 24)
    return gettext("%(days)d d %(hours)d h") % {"days": days, "hours": hours}
