"""The policy of ``HELIX_STORE["RETENTION"]``: the ages at which stored data is deleted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from helix_store.core.types import SessionStatus

__all__ = ["RetentionPolicy"]

_LONGEST_DAYS: Final = 36_500


@dataclass(frozen=True, slots=True, kw_only=True)
class RetentionPolicy:
    """The rules of retention. The default keeps everything. Raises `ValueError` for an invalid rule."""

    sessions_idle_days: Mapping[str, float] = field(default_factory=dict)
    """Days by status: a tree is deleted once all of its sessions have been idle for that many days."""
    checkpoints_keep: int | None = None
    """The number of newest step checkpoints that each session keeps."""
    streams_ended_days: float | None = None
    """The number of days after the end of a stream at which its chunks are deleted."""
    usage_anonymise_days: float | None = None
    """The age in days at which a usage entry loses its user, session and run."""
    usage_drop_days: float | None = None
    """The age in days at which a usage entry is deleted."""

    def __post_init__(self) -> None:
        if not isinstance(self.sessions_idle_days, Mapping):
            raise ValueError("sessions_idle_days must be a dict of days by status")
        for status, days in self.sessions_idle_days.items():
            if status not in list(SessionStatus):
                raise ValueError(
                    f"sessions_idle_days has no status {status!r}; the statuses are "
                    f"{', '.join(SessionStatus)}"
                )
            _check_days(f"sessions_idle_days[{str(status)!r}]", days)
        for name in ("streams_ended_days", "usage_anonymise_days", "usage_drop_days"):
            if getattr(self, name) is not None:
                _check_days(name, getattr(self, name))
        keep = self.checkpoints_keep
        if keep is not None and (type(keep) is not int or keep < 1):
            raise ValueError("checkpoints_keep must be None or a whole number of at least 1")
        anonymise, drop = self.usage_anonymise_days, self.usage_drop_days
        if anonymise is not None and drop is not None and anonymise >= drop:
            raise ValueError("usage_anonymise_days must be less than usage_drop_days")

    @property
    def keeps_everything(self) -> bool:
        return self == RetentionPolicy()


def _check_days(name: str, days: Any) -> None:
    if type(days) not in (int, float) or not 0 <= days <= _LONGEST_DAYS:
        raise ValueError(f"{name} must be a number of days from 0 to {_LONGEST_DAYS:,}")
