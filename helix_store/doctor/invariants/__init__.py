"""The invariants that hold between the rows of a sound database. Each invariant is defined only here."""

from typing import Final

from helix_store.doctor.invariants import budgets, checkpoints, owners, sessions

__all__ = ["INVARIANTS"]

INVARIANTS: Final = (*sessions.CHECKS, *checkpoints.CHECKS, *owners.CHECKS, *budgets.CHECKS)
