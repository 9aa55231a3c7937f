"""A public call whose statements are looked at, and what they may read."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from tests.plans.rows import World

__all__ = ["ANALYSED", "FORMS", "PAGE", "PORTABLE", "POSTGRES", "SQLITE", "Call", "gap"]

PAGE: Final = 25

SQLITE: Final = "sqlite"
"""Without statistics: nothing in Django or in this app ever runs ANALYZE on SQLite."""
ANALYSED: Final = "sqlite analysed"
POSTGRES: Final = "postgres"
PORTABLE: Final = "postgres without fast paths"
FORMS: Final = (SQLITE, ANALYSED, POSTGRES, PORTABLE)


@dataclass(frozen=True)
class Call:
    """``make`` prepares a call; every statement that the call then sends keeps to ``reads`` and ``sorts``.

    Ten rows looked at for one returned is a page's share; a sorted row is nothing. ``gaps`` says where
    no index serves the call, and why: that is a known fault, and the test wants to hear of its end.
    """

    name: str
    make: Callable[[World], Callable[[], object]]
    reads: int = 10 * PAGE
    sorts: int = 1
    gaps: Mapping[str, str] = field(default_factory=dict)
    commits: bool = False
    """The call is not undone: on PostgreSQL a step, for one, is another statement in a transaction."""


def gap(reason: str, forms: Iterable[str] = FORMS) -> dict[str, str]:
    return dict.fromkeys(forms, reason)
