"""The conditions of a guarded write: expected version and fencing token."""

from __future__ import annotations

from dataclasses import dataclass

from helix_store.core import validation
from helix_store.exceptions import FencedOutError, StaleStateError


@dataclass(frozen=True, slots=True)
class Guard:
    """The conditions of a write; a condition that is ``None`` is not checked."""

    expected_version: int | None = None
    fencing_token: int | None = None

    def check_version(self, current_version: int) -> None:
        """Raise `StaleStateError` if the version differs. The session must be locked."""
        if self.expected_version is not None and self.expected_version != current_version:
            raise StaleStateError(self.expected_version, current_version)

    def check_fence(self, newest_token: int | None) -> None:
        """Raise `FencedOutError` if the lock has a newer token; ``None`` means that no such lock exists."""
        if self.fencing_token is not None and newest_token is not None and self.fencing_token < newest_token:
            raise FencedOutError(self.fencing_token, newest_token)


def guard(expected_version: int | None = None, fencing_token: int | None = None) -> Guard:
    """Return the `Guard` for a caller's arguments. Raises `InvalidPayload`."""
    if expected_version is not None:
        validation.whole_number(expected_version, "expected_version")
    if fencing_token is not None:
        validation.whole_number(fencing_token, "fencing_token")
    return Guard(expected_version, fencing_token)
