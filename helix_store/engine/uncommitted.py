"""What a write in an open transaction has in common in a database and in memory.

This is a module of its own because neither of the two imports the other.
"""

from __future__ import annotations


class UncommittedWrite:
    """A write in a transaction of the caller, and its outcome."""

    __slots__ = ()

    @property
    def is_committed(self) -> bool:
        """True if neither the transaction nor a savepoint around the write was rolled back, and all ended."""
        raise NotImplementedError

    @property
    def is_open(self) -> bool:
        """True if the transaction is still open, and no savepoint around the write was rolled back."""
        raise NotImplementedError

    @property
    def is_lost(self) -> bool:
        """True if the write was rolled back, or if only the store knows whether it was committed."""
        return not (self.is_committed or self.is_open)
