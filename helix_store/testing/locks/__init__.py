"""The contract of a lock manager, as tests: a class for each part, and `LockManagerContract` for all."""

from helix_store.testing.locks.acquiring import AcquiringContract
from helix_store.testing.locks.arguments import LockArgumentContract
from helix_store.testing.locks.async_twins import AsyncLockContract
from helix_store.testing.locks.base import LockTests
from helix_store.testing.locks.terms import TermContract
from helix_store.testing.locks.tokens import TokenContract

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
    """Everything a lock manager promises."""
