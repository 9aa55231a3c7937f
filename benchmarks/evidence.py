"""Evidence: what has to be in the database after so many operations."""

from __future__ import annotations

from dataclasses import dataclass

from django.db import connections

__all__ = ["Evidence", "NotDone"]


class NotDone(AssertionError):
    """A leg was timed and did not do its work."""


@dataclass(frozen=True)
class Evidence:
    """A query for numbers, and by how much each of them grows with every operation."""

    sql: str
    growth: tuple[int, ...]
    alias: str = "default"

    def numbers(self) -> tuple[int, ...]:
        with connections[self.alias].cursor() as cursor:
            cursor.execute(self.sql)
            return tuple(int(number or 0) for number in cursor.fetchone())

    def require(self, before: tuple[int, ...], operations: int) -> None:
        """Fail unless the numbers grew by what so many operations add."""
        after = self.numbers()
        grown = tuple(late - early for early, late in zip(before, after, strict=True))
        expected = tuple(each * operations for each in self.growth)
        if grown != expected:
            raise NotDone(f"{operations} operations: grown by {grown} instead of {expected}: {self.sql}")
