"""Value objects of locks."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from helix_store.core.serialization import Serializable

__all__ = ["LockInfo"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LockInfo(Serializable):
    """A held lock."""

    name: str
    owner: str
    fencing_token: int
    expires_at: datetime
