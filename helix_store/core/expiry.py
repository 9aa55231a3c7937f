"""What a session that has expired becomes."""

from __future__ import annotations

from typing import Final

__all__ = ["SESSION_EXPIRED"]

SESSION_EXPIRED: Final = "session_expired"
"""The failure reason of a session that nobody renewed or resumed in time."""
