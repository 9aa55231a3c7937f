"""Conditions of a guarded write: the expected version and the fencing token."""

from __future__ import annotations

from dataclasses import dataclass

from helix_store.core import validation
from helix_store.exceptions import FencedOutError, StaleStateError

__all__ = ["Guard", "guard"]


@dataclass(frozen=True, slots=True)
class Guard:
    """What must hold for a write to go ahead."""

    expected_version: int | None = None
    fencing_token: int | None = None

    def check_version(self, current_version: int) -> None:
        """Raise `StaleStateError` when the session has moved on. Call with the session locked."""
        if self.expected_version is not None and self.expected_version != current_version:
            raise StaleStateError(self.expected_version, current_version)

    def check_fence(self, newest_token: int | None) -> None:
        """Raise `FencedOutError` when the lock has a newer token; ``None`` when there is no lock."""
        if self.fencing_token is not None and newest_token is not None and self.fencing_token < newest_token:
            raise FencedOutError(self.fencing_token, newest_token)


def guard(expected_version: int | None = None, fencing_token: int | None = None) -> Guard:
    """Check what a caller requires of a write. Raises `InvalidPayload`."""
    if expected_version is not None:
        validation.whole_number(expected_version, "expected_version")
    if fencing_token is not None:
        validation.whole_number(fencing_token, "fencing_token")
    return Guard(expected_version, fencing_token)
