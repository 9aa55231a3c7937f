"""The invariants: what must hold between the rows of a sound database. Each is written here alone."""

from typing import Final

from helix_store.doctor.invariants import checkpoints, owners, sessions

__all__ = ["INVARIANTS"]

INVARIANTS: Final = (*sessions.CHECKS, *checkpoints.CHECKS, *owners.CHECKS)
