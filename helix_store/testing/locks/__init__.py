"""The contract suite of a lock manager: a class for each part, and `LockManagerContract` for all."""

from helix_store.testing.locks.acquiring import AcquiringContract, AsyncLockContract
from helix_store.testing.locks.arguments import LockArgumentContract
from helix_store.testing.locks.base import LockTests
from helix_store.testing.locks.terms import TermContract, TokenContract

__all__ = [
    "AcquiringContract",
    "AsyncLockContract",
    "LockArgumentContract",
    "LockManagerContract",
    "LockTests",
    "TermContract",
    "TokenContract",
]


class LockManagerContract(
    AcquiringContract, TermContract, TokenContract, LockArgumentContract, AsyncLockContract
):
    """All tests of a lock manager."""
