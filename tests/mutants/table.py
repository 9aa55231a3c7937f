"""One mutant for each safety predicate: the condition is taken away or turned, and some test must notice."""

from __future__ import annotations

from typing import Final

from tests.mutants.approvals import APPROVALS
from tests.mutants.effects import EFFECTS
from tests.mutants.ledgers import LEDGERS
from tests.mutants.posts import POSTS
from tests.mutants.sessions_and_locks import SESSIONS_AND_LOCKS
from tests.mutants.upkeep import UPKEEP

__all__ = ["MUTANTS"]

MUTANTS: Final = (*SESSIONS_AND_LOCKS, *APPROVALS, *POSTS, *EFFECTS, *LEDGERS, *UPKEEP)
